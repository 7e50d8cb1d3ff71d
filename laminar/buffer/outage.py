"""How a failure that goes on is told: once at its start, then now and then, then its end. Without I/O or a clock."""

from __future__ import annotations

TELL_AGAIN_S = 5.0


class Outage:
    """One thing that may fail again and again. Times are those of one monotonic clock, in seconds."""

    def __init__(self, again_s: float = TELL_AGAIN_S) -> None:
        self.again_s = again_s
        self.failures = 0
        """Since it began."""
        self._began_at = 0.0
        self._told_at = 0.0

    @property
    def on(self) -> bool:
        return self.failures > 0

    def failed(self, now: float) -> float | None:
        """Seconds since the first failure if this one is to be told of, else None."""
        self.failures += 1
        if self.failures == 1:
            self._began_at = now
        elif now < self._told_at + self.again_s:
            return None
        self._told_at = now
        return now - self._began_at

    def over(self, now: float) -> float | None:
        """Seconds that it lasted; None if nothing had failed."""
        if not self.failures:
            return None
        self.failures = 0
        return now - self._began_at

    def lasts(self, now: float) -> float:
        return now - self._began_at if self.failures else 0.0
