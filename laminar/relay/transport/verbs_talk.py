"""What the two ends of a transfer hear and say over their connection while a device writes, or fails.

asker    Incoming: credits and signs of life ──▶   ◀── signs of life, DONE, REFUSED, FAILED
server   Hearing:  credits, DONE, FAILED; the FETCH that follows a failure
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from laminar.relay.transport.base import HEARTBEAT_S, FabricFailed, LinkBroken, PeerRefused
from laminar.relay.transport.frames import CREDIT, FrameChannel, Kind, decode_reason
from laminar.relay.transport.verbs_queue import RECEIVES, QueuePair
from laminar.relay.transport.verbs_words import decode_failure, encode_failure

log = logging.getLogger(__name__)
T = TypeVar("T")

LAST_WORDS_S = 2.0
"""Seconds for the peer's last word once all has arrived."""


class Incoming:
    """What the asker hears and says while pieces are written into its arena."""

    def __init__(self, channel: FrameChannel, pair: QueuePair) -> None:
        self._channel, self._pair = channel, pair
        self._credits = RECEIVES
        self._more = asyncio.Event()
        self._more.set()
        self._finishing = False
        self._speaking = asyncio.create_task(self._speak())
        self._hearing = asyncio.create_task(self._hear())

    async def arrival(self) -> int:
        """The first chunk of the piece that came next. Raises what the peer told, or the device."""
        if self._pair.arrived:
            return self._pair.arrived.popleft()
        # All was acknowledged by our device when the peer is done; its completions are seen a little later.
        complaint = f"{self._channel.peer} is done, but not all pieces came"
        return await guarded(self._hearing, self._pair.arrival(), complaint)

    def used_one(self) -> None:
        """A piece was used: there is room for another."""
        self._pair.post_receives(1)
        self._credits += 1
        self._more.set()

    async def finish(self) -> None:
        """All pieces came: the connection is left ready for the next request."""
        self._finishing = True
        self._more.set()
        await self._speaking
        async with _deadline(f"{self._channel.peer} wrote all pieces, but did not say that it is done"):
            await self._hearing
        await self._channel.send(Kind.DONE)

    async def give_up(self, problem: FabricFailed) -> FabricFailed:
        """A device failed: what the peer says of it. The peer writes nothing more then, and the connection is left
        ready for another FETCH."""
        self._finishing = True
        self._more.set()
        await self._speaking
        told = await self._told_failure() if self._hearing.done() else None
        if told is None:
            # It may not know yet; if it does, it takes this for the old news that it is.
            await self._channel.send(Kind.FAILED, encode_failure(problem))
            told = await self._told_failure()
        while told is None:
            kind, payload = await self._channel.receive(Kind.FAILED, Kind.WAITING)
            told = decode_failure(self._channel.peer, payload) if kind is Kind.FAILED else None
        return told

    async def _told_failure(self) -> FabricFailed | None:
        """What the peer said at last, heard to its end; None if that was that it is done."""
        try:
            await self._hearing
        except FabricFailed as e:
            return e
        return None

    async def stop(self) -> None:
        for task in (self._speaking, self._hearing):
            task.cancel()
        await asyncio.gather(self._speaking, self._hearing, return_exceptions=True)

    async def _speak(self) -> None:
        """Credits as they come up, and a sign of life. Never cut off within a frame while the link is to live on."""
        try:
            while not self._finishing:
                credits, self._credits = self._credits, 0
                self._more.clear()
                await self._channel.send(Kind.CREDIT, CREDIT.pack(credits))
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._more.wait()
                except TimeoutError:
                    continue
        except LinkBroken as e:
            self._pair.fail(e)

    async def _hear(self) -> None:
        while True:
            kind, payload = await self._channel.receive(Kind.DONE, Kind.WAITING, Kind.REFUSED, Kind.FAILED)
            if kind is Kind.DONE:
                return
            raise_told(self._channel.peer, kind, payload)


class Hearing:
    """What the server hears while it writes. Never cut off within a frame while the link is to live on."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self._task: asyncio.Task[bytes | None] | None = None

    def begin(self, pair: QueuePair) -> asyncio.Task[bytes | None]:
        """Until the asker says that it is done; raises what failed there."""
        self._task = asyncio.create_task(self._hear(pair))
        return self._task

    async def next_fetch(self) -> bytes:
        """Of an asker that begins anew, after it was told FAILED; what it says before is of the queue pair before."""
        fetch = None
        if self._task is not None:
            try:
                fetch = await self._task
            except FabricFailed as e:
                log.debug("the failure is known at both ends: %s", e)
        while fetch is None:
            kind, payload = await self._channel.receive(Kind.FETCH, Kind.CREDIT, Kind.FAILED)
            fetch = payload if kind is Kind.FETCH else None
        return fetch

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _hear(self, pair: QueuePair) -> bytes | None:
        while True:
            kind, payload = await self._channel.receive(Kind.CREDIT, Kind.DONE, Kind.FAILED, Kind.FETCH)
            if kind is Kind.DONE:
                return None
            if kind is Kind.FETCH:
                return payload
            if kind is Kind.FAILED:
                raise decode_failure(self._channel.peer, payload)
            if len(payload) != CREDIT.size:
                raise PeerRefused(f"a credit of {len(payload)} bytes")
            (count,) = CREDIT.unpack(payload)
            if count > RECEIVES:
                raise PeerRefused(f"{count} credits at once, {RECEIVES} are the most")
            pair.grant(count)


async def guarded(guard: asyncio.Task[Any], work: Awaitable[T], complaint: str) -> T:
    """The result of `work`, which is cancelled if `guard` fails first. Raises LinkBroken with `complaint` if it does
    not come within `LAST_WORDS_S` of the guard's good end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, guard], return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and guard.exception() is None:
            await asyncio.wait([task], timeout=LAST_WORDS_S)
        if task.done():
            return task.result()
        raise guard.exception() or LinkBroken(f"{complaint} within {LAST_WORDS_S:.0f} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def raise_told(peer: str, kind: Kind, payload: bytes) -> None:
    """What a frame other than a sign of life means."""
    if kind is Kind.FAILED:
        raise decode_failure(peer, payload)
    if kind is Kind.REFUSED:
        raise PeerRefused(f"{peer}: {decode_reason(payload)}")


@asynccontextmanager
async def _deadline(complaint: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            yield
    except TimeoutError:
        raise LinkBroken(f"{complaint} within {LAST_WORDS_S:.0f} s") from None
