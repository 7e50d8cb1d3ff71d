"""Which weights a rollout's engine holds, and how it comes to others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from laminar.buffer import claims
from laminar.buffer.records import Claim
from laminar.errors import EngineError, WeightsError
from laminar.workers.engines.base import WeightSource
from laminar.workers.weights import find_weights

if TYPE_CHECKING:
    from laminar.workers.rollout import Rollout

log = logging.getLogger(__name__)

MAX_LOAD_FAILURES = 5
SWAP_STOP_S = 5.0
"""Within which all that runs leaves the engine for a swap; a decode step or two."""


class Loader:
    """Called by the rollout's steering only, one at a time. Each method says whether it got on."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.failures = 0

    async def load(self, version: int) -> bool:
        """Load a version into the empty engine, unless work of the present one has come meanwhile."""
        source = await self._source(version)
        if source is None:
            return await self._version_lost(version)
        if self.rollout.engine.version >= 0 and not await self._gave_notice():
            return False
        try:
            return await self._load(source)
        finally:
            self.rollout.switching = False

    async def _gave_notice(self) -> bool:
        """Tell that this version is about to go. Whoever hands something over compares the report that this replaces:
        what is not in the inbox by now is refused. What has come since steering decided, while the weights were looked
        for, can go on under this version, so steering decides anew."""
        r = self.rollout
        r.switching = True
        await r.reporter.write()
        arrived = (await r.run_info.coordination.range(r.run_info.keys.inbox(r.member.id))).items
        seen = all(kv.key in r.inbox.items for kv in arrived)
        view = r.view(await r.waiting())
        if seen and not view.owing and not view.adoptable:
            return True
        r.switching = False
        log.info("%d trajectories came before version %d was given up", len(arrived), r.engine.version)
        return False

    async def _load(self, source: WeightSource) -> bool:
        r = self.rollout
        try:
            await r.engine.load(source)
        except WeightsError as e:
            self.failures += 1
            if self.failures >= MAX_LOAD_FAILURES:
                raise EngineError(
                    f"version {source.version} could not be loaded {self.failures} times; last: {e}"
                ) from e
            log.warning("version %d could not be loaded (%s); trying again", source.version, e)
            await r.clock.sleep(r.ledger.jitter(0.5))
            return True
        self.failures = 0
        log.info("loaded version %d (%s)", source.version, source.digest[:12])
        return True

    async def swap(self, version: int) -> bool:
        """Load a version under what runs: all of it stops between two tokens, and goes on under the new weights."""
        r = self.rollout
        source = await self._source(version)
        if source is None:
            await r.clock.sleep(r.ledger.jitter(0.5))
            return False
        async with r.halting.alone:
            halted = list(r.live.values())
            await r.halting.stop(halted, SWAP_STOP_S)
            try:
                if any(t.request for t in halted):
                    log.warning("version %d waits: a request has not stopped within %.0f s", version, SWAP_STOP_S)
                    return False
                await self._load(source)
                for t in halted:
                    t.version, t.digest = r.engine.version, r.engine.digest
            finally:
                r.halting.go_on([t for t in halted if t.id in r.live])
        return True

    async def _source(self, version: int) -> WeightSource | None:
        """The relay of this host, else a checkpoint's export."""
        published, relays = self.rollout.published(), list(self.rollout.relays.items.values())
        if published is None or published.version != version:
            return await find_weights(self.rollout.run_info, relays, version)
        source = await find_weights(self.rollout.run_info, relays, version, published.digest)
        if source is None:
            # Nobody has the published bits any more: those that the trainer offers in their place.
            prefix = self.rollout.run_info.keys.offers_of(version)
            for kv in (await self.rollout.run_info.coordination.range(prefix)).items:
                source = source or await find_weights(self.rollout.run_info, relays, version, kv.key[len(prefix) :])
        return source

    async def _version_lost(self, version: int) -> bool:
        """Nobody can bring `version` back. Waiting work of it goes on under the newest, or starts again."""
        published = self.rollout.published()
        # Without the newest version there is nothing to go on under: the trainer may be replaying, and then it brings
        # back this one on its way to the newest.
        if published is None or published.version == version or await self._source(published.version) is None:
            log.info("waiting for the relay to hold version %d", version)
            await self.rollout.clock.sleep(self.rollout.ledger.jitter(0.5))
            return False
        then = self.rollout.config.rollout.on_version_lost
        waiting = [h for h in await self.rollout.waiting() if h.claim.version == version]
        if waiting:
            log.warning(
                "version %d is lost: %d waiting trajectories, %012d-%03d the first, %s under version %d "
                "(rollout.on_version_lost)", version, len(waiting), *waiting[0].id, then, published.version,
            )  # fmt: skip
        for held in waiting:
            if then == "restart":
                claim: Claim = claims.restarted(
                    held.claim, version=published.version, error=f"version {version} was lost", counts=False
                ).model_copy(update={"state": "waiting"})
            else:
                claim = held.claim.model_copy(update={"version": published.version})
            log.info("trajectory %012d-%03d: %s under version %d", *held.id, then, published.version)
            await self.rollout.ledger.update(held, claim)
        await self.rollout.evaluator.give_up(version)
        return True
