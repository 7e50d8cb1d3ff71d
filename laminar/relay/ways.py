"""Whether a version comes whole or as its difference to the one before: by what was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LOOK_AGAIN = 16
"""Versions after which the slower way is measured again."""


@dataclass
class WayChoice:
    """Whether the next version is asked for as a difference: the way by which versions came faster, the slower one to
    the test now and then. On fast links it costs more to compute differences than to send what they save."""

    whole_rate: float = 0.0
    delta_rate: float = 0.0
    """Bytes of a version a second, the mean of the last with those before; 0: not measured yet."""
    repeated: int = 0
    loaded: bool = False
    """Whether a difference has come: the first one waits until both relays have loaded what computes it."""

    @property
    def delta(self) -> bool:
        if not self.delta_rate or not self.whole_rate:
            return not self.delta_rate
        return (self.delta_rate >= self.whole_rate) != (self.repeated >= LOOK_AGAIN)

    def measured(self, rate: float, *, delta: bool) -> None:
        """A version came at `rate`, as a difference or whole."""
        if delta and not self.loaded:
            self.loaded = True
            return
        self.repeated = 0 if self.repeated >= LOOK_AGAIN else self.repeated + 1
        if delta:
            self.delta_rate = (self.delta_rate + rate) / 2 if self.delta_rate else rate
        else:
            self.whole_rate = (self.whole_rate + rate) / 2 if self.whole_rate else rate
