"""What follows when a device fails while the connection works. Pure: moments are given.

    failed ──▶ transient, and tried less than RENEWALS times ──▶ a new queue pair for what is missing yet
          └──▶ else ──▶ the relay is reached by another transport for AVOID_S, and after that by the device again

A device that is late answers a write that was sent again as one that it never expected: such an error is gone with the
queue pair, and must not cost a minute of the faster way.
"""

from __future__ import annotations

from laminar.relay.transport.base import FabricFailed

RENEWALS = 3
"""Queue pairs that one transfer may make anew."""
AVOID_S = 60.0
"""Seconds for which a relay that the device did not get through to is reached otherwise."""


class Renewals:
    """Of one transfer: whether it goes on by a new queue pair."""

    def __init__(self) -> None:
        self.made = 0

    def granted(self, problem: FabricFailed) -> bool:
        """Counts it, if it is."""
        granted = problem.transient and self.made < RENEWALS
        self.made += granted
        return granted


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
