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

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from laminar.workers.draining import Draining, Unfinished
from laminar.workers.kv_space import Part, Space, State, outlooks

KNEE = 1.5
"""A decode step of `batch_limit` trajectories takes this many times as long as one of one trajectory."""
HAND_OVER_S = 0.3
"""What a move costs beside the prefill: a flush, a transaction each, and the copy at the new owner."""


class Handing(NamedTuple):
    """One trajectory of the plan."""

    trajectory: str
    source: str
    target: str


# -- the cost model ---------------------------------------------------------------------------------------------


def step_s(rollout: Draining, batch: int) -> float:
    """Seconds of a decode step: memory-bound, so nearly flat, up to the knee."""
    return rollout.step_s * (1 + (KNEE - 1) * max(0, batch - 1) / max(1, rollout.batch_limit - 1))


def held_s(rollout: Draining) -> float:
    """Expected seconds until its last trajectory ends: for so long the old version holds it."""
    return rollout.longest * step_s(rollout, len(rollout.tail))


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
    space = Space(order, [r.slots for r in order])
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


def _whole(source: Draining, place: int, space: Space) -> Parts:
    part = space.whole(place)
    target = _fullest(space, part, place)
    return [] if target is None else [(target, part)]


def _by_groups(source: Draining, place: int, space: Space) -> Parts:
    """Spread over several destinations, the largest group first; nothing if a group stays over: a source that is not
    emptied gains nothing. Samples of a group stay together, for they share their prompt's KV cache."""
    groups: dict[int, list[int]] = {}
    for i, t in enumerate(source.tail):
        groups.setdefault(t.group, []).append(i)
    if len(groups) == 1 or max(map(len, groups.values())) > space.most:
        return []
    parts: dict[int, Part] = {}
    before: dict[int, State] = {}
    for _, members in sorted(groups.items(), key=lambda item: (-sum(source.tail[i].tokens for i in item[1]), item[0])):
        part = space.part(place, members)
        target = _fullest(space, part, place)
        if target is None:
            parts = {}
            break
        if target not in before:
            before[target] = space.state(target)
        space.put(target, part, space.rollouts[target].taking(part.tail))
        known = parts.get(target)
        parts[target] = Part((*known.tail, *part.tail), known.outlook + part.outlook) if known else part
    for target, state in before.items():
        space.restore(target, state)
    return sorted(parts.items(), key=lambda item: item[0])


def _fullest(space: Space, part: Part, source: int) -> int | None:
    """The fullest place that takes all of it; among equals one with samples of its groups, then the first."""
    places = space.best(part, space.used, but=source)
    if len(places) <= 1:
        return int(places[0]) if len(places) else None
    groups = {t.group for t in part.tail}
    return int(max(places, key=lambda i: (sum(t.group in groups for t in space.rollouts[i].tail), -i)))


# -- rollouts that rest -----------------------------------------------------------------------------------------


def evacuate(sources: Sequence[Draining], others: Iterable[Draining]) -> list[Handing]:
    """All that `sources` have goes to the others of their versions, evenly by number, as far as their slots and KV
    caches take it: beyond their batch limit they become slower, as it is here."""
    leaving = {s.id for s in sources}
    by_version: dict[int, list[Draining]] = {}
    for r in sorted(others, key=lambda r: r.id):
        if r.id not in leaving:
            by_version.setdefault(r.version, []).append(r)
    result: list[Handing] = []
    for version, targets in sorted(by_version.items()):
        result += _spread([s for s in sources if s.version == version and s.tail], targets)
    return result


def _spread(sources: Sequence[Draining], targets: Sequence[Draining]) -> list[Handing]:
    """Of one version; the targets in the order in which equals are taken."""
    tail = [t for s in sources for t in s.tail]
    if not tail:
        return []
    space = Space(targets, [r.room for r in targets], also=tail)
    order = np.arange(len(targets))
    owned = np.array([max(r.running, len(r.tail)) for r in targets])
    rank = len(targets) * (owned.max() - owned + len(tail) + 1) - order
    result: list[Handing] = []
    places = ((source, t) for source in sources for t in source.tail)
    for (source, t), outlook in zip(places, outlooks(tail, space.moments), strict=True):
        part = Part((t,), outlook)
        for target in map(int, space.best(part, rank)):
            space.put(target, part, space.rollouts[target])
            rank[target] -= len(targets)
            result.append(Handing(t.trajectory, source.id, targets[target].id))
    return result
