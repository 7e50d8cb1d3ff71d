"""What follows when an RDMA device fails while the connection works: a new queue pair, or tcp for a while.

The queue pairs here write within this process and fail when they are told to; all else is the real transport.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.receiving import Arriving
from laminar.relay.transport import verbs
from laminar.relay.transport.base import (
    ChunkSource,
    FabricFailed,
    Link,
    LinkBroken,
    PullRequest,
    VersionHeader,
    VersionName,
)
from laminar.relay.transport.recovery import AVOID_S, RENEWALS, UNREACHED, Avoidance, Renewals, Unreached
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import ETHERNET, Gid, Port, Region
from laminar.relay.transport.verbs_queue import LASTING, QueueEnd, QueuePair, Target
from laminar.relay.transport.verbs_words import decode_failure, encode_failure

CHUNK, CHUNKS = 4096, 80
"""More pieces than a sender has credits for at the start."""
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * CHUNKS - 1000,))})
BYTES = LAYOUT.total_bytes
GID = Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", 2)
SIDES = [("sender",), ("receiver",), ("sender", "receiver")]


# -- decisions ------------------------------------------------------------------------------------------------------


def test_a_transient_failure_is_met_with_a_new_queue_pair_a_few_times_and_a_lasting_one_never() -> None:
    renewals = Renewals()
    assert not renewals.granted(FabricFailed("gone"))
    assert [renewals.granted(FabricFailed("odd", transient=True)) for _ in range(RENEWALS + 2)] == [
        *[True] * RENEWALS, False, False,
    ]  # fmt: skip


def test_a_relay_is_avoided_for_a_while_then_asked_by_the_device_again() -> None:
    avoidance = Avoidance()
    assert not avoidance.avoided("r0", 100.0)
    assert avoidance.failed("r0", 100.0), "news"
    assert avoidance.avoided("r0", 100.0 + AVOID_S - 1) and not avoidance.avoided("r1", 100.0)
    assert not avoidance.avoided("r0", 100.0 + AVOID_S)
    assert not avoidance.failed("r0", 200.0), "told once, until it worked"
    assert avoidance.worked("r0") and not avoidance.worked("r0")
    assert not avoidance.avoided("r0", 201.0) and avoidance.failed("r0", 300.0)


def test_a_relay_without_a_control_connection_is_tried_again_a_few_times_before_another_transport_is() -> None:
    unreached = Unreached()
    assert [unreached.failed("r0") for _ in range(UNREACHED + 1)] == [*[0] * (UNREACHED - 1), UNREACHED, UNREACHED + 1]
    assert unreached.failed("r1") == 0, "each for itself"
    unreached.reached("r0")
    assert unreached.failed("r0") == 0, "in a row"


@pytest.mark.parametrize("transient", [True, False])
def test_a_failure_is_told_with_whether_it_lasts(transient: bool) -> None:
    told = decode_failure("r0", encode_failure(FabricFailed("the device is odd", transient=transient)))
    assert (str(told), told.transient) == ("r0: the device is odd", transient)


def test_a_failure_that_is_told_without_saying_so_is_taken_to_last() -> None:
    assert not decode_failure("r0", b'{"reason": "gone"}').transient
    assert not decode_failure("r0", b'{"reason": "gone", "transient": "yes"}').transient
    with pytest.raises(WeightsError):
        decode_failure("r0", b'{"transient": true}')


@pytest.mark.parametrize(
    ("name", "transient"),
    [("REM_INV_REQ_ERR", True), ("WR_FLUSH_ERR", True), ("RNR_RETRY_EXC_ERR", True), ("REM_OP_ERR", True)]
    + [(name, False) for name in LASTING],
)
def test_which_errors_of_a_device_are_gone_with_the_queue_pair(name: str, transient: bool) -> None:
    pair = Pair(SimpleNamespace(fabric=Fabric()), "the peer", writable=True)
    pair._constants = SimpleNamespace(**{f"IBV_WC_{name}": 9, "IBV_WC_SUCCESS": 0})
    pair._device = SimpleNamespace(port="rx0:1")
    pair.completed(SimpleNamespace(wr_id=1, status=9, vendor_err=0))
    assert isinstance(pair._problem, FabricFailed)
    assert name in str(pair._problem) and pair._problem.transient is transient


# -- the transport --------------------------------------------------------------------------------------------------


class Fabric:
    """`faults`: at which writes, counted from 1, whose queue pair fails; `after`: once what was written has come."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.writes = self.landed = 0
        self.faults: dict[int, Sequence[str]] = {}
        self.transient = True
        self.after = False

    def writers(self) -> list[Pair]:
        return [pair for pair in self.pairs if not pair.writable]


