"""The trainer holds on to the newest version that it published, and offers the same bytes again when its relay dies.

    announced ──▶ mapped here ──▶ (the relay of this host is another one, and lacks it) ──▶ copied, sealed, master

The mapping costs no memory while the relay lives: it is the relay's own arena. When the relay dies, it is what is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from laminar.buffer.coordination import unchanged
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import WeightsHead
from laminar.errors import CoordinationUnavailable, WeightsError
from laminar.workers.context import Run
from laminar.workers.machine import KeptWeights, RelayAccess

log = logging.getLogger(__name__)

LOOK_S = 0.5
FindRelay = Callable[[], tuple[str, RelayAccess] | None]
"""The id of this host's relay and a way to it, if there is one."""


class Keeper:
    """`relay` finds the relay of this host; `ledger.actor` is the trainer's leadership."""

    def __init__(self, run: Run, ledger: Ledger, relay: FindRelay) -> None:
        self.coordination = run.coordination
        self.keys = run.keys
        self.clock = run.clock
        self.ledger = ledger
        self.relay = relay
        self.offered = 0
        self._kept: KeptWeights | None = None
        self._at = ""
        """Id of the relay that has what is kept."""
        self._lock = asyncio.Lock()

    async def keep(self, relay: str, client: RelayAccess, version: int) -> None:
        """Map a version that was announced, in place of the one before."""
        async with self._lock:
            await self._keep(relay, client, version)

    async def _keep(self, relay: str, client: RelayAccess, version: int) -> None:
        try:
            kept = await client.open(version)
        except (WeightsError, OSError) as e:
            log.warning("version %d is not kept for another offer: %s", version, e)
            return
        self.close()
        self._kept, self._at = kept, relay

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def run(self) -> None:
        """Until cancelled. Raises Fenced if this trainer has been replaced."""
        try:
            while True:
                await self.clock.sleep(LOOK_S)
                try:
                    await self.look()
                except (WeightsError, OSError, CoordinationUnavailable) as e:
                    log.warning("the newest version is not offered again yet: %s", e)
        finally:
            self.close()

    async def look(self) -> None:
        """Offer what is kept if this host's relay has been replaced by one that lacks it."""
        async with self._lock:
            await self._look()

    async def _look(self) -> None:
        found, kept = self.relay(), self._kept
        if found is None or kept is None or found[0] == self._at:
            return
        relay, client = found
        held = {v.info.version: v.info.digest for v in (await client.status()).versions}
        if held.get(kept.info.version) != kept.info.digest:
            arena = await client.reserve(kept.layout)
            if arena is None:
                raise WeightsError(f"relay {relay} has no free arena")
            await asyncio.to_thread(_copy, kept, arena.buffer)
            info = await client.seal(arena, kept.info.version)
            log.info("offered version %d again (%s), to relay %s", info.version, info.digest[:12], relay)
            self.offered += 1
        await self._move_master(relay, kept)
        # The new relay's memory is as good; the old one's is given back.
        await self._keep(relay, client, kept.info.version)
        self._at = relay

    async def _move_master(self, relay: str, kept: KeptWeights) -> None:
        kv = await self.coordination.get(self.keys.weights)
        head = WeightsHead.parse(kv.value) if kv else None
        if kv is None or head is None or (head.version, head.digest) != (kept.info.version, kept.info.digest):
            return
        after = head.model_copy(update={"master": relay})
        if after != head and not await self.ledger.guarded_put(self.keys.weights, after, unchanged(kv)):
            await self.ledger.check_fence()


def _copy(kept: KeptWeights, target: memoryview) -> None:
    target[:] = kept.buffer[: target.nbytes]
