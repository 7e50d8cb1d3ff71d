"""What a device refuses, told in words; and that after an error a new queue pair works on the same memory.

Runs in the guest of scripts/rdma, whose devices LAMINAR_TEST_RDMA_DEVICES names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.receiving import Arriving
from laminar.relay.transport.base import ChunkSource, FabricFailed, PullRequest, VersionHeader, VersionName
from laminar.relay.transport.recovery import Renewals
from laminar.relay.transport.selection import open_transports
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import Device, Region, active_ports, select
from laminar.relay.transport.verbs_queue import Completions, QueuePair, Target

DEVICES = [name for name in os.environ.get("LAMINAR_TEST_RDMA_DEVICES", "").split(",") if name]
BYTES = 1 << 20
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(len(DEVICES) < 2, reason="needs two RDMA devices; scripts/rdma makes them in a virtual machine"),
]


class End:
    """A device with an arena, and queue pairs on them."""

    def __init__(self, name: str) -> None:
        self.completions = Completions(Device(*select(active_ports(), wanted=name)))
        self.arena = Arena.create(BYTES)
        self.regions: list[Region] = []

    def pair(self, *, writable: bool) -> QueuePair:
        return QueuePair(self.completions, "the other end", writable=writable)

    @property
    def target(self) -> Target:
        return Target(self.arena.address, BYTES, tuple(region.remote_key for region in self.regions))

    def close(self) -> None:
        self.completions.close()
        self.completions.device.close()
        self.arena.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    """(sender, receiver), with their memory registered."""
    ends = End(DEVICES[0]), End(DEVICES[1])
    for end in ends:
        end.regions = await end.completions.device.regions(end.arena)
    with ends[0].arena.buffer(BYTES) as buffer:
        buffer[:] = os.urandom(BYTES)
    yield ends
    for end in ends:
        end.close()


def joined(sender: End, receiver: End, *, receives: int = 1) -> tuple[QueuePair, QueuePair]:
    out, into = sender.pair(writable=False), receiver.pair(writable=True)
    into.post_receives(receives)
    into.connect(out.end)
    out.connect(into.end)
    out.grant(8)
    return out, into


async def write(pair: QueuePair, sender: End, target: Target, immediate: int = 7) -> None:
    await pair.write(sender.regions, sender.arena.address, target, 0, BYTES, immediate)
    await asyncio.wait_for(pair.drained(), 30)


async def renewed(
    ends: tuple[End, End], work: Callable[[QueuePair, QueuePair], Awaitable[None]], *, receives: int
) -> None:
    """`work` of a sender and a receiver, by new ones after an error that passes with them, as transfers do it: a loaded
    machine's soft-RoCE refuses some of what it sends twice."""
    renewals = Renewals()
    while True:
        pairs = joined(*ends, receives=receives)
        try:
            return await work(*pairs)
        except FabricFailed as e:
            if not renewals.granted(e):
                raise
        finally:
            for pair in pairs:
                pair.close()


def same(ends: tuple[End, End]) -> bool:
    with ends[0].arena.buffer(BYTES) as ours, ends[1].arena.buffer(BYTES) as theirs:
        return ours == theirs


async def test_bytes_are_written_in_place_and_announced_by_their_number(ends: tuple[End, End]) -> None:
    async def announced(out: QueuePair, into: QueuePair) -> None:
        await write(out, ends[0], ends[1].target, immediate=0xF0E1)
        assert await asyncio.wait_for(into.arrival(), 30) == 0xF0E1 and same(ends)

    await renewed(ends, announced, receives=1)


async def test_a_wrong_key_is_refused_by_the_peers_device_and_writes_nothing(ends: tuple[End, End]) -> None:
    out, _ = joined(*ends)
    target = ends[1].target
    with pytest.raises(FabricFailed, match=r"not registered any more.*REM_ACCESS_ERR"):
        await write(out, ends[0], Target(target.address, BYTES, (target.keys[0] ^ 0x5500,)))
    with ends[1].arena.buffer(BYTES) as buffer:
        assert not any(buffer)


async def test_without_a_posted_receive_the_sender_gives_up_soon(ends: tuple[End, End]) -> None:
    """Credits prevent this; a peer that grants more than it has room for is not waited for."""
    out, _ = joined(*ends, receives=0)
    with pytest.raises(FabricFailed, match="no receive posted"):
        await write(out, ends[0], ends[1].target)


