"""The order in which relays pass weights on, and who is master. Pure.

trainer ──▶ master ──▶ second ──▶ third      each forwards a chunk as soon as it has it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def order(members: Iterable[str], previous: Sequence[str]) -> list[str]:
    """The chain of the living `members`: survivors keep their places, newcomers follow at the end, by name.

    Links between survivors stay as they were, so that a death costs one reconnection and a join none.
    """
    alive = set(members)
    kept = [member for member in dict.fromkeys(previous) if member in alive]
    return kept + sorted(alive.difference(kept))


def master(chain: Sequence[str], versions: Mapping[str, int]) -> str | None:
    """The first relay of `chain` that holds the newest version; `versions` gives the newest of each (absent: none).

    If nobody holds any, the first of the chain. None for an empty chain.
    """
    return max(chain, key=lambda member: versions.get(member, -1), default=None)


def led_by(chain: Sequence[str], leader: str) -> list[str]:
    """`chain` with `leader` in front, the others in their order."""
    return [leader, *(member for member in chain if member != leader)]
