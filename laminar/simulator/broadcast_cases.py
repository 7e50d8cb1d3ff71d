"""Who fails within a broadcast, when and how: the matrix of faults of `broadcasts`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from laminar.relay.pull import Repair


class Who(Enum):
    MASTER = "master"
    MIDDLE = "middle"
    LAST = "last"
    TWO = "two at once"


class When(Enum):
    """How far the first victim is; of the master, the relay after it."""

    BEFORE_FIRST = "before the first chunk"
    MIDWAY = "midway"
    BEFORE_LAST = "before the last chunk"
    AT_SEAL = "at the seal"


class How(Enum):
    KILLED = "killed"
    HOST_LOST = "host lost"
    STOPPED = "stopped for a while"
    CUT_OFF = "cut off for a while"
    RESET = "connections reset"
    JOINED = "others join beside it, then connections reset"
    DEVICES = "devices fail for a while"
    """Only of verbs: relays go on by tcp."""


@dataclass(frozen=True)
class Case:
    """`faults`: 2 means that another relay fails soon after."""

    who: Who
    when: When
    how: How
    transport: Literal["tcp", "verbs"]
    faults: int
    seed: int

    def __str__(self) -> str:
        parts = (self.who.value, self.when.value, self.how.value, self.transport, f"{self.faults} faults")
        return f"{', '.join(parts)}, seed {self.seed}"


@dataclass(frozen=True)
class Report:
    """`problems`: empty if every relay that lives has the right bytes. `repairs`: with the relay that went round
    another. `broadcast_s`: virtual seconds from the announcement until all had the version. `away`: relays that were
    stopped or cut off themselves."""

    case: Case
    problems: list[str]
    repairs: list[tuple[str, Repair]]
    broadcast_s: float
    story: list[str] = field(repr=False)
    away: frozenset[str]

    @property
    def gone_round(self) -> list[Repair]:
        """The repairs by relays that could reach the others all the time. For one that was away itself the seconds
        until its next chunk are those until it was back: nobody could have repaired that."""
        return [repair for relay, repair in self.repairs if relay not in self.away]


def cases(seed: int) -> Iterator[Case]:
    """The whole matrix once."""
    axes = itertools.product(Who, When, How, ("tcp", "verbs"), (1, 2))
    for who, when, how, transport, faults in axes:
        if how is not How.DEVICES or transport == "verbs":
            yield Case(who, when, how, transport, faults, seed)  # type: ignore[arg-type]
