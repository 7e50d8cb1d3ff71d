"""What follows when a device fails, or its control port, while the peer lives. Pure: moments are given.

    failed ──▶ transient, and tried less than RENEWALS times ──▶ a new queue pair for what is missing yet
          └──▶ else ──▶ the relay is reached by another transport for AVOID_S, and after that by the device again
    no control connection, UNREACHED times in a row, and another transport reaches the relay ──▶ likewise

A device that is late answers a write that was sent again as one that it never expected: such an error is gone with the
queue pair, and must not cost a minute of the faster way.
"""

from __future__ import annotations

from laminar.relay.transport.base import FabricFailed

RENEWALS = 3
"""Queue pairs that one transfer may make anew."""
AVOID_S = 60.0
"""Seconds for which a relay that the device did not get through to is reached otherwise."""


UNREACHED = 3
"""Control connections in a row that fail before another transport is tried: it may be the port alone that is filtered,
while a relay that has died is reached by none."""


class Renewals:
    """Of one transfer: whether it goes on by a new queue pair."""

    def __init__(self) -> None:
        self.made = 0

    def granted(self, problem: FabricFailed) -> bool:
        """Counts it, if it is."""
        granted = problem.transient and self.made < RENEWALS
        self.made += granted
        return granted


class Unreached:
    """Of one relay's transport: to whom no control connection came about, and how often in a row."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}

    def failed(self, relay: str) -> int:
        """How often in a row by now; 0 as long as it is to be tried again by the device."""
        self._failures[relay] = failures = self._failures.get(relay, 0) + 1
        return failures if failures >= UNREACHED else 0

    def reached(self, relay: str) -> None:
        self._failures.pop(relay, None)


class Avoidance:
    """Of one relay's transport: whom it does not reach by the device for now."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._told: set[str] = set()

    def failed(self, relay: str, now: float) -> bool:
        """Avoid `relay` for AVOID_S from `now` (seconds); whether that is news: it worked since it was said last."""
        self._until[relay] = now + AVOID_S
        news = relay not in self._told
        self._told.add(relay)
        return news

    def worked(self, relay: str) -> bool:
        """A transfer came by the device; whether that is news."""
        news = relay in self._told
        self._told.discard(relay)
        self._until.pop(relay, None)
        return news

    def avoided(self, relay: str, now: float) -> bool:
        return now < self._until.get(relay, 0.0)
