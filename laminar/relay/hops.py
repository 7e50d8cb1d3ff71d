"""What is known of a finished transfer into this relay, and what the next one starts from. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.relay.chunks import best_grain
from laminar.relay.layout import Layout
from laminar.relay.pull import Repair
from laminar.relay.transport.base import Link, VersionHeader, VersionName
from laminar.relay.ways import WayChoice

USUAL_RATE = 1e9
"""Bytes a second that a link is taken for until one was measured."""
FAST_RATE, FAST_STREAMS = 1.5e9, 2
"""Bytes a second from which on more than one connection is worth its place, and how many are."""
HANDLING_S = 1e-3
"""Seconds that a piece costs beside its bytes and the way there and back: words about it, and from thread to thread,
where all cores are busy with the bytes."""


@dataclass(frozen=True)
class Hop:
    """One finished transfer into this relay: seconds from the first request for chunks to the last checked one, which
    was at `ended_at` of the loop's time. `received`: bytes that pieces took on their way, fewer than `nbytes` where
    they came as differences, more where some came twice. `filling_s`: of `seconds`, those until the first piece, in
    which the chain before this relay filled; `landed_s`: those until the last byte lay here, not yet checked."""

    name: VersionName
    peers: tuple[str, ...]
    nbytes: int
    received: int
    seconds: float
    filling_s: float
    landed_s: float
    ended_at: float
    piece_bytes: int
    repairs: tuple[Repair, ...]

    @property
    def rate(self) -> float:
        """Bytes a second, from the first piece on where there were several."""
        rest = self.nbytes - self.piece_bytes
        if rest <= 0:
            return self.nbytes / max(self.seconds, 1e-9)
        return rest / max(self.seconds - self.filling_s, 1e-9)


@dataclass
class Measures:
    """Of a transfer under way: moments of the loop's time (0: not yet), and what `Hop` says at its end. `differences`:
    pieces that came as such."""

    began: float = 0.0
    first_at: float = 0.0
    landed_at: float = 0.0
    peers: list[str] = field(default_factory=list)
    grain: int = 1
    received: int = 0
    differences: int = 0

    def hop(self, header: VersionHeader, repairs: Sequence[Repair], now: float) -> Hop:
        """The version of `header` is complete."""
        return Hop(
            header.name,
            tuple(self.peers),
            header.layout.total_bytes,
            self.received,
            now - self.began,
            (self.first_at or now) - self.began,
            (self.landed_at or now) - self.began,
            now,
            self.grain * header.chunk_bytes,
            tuple(repairs),
        )


@dataclass
class Tuning:
    """What the next transfer starts from: the rate of the last one (bytes a second), and streams a hop."""

    streams: int = 0
    """Connections, if fixed; 0: one, and several where the last transfer was fast."""
    rate: float = USUAL_RATE
    layout: Layout | None = None
    grain: int = 0
    """Chunks of a piece, if fixed; 0: computed."""
    deltas: bool = True
    """Whether differences to the newest version here are asked for, where they are faster."""
    way: WayChoice = field(default_factory=WayChoice)

    def streams_for(self, pieces: int) -> int:
        """Connections for a transfer of so many pieces. What the processor limits, threads of several move faster."""
        return max(1, min(self.streams or (FAST_STREAMS if self.rate >= FAST_RATE else 1), pieces))

    def grain_for(self, header: VersionHeader, *, relays: int, link: Link) -> int:
        """Chunks of a piece, in a chain of so many relays. Checking a piece is one more stage of it, which works while
        the next piece comes; unless threads check what they receive, as on a fast link."""
        checking = 0 if link.tells_landed and self.rate >= FAST_RATE else 1
        return self.grain or best_grain(
            header.layout.total_bytes,
            relays + checking,
            header.chunk_bytes,
            seconds_a_byte=1 / self.rate,
            seconds_a_piece=link.round_trip_s + HANDLING_S,
        )

    def learn(self, hop: Hop, layout: Layout, *, differences: bool) -> None:
        """What a finished transfer showed."""
        self.rate = hop.rate
        self.way.measured(hop.rate, delta=differences)
        self.layout = layout
