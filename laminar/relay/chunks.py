"""Which chunks of a version are there, and in what pieces they travel. Pure.

    chunk    what a checksum covers; one size a run, since digests depend on it (relay.chunk_mib)
    piece    consecutive chunks that are sent and checked together: at most `grain`, inside one aligned group of them

A piece is what a relay forwards, so its size sets how long a broadcast takes: small ones fill the chain sooner,
large ones cost less to handle. T = (p + k - 2) t for p relays and k pieces is least at k = sqrt((p - 2) M b / s), with
M the version's bytes, b seconds a byte on a link and s seconds of handling a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.errors import WeightsError

MAX_CHUNKS = 1 << 20
"""Of one version; keeps what describes it below 64 MiB on the wire. Larger models take a larger chunk."""
MIN_PIECE, MAX_PIECE = 1 << 20, 64 << 20
"""Bytes: below, handling counts more than moving; above, a break loses too much of what was under way."""
_PRESENT = b"\x01"
_TO_BITS = bytes.maketrans(b"\x00\x01", b"01")


@dataclass(frozen=True)
class Piece:
    """Chunks `first` to `first + count - 1`."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class ChunkSet:
    """A set of the chunks 0 to `size` - 1; one byte each, so that a search runs at memory speed."""

    def __init__(self, size: int, *, full: bool = False) -> None:
        if not 0 < size <= MAX_CHUNKS:
            raise WeightsError(f"{size} chunks: 1 to {MAX_CHUNKS} are allowed; raise relay.chunk_mib")
        self._flags = bytearray(_PRESENT * size) if full else bytearray(size)
        self._count = size if full else 0

    @property
    def size(self) -> int:
        return len(self._flags)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: int) -> bool:
        return bool(self._flags[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkSet) and self._flags == other._flags

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._count} of {self.size} chunks>"

    def __iter__(self) -> Iterator[int]:
        index = self._flags.find(_PRESENT)
        while index >= 0:
            yield index
            index = self._flags.find(_PRESENT, index + 1)

    @property
    def full(self) -> bool:
        return self._count == self.size

    def add(self, piece: Piece) -> None:
        self._set(piece, 1)

    def discard(self, piece: Piece) -> None:
        self._set(piece, 0)

    def holds(self, piece: Piece) -> bool:
        return self._flags.count(_PRESENT, piece.first, piece.end) == piece.count

    def copy(self) -> ChunkSet:
        result = ChunkSet(self.size)
        result._flags[:] = self._flags
        result._count = self._count
        return result

    def complement(self) -> ChunkSet:
        result = ChunkSet(self.size, full=True)
        for piece in self.runs():
            result.discard(piece)
        return result

    def runs(self, longest: int = MAX_CHUNKS) -> Iterator[Piece]:
        """Consecutive members, cut at multiples of `longest`."""
        start = self._flags.find(_PRESENT)
        while start >= 0:
            stop = self._flags.find(b"\x00", start)
            end = min(self.size if stop < 0 else stop, (start // longest + 1) * longest)
            yield Piece(start, end - start)
            start = self._flags.find(_PRESENT, end)

    def first_in(self, available: ChunkSet, grain: int) -> Piece | None:
        """The first piece of this set whose chunks are all `available`; None if there is none."""
        start = self._flags.find(_PRESENT)
        while start >= 0:
            stop = self._flags.find(b"\x00", start)
            end = min(self.size if stop < 0 else stop, (start // grain + 1) * grain)
            if available.holds(Piece(start, end - start)):
                return Piece(start, end - start)
            # Jump over what cannot be there: the piece around the next available chunk is the next that may be.
            there = available._flags.find(_PRESENT, end)
            start = self._flags.find(_PRESENT, max(end, there // grain * grain)) if there >= 0 else -1
        return None

    def piece_from(self, first: int, grain: int) -> Piece | None:
        """The piece that begins with chunk `first`, as `first_in` gives it; None if `first` is no member."""
        if not self._flags[first]:
            return None
        stop = self._flags.find(b"\x00", first)
        return Piece(first, min(self.size if stop < 0 else stop, (first // grain + 1) * grain) - first)

    def every(self, step: int, offset: int, grain: int) -> ChunkSet:
        """The members in each `step`th group of `grain` chunks, from group `offset` on: one stream's share."""
        result = ChunkSet(self.size)
        for piece in self.runs(grain):
            if piece.first // grain % step == offset:
                result.add(piece)
        return result

    def to_hex(self) -> str:
        return f"{int(self._flags.translate(_TO_BITS), 2):x}"

    @classmethod
    def from_hex(cls, text: str, size: int) -> ChunkSet:
        """Raises WeightsError unless `text` names chunks below `size`."""
        result = cls(size)
        try:
            value = int(text, 16)
        except ValueError as e:
            raise WeightsError(f"a set of chunks is not hexadecimal: {text[:20]!r}") from e
        if value < 0 or value.bit_length() > size:
            raise WeightsError(f"a set of chunks names one beyond the last of {size}")
        bits = f"{value:0{size}b}".encode("ascii")
        result._flags[:] = bits.translate(bytes.maketrans(b"01", b"\x00\x01"))
        result._count = bits.count(b"1")
        return result

    def _set(self, piece: Piece, value: int) -> None:
        if not 0 <= piece.first < piece.end <= self.size:
            raise WeightsError(f"chunks {piece.first} to {piece.end - 1} are not among {self.size}")
        before = self._flags.count(_PRESENT, piece.first, piece.end)
        self._flags[piece.first : piece.end] = bytes([value]) * piece.count
        self._count += (piece.count if value else 0) - before


def chunk_count(total_bytes: int, chunk_bytes: int) -> int:
    return -(-total_bytes // chunk_bytes)


def span(piece: Piece, chunk_bytes: int, total_bytes: int) -> tuple[int, int]:
    """Where a piece's bytes begin and end; the last chunk may be shorter."""
    return piece.first * chunk_bytes, min(piece.end * chunk_bytes, total_bytes)


def best_grain(
    total_bytes: int, relays: int, chunk_bytes: int, *, seconds_a_byte: float, seconds_a_piece: float
) -> int:
    """Chunks of a piece for a chain of `relays` (the master counts): the best k, within MIN_PIECE and MAX_PIECE."""
    # Without a relay in the middle nothing is forwarded: large pieces cost least, but are lost whole at a break.
    pieces = math.sqrt(max(0, relays - 2) * total_bytes * seconds_a_byte / max(seconds_a_piece, 1e-6))
    wanted = min(MAX_PIECE, max(MIN_PIECE, total_bytes / pieces)) if pieces >= 1 else MAX_PIECE
    return max(1, round(wanted / chunk_bytes))


def broadcast_s(total_bytes: int, relays: int, piece_bytes: int, seconds_a_byte: float) -> float:
    """The model's T = (p + k - 2) t: seconds until the last of `relays` has all bytes."""
    pieces = chunk_count(total_bytes, piece_bytes)
    return (relays + pieces - 2) * (total_bytes / pieces) * seconds_a_byte
