"""The manager's part in the chain: it writes the order whenever a relay comes or goes, and names another master when
the one that the newest version was published to is gone.

    workers/relay ──▶ planned ──▶ chain {epoch, order}
    load/relay    ──▶ elected ──▶ weights.master
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from laminar.buffer.coordination import KeyValue, absent, unchanged
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import ChainRecord, RelayLoad, WeightsHead, WorkerRecord
from laminar.relay.chain import Place, master, order
from laminar.workers.context import Run
from laminar.workers.mirror import Bell, Mirror

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0


def planned(relays: Iterable[KeyValue], current: ChainRecord | None) -> ChainRecord | None:
    """The chain of these relays, of the next epoch; None if the current one is right."""
    records = [WorkerRecord.parse(kv.value) for kv in relays]
    places = {record.id: Place(record.host, record.rack) for record in records}
    before = current.order if current else []
    after = order(places, before)
    if current is not None and after == before:
        return None
    return ChainRecord(epoch=current.epoch + 1 if current else 1, order=after)


def elected(head: WeightsHead, chain: ChainRecord, loads: Iterable[KeyValue]) -> str | None:
    """The relay that serves the newest version in place of its master, which is gone; None while nobody holds it."""
    holders: dict[str, int] = {}
    for kv in loads:
        load = RelayLoad.parse(kv.value)
        if load.held.get(head.version) == head.digest:
            holders[kv.key.rsplit("/", 1)[-1]] = head.version
    holding = [relay for relay in chain.order if relay in holders]
    return master(holding, holders)


class ChainPlanner:
    """Under the manager's leadership (`ledger.actor`)."""

    def __init__(self, run: Run, ledger: Ledger) -> None:
        self.coordination = run.coordination
        self.keys = run.keys
        self.ledger = ledger
        self.bell = Bell()
        self.relays = Mirror(run.coordination, run.keys.workers("relay"), bell=self.bell)
        self.loads = Mirror(run.coordination, f"{run.keys.loads_root}relay/")

    async def run(self) -> None:
        """Until cancelled."""
        async with self.relays, self.loads:
            while True:
                self.relays.check()
                self.loads.check()
                chain = await self.plan()
                await self.elect(chain)
                await self.bell.wait(LOOK_AGAIN_S)

    async def plan(self) -> ChainRecord:
        kv = await self.coordination.get(self.keys.chain)
        current = ChainRecord.parse(kv.value) if kv else None
        chain = planned(self.relays.items.values(), current)
        if chain is None and current is not None:
            return current
        assert chain is not None
        if not await self.ledger.guarded_put(self.keys.chain, chain, unchanged(kv) if kv else absent(self.keys.chain)):
            await self.ledger.check_fence()
        log.info("chain epoch %d: %s", chain.epoch, " -> ".join(chain.order) or "no relay")
        return chain

    async def elect(self, chain: ChainRecord) -> None:
        """Publishing names its relay as master; only a master that is gone is replaced here."""
        kv = await self.coordination.get(self.keys.weights)
        head = WeightsHead.parse(kv.value) if kv else None
        if kv is None or head is None or not head.master or head.master in chain.order:
            return
        successor = elected(head, chain, self.loads.items.values())
        if successor is None:
            return
        after = head.model_copy(update={"master": successor})
        if await self.ledger.guarded_put(self.keys.weights, after, unchanged(kv)):
            log.info("relay %s is master of version %d: %s is gone", successor, head.version, head.master)
