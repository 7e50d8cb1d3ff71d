"""Large pieces through threads: the same bytes, the same deadlines, and no thread for those who are slow."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from laminar.relay.transport import bulk
from laminar.relay.transport.base import LinkBroken
from laminar.relay.transport.bulk import BULK_BYTES, SEND_BUFFER, Blocks, Bulk, keep_in_cache
from laminar.relay.transport.frames import FrameChannel

MANY = 8 * BULK_BYTES


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


class Noting(Bulk):
    """Tells what went through its threads."""

    def __init__(self, threads: int = 2) -> None:
        super().__init__(threads)
        self.moved: list[int] = []

    async def _move(self, *given: object) -> int:
        self.moved.append(await super()._move(*given))  # type: ignore[arg-type]
        return self.moved[-1]


@pytest.fixture
def threads() -> Iterator[Noting]:
    noting = Noting()
    yield noting
    noting.close()


def channel(sock: socket.socket, threads: Bulk | None, stall_s: float = 20.0) -> FrameChannel:
    return FrameChannel(sock, peer="them", stall_s=stall_s, bulk=threads)


@pytest.mark.parametrize("threaded", [True, False])
async def test_many_bytes_go_through_threads_and_come_as_they_were(
    ends: tuple[socket.socket, socket.socket], threads: Noting, threaded: bool
) -> None:
    ours, theirs = ends
    data, target = os.urandom(MANY + 12345), bytearray(MANY + 12345)
    sender = channel(theirs, threads if threaded else None)
    receiver = channel(ours, threads if threaded else None)
    await asyncio.gather(sender.send_bytes(memoryview(data)), receiver.receive_into(memoryview(target)))
    assert target == data
    assert (sum(threads.moved) > MANY) is threaded


async def test_few_bytes_take_no_thread(ends: tuple[socket.socket, socket.socket], threads: Noting) -> None:
    ours, theirs = ends
    target = bytearray(BULK_BYTES - 1)
    sent = channel(theirs, threads).send_bytes(memoryview(bytes(BULK_BYTES - 1)))
    await asyncio.gather(sent, channel(ours, threads).receive_into(memoryview(target)))
    assert not any(threads.moved)


async def test_without_a_free_thread_the_loop_moves_them(
    ends: tuple[socket.socket, socket.socket], threads: Noting
) -> None:
    ours, theirs = ends
    data, target = os.urandom(MANY), bytearray(MANY)
    threads._free = 0
    sent = channel(theirs, threads).send_bytes(memoryview(data))
    await asyncio.gather(sent, channel(ours, threads).receive_into(memoryview(target)))
    assert target == data and not any(threads.moved)


async def test_slow_peers_hold_no_thread(ends: tuple[socket.socket, socket.socket], threads: Noting) -> None:
    """One that sends a byte now and then, and one that sends nothing."""
    ours, theirs = ends
    target = bytearray(MANY)
    receiving = asyncio.create_task(channel(ours, threads).receive_into(memoryview(target)))
    for _ in range(20):
        await asyncio.get_running_loop().sock_sendall(theirs, b"x")
        await asyncio.sleep(2 * bulk.PAUSE_MS / 1e3)
    await asyncio.sleep(0.1)
    assert threads._free == 2 and len(threads.moved) > 1
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)


async def test_a_steady_trickle_holds_a_thread_for_a_turn_only(
    ends: tuple[socket.socket, socket.socket], threads: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "TURN_S", 0.02)
    monkeypatch.setattr(bulk, "PAUSE_MS", 1000)
    ours, theirs = ends
    stop = threading.Event()

    def trickle() -> None:
        while not stop.is_set():
            theirs.send(b"x")
            time.sleep(0.001)

    pouring = threading.Thread(target=trickle)
    pouring.start()
    try:
        async with asyncio.timeout(20):
            while not any(threads.moved[1:]):
                await threads.receive(ours, memoryview(bytearray(MANY)))
    finally:
        stop.set()
        pouring.join()
    assert 0 < sum(threads.moved) < MANY


async def test_silence_and_an_end_within_a_piece_are_told(
    ends: tuple[socket.socket, socket.socket], threads: Noting
) -> None:
    ours, theirs = ends
    receiver = channel(ours, threads, stall_s=0.2)
    half = BULK_BYTES // 2
    theirs.setblocking(True)
    theirs.sendall(bytes(half))
    with pytest.raises(LinkBroken, match=r"them sent nothing for 0\.2 s"):
        await receiver.receive_into(memoryview(bytearray(MANY)))
    theirs.close()
    with pytest.raises(LinkBroken, match="them closed the connection within a piece"):
        await receiver.receive_into(memoryview(bytearray(MANY)))


async def test_who_takes_nothing_is_left(ends: tuple[socket.socket, socket.socket], threads: Noting) -> None:
    _, theirs = ends
    sender = FrameChannel(theirs, peer="them", stall_s=20.0, send_s=0.2, bulk=threads)
    with pytest.raises(LinkBroken, match=r"them took nothing for 0\.2 s"):
        await sender.send_bytes(memoryview(bytes(64 * BULK_BYTES)))
    assert threads._free == 2


async def test_after_a_cancellation_nothing_is_written_any_more(
    ends: tuple[socket.socket, socket.socket], threads: Noting
) -> None:
    """The memory may be another version's by then."""
    ours, theirs = ends
    target = bytearray(MANY)
    stop = threading.Event()

    def pour() -> None:
        while not stop.is_set():
            try:
                theirs.send(b"x" * 65536)
            except BlockingIOError:
                time.sleep(0.001)

    pouring = threading.Thread(target=pour)
    pouring.start()
    try:
        for _ in range(20):
            receiving = asyncio.create_task(channel(ours, threads).receive_into(memoryview(target)))
            await asyncio.sleep(0.005)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            target[:] = bytes(len(target))
            await asyncio.sleep(0.005)
            assert target.count(0) == len(target)
    finally:
        stop.set()
        pouring.join()


