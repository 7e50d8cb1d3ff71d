"""How the relays of a running run stand: the chain, what each holds and receives, how fast, and what went wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from laminar.buffer.coordination import Coordination
from laminar.buffer.keys import Keys
from laminar.buffer.records import ChainRecord, RelayHop, RelayLoad, WeightsHead, WorkerRecord
from laminar.errors import CoordinationError
from laminar.relay.chain import led_by
from laminar.workers.viewing.display import duration, short
from laminar.workers.viewing.inspect import StoreView
from laminar.workers.viewing.status import ask_etcd, ways_to_etcd


@dataclass(frozen=True)
class RelayView:
    """One relay at its place in the chain; `load` is None until it has reported."""

    record: WorkerRecord
    load: RelayLoad | None


@dataclass(frozen=True)
class ChainStatus:
    """`relays` in the order in which the newest version passes through them; as seen at `now_us` (UTC microseconds)."""

    run: str
    epoch: int
    head: WeightsHead | None
    relays: tuple[RelayView, ...]
    now_us: int


def chain_status(store: StoreView, endpoints: list[str]) -> ChainStatus:
    """Blocks. Raises CoordinationError if no etcd of the run answers: relays exist only while it works."""
    why = "no etcd of it runs here: it has ended, was stopped, or runs elsewhere (--etcd HOST:PORT)"
    for access in ways_to_etcd(store, endpoints):
        found, why = asyncio.run(ask_etcd(store, access, read_chain))
        if found is not None:
            return found
    raise CoordinationError(f"run {store.run.run!r} has no relays that can be asked: {why}")


async def read_chain(coordination: Coordination, keys: Keys) -> ChainStatus:
    chain_kv, head_kv = await coordination.get(keys.chain), await coordination.get(keys.weights)
    chain = ChainRecord.parse(chain_kv.value) if chain_kv else ChainRecord(epoch=0, order=[])
    head = WeightsHead.parse(head_kv.value) if head_kv else None
    prefix = keys.load("relay", "")
    loads = {kv.key[len(prefix) :]: RelayLoad.parse(kv.value) for kv in (await coordination.range(prefix)).items}
    records = [WorkerRecord.parse(kv.value) for kv in (await coordination.range(keys.workers("relay"))).items]
    order = led_by(chain.order, head.master if head else "")
    place = {relay: i for i, relay in enumerate(order)}
    records.sort(key=lambda record: (place.get(record.id, len(place)), record.id))
    views = tuple(RelayView(record, loads.get(record.id)) for record in records)
    return ChainStatus(keys.run, chain.epoch, head, views, time.time_ns() // 1000)


def render_chain(status: ChainStatus) -> RenderableType:
    head = status.head
    newest = f"version {head.version} ({head.digest[:12]}), {head.bytes / 2**20:.1f} MiB" if head else "none yet"
    parts: list[RenderableType] = [
        Text(f"{status.run}: {len(status.relays)} relays, chain epoch {status.epoch}", style="bold"),
        Text(f"newest published: {newest}"),
        _table(status),
    ]
    for view in status.relays:
        if view.load is None:
            continue
        told = [*_repairs(view.load.hop), *view.load.errors]
        name = short(view.record.id)
        parts += [Text(f"{name}: {line}", style="red") for line in _hindrances(view.load, status.now_us)]
        if view.load.last_refusal:
            told.append(f"{view.load.refusals} connections refused, the last one: {view.load.last_refusal}")
        parts += [Text(f"{name}: {line}", style="yellow") for line in told]
    return Group(*parts)


def _repairs(hop: RelayHop | None) -> list[str]:
    """Of the last transfer; how many came before those that were reported, if any did."""
    if hop is None:
        return []
    earlier = hop.repaired - len(hop.repairs)
    return [*([f"{earlier} repairs of version {hop.version} before these:"] if earlier > 0 else []), *hop.repairs]


def _hindrances(load: RelayLoad, now_us: int) -> list[str]:
    """What keeps the newest version from coming, and which neighbours fail: since when, and for what reason."""

    def age(moment_us: int) -> str:
        return duration(max(0, now_us - moment_us) / 1e6)

    lines = []
    if (stall := load.stall) is not None:
        last = f"; last error {age(stall.at)} ago: {stall.reason}" if stall.reason else ""
        lines.append(f"version {stall.version} does not come, nothing did for {age(stall.since)}: {stall.waits}{last}")
    lines += [f"{short(t.relay)} fails for {age(t.since)}, last {age(t.at)} ago: {t.reason}" for t in load.troubles]
    return lines


def _table(status: ChainStatus) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, justify in (
        ("relay", "left"), ("host", "left"), ("holds", "left"), ("receives", "left"), ("from", "left"),
        ("MB/s", "right"), ("sent", "right"), ("lag s", "right"), ("repairs", "right"), ("refused", "right"),
    ):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    for view in status.relays:
        table.add_row(*_cells(view, status.head))
    return table


def _cells(view: RelayView, head: WeightsHead | None) -> Sequence[RenderableType]:
    name = short(view.record.id)
    leads = head is not None and view.record.id == head.master
    if leads:
        name += " (master)"
    load = view.load
    if load is None:
        return (name, view.record.host, "not reported yet", "", "", "", "", "", "", "")
    held = " ".join(str(version) for version in sorted(load.held)) or "nothing"
    last = _last_hop(None if leads else load.hop, head)
    return (name, view.record.host, held, load.arriving or "–", *last, str(load.repairs), str(load.refusals))


def _last_hop(hop: RelayHop | None, head: WeightsHead | None) -> Sequence[Text]:
    """From whom, MB/s, bytes sent, lag; faint and with its version if that is not the newest. The master has none: the
    trainer publishes there, and what it once received as another one's neighbour says nothing of now."""
    if hop is None:
        return [Text("–")] * 4
    source = short(hop.peers[-1]) if hop.peers else "–"
    rate, sent = hop.bytes / max(hop.seconds, 1e-9) / 1e6, hop.received / hop.bytes
    old = head is not None and hop.version < head.version
    cells = (source, f"{rate:.0f}", f"{sent:.0%}", f"{hop.lag_s:.2f}" + (f" (of {hop.version})" if old else ""))
    return [Text(cell, style="dim" if old else "") for cell in cells]
