"""The trainer's side of the relay: one copy into an arena, then the version is announced under the trainer's fence.

The trainer's stall is the copy. Sealing (checksums, by the relay) and the announcement run while it trains on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from laminar.buffer.coordination import Coordination, KeyValue, absent, unchanged
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import RelayLoad, WeightsHead
from laminar.clock import Clock
from laminar.errors import Fenced, LaminarError, WeightsError
from laminar.workers.context import Run
from laminar.workers.learning.base import Learner
from laminar.workers.machine import ArenaToFill, RelayAccess
from laminar.workers.mirror import Mirror
from laminar.workers.training.keeping import Keeper
from laminar.workers.weights import held_digest, local_relay, relay_socket

log = logging.getLogger(__name__)

RELAY_WAIT_S = 30.0
"""How long the trainer waits for a relay to be there before it trains on without publishing."""
RETRY_S = 0.2


@dataclass(frozen=True)
class Staged:
    """Weights that lie in an arena of `relay` (its id), not yet sealed, of which this process `wrote` so many bytes.
    Times in seconds."""

    version: int
    arena: ArenaToFill
    client: RelayAccess
    relay: str
    copy_s: float
    cast_s: float
    wrote: int


class Publisher:
    """`ledger.actor` is the trainer's leadership."""

    def __init__(self, run: Run, ledger: Ledger, relays: Mirror) -> None:
        self.coordination: Coordination = run.coordination
        self.keys = run.keys
        self.clock: Clock = run.clock
        self.machine = run.machine
        self.ledger = ledger
        self.relays = relays
        self.skipped = 0
        self.keeper = Keeper(run, ledger, self._relay)

    def _relay(self) -> tuple[str, RelayAccess] | None:
        """The id of this host's relay, and a way to it."""
        record = local_relay(list(self.relays.items.values()), self.machine.host)
        return (record.id, self.machine.relay(relay_socket(record), self.keys.run)) if record else None

    async def published(self) -> WeightsHead | None:
        kv = await self.coordination.get(self.keys.weights)
        return WeightsHead.parse(kv.value) if kv else None

    async def held(self, version: int) -> str | None:
        """The digest under which the relay holds a version: empty if it does not, None when no relay answers."""
        found = self._relay()
        if found is None:
            return None
        try:
            versions = (await found[1].status()).versions
        except (LaminarError, OSError):
            return None
        return next((v.info.digest for v in versions if v.info.version == version), "")

    async def stage(self, learner: Learner) -> Staged | None:
        """Copy the learner's weights into an arena of the relay; None if no relay has room for them in time."""
        cast_s = await asyncio.to_thread(learner.stage)
        deadline = self.clock.monotonic() + RELAY_WAIT_S
        reason = "there is no relay on this host"
        while self.clock.monotonic() < deadline:
            found = self._relay()
            if found is not None:
                relay, client = found
                try:
                    arena = await client.reserve(learner.layout, writers=learner.writers)
                    if arena is None:
                        log.warning("the relay has no free arena: version %d is not published", learner.version)
                        self.skipped += 1
                        return None
                    copy_s, wrote = await self._copy(learner, arena)
                    return Staged(learner.version, arena, client, relay, copy_s, cast_s, wrote)
                except (LaminarError, OSError) as e:
                    reason = str(e)
            await self.clock.sleep(RETRY_S)
        log.error("version %d: no relay took it within %.0f s: %s", learner.version, RELAY_WAIT_S, reason)
        self.skipped += 1
        return None

    async def _copy(self, learner: Learner, arena: ArenaToFill) -> tuple[float, int]:
        """Seconds, and the bytes that this process wrote."""
        before = self.clock.monotonic()
        try:
            wrote = await asyncio.to_thread(learner.write_weights, arena.buffer, arena.invitation)
        except (LaminarError, OSError):
            arena.drop()
            raise
        return self.clock.monotonic() - before, wrote

    async def announce(self, staged: Staged, *, expected_digest: str = "", recorded: bool = False) -> str:
        """Seal, and make the version the newest if it is newer than the newest; the digest.

        `recorded`: whether the step that made it has its record already, with `expected_digest`, or without one if no
        relay took the version at the time. Nothing would tell another digest once a newer version is published, so
        that one is recorded as an offer.

        Raises WeightsError if the relay lost it; logs `replay_drift` when the digest is not the expected one. A replay
        need not give the same bits (other hardware, kernels that are not deterministic), and the bits that were
        published may be nowhere any more: so what is offered again is recorded, for rollouts to take."""
        replaces = await self._never_published(staged)
        info = await staged.client.seal(staged.arena, staged.version, wrote=staged.wrote, replaces=replaces)
        kv = await self.coordination.get(self.keys.weights)
        newest = WeightsHead.parse(kv.value) if kv else None
        promised = newest.digest if newest is not None and newest.version == staged.version else expected_digest
        if promised and info.digest != promised:
            log.error(
                "replay_drift: version %d came out as %s, it was published as %s (with another number of devices or "
                "threads, or on other hardware?)",
                staged.version, info.digest[:12], promised[:12],
            )  # fmt: skip
        head = WeightsHead(
            version=staged.version, digest=info.digest, layout_digest=info.layout_digest, bytes=info.bytes,
            master=staged.relay,
        )  # fmt: skip
        if newest is not None and newest.version >= staged.version:
            await self._record_offer(head)
            if kv is not None and newest.version == staged.version and newest.digest == info.digest:
                # The chain asks the master first: the relay that has it now, whatever became of the one before.
                await self.ledger.guarded_put(self.keys.weights, head, unchanged(kv))
            log.info("offered version %d again (%s)", staged.version, info.digest[:12])
            return info.digest
        while not await self._put_head(head, kv):
            await self.ledger.check_fence()
            # The manager may have named another master, of the version before or, its reply to us lost, of this one.
            kv = await self.coordination.get(self.keys.weights)
            found = WeightsHead.parse(kv.value) if kv else None
            if found is not None and (found.version, found.digest) == (head.version, head.digest):
                break
            if found is None or found.version >= staged.version:
                raise Fenced(f"version {staged.version} was not announced: somebody else published {self.keys.weights}")
        if recorded and info.digest != expected_digest:
            await self._record_offer(head)
        log.info("published version %d (%s)", staged.version, info.digest[:12])
        await self.keeper.keep(staged.relay, staged.client, staged.version)
        return info.digest

    async def _never_published(self, staged: Staged) -> str:
        """The digest under which the relay holds a version that is still to be published: a trainer that died before
        it announced it has sealed it, and a replay need not give the same bits. Empty if there is none."""
        held = await held_digest(staged.client, staged.version, "")
        published = await self.published()
        return held if published is None or published.version < staged.version else ""

    async def spread(self) -> dict[str, float | None]:
        """How the newest version that any other relay has got spread, for the metrics: `broadcast_s` until the last of
        those had it, or for which a relay has now waited in vain, if that is longer: a broadcast that is stuck must
        not look like the one before it. `hop_bytes_s` of the slowest hop, `delta_ratio` of bytes sent to bytes of the
        version. Empty without other relays."""
        found = (await self.coordination.range(self.keys.load("relay", ""))).items
        loads = [RelayLoad.parse(kv.value) for kv in found]
        waited = [max(0, self.clock.now_us() - load.stall.since) / 1e6 for load in loads if load.stall is not None]
        hops = [load.hop for load in loads if load.hop is not None]
        newest = max((hop.version for hop in hops), default=-1)
        last = [hop for hop in hops if hop.version == newest]
        if not last:
            return {"broadcast_s": max(waited)} if waited and len(loads) > 1 else {}
        slowest = min(hop.bytes / max(hop.seconds, 1e-9) for hop in last)
        ratio = sum(hop.received for hop in last) / sum(hop.bytes for hop in last)
        longest = max([*(hop.lag_s for hop in last), *waited])
        return {"broadcast_s": longest, "hop_bytes_s": slowest, "delta_ratio": ratio}

    async def _put_head(self, head: WeightsHead, seen: KeyValue | None) -> bool:
        expected = unchanged(seen) if seen else absent(self.keys.weights)
        return await self.ledger.guarded_put(self.keys.weights, head, expected)

    async def _record_offer(self, head: WeightsHead) -> None:
        """Raises Fenced if this trainer has been replaced."""
        key = f"{self.keys.offers_of(head.version)}{head.digest}"
        if not await self.ledger.guarded_put(key, head, self.ledger.actor.guard()):
            await self.ledger.check_fence()

    async def offer(self, learner: Learner) -> str:
        """Publish, or offer again, what the learner holds; the digest, empty if no relay took it."""
        staged = await self.stage(learner)
        if staged is None:
            return ""
        try:
            digest = await self.announce(staged)
            published = await self.published()
            if published is not None and published.digest == digest:
                # The step's record may have been written without a digest, if the publish was skipped then.
                await self._record_offer(published)
            return digest
        except (WeightsError, OSError) as e:
            log.error("version %d could not be offered: %s", learner.version, e)
            return ""