@pytest.mark.parametrize("size", [BULK_BYTES, 3 * BULK_BYTES + 7, 2 * MANY])
async def test_a_block_is_told_of_once_its_bytes_are_there(
    ends: tuple[socket.socket, socket.socket], threads: Noting, size: int
) -> None:
    ours, theirs = ends
    data, target = os.urandom(MANY + 12345), bytearray(MANY + 12345)
    told: dict[int, bool] = {}
    loop_thread = threading.get_ident()

    def ended(index: int) -> None:
        here = slice(index * size, (index + 1) * size)
        told[index] = target[here] == data[here] and threading.get_ident() != loop_thread

    sent = channel(theirs, threads).send_bytes(memoryview(data))
    blocks = Blocks(len(target), size, ended)
    await asyncio.gather(sent, channel(ours, threads).receive_into(memoryview(target), blocks))
    # The loop itself receives what comes after a pause, and tells nothing of it.
    assert all(told.values()) and list(told) == sorted(told) and set(told) <= set(range(-(-len(target) // size)))
    assert target == data and blocks.at == len(target)


async def test_blocks_keep_their_place_while_the_loop_receives(
    ends: tuple[socket.socket, socket.socket], threads: Noting
) -> None:
    ours, theirs = ends
    data, target, told = os.urandom(MANY), bytearray(MANY), list[int]()
    threads._free = 0
    blocks = Blocks(MANY, 2 * BULK_BYTES, told.append)
    receiving = asyncio.create_task(channel(ours, threads).receive_into(memoryview(target), blocks))
    sender = channel(theirs, None)
    await sender.send_bytes(memoryview(data)[: BULK_BYTES + 5])
    async with asyncio.timeout(20):
        while blocks.at < BULK_BYTES + 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert told == []
    threads._free = 2
    await asyncio.gather(sender.send_bytes(memoryview(data)[BULK_BYTES + 5 :]), receiving)
    assert target == data and told == sorted(set(told)) and set(told) <= {0, 1, 2, 3}


async def test_what_blocks_raise_ends_the_receiving(ends: tuple[socket.socket, socket.socket], threads: Noting) -> None:
    ours, theirs = ends

    def ended(index: int) -> None:
        raise MemoryError(f"at block {index}")

    blocks = Blocks(MANY, MANY // 8, ended)
    sending = asyncio.create_task(channel(theirs, None).send_bytes(memoryview(bytes(MANY))))
    with pytest.raises(MemoryError, match="at block"):
        await channel(ours, threads).receive_into(memoryview(bytearray(MANY)), blocks)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert threads._free == 2


class Elsewhere(socket.socket):
    """A connection whose peer has another address; none: it is gone."""

    def __init__(self, sock: socket.socket, peer: tuple[str, int] | None) -> None:
        super().__init__(fileno=os.dup(sock.fileno()))
        self._peer = peer

    def getpeername(self) -> tuple[str, int]:
        if self._peer is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return self._peer


def test_what_is_under_way_stays_small_within_a_host_only(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    for peer in (("10.0.0.2", 7), ("fe80::1%lo", 7), None):
        with Elsewhere(ours, peer) as elsewhere:
            keep_in_cache(elsewhere)
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before, "the kernel tunes it further"
    keep_in_cache(theirs)
    most = int(open("/proc/sys/net/core/wmem_max").read())
    assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * min(SEND_BUFFER, most)
    left, right = socket.socketpair()
    with left, right:
        keep_in_cache(left)
