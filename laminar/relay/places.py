"""How many versions a relay has places for, and which of them it keeps. Pure.

memory ──▶ places ──▶ less two for what comes in ──▶ room ──▶ kept: the newest, then those that claims refer to
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from laminar.relay.memory import Scope, gib

RESERVE, LEAST_RESERVE = 0.1, 0.05
"""Shares of the host's (or container's) memory that stay free: a relay takes more places as long as the first is left,
and gives some up below the second. Between the two it keeps what it has, or each breath of another process would cost
a version."""


@dataclass(frozen=True)
class Places:
    """`count` arenas at most, those for what comes in among them; `why`: what bounds them, and how to raise it."""

    count: int
    why: str


def places(size: int, *, minimum: int, mapped: int, scopes: Sequence[Scope], share: float) -> Places:
    """Places for arenas of `size` bytes, where this relay has `mapped` bytes of arenas: at least `minimum`, and beyond
    that as many as leave the reserve of every scope free and do not raise all shared memory in it above `share`. So
    several relays of a host share what there is, and each has its minimum."""
    if share <= 0:
        return Places(minimum, "the fewest, as relay.memory_share is 0; raise it")
    if size <= 0 or not scopes:
        return Places(minimum, "the fewest, until memory was looked at")
    bounds = [_allowed(scope, mapped, share) for scope in scopes]
    allowed, why = min(bounds, key=lambda bound: bound[0])
    return Places(max(minimum, allowed // size), why)


def kept(
    versions: Iterable[int],
    *,
    newest: int,
    wanted: Collection[int],
    first: int | None,
    room: int,
    recent: Collection[int] = (),
) -> set[int]:
    """Which of `versions` stay: the `newest` newest, then `first` (just sealed: its claims may be on their way), then
    the wanted ones, then those of `recent` (which may be wanted), newest first, up to `room` in all."""
    ordered = sorted(versions, reverse=True)
    result, rest = ordered[:newest], ordered[newest:]
    extra = [v for v in rest if v == first] + [v for v in rest if v != first and v in wanted]
    extra += [v for v in rest if v != first and v not in wanted and v in recent]
    return set(result + extra[: max(0, room - len(result))])


def _allowed(scope: Scope, mapped: int, share: float) -> tuple[int, str]:
    """Bytes of arenas that this relay may have, and what bounds them."""
    others = max(0, scope.shared - mapped)
    by_share = int(share * scope.total) - others
    reserve, least = int(RESERVE * scope.total), int(LEAST_RESERVE * scope.total)
    by_free = mapped + max(scope.available - reserve, min(0, scope.available - least))
    if by_share <= by_free:
        taken = f", of which {gib(others)} are other shared memory" if others else ""
        why = f"relay.memory_share = {share:g} of the {gib(scope.total)} of {scope.name}{taken}; raise it"
        return by_share, why
    why = f"{gib(scope.available)} of the {gib(scope.total)} of {scope.name} are free, {gib(reserve)} stay so"
    return by_free, f"{why}; give it more memory, relay.memory_share = {share:g} would allow {gib(max(0, by_share))}"
