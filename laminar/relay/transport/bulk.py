"""The bytes of large pieces, moved by threads: an event loop moves what one core does, and meanwhile nothing else.

    many bytes ──a thread is free──▶ thread: as long as bytes go through ──▶ loop: waits, keeps the deadline, and again
                └─ none is free ───▶ the loop itself, slice by slice

A thread is left as soon as nothing goes through for a moment, and after a while in any case: peers that are slow or
silent hold none, however many there are, and all deadlines stay with the loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Move = Callable[[socket.socket, memoryview], int]

BULK_BYTES = 1 << 20
"""From so many on a thread is worth it: to reach one and come back takes as long as 200 KB on a fast link."""
PAUSE_MS = 5
"""Milliseconds without a byte after which a thread is left."""
TURN_S = 0.25
"""Seconds after which it is left in any case."""
MOST_THREADS = 8


class Bulk:
    """Threads of one transport. Sockets are non-blocking; each is read, and written, by one task at a time."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: at once at most; 0: as many as there are cores, but two to eight."""
        self._free = threads or min(max(2, len(os.sched_getaffinity(0))), MOST_THREADS)
        self._threads = ThreadPoolExecutor(self._free, "laminar-bulk")

    async def receive(self, sock: socket.socket, target: memoryview) -> int:
        """How many bytes came into `target`: 0 if there are few to come, no thread is free, or nothing is there for
        now, be it that the peer has closed. Raises OSError. When this returns or is cancelled, no thread writes."""
        return await self._move(_receive, sock, target)

    async def send(self, sock: socket.socket, data: memoryview) -> int:
        """How many bytes of `data` were taken; 0 as with `receive`. Raises OSError."""
        return await self._move(_send, sock, data)

    async def _move(self, move: Move, sock: socket.socket, view: memoryview) -> int:
        if view.nbytes < BULK_BYTES or not self._free:
            return 0
        self._free -= 1
        try:
            return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, move, sock, view))
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


def _receive(sock: socket.socket, target: memoryview) -> int:
    return _go_on(sock, target, sock.recv_into, select.POLLIN)


def _send(sock: socket.socket, data: memoryview) -> int:
    return _go_on(sock, data, sock.send, select.POLLOUT)


def _go_on(sock: socket.socket, view: memoryview, call: Callable[[memoryview], int], event: int) -> int:
    """`call` for what is left of `view`, as long as it gets on."""
    ready = select.poll()
    ready.register(sock, event)
    until = time.monotonic() + TURN_S
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