class Pair(QueuePair):
    def __init__(self, completions: Any, peer: str, *, writable: bool) -> None:
        self.fabric: Fabric = completions.fabric
        self.peer, self.writable = peer, writable
        self.arrived = deque()
        self.credits = 0
        self.closed = False
        self.room = 0
        self.other: Pair | None = None
        self._sends = 0
        self._problem = None
        self._changed = asyncio.Event()
        alive = [pair for pair in self.fabric.pairs if pair.writable == writable and not pair.closed]
        assert not alive, "what failed was let go of before something new can write"
        self.fabric.pairs.append(self)

    @property
    def end(self) -> QueueEnd:
        return QueueEnd(self.fabric.pairs.index(self), 0, GID.text, 0, 5, ETHERNET)

    def connect(self, other: QueueEnd) -> None:
        self.other = self.fabric.pairs[other.number]

    def post_receives(self, count: int) -> None:
        self.room += count

    async def write(
        self, regions: Sequence[Region], address: int, target: Target, start: int, end: int, immediate: int
    ) -> None:
        await self._until(lambda: self.credits > 0, "gave no credit")
        self.credits -= 1
        self.fabric.writes += 1
        other = self.other
        assert other is not None
        if self._problem is not None or other._problem is not None:
            self._sends += 1  # neither written nor acknowledged: one of the two does nothing any more
            return
        failing = self.fabric.faults.get(self.fabric.writes, ())
        if not failing or self.fabric.after:
            assert other.room > 0 and not other.closed
            other.room -= 1
            self.fabric.landed += 1
            ctypes.memmove(target.address + start, address + start, end - start)
            other.arrived.append(immediate)
            other._changed.set()
        if failing:
            problem = FabricFailed("the peer's device finds the request invalid", transient=self.fabric.transient)
            self._sends += "sender" not in failing  # never acknowledged
            for pair in [self] * ("sender" in failing) + [other] * ("receiver" in failing):
                pair.fail(problem)

    def close(self) -> None:
        self.closed = True
        self.fail(LinkBroken("closed"))