async def test_nobody_writes_into_memory_whose_queue_pair_is_closed(ends: tuple[End, End]) -> None:
    """A late writer of an earlier transfer, which still knows address and key of an arena that is used again."""
    out, into = joined(*ends)
    into.close()
    with pytest.raises(FabricFailed, match=r"does not acknowledge.*RETRY_EXC_ERR"):
        await write(out, ends[0], ends[1].target)
    with ends[1].arena.buffer(BYTES) as buffer:
        assert not any(buffer)


async def test_after_an_error_new_queue_pairs_work_on_the_same_memory(ends: tuple[End, End]) -> None:
    out, into = joined(*ends, receives=0)
    with pytest.raises(FabricFailed):
        await write(out, ends[0], ends[1].target)
    with pytest.raises(FabricFailed, match=r"had broken before|no receive posted|takes no write"):
        await write(out, ends[0], ends[1].target)
    out.close()
    into.close()

    async def again(out: QueuePair, into: QueuePair) -> None:
        await write(out, ends[0], ends[1].target)
        assert same(ends)

    await renewed(ends, again, receives=1)


async def test_as_many_pieces_as_there_are_credits_come_in_their_order(ends: tuple[End, End]) -> None:
    async def many(out: QueuePair, into: QueuePair) -> None:
        out.grant(24)
        for i in range(32):
            await out.write(ends[0].regions, ends[0].arena.address, ends[1].target, 0, BYTES // 4, i)
        await out.drained()
        assert [await into.arrival() for _ in range(32)] == list(range(32))

    await renewed(ends, many, receives=32)


async def set_wire(state: str) -> None:
    """Of the first device: `up` or `down`."""
    process = await asyncio.create_subprocess_exec("ip", "link", "set", "wire-a", state)
    assert await process.wait() == 0


class OneVersion:
    """Serves one version, of which a quarter is there."""

    def __init__(self) -> None:
        self.layout = Layout.from_tensors({"w": ("uint8", (BYTES,))})
        self.arena = Arena.create(BYTES)
        with self.arena.buffer(BYTES) as buffer:
            buffer[:] = os.urandom(BYTES)
            sums = checksums(buffer, BYTES // 4)
        name = VersionName(1, version_digest(self.layout, sums))
        self.arriving = Arriving(VersionHeader(name, self.layout, BYTES // 4, tuple(sums)), self.arena)
        self.arriving.add(Piece(0, 1))
        self.name = name

    async def find(self, request: PullRequest) -> ChunkSource:
        return self.arriving.open()


async def test_a_relay_that_only_the_device_does_not_reach_is_reached_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The network of the devices is cut while connections work: said once, and left alone for a while."""
    version = OneVersion()
    arena = Arena.create(BYTES)
    server, asker = (
        VerbsTransport(*select(active_ports(), wanted=name), secret=b"s" * 32, run="demo", relay="server", stall_s=20.0)
        for name in DEVICES[:2]
    )
    endpoint = await server.listen(version.find)
    link = await asker.connect("server", endpoint, deadline_s=20)
    await link.find(PullRequest((version.name,)))
    async with aclosing(link.receive(arena, ChunkSet(4, full=True), 1)) as pieces:
        assert await asyncio.wait_for(anext(pieces), 30) == Piece(0, 1)
        await set_wire("down")
        try:
            version.arriving.add(Piece(1, 3))
            with pytest.raises(FabricFailed, match="does not acknowledge"):
                await anext(pieces)
        finally:
            await set_wire("up")
    with pytest.raises(FabricFailed, match="not reached by verbs for now"):
        await asker.connect("server", endpoint, deadline_s=20)
    assert [r.message for r in caplog.records if "reached without RDMA" in r.message and "server" in r.message]
    assert arena.pins == 0
    await link.close()
    await asker.close()
    await server.close()
    arena.close()
    version.arena.close()


async def test_a_host_with_a_device_offers_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINAR_RDMA_DEVICE", DEVICES[1])
    control = {"secret": b"s" * 32, "run": "demo", "relay": "r0"}
    offered = open_transports("auto", bind="0.0.0.0", **control)  # type: ignore[arg-type]
    assert [transport.name for transport in offered] == ["verbs", "tcp"]
    alone = open_transports("auto", bind="127.0.0.1", **control)  # type: ignore[arg-type]
    assert [transport.name for transport in alone] == ["tcp"], "no weights are to leave the host"
