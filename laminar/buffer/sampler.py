"""Which experience a step trains on: a pure function of the complete, unconsumed groups.

Groups are taken first in, first out, by the `commit_seq` of the group's last row. A group is complete when all
its samples are committed, whatever their status. It can be trained on if at least two samples are ok and their
raw rewards differ (`no_signal` else); with fewer than two ok samples it is retired as `error`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

NO_SIGNAL = "no_signal"
ERROR = "error"
REMAINDER = "remainder"


@dataclass(frozen=True)
class Outcome:
    """One committed trajectory, as far as sampling cares. `reward` is the raw reward, None unless status is ok."""

    group: int
    sample: int
    status: str
    reward: float | None
    commit_seq: int


@dataclass(frozen=True)
class Selection:
    """What a step consumes: `trained` in the order of training, `retired` with reasons."""

    trained: tuple[int, ...]
    retired: Mapping[int, str] = field(default_factory=dict)

    @property
    def consumed(self) -> int:
        return len(self.trained) + len(self.retired)


class OpenGroups:
    """Committed outcomes of groups that no step has consumed yet."""

    def __init__(self, samples_per_prompt: int, *, baseline: bool = True) -> None:
        self.samples_per_prompt = samples_per_prompt
        self.minimum = 2 if baseline else 1
        self._groups: dict[int, dict[int, Outcome]] = {}
        # All groups below `_first_open` are consumed, and those of `_consumed`: a long run keeps no list of them all.
        self._first_open = 0
        self._consumed: set[int] = set()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """The same (group, sample) again, or one of a consumed group, changes nothing."""
        for o in outcomes:
            if o.group >= self._first_open and o.group not in self._consumed:
                self._groups.setdefault(o.group, {}).setdefault(o.sample, o)

    def consume(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._consumed.add(group)
            self._groups.pop(group, None)
        while self._first_open in self._consumed:
            self._consumed.remove(self._first_open)
            self._first_open += 1

    def complete(self) -> list[int]:
        """First in, first out."""
        full = [(max(o.commit_seq for o in g.values()), n) for n, g in self._groups.items() if self._is_full(g)]
        return [n for _, n in sorted(full)]

    def _is_full(self, group: Mapping[int, Outcome]) -> bool:
        return len(group) == self.samples_per_prompt

    def incomplete(self) -> list[int]:
        return sorted(n for n, g in self._groups.items() if not self._is_full(g))

    def verdict(self, group: int) -> str:
        """Why a complete group cannot be trained on; empty if it can."""
        ok = [o for o in self._groups[group].values() if o.status == "ok" and o.reward is not None]
        if len(ok) < self.minimum:
            return ERROR
        if self.minimum > 1 and len({o.reward for o in ok}) == 1:
            return NO_SIGNAL
        return ""


def select(
    open_groups: OpenGroups, groups_per_step: int, mode: Literal["count", "replace"], *, final: bool = False
) -> Selection | None:
    """The next step's groups, or None if there are not enough yet.

    `count`: each complete group takes a place, but a step whose every place would go to groups without signal keeps
    retiring whole batches of them until one has something to learn from. `replace`: only groups with signal take
    places. `final`: no group will come any more, so a short batch is taken, if it has anything to train on.
    """
    trained: list[int] = []
    retired: dict[int, str] = {}
    places = 0
    for group in open_groups.complete():
        reason = open_groups.verdict(group)
        if reason:
            retired[group] = reason
        else:
            trained.append(group)
        places += 1 if mode == "count" or not reason else 0
        if places == groups_per_step:
            if trained:
                return Selection(tuple(trained), retired)
            places = 0
    return Selection(tuple(trained), retired) if final and trained else None


def to_retire(open_groups: OpenGroups, groups_per_step: int, mode: Literal["count", "replace"]) -> int:
    """Complete groups that will be retired in addition to the places of the next step (see `TrainerHead.to_retire`)."""
    reasons = [open_groups.verdict(g) for g in open_groups.complete()]
    if mode == "replace":
        return sum(1 for r in reasons if r)
    leading = 0
    for reason in reasons:
        if not reason:
            break
        leading += 1
    return leading - leading % groups_per_step


def lengths_by_reason(retired: Sequence[tuple[str, int]]) -> dict[str, dict[str, float]]:
    """Count, mean and longest response of retired trajectories by reason: a drop that favours a length is visible."""
    result: dict[str, dict[str, float]] = {}
    for reason in {r for r, _ in retired}:
        lengths = [n for r, n in retired if r == reason]
        result[reason] = {"count": len(lengths), "mean_length": sum(lengths) / len(lengths), "longest": max(lengths)}
    return result
