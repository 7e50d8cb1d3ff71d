"""Which rollouts are much slower than others of their kind: a pure decision over what they reported for half a minute.

A machine that throttles, swaps or shares its device with something else holds each trajectory that it has for many
times as long as any other would. Compared is the decode rate of each trajectory, and only with rollouts that run at
least half as many: a larger batch is never faster for the single trajectory, so whoever is slower than they are is
slow for another reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from laminar.buffer.records import Load

WINDOW_S = 30.0
SHARE = 1 / 3
"""Of the median of the others: below it a rollout is slow."""
MIN_PEERS = 2
MAX_RESTING = 1 / 3
"""Of all rollouts: more than so many are never found slow at once; then it is the others that are fast."""


@dataclass(frozen=True)
class Sample:
    """A report at `at` seconds: tokens a second, trajectories in the engine."""

    at: float
    rate: float
    running: int


@dataclass
class Window:
    """The reports of one rollout over the last half minute."""

    samples: deque[Sample] = field(default_factory=deque)

    def add(self, at: float, load: Load) -> None:
        self.samples.append(Sample(at, load.decode_tokens_per_s, load.running))
        while self.samples[0].at < at - WINDOW_S:
            self.samples.popleft()

    @property
    def telling(self) -> bool:
        """It was busy all the time, and not with ever more: the rate that is reported lags behind a growing batch."""
        s = self.samples
        whole = len(s) > 2 and s[-1].at - s[0].at >= 0.8 * WINDOW_S
        return whole and all(x.running for x in s) and max(x.running for x in s) <= 1.5 * s[0].running

    @property
    def running(self) -> float:
        return fmean(x.running for x in self.samples)

    @property
    def rate_each(self) -> float:
        """Tokens a second of one trajectory."""
        return fmean(x.rate for x in self.samples) / self.running


def slow(windows: Mapping[str, Window], resting: Set[str]) -> dict[str, str]:
    """The slow ones among those that do not rest, slowest first, each with the reason."""
    fleet = len(windows.keys() | resting)
    # Each window's means once: with a thousand rollouts there are a million pairs.
    telling = {id: (w.rate_each, w.running) for id, w in windows.items() if id not in resting and w.telling}
    rates = np.array([rate for rate, _ in telling.values()])
    numbers = np.array([running for _, running in telling.values()])
    found: dict[str, str] = {}
    places = {id: place for place, id in enumerate(telling)}
    for id, (rate, running) in sorted(telling.items(), key=lambda item: (item[1][0], item[0])):
        chosen = numbers >= running / 2
        chosen[places[id]] = False
        peers = rates[chosen]
        if len(peers) < MIN_PEERS or len(resting) + len(found) + 1 > MAX_RESTING * fleet:
            continue
        usual = float(np.median(peers))
        if rate < SHARE * usual:
            found[id] = (
                f"{rate:.1f} tokens a second for each of {running:.0f} trajectories over "
                f"{WINDOW_S:.0f} s; {len(peers)} others that run at least half as many make {usual:.1f}"
            )
    return found
