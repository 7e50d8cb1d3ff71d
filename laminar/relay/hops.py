"""What is known of a finished transfer into this relay, and what the next one starts from. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.relay.layout import Layout
from laminar.relay.pull import Repair
from laminar.relay.transport.base import VersionName
from laminar.relay.ways import WayChoice

USUAL_RATE = 1e9
"""Bytes a second that a link is taken for until one was measured."""


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
class Tuning:
    """What the next transfer starts from: the rate of the last one (bytes a second), and streams a hop."""

    streams: int = 1
    rate: float = USUAL_RATE
    layout: Layout | None = None
    grain: int = 0
    """Chunks of a piece, if fixed; 0: computed."""
    deltas: bool = True
    """Whether differences to the newest version here are asked for, where they are faster."""
    way: WayChoice = field(default_factory=WayChoice)
