"""A version that is still arriving from another relay, and how others read it meanwhile (cut-through).

    header ──▶ arena is made ──▶ pieces ──checked──▶ have ──▶ sources of the relays after us
       └─ told to those at once              └─ all of it: the version is held like any other

Memory for a first version takes as long as its way here, or longer: whoever reads along learns what comes before there
is an arena, and makes its own meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import blake3

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.transport.base import VersionHeader


class Arriving:
    """`have` holds the chunks that are in the arena and were checked. A complete version is one that has all."""

    def __init__(self, header: VersionHeader, arena: Arena | None = None, *, complete: bool = False) -> None:
        self.header = header
        self.have = ChunkSet(header.chunks, full=complete)
        self.problem = ""
        self._arena = arena
        self._readers = 0
        self._changed = asyncio.Event()

    @property
    def has_arena(self) -> bool:
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise AssertionError(f"there is no memory for version {self.header.name} yet: wait for `allocated`")
        return self._arena

    def lies_in(self, arena: Arena) -> None:
        """There is memory for it now, which those that read along keep as well."""
        assert self._arena is None, "a version lies in one arena"
        self._arena = arena
        arena.pins += self._readers
        self._wake()

    def is_sound(self, index: int) -> bool:
        """Whether the bytes of a chunk are what the header promised. Blocks (4-5 GB/s, without the GIL)."""
        header = self.header
        total = header.layout.total_bytes
        start, end = span(Piece(index, 1), header.chunk_bytes, total)
        with self.arena.buffer(total) as buffer, buffer[start:end] as chunk:
            return blake3.blake3(chunk).digest() == header.checksums[index]

    def add(self, piece: Piece) -> None:
        """A checked piece: whoever waits for it may read it now."""
        self.have.add(piece)
        self._wake()

    def give_up(self, problem: str) -> None:
        """The rest will not come; readers are told."""
        self.problem = problem
        self._wake()

    def open(self) -> Source:
        return Source(self)

    def enter(self) -> None:
        """One more reads along."""
        self._readers += 1
        if self._arena is not None:
            self._arena.pins += 1

    def leave(self) -> None:
        self._readers -= 1
        if self._arena is not None:
            self._arena.pins -= 1

    async def allocated(self) -> None:
        while self._arena is None:
            if self.problem:
                raise WeightsError(f"version {self.header.name} is not coming any more: {self.problem}")
            await self._changed.wait()

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        while (piece := wanted.first_in(self.have, grain)) is None:
            if self.problem:
                raise WeightsError(f"version {self.header.name} is not coming any more: {self.problem}")
            await self._changed.wait()
        return piece

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Checks:
    """Of what one stream receives: chunks are checked by the thread that received them, while a processor's cache still
    has them, as far as there is one; the rest of a piece before it is added."""

    def __init__(self, arriving: Arriving) -> None:
        self._arriving = arriving
        self._sound: set[int] = set()

    def landed(self, index: int) -> None:
        """Blocks. Says nothing of a chunk that is wrong: `finish` does."""
        if self._arriving.is_sound(index):
            self._sound.add(index)

    def left(self, piece: Piece) -> list[int]:
        """The chunks of `piece`, which has come, that are not known to be sound. Asked once."""
        chunks = range(piece.first, piece.end)
        left = [index for index in chunks if index not in self._sound]
        self._sound.difference_update(chunks)
        return left

    def check(self, left: Sequence[int]) -> None:
        """Raises WeightsError naming the first of these chunks that is not what the header promised. Blocks."""
        for index in left:
            if not self._arriving.is_sound(index):
                name = self._arriving.header.name
                raise WeightsError(f"chunk {index} of version {name} came with other bytes than promised")


class Source:
    """One reader of an arriving or complete version; its memory is not used again before `close`, nor is that of the
    version that `compare_with` gave it."""

    def __init__(self, arriving: Arriving, *, closed: Callable[[], None] = lambda: None) -> None:
        self._arriving = arriving
        self._closed = closed
        self._open = True
        self._base: Source | None = None
        arriving.enter()

    def compare_with(self, base: Source) -> None:
        """Differences to `base` may be sent; it is closed with this source."""
        self._base = base

    @property
    def base(self) -> Arena | None:
        return self._base.arena if self._base else None

    @property
    def header(self) -> VersionHeader:
        return self._arriving.header

    @property
    def arena(self) -> Arena:
        return self._arriving.arena

    async def allocated(self) -> None:
        """As `transport.base.ChunkSource.allocated`."""
        await self._arriving.allocated()

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        """As `transport.base.ChunkSource.ready`."""
        return await self._arriving.ready(wanted, grain)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._arriving.leave()
            self._closed()
            if self._base is not None:
                self._base.close()
