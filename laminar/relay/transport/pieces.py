"""Pieces over a connection: whole, or as what changed since a version that both ends hold.

    ready ──▶ encoded, if a base was named and it is worth it ──▶ sent while the next one is made ready
                                                                        │
    yielded ◀── received into the arena, or applied to the base's bytes ◀┘

Both ways give the same bytes in the same place; the receiver's checksums do not know which it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.transport.base import HEARTBEAT_S, ChunkSource, LinkBroken, PeerRefused
from laminar.relay.transport.bulk import to_its_end
from laminar.relay.transport.frames import DELTA, PIECE, FrameChannel, Kind, reason_of

T = TypeVar("T")

MISSES = 3
"""Differences in a row that were too large, after which no more are looked for in this transfer."""


async def alive(channel: FrameChannel, work: Awaitable[T]) -> T:
    """The result of `work`; meanwhile the peer hears that we live, and we hear if it does not."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=HEARTBEAT_S))[0]:
            await channel.send(Kind.WAITING)
        return task.result()
    finally:
        await _ended(task)


async def send_pieces(
    channel: FrameChannel, source: ChunkSource, wanted: ChunkSet, grain: int, *, delta_share: float
) -> None:
    """All of `wanted`, which is used up. A difference is sent where it takes at most `delta_share` of the bytes."""
    header = source.header
    total = header.layout.total_bytes
    with ExitStack() as views:
        buffer = views.enter_context(source.arena.buffer(total))
        base = views.enter_context(source.base.buffer(total)) if source.base and delta_share > 0 else None
        differences = Differences(base, buffer, delta_share)

        async def prepare() -> tuple[Piece, bytes | None]:
            piece = await source.ready(wanted, grain)
            wanted.discard(piece)
            return piece, await differences.of(*span(piece, header.chunk_bytes, total))

        upcoming: asyncio.Future[tuple[Piece, bytes | None]] | None = asyncio.ensure_future(prepare())
        try:
            while upcoming is not None:
                piece, encoded = await told(channel, upcoming)
                upcoming = asyncio.ensure_future(prepare()) if len(wanted) > 0 else None
                start, end = span(piece, header.chunk_bytes, total)
                if encoded is not None:
                    await channel.send(Kind.DELTA, DELTA.pack(piece.first, piece.count, len(encoded)))
                    await channel.send_bytes(memoryview(encoded))
                    continue
                await channel.send(Kind.PIECE, PIECE.pack(piece.first, piece.count))
                with buffer[start:end] as data:
                    await channel.send_bytes(data)
        finally:
            if upcoming is not None:
                await _ended(upcoming)
    await channel.send(Kind.DONE)


class Differences:
    """Of `new` to `base`, as far as they are worth it; None as base: none are."""

    def __init__(self, base: memoryview | None, new: memoryview, share: float) -> None:
        self._base, self._new, self._share = base, new, share
        self._misses = 0

    async def of(self, start: int, end: int) -> bytes | None:
        """Of the bytes `start` to `end`; None if they are better sent whole."""
        if self._base is None or self._misses >= MISSES:
            return None
        with self._base[start:end] as before, self._new[start:end] as after:
            encoded = await uninterrupted(_encode, before, after, int(self._share * (end - start)))
        self._misses = 0 if encoded is not None else self._misses + 1
        return encoded


async def receive_delta(channel: FrameChannel, base: Arena, arena: Arena, bounds: tuple[int, int], nbytes: int) -> None:
    """A difference of `nbytes`, whose result lies between `bounds` of `arena` on return. Raises DeltaError."""
    start, end = bounds
    if nbytes > end - start:
        raise PeerRefused(f"a difference of {nbytes} bytes for a piece of {end - start}")
    encoded = bytearray(nbytes)
    await channel.receive_into(memoryview(encoded))
    with base.buffer(end)[start:] as before, arena.buffer(end)[start:] as target:
        await uninterrupted(_apply, before, target, encoded)


async def uninterrupted(function: Callable[..., T], *arguments: object) -> T:
    """Its result, from a thread. A cancellation waits for its end."""
    return await to_its_end(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def told(channel: FrameChannel, upcoming: Awaitable[T]) -> T:
    """What is upcoming; if it will not come, the peer is told why before LinkBroken is raised."""
    try:
        return await alive(channel, upcoming)
    except LinkBroken:
        raise
    except WeightsError as e:
        await channel.send(Kind.REFUSED, reason_of(e))
        raise LinkBroken(f"{channel.peer}: {e}") from e


async def _ended(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# What computes differences takes a second to load: not where none are sent, and not in the event loop.


def _encode(base: memoryview, new: memoryview, limit: int) -> bytes | None:
    from laminar.relay.delta import encode

    return encode(base, new, limit=limit)


def _apply(base: memoryview, target: memoryview, encoded: bytearray) -> None:
    from laminar.relay.delta import apply

    apply(base, target, encoded)
