"""Why the version that a relay wants does not come, over all pulls for it. For its report and its log; without I/O.

    wants ──▶ quiet since then ◀── progress (a checked piece)
    failed ──▶ a neighbour's trouble ──▶ told once for each kind of reason
    reached, gave ──▶ over, and told

A neighbour that cannot be *reached* is in trouble until it is. One that is reached and refuses (it has not got the
version, or speaks another protocol) is so until it gives something, or the version is no longer wanted.
All moments are seconds of the caller's clock.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

STALLED_S = 3.0
"""Seconds without a piece after which a wanted version counts as stalled: filling a chain and repairs take less."""
MAX_KINDS = 8
"""Kinds of reasons told of one neighbour until it is reached again, and of the unforeseen until a piece comes."""


@dataclass(frozen=True)
class Trouble:
    """A neighbour: all tries since `since` failed, the last one at `at` for `reason`. `reached`: it answered."""

    relay: str
    reason: str
    since: float
    at: float
    reached: bool


@dataclass(frozen=True)
class Stall:
    """`version` is wanted, and neither of it nor of one on the way to it has anything come since `since`. `reason`: the
    last failure in that time, at `at`; empty: none."""

    version: int
    since: float
    reason: str = ""
    at: float = 0.0


class Hindrances:
    def __init__(self) -> None:
        self._version: int | None = None
        self._newest_here = -1
        self._quiet_since = 0.0
        self._last: tuple[str, float] = ("", 0.0)
        self._troubles: dict[str, Trouble] = {}
        self._told: dict[str, set[str]] = {}
        self._told_unforeseen: set[str] = set()

    def validate(self) -> None:
        """Raises AssertionError if the parts of the state disagree."""
        assert all(name == t.relay and t.since <= t.at for name, t in self._troubles.items())
        assert self._told.keys() <= self._troubles.keys(), "what is over may be told again"
        assert self._version is not None or all(not t.reached for t in self._troubles.values())

    # -- events -------------------------------------------------------------------------------------------------

    def wants(self, version: int | None, now: float, *, newest_here: int = -1) -> None:
        """The newest published version; None: it is here. Another one published meanwhile is no progress."""
        if version is None or self._version is None or newest_here > self._newest_here:
            self._move_on(now)
            for relay in [relay for relay, trouble in self._troubles.items() if trouble.reached]:
                self._over(relay)
        self._version, self._newest_here = version, newest_here

    def progress(self, version: int, now: float) -> None:
        """A checked piece of `version` lies here. Older ones that readers ask for are no step towards the newest."""
        if self._version is not None and self._newest_here < version <= self._version:
            self._move_on(now)

    def failed(self, relay: str, reason: str, now: float, *, reached: bool) -> bool:
        """A try at `relay` failed, before or after it was reached. True if the log should tell it."""
        self._last = (f"{relay}: {reason}", now)
        if reached and self._version is None:
            return False
        before = self._troubles.get(relay)
        trouble = Trouble(relay, reason, now, now, reached)
        self._troubles[relay] = trouble if before is None else replace(trouble, since=before.since)
        told = self._told.setdefault(relay, set())
        if len(told) >= MAX_KINDS or kind(reason) in told:
            return False
        told.add(kind(reason))
        return True

    def gave_up(self, reason: str, now: float) -> None:
        """A pull ended without the version for a reason of this relay's own, such as no memory."""
        self._last = (reason, now)

    def unforeseen(self, reason: str, now: float) -> bool:
        """An error that has no words of its own, such as one of this host's system. True if the log should tell it:
        once for each kind until something comes."""
        self._last = (reason, now)
        if len(self._told_unforeseen) >= MAX_KINDS or kind(reason) in self._told_unforeseen:
            return False
        self._told_unforeseen.add(kind(reason))
        return True

    def reached(self, relay: str, now: float) -> float | None:
        """It proved the secret. Returns the seconds for which it could not be reached; None if it could."""
        trouble = self._troubles.get(relay)
        if trouble is None or trouble.reached:
            return None
        self._over(relay)
        return now - trouble.since

    def gave(self, relay: str) -> None:
        """It has, or begins to get, what it was asked for."""
        self._over(relay)

    def see(self, relays: Collection[str]) -> None:
        """Who is in the chain: the others are nobody's neighbours any more."""
        for relay in self._troubles.keys() - set(relays):
            self._over(relay)

    # -- questions ----------------------------------------------------------------------------------------------

    def stall(self, now: float) -> Stall | None:
        """None while nothing is wanted, or it comes."""
        if self._version is None or now - self._quiet_since < STALLED_S:
            return None
        return Stall(self._version, self._quiet_since, *self._last)

    def troubles(self) -> list[Trouble]:
        """The neighbours in trouble, the one that was tried last first."""
        return sorted(self._troubles.values(), key=lambda trouble: (-trouble.at, trouble.relay))

    def _move_on(self, now: float) -> None:
        self._quiet_since, self._last = now, ("", 0.0)
        self._told_unforeseen.clear()

    def _over(self, relay: str) -> None:
        self._troubles.pop(relay, None)
        self._told.pop(relay, None)


def kind(reason: str) -> str:
    """A reason without what differs from try to try: numbers, digests, lists of them."""
    plain = re.sub(r"\b[0-9a-f]*\d[0-9a-f]*\b", "#", reason)
    return re.sub(r"#([.:, ]+#)+", "#", plain)
