"""Which rollouts give their unfinished tails to which: a pure plan, and the model of what a move costs and gains.

    version 7 (newest: 8)      A ▇▇▇▇▁▁▁▁▁▁   4 of at most 10      A ▇▇▇▇▇▇▇▇▇▁  9
                               B ▇▇▇▁▁▁▁▁▁▁   3               ──▶  B            empty: takes version 8 at once
                               C ▇▇▁▁▁▁▁▁▁▁   2                    C            empty: takes version 8 at once

Best-fit consolidation: candidates from the emptiest on, each wholly into the fullest one that still takes it. What the
plan keeps: no trajectory moves twice; a destination is never also a source; nobody exceeds its KV cache, now or at
any moment to come as far as growth and ends can be expected, and nobody its batch limit or its slots; each move
shortens the time for which rollouts are held by old versions by more than it costs; no more rollouts are emptied than
there is work for; equal loads give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from laminar.buffer.keys import parse_trajectory
from laminar.buffer.records import Load

MAX_KV_SHARE = 0.99
"""Of a KV cache that a plan fills, growth included (the paper's C_max)."""
DEVIATIONS = 1.0
"""Of the tokens at a moment to come, in standard deviations above what is expected, that a plan leaves room for."""
MOMENTS = np.array([0.0, *2.0 ** np.arange(-5, 1)])
"""At which a plan looks ahead, in parts of the longest growth that is expected of anyone."""
SINGLY = 4
"""The fullest that takes a tail is nearly always among the first that are looked at; to look at all is dearer."""
WAITING_SHARE = 1 / 16
"""Of its batch limit: so many may wait for a slot of a rollout that draws, which gives it to them first."""
UNBOUNDED = 1 << 30
"""Slots, as far as nobody has told of a bound."""
KNEE = 1.5
"""A decode step of `batch_limit` trajectories takes this many times as long as one of one trajectory."""
HAND_OVER_S = 0.3
"""What a move costs beside the prefill: a flush, a transaction each, and the copy at the new owner."""
TYPICAL_STEP_S, TYPICAL_PREFILL = 0.03, 4000.0
"""Seconds of a decode step, prefilled tokens a second: where an engine has not measured its own yet."""


@dataclass(frozen=True)
class Unfinished:
    """A trajectory that is being generated: its tokens now, and how many more are to be expected."""

    trajectory: str
    tokens: int
    growth: int

    @cached_property
    def group(self) -> int:
        return parse_trajectory(self.trajectory)[0]


@dataclass(frozen=True)
class Draining:
    """A rollout that drains, or, as a target of `evacuate`, any other. `kv_tokens` may exceed the sum of its `tail`;
    `settled`: nothing keeps it but its tail (no environment that acts, no evaluation), so that it is free without.
    `room`: trajectories that it takes beside its tail, whatever its batch limit."""

    id: str
    version: int
    kv_tokens: int
    kv_capacity: int
    batch_limit: int
    tail: tuple[Unfinished, ...]
    running: int = 0
    waiting: int = 0
    room: int = UNBOUNDED
    settled: bool = True
    step_s: float = TYPICAL_STEP_S
    prefill_tokens_per_s: float = TYPICAL_PREFILL

    @classmethod
    def of(cls, worker: str, load: Load) -> Draining:
        tail = tuple(Unfinished(name, tokens, growth) for name, (tokens, growth) in sorted(load.tail.items()))
        return cls(
            id=worker,
            version=load.version,
            kv_tokens=load.kv_tokens,
            kv_capacity=load.kv_capacity,
            batch_limit=load.batch_limit,
            tail=tail,
            running=load.running,
            waiting=load.waiting,
            room=free_slots(load),
            settled=not load.acting and not load.evaluating,
            step_s=load.step_s or TYPICAL_STEP_S,
            prefill_tokens_per_s=load.prefill_tokens_per_s or TYPICAL_PREFILL,
        )

    @cached_property
    def used(self) -> int:
        return max(self.kv_tokens, sum(t.tokens for t in self.tail))

    @cached_property
    def beside(self) -> int:
        """Tokens in its KV cache that are not of its tail."""
        return self.used - sum(t.tokens for t in self.tail)

    @cached_property
    def expected(self) -> int:
        """Tokens in its KV cache at the fullest moment to come, as far as can be expected."""
        longest = max((t.growth for t in self.tail), default=0)
        return self.beside + math.ceil(float(fullest_moment(outlooks(self.tail, longest * MOMENTS).sum(axis=0))))

    @property
    def slots(self) -> int:
        """Trajectories that it takes without becoming slow."""
        return min(self.batch_limit - len(self.tail), self.room)

    def is_candidate(self) -> bool:
        """Nothing waits in it, and it is below both limits: the tail of a drain, not its bulk."""
        below = self.used < MAX_KV_SHARE * self.kv_capacity and len(self.tail) < self.batch_limit
        return bool(self.tail) and not self.waiting and below

    def taking(self, tail: Sequence[Unfinished]) -> Draining:
        tokens = self.used + sum(t.tokens for t in tail)
        return replace(self, tail=(*self.tail, *tail), kv_tokens=tokens, room=self.room - len(tail))


def free_slots(load: Load) -> int:
    """Trajectories that a rollout takes from others. One that drains may be full of what waits for a slow reward, so
    that what came beyond its room would stand still for as long; one that draws takes some more."""
    if load.room is None:
        return UNBOUNDED
    return load.room if load.draining else load.room + max(1, int(WAITING_SHARE * load.batch_limit))


@dataclass(frozen=True)
class Handing:
    """One trajectory of the plan."""

    trajectory: str
    source: str
    target: str


# -- the KV cache in the time to come -----------------------------------------------------------------------------


def outlooks(tail: Sequence[Unfinished], moments: np.ndarray) -> np.ndarray:
    """What each of `tail` will hold of a KV cache, once so many more tokens are written of each as `moments` says (K).

    Returns float64 (len(tail), 2, K): the expected tokens and their variance; for several, their sums. One of which
    `growth` more tokens are expected is still there after t of them with probability exp(-t / growth), has t more
    then, and holds nothing once it has ended: while the long ones grow the short ones go, and a cache never holds the
    ends of all."""
    known = np.array([(t.tokens, t.growth) for t in tail], dtype=np.float64).reshape(-1, 2)
    held, alive = known[:, :1] + moments, np.exp(-moments / np.maximum(known[:, 1:], 1e-9))
    expected = alive * held
    return np.stack([expected, expected * (held - expected)], axis=1)


def fullest_moment(outlook: np.ndarray) -> np.ndarray:
    """Tokens to leave room for: (..., 2, K) to (...)."""
    tokens: np.ndarray = outlook[..., 0, :] + DEVIATIONS * np.sqrt(outlook[..., 1, :])
    return np.asarray(tokens.max(axis=-1))


# -- the cost model ---------------------------------------------------------------------------------------------


def step_s(rollout: Draining, batch: int) -> float:
    """Seconds of a decode step: memory-bound, so nearly flat, up to the knee."""
    return rollout.step_s * (1 + (KNEE - 1) * max(0, batch - 1) / max(1, rollout.batch_limit - 1))


def held_s(rollout: Draining) -> float:
    """Expected seconds until its last trajectory ends: for so long the old version holds it."""
    return max((t.growth for t in rollout.tail), default=0) * step_s(rollout, len(rollout.tail))


def refill_s(rollout: Draining, tail: Sequence[Unfinished]) -> float:
    """Seconds for which its engine prefills what comes to it, in which nothing else of it is decoded."""
    return sum(t.tokens for t in tail) / rollout.prefill_tokens_per_s


def gain_s(source: Draining, destinations: Iterable[tuple[Draining, Draining]]) -> float:
    """By how many seconds the rollouts are held for less, in sum, if `source` is emptied: `destinations` as they are
    before and after that."""
    gain = held_s(source) - HAND_OVER_S
    for before, after in destinations:
        gain += held_s(before) - held_s(after) - refill_s(before, after.tail[len(before.tail) :])
    return gain


# -- the plan ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Of a source's tail, and what it will hold of a KV cache: (2, K)."""

    tail: tuple[Unfinished, ...]
    outlook: np.ndarray


Parts = list[tuple[int, Part]]
"""Places of destinations, and what goes to each."""


def plan(rollouts: Iterable[Draining], work: int | None = None) -> list[Handing]:
    """Rollouts of several versions are packed version by version, the oldest first. `work`: trajectories that can be
    drawn soon and that nobody who draws now has room for; None: more than all could take. A rollout that would find
    nothing to draw gains nothing by being emptied, while those that take its tail become slower."""
    by_version: dict[int, list[Draining]] = {}
    for rollout in rollouts:
        if rollout.is_candidate():
            by_version.setdefault(rollout.version, []).append(rollout)
    result: list[Handing] = []
    for _, group in sorted(by_version.items()):
        handings, work = _consolidate(group, work)
        result += handings
    return result


def _consolidate(candidates: Sequence[Draining], work: int | None) -> tuple[list[Handing], int | None]:
    """The candidates of one version, from the emptiest on; and the work that is left."""
    order = sorted(candidates, key=lambda r: (r.used, r.id))
    space = _Space(order)
    targets: set[int] = set()
    result: list[Handing] = []
    for place, source in enumerate(order):
        if work is not None and work <= 0:
            break
        if place in targets or not source.settled:
            continue
        parts = _whole(source, place, space) or _by_groups(source, place, space)
        after = [space.rollouts[target].taking(part.tail) for target, part in parts]
        before = [space.rollouts[target] for target, _ in parts]
        if not parts or gain_s(source, zip(before, after, strict=True)) <= 0:
            continue
        space.remove(place)
        for (target, part), filled in zip(parts, after, strict=True):
            space.put(target, part, filled)
            targets.add(target)
            result += [Handing(t.trajectory, source.id, order[target].id) for t in part.tail]
        work = work and work - min(source.batch_limit, source.room + len(source.tail))
    return result, work


class _Space:
    """What each destination still takes, in arrays: a plan for 1,000 rollouts looks at a million pairs."""

    def __init__(self, rollouts: Sequence[Draining]) -> None:
        self.rollouts = list(rollouts)
        self.used = np.array([r.used for r in rollouts], dtype=np.int64)
        self.room = np.array([MAX_KV_SHARE * r.kv_capacity - r.beside for r in rollouts])
        self.slots = np.array([r.slots for r in rollouts], dtype=np.int64)
        everyone = [t for r in rollouts for t in r.tail]
        self.moments = max(t.growth for t in everyone) * MOMENTS
        firsts = np.cumsum([0, *(len(r.tail) for r in rollouts[:-1])])
        self.outlooks = np.add.reduceat(outlooks(everyone, self.moments), firsts, axis=0)

    def outlook(self, tail: Sequence[Unfinished]) -> np.ndarray:
        return np.asarray(outlooks(tail, self.moments).sum(axis=0))

    def without(self, place: int) -> _Space:
        """A copy to try with, in which nothing goes to `place`."""
        copy = object.__new__(_Space)
        copy.rollouts, copy.moments, copy.room = list(self.rollouts), self.moments, self.room
        copy.used, copy.slots, copy.outlooks = self.used.copy(), self.slots.copy(), self.outlooks.copy()
        copy.remove(place)
        return copy

    def remove(self, place: int) -> None:
        self.slots[place] = -1

    def put(self, place: int, part: Part, filled: Draining) -> None:
        """`filled`: what is at `place` with it."""
        self.rollouts[place] = filled
        self.used[place] = filled.used
        self.outlooks[place] += part.outlook
        self.slots[place] -= len(part.tail)

    def fullest(self, part: Part, but: int | None = None) -> int | None:
        """The fullest place, other than `but`, that takes all of it; among equals one with samples of its groups, then
        the first."""
        filled = np.where(self.slots >= len(part.tail), self.used, -1)
        if but is not None:
            filled[but] = -1
        for _ in range(SINGLY):
            most = filled.max()
            if most < 0:
                return None
            equals = np.flatnonzero(filled == most)
            if len(fitting := self._fitting(equals, part)):
                return self._nearest(fitting, part)
            filled[equals] = -1
        fitting = self._fitting(np.flatnonzero(filled >= 0), part)
        if not len(fitting):
            return None
        return self._nearest(fitting[filled[fitting] == filled[fitting].max()], part)

    def _fitting(self, places: np.ndarray, part: Part) -> np.ndarray:
        return np.asarray(places[fullest_moment(self.outlooks[places] + part.outlook) <= self.room[places]])

    def _nearest(self, places: np.ndarray, part: Part) -> int:
        if len(places) == 1:
            return int(places[0])
        groups = {t.group for t in part.tail}
        return int(max(places, key=lambda i: (sum(t.group in groups for t in self.rollouts[i].tail), -i)))


def _whole(source: Draining, place: int, space: _Space) -> Parts:
    part = Part(source.tail, space.outlooks[place])
    target = space.fullest(part, but=place)
    return [] if target is None else [(target, part)]


def _by_groups(source: Draining, place: int, space: _Space) -> Parts:
    """Spread over several destinations, the largest group first; nothing if a group stays over: a source that is not
    emptied gains nothing. Samples of a group stay together, for they share their prompt's KV cache."""
    groups: dict[int, tuple[Unfinished, ...]] = {}
    for t in source.tail:
        groups[t.group] = (*groups.get(t.group, ()), t)
    parts: dict[int, Part] = {}
    if len(groups) == 1:
        return []
    free = space.without(place)
    for _, tail in sorted(groups.items(), key=lambda item: (-sum(t.tokens for t in item[1]), item[0])):
        part = Part(tail, space.outlook(tail))
        target = free.fullest(part)
        if target is None:
            return []
        free.put(target, part, free.rollouts[target].taking(tail))
        known = parts.get(target)
        parts[target] = Part((*known.tail, *tail), known.outlook + part.outlook) if known else part
    return sorted(parts.items(), key=lambda item: item[0])


# -- a rollout that rests ---------------------------------------------------------------------------------------


def evacuate(source: Draining, others: Sequence[Draining]) -> list[Handing]:
    """All that `source` has goes to the others of its version, evenly by number, as far as their slots and KV
    caches take it: beyond their batch limit they become slower, as it is here."""
    now = {r.id: r for r in others if r.id != source.id and r.version == source.version}
    owned = {r.id: max(r.running, len(r.tail)) for r in now.values()}
    result: list[Handing] = []
    for t in source.tail:
        fitting = [
            r for r in now.values() if r.room > 0 and r.taking([t]).expected <= MAX_KV_SHARE * r.kv_capacity
        ]  # fmt: skip
        if not fitting:
            continue
        target = min(fitting, key=lambda r: (owned[r.id], r.id))
        owned[target.id] += 1
        now[target.id] = target.taking([t])
        result.append(Handing(t.trajectory, source.id, target.id))
    return result
