"""The order in which relays pass weights on, and who is master. Pure.

trainer ──▶ master ──▶ second ──▶ third      each forwards a chunk as soon as it has it

The manager keeps one order of all living relays. A version starts at the relay that the trainer published to (the
master in the weights record), so each relay reads the order with that one in front. Nobody pushes: a relay asks the
nearest living one before it, so a repair is asking the next one for what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a relay is: neighbours within a rack, and within a host, keep most links short."""

    host: str
    rack: str = ""


@dataclass(frozen=True)
class Candidate:
    """A relay to ask. `held_only`: it comes after us in the chain, so only what it holds complete will do: else two
    relays could wait for each other."""

    relay: str
    held_only: bool


def order(members: Mapping[str, Place], previous: Sequence[str]) -> list[str]:
    """The chain of the living `members`: survivors keep their order; a newcomer, by name, follows the last relay of
    its host, else of its rack, else all.

    Links between survivors mostly stay as they were: a death costs one reconnection, a join one or two.
    """
    result = [member for member in dict.fromkeys(previous) if member in members]
    for member in sorted(members.keys() - set(result)):
        place = members[member]
        same_host = [i for i, other in enumerate(result) if members[other].host == place.host]
        same_rack = [i for i, other in enumerate(result) if place.rack and members[other].rack == place.rack]
        last = max(same_host or same_rack or [len(result) - 1])
        result.insert(last + 1, member)
    return result


def master(chain: Sequence[str], versions: Mapping[str, int]) -> str | None:
    """The first relay of `chain` that holds the newest version; `versions` gives the newest of each (absent: none).

    If nobody holds any, the first of the chain. None for an empty chain.
    """
    return max(chain, key=lambda member: versions.get(member, -1), default=None)


def led_by(chain: Sequence[str], leader: str) -> list[str]:
    """`chain` with `leader` in front, the others in their order; as it is if `leader` is not in it."""
    return [leader, *(member for member in chain if member != leader)] if leader in chain else list(chain)


def candidates(chain: Sequence[str], me: str) -> list[Candidate]:
    """Whom relay `me` asks, best first: those before it, the nearest first, then those after it, the nearest first.

    A relay that is not in the chain yet stands at its end.
    """
    place = chain.index(me) if me in chain else len(chain)
    before = [Candidate(relay, held_only=False) for relay in reversed(chain[:place])]
    return before + [Candidate(relay, held_only=True) for relay in chain[place + 1 :]]
