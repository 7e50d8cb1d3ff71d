"""The bytes of large pieces, moved by threads: an event loop moves what one core does, and meanwhile nothing else.

    many bytes ──a thread is free──▶ thread: as long as bytes go through ──▶ loop: waits, keeps the deadline, and again
                └─ none is free ───▶ the loop itself, slice by slice

A thread is left as soon as nothing goes through for a moment, and after a while in any case: peers that are slow or
silent hold none, however many there are, and all deadlines stay with the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

BULK_BYTES = 1 << 20
"""From so many on a thread is worth it: to reach one and come back takes as long as 200 KB on a fast link."""
PAUSE_MS = 5
"""Milliseconds without a byte after which a thread is left."""
TURN_S = 0.25
"""Seconds after which it is left in any case."""
MOST_THREADS = 8
SEND_BUFFER = 512 << 10
"""Bytes; the kernel takes twice as many, as far as net.core.wmem_max lets it. Left to itself it lets 4 MB and more be
under way within a host, more than a processor's cache: two connections over loopback then move 5.4 GB/s instead of 7.9,
or 3.5 instead of 4.5 with checks. Between hosts it would slow down a fast link."""


class Blocks:
    """What comes is made of `nbytes` in blocks of `size`, the last may be shorter; `ended` is called with the number of
    each, counted from 0, once its bytes are there, by the thread that received the last of them."""

    def __init__(self, nbytes: int, size: int, ended: Callable[[int], None]) -> None:
        self._nbytes, self._size, self._ended = nbytes, size, ended
        self.at = 0
        """Bytes that have come."""

    @property
    def to_the_next(self) -> int:
        """Bytes until the end of a block."""
        return self._size - self.at % self._size

    def came(self, count: int) -> None:
        """So many more bytes, within one block."""
        self.at += count
        if count and (self.at % self._size == 0 or self.at == self._nbytes):
            self._ended((self.at - 1) // self._size)

    def passed(self, count: int) -> None:
        """So many more came by another way, and whose blocks are not told of."""
        self.at += count


class Bulk:
    """Threads of one transport. Sockets are non-blocking; each is read, and written, by one task at a time."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: at once at most; 0: as many as there are cores, but two to eight."""
        self._free = threads or min(max(2, len(os.sched_getaffinity(0))), MOST_THREADS)
        self._threads = ThreadPoolExecutor(self._free, "laminar-bulk")

    async def receive(self, sock: socket.socket, target: memoryview, blocks: Blocks | None = None) -> int:
        """How many bytes came into `target`: 0 if there are few to come, no thread is free, or nothing is there for
        now, be it that the peer has closed. `blocks` are told of what came. Raises OSError, and what they raise. When
        this returns or is cancelled, no thread writes."""
        return await self._move(target.nbytes, partial(_receive, sock, target, blocks))

    async def send(self, sock: socket.socket, data: memoryview) -> int:
        """How many bytes of `data` were taken; 0 as with `receive`. Raises OSError."""
        return await self._move(data.nbytes, partial(_send, sock, data))

    async def _move(self, nbytes: int, move: Callable[[], int]) -> int:
        if nbytes < BULK_BYTES or not self._free:
            return 0
        self._free -= 1
        try:
            return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, move))
        finally:
            self._free += 1

    def close(self) -> None:
        """No thread is at work any more, once all that called has returned."""
        self._threads.shutdown(wait=False)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Its result. A cancellation waits for its end: it uses memory that may go afterwards."""
    try:
        return await asyncio.shield(work)
    finally:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue  # the one that is under way already, asked for again
        if not work.cancelled():
            work.exception()  # seen, should the cancellation be what is raised


def _receive(sock: socket.socket, target: memoryview, blocks: Blocks | None) -> int:
    until = time.monotonic() + TURN_S
    if blocks is None:
        return _go_on(sock, target, sock.recv_into, select.POLLIN, until)
    done = 0
    while done < target.nbytes and time.monotonic() < until:
        end = min(done + blocks.to_the_next, target.nbytes)
        with target[done:end] as part:
            count = _go_on(sock, part, sock.recv_into, select.POLLIN, until)
        done += count
        blocks.came(count)
        if done < end:
            break
    return done


def _send(sock: socket.socket, data: memoryview) -> int:
    return _go_on(sock, data, sock.send, select.POLLOUT, time.monotonic() + TURN_S)


def _go_on(
    sock: socket.socket, view: memoryview, call: Callable[[memoryview], int], event: int, until: float
) -> int:
    """`call` for what is left of `view`, as long as it gets on, but not after `until`."""
    ready = select.poll()
    ready.register(sock, event)
    done = 0
    while done < view.nbytes and time.monotonic() < until:
        try:
            with view[done:] as rest:
                count = call(rest)
        except BlockingIOError:
            if not ready.poll(PAUSE_MS):
                break
            continue
        if not count:
            break  # closed: the loop finds that too, and says it
        done += count
    return done


def keep_in_cache(sock: socket.socket) -> None:
    """What is under way from `sock` to a peer on this host does not grow beyond a processor's cache."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:  # it has ended already, which the next word finds
        return
    if here == there or ipaddress.ip_address(there).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
