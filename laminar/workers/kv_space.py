"""What the KV caches of many rollouts still take, in arrays: a plan for 1,000 rollouts looks at a million pairs.

    tail ──outlooks──▶ expected tokens and variance at MOMENTS to come ──sum──▶ what a place holds
    part ──▶ leeway: refused at once wherever its expected tokens alone are too many ──▶ the best of the others, exactly
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laminar.workers.draining import MAX_KV_SHARE, Draining, Unfinished

DEVIATIONS = 1.0
"""Of the tokens at a moment to come, in standard deviations above what is expected, that a plan leaves room for."""
MOMENTS = np.array([0.0, *2.0 ** np.arange(-5, 1)])
"""At which a plan looks ahead, in parts of the longest growth that is expected of anyone."""
SINGLY = 3
"""The best place is nearly always among the first that are looked at; to look at all is dearer."""


def outlooks(tail: Sequence[Unfinished], moments: np.ndarray) -> np.ndarray:
    """What each of `tail` will hold of a KV cache, once so many more tokens are written of each as `moments` says (K).

    Returns float64 (len(tail), 2, K): the expected tokens and their variance; for several, their sums. One of which
    `growth` more tokens are expected is still there after t of them with probability exp(-t / growth), has t more
    then, and holds nothing once it has ended: while the long ones grow the short ones go, and a cache never holds the
    ends of all."""
    tokens, growth = (np.array(figures, dtype=np.float64)[:, None] for figures in _figures(tail))
    held, alive = tokens + moments, np.exp(-moments / np.maximum(growth, 1e-9))
    expected = alive * held
    return np.stack([expected, expected * (held - expected)], axis=1)


def _figures(tail: Sequence[Unfinished]) -> tuple[list[int], list[int]]:
    return [t.tokens for t in tail], [t.growth for t in tail]


def tokens_at(outlook: np.ndarray) -> np.ndarray:
    """Tokens to leave room for at each moment: (2, K, ...) to (K, ...)."""
    tokens: np.ndarray = outlook[0] + DEVIATIONS * np.sqrt(outlook[1])
    return tokens


NOWHERE = np.empty(0, dtype=np.int64)


class Part(NamedTuple):
    """Some trajectories, and what they will hold of a KV cache: (2, K)."""

    tail: tuple[Unfinished, ...]
    outlook: np.ndarray


class State(NamedTuple):
    """What a place holds, and what it still takes."""

    rollout: Draining
    slots: int
    held: np.ndarray
    leeway: np.ndarray


class Space:
    """`rollouts` are the places. `slots`: trajectories that each takes. `also`: who else may come to them."""

    def __init__(self, rollouts: Sequence[Draining], slots: Sequence[int], also: Sequence[Unfinished] = ()) -> None:
        self.rollouts = list(rollouts)
        self.slots = np.array(slots, dtype=np.int64)
        self.used = np.array([r.used for r in rollouts], dtype=np.int64)
        everyone = [t for r in rollouts for t in r.tail]
        self.moments = max((t.growth for t in (*everyone, *also)), default=0) * MOMENTS
        self.each = outlooks(everyone, self.moments)
        """Of all tails, one after the other: that of a place begins at `firsts`."""
        counts = np.array([len(r.tail) for r in rollouts], dtype=np.int64)
        self.firsts = np.cumsum(counts) - counts
        self.wholes = np.zeros((len(rollouts), 2, len(MOMENTS)))
        if len(some := np.flatnonzero(counts)):
            self.wholes[some] = np.add.reduceat(self.each, self.firsts[some], axis=0)
        self._held = np.ascontiguousarray(self.wholes.transpose(1, 2, 0))
        """(2, K, places): what is the same moment for all places lies side by side."""
        self._room = np.array([MAX_KV_SHARE * r.kv_capacity - r.beside for r in rollouts])
        self._leeway = self._room - tokens_at(self._held)
        """(K, places): more expected tokens than these do not fit, and fewer mostly do."""
        self.most = int(self.slots.max(initial=-1))
        self._widest = self._leeway.max(axis=1, initial=-np.inf)
        """Places only fill up: no part that is larger than any of them could take at first ever fits."""

    def whole(self, place: int) -> Part:
        """The tail that `place` had at first."""
        return Part(self.rollouts[place].tail, self.wholes[place])

    def part(self, place: int, members: Sequence[int]) -> Part:
        """Some of the tail that `place` had at first."""
        tail = self.rollouts[place].tail
        outlook = self.each[self.firsts[place] + np.array(members)].sum(axis=0)
        return Part(tuple(tail[i] for i in members), outlook)

    def remove(self, place: int) -> None:
        """Nothing goes there any more."""
        self.slots[place] = -1

    def put(self, place: int, part: Part, filled: Draining) -> None:
        """`filled`: what is at `place` with it."""
        self.rollouts[place] = filled
        self.used[place] = filled.used
        self.slots[place] -= len(part.tail)
        self._held[:, :, place] += part.outlook
        self._leeway[:, place] = self._room[place] - tokens_at(self._held[:, :, place])

    def state(self, place: int) -> State:
        return State(
            self.rollouts[place], int(self.slots[place]), self._held[:, :, place].copy(), self._leeway[:, place].copy()
        )

    def restore(self, place: int, state: State) -> None:
        """Take out what was put there since."""
        self.rollouts[place], self.slots[place], self._held[:, :, place], self._leeway[:, place] = state
        self.used[place] = state.rollout.used

    def best(self, part: Part, rank: np.ndarray, but: int | None = None) -> np.ndarray:
        """Of the places other than `but` that take all of it, those of the highest `rank` (0 or more); none: empty."""
        count, expected = len(part.tail), part.outlook[0]
        if count > self.most or (expected > self._widest).any():
            return NOWHERE
        possible = (self.slots >= count) & (self._leeway[0] >= expected[0])
        if but is not None:
            possible[but] = False
        ranks = np.where(possible, rank, -1)
        for turn in range(SINGLY):
            highest = ranks.max(initial=-1)
            if highest < 0:
                return NOWHERE
            equals = np.flatnonzero(ranks == highest)
            if len(fitting := self._fitting(equals, part)):
                return fitting
            ranks[equals] = -1
            if turn == 0:
                ranks[(self._leeway < expected[:, None]).any(axis=0)] = -1
        fitting = self._fitting(np.flatnonzero(ranks >= 0), part)
        return np.asarray(fitting[ranks[fitting] == ranks[fitting].max(initial=-1)])

    def _fitting(self, places: np.ndarray, part: Part) -> np.ndarray:
        held = self._held[:, :, places] + part.outlook[:, :, None]
        return np.asarray(places[(tokens_at(held) <= self._room[places]).all(axis=0)])