class Two:
    """A server with one version and an asker, each with a device."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.server, self.asker = (self._transport(name) for name in ("server", "asker"))
        self.source, self.target = Arena.create(BYTES), Arena.create(BYTES)
        with self.source.buffer(BYTES) as buffer:
            buffer[:] = os.urandom(BYTES)
            sums = checksums(buffer, CHUNK)
        self.name = VersionName(1, version_digest(LAYOUT, sums))
        self.version = Arriving(VersionHeader(self.name, LAYOUT, CHUNK, tuple(sums)), self.source, complete=True)
        self.endpoint = ""

    def _transport(self, relay: str) -> VerbsTransport:
        port = Port("rx0", 1, ETHERNET, 5, 1 << 30, 0, (GID,))
        transport = VerbsTransport(port, GID, secret=b"s" * 32, run="demo", relay=relay, stall_s=20.0)

        async def regions(arena: Arena) -> list[Region]:
            return [Region(0, arena.capacity, 1, 1)]

        device = SimpleNamespace(regions=regions, close=lambda: None)
        completions: Any = SimpleNamespace(fabric=self.fabric, device=device, close=lambda: None)
        transport._completions = completions
        return transport

    async def find(self, request: PullRequest) -> ChunkSource:
        return self.version.open()

    async def open(self) -> Link:
        self.endpoint = self.endpoint or await self.server.listen(self.find)
        return await self.asker.connect("server", self.endpoint, deadline_s=20.0)

    async def receive(self, link: Link) -> list[Piece]:
        """All pieces of the version by this link, whose bytes are checked."""
        with self.target.buffer(BYTES) as buffer:
            buffer[:] = bytes(BYTES)
        await link.find(PullRequest((self.name,)))
        came = []
        async with aclosing(link.receive(self.target, ChunkSet(CHUNKS, full=True), 1)) as pieces:
            async for piece in pieces:
                came.append(piece)
        assert came == [Piece(i, 1) for i in range(CHUNKS)], "each once"
        with self.source.buffer(BYTES) as ours, self.target.buffer(BYTES) as theirs:
            assert ours == theirs
        return came

    async def close(self) -> None:
        await self.asker.close()
        await self.server.close()
        assert all(pair.closed for pair in self.fabric.pairs)
        assert self.target.pins == 0
        self.source.close()
        self.target.close()


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    monkeypatch.setattr(verbs, "QueuePair", Pair)
    two = Two()
    yield two
    await two.close()


@pytest.mark.parametrize("failing", SIDES, ids="+".join)
@pytest.mark.parametrize("at", [1, 2, 33, 50, CHUNKS])
async def test_after_a_transient_error_the_rest_comes_by_a_new_queue_pair_over_the_same_link(
    two: Two, at: int, failing: Sequence[str]
) -> None:
    two.fabric.faults = {at: failing}
    link = await two.open()
    async with asyncio.timeout(60.0):
        await two.receive(link)
        assert len(two.fabric.writers()) == 2
        await two.receive(link)
    assert len(two.fabric.writers()) == 3, "the link serves the next request as before"
    await (await two.open()).close()
    await link.close()


async def test_pieces_that_came_before_the_error_was_seen_count(two: Two) -> None:
    two.fabric.faults, two.fabric.after = {40: ("sender", "receiver")}, True
    link = await two.open()
    async with asyncio.timeout(60.0):
        await two.receive(link)
    assert two.fabric.landed == CHUNKS, "nothing was written twice"
    await link.close()


@pytest.mark.parametrize("failing", SIDES, ids="+".join)
async def test_errors_that_come_again_end_in_another_transport_for_a_while(
    two: Two, failing: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    two.fabric.faults = dict.fromkeys(range(5, 1000), failing)
    link = await two.open()
    async with asyncio.timeout(60.0):
        with pytest.raises(FabricFailed, match="finds the request invalid"):
            await two.receive(link)
    assert len(two.fabric.writers()) == 1 + RENEWALS
    with pytest.raises(FabricFailed, match="not reached by verbs for now"):
        await two.open()
    assert len([r for r in caplog.records if "reached without RDMA" in r.message]) == 1
    await link.close()


@pytest.mark.parametrize("failing", SIDES, ids="+".join)
async def test_a_lasting_error_ends_in_another_transport_at_once_and_the_device_is_asked_again_later(
    two: Two, failing: Sequence[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=verbs.__name__)
    two.fabric.faults, two.fabric.transient = {5: failing}, False
    link = await two.open()
    async with asyncio.timeout(60.0):
        with pytest.raises(FabricFailed, match="finds the request invalid"):
            await two.receive(link)
    await link.close()
    assert len(two.fabric.writers()) == 1
    with pytest.raises(FabricFailed, match="not reached by verbs for now"):
        await two.open()
    loop = asyncio.get_running_loop()
    now = loop.time
    with monkeypatch.context() as later:
        later.setattr(loop, "time", lambda: now() + AVOID_S)
        link = await two.open()
    async with asyncio.timeout(60.0):
        await two.receive(link)
    assert [r.message for r in caplog.records if "reached by RDMA again" in r.message]
    await link.close()


async def test_an_error_after_the_last_piece_costs_the_link_but_not_the_device(two: Two) -> None:
    two.fabric.faults, two.fabric.after = {CHUNKS: ("sender",)}, True
    link = await two.open()
    async with asyncio.timeout(60.0):
        with pytest.raises(LinkBroken, match="all pieces had come") as broken:
            await two.receive(link)
    assert not isinstance(broken.value, FabricFailed)
    await link.close()
    link = await two.open()
    await two.receive(link)
    await link.close()
