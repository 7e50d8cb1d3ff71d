"""Which rollouts are much slower than others of their kind: a pure decision over what they reported for half a minute.

A machine that throttles, swaps or shares its device with something else holds each trajectory that it has for many
times as long as any other would. Compared are tokens for each second that a trajectory spent in the engine, and only
with rollouts that run at least half as many: a larger batch is never faster for the single trajectory, so whoever is
slower than they are is slow for another reason. A count of n tokens is known to its root at best: who has made too few
to tell, as with one long trajectory at seconds a token, is not found slow.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from laminar.buffer.records import Load

WINDOW_S = 30.0
BUSY = 0.2
"""Of the reports, with something in the engine, that a comparison takes."""
SHARE = 1 / 3
"""Of the median of the others: below it a rollout is slow."""
CHANCE = 4.0
"""Standard deviations of the number of tokens that others would have made in its place: less than so many below it is
chance."""
MIN_PEERS = 2
MAX_RESTING = 1 / 3
"""Of all rollouts: more than so many are never found slow at once; then it is the others that are fast."""


@dataclass(frozen=True)
class Sample:
    """A report at `at` seconds: tokens generated so far, trajectories in the engine."""

    at: float
    tokens: int
    running: int


@dataclass
class Window:
    """The reports of one rollout over the last half minute."""

    samples: deque[Sample] = field(default_factory=deque)

    def add(self, at: float, load: Load) -> None:
        self.samples.append(Sample(at, load.tokens, load.running))
        while self.samples[0].at < at - WINDOW_S:
            self.samples.popleft()

    @property
    def busy(self) -> list[int]:
        """How many ran, whenever any did."""
        return [s.running for s in self.samples if s.running]

    @property
    def telling(self) -> bool:
        """It was seen for nearly the whole time, and busy often enough. Not all the time: whoever takes new versions is
        empty now and then, and where a slow one holds up the trainer, the others have nothing to draw."""
        whole = len(self.samples) > 2 and self.samples[-1].at - self.samples[0].at >= 0.8 * WINDOW_S
        return whole and len(self.busy) >= BUSY * len(self.samples)

    @property
    def running(self) -> float:
        return fmean(self.busy)

    @property
    def made(self) -> int:
        return self.samples[-1].tokens - self.samples[0].tokens

    @property
    def trajectory_s(self) -> float:
        """Seconds in the engine of all trajectories together."""
        return sum((b.at - a.at) * (a.running + b.running) / 2 for a, b in itertools.pairwise(self.samples))


def slow(windows: Mapping[str, Window], resting: Set[str]) -> dict[str, str]:
    """The slow ones among those that do not rest, slowest first, each with the reason."""
    fleet = len(windows.keys() | resting)
    awake = [(id, w.made, w.trajectory_s, w.running) for id, w in windows.items() if id not in resting and w.telling]
    telling = sorted((made / spent_s, id, batch, spent_s) for id, made, spent_s, batch in awake)
    if len(telling) <= MIN_PEERS:
        return {}
    # In arrays: each of a thousand rollouts is compared with all others, once a second.
    rates, running = (np.array([each[column] for each in telling]) for column in (0, 2))
    found: dict[str, str] = {}
    for place, (rate, id, batch, spent_s) in enumerate(telling):
        if rate >= SHARE * rates[-1] or len(resting) + len(found) + 1 > MAX_RESTING * fleet:
            break  # those that follow are faster still
        peers = running >= batch / 2
        peers[place] = False
        count = int(peers.sum())
        if count < MIN_PEERS:
            continue
        usual = float(np.median(rates[peers]))
        expected = usual * spent_s
        if rate < SHARE * usual and expected - rate * spent_s > CHANCE * math.sqrt(expected):
            found[id] = (
                f"{rate:.1f} tokens a second for each of {batch:.0f} trajectories over {WINDOW_S:.0f} s; "
                f"{count} others that run at least half as many make {usual:.1f}"
            )
    return found


def may_rest(living: int) -> int:
    """How many of so many rollouts may go on resting: when others leave, those that rest are needed again."""
    return max(int(MAX_RESTING * living), min(1, living - 1))
