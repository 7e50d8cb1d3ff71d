"""Whether a version comes whole or as its difference to the one before: by what was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LOOK_AGAIN = 16
"""Versions after which the slower way is measured again."""


@dataclass
class WayChoice:
    """Whether the next version is asked for as a difference: the way by which versions came faster, each new one to the
    test now and then. On fast links it costs more to compute differences than to send what they save."""

    whole_rate: float = 0.0
    delta_rate: float = 0.0
    """Bytes of a version a second, as measured; 0: not yet."""
    repeated: int = 0

    @property
    def delta(self) -> bool:
        if not self.delta_rate or not self.whole_rate:
            return not self.delta_rate
        return (self.delta_rate >= self.whole_rate) != (self.repeated >= LOOK_AGAIN)

    def measured(self, rate: float, *, delta: bool) -> None:
        """A version came at `rate`, as a difference or whole."""
        self.repeated = 0 if self.repeated >= LOOK_AGAIN else self.repeated + 1
        if delta:
            self.delta_rate = rate
        else:
            self.whole_rate = rate
