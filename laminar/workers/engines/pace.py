"""How fast an engine is, from its own steps: seconds of a decode step by batch, and prefilled tokens a second.

Decode is memory-bound: a step of a few trajectories takes about as long as one of one. The batch at which it takes 1.5
times as long is where a rollout is well filled; a tail below it wastes the engine.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KNEE = 1.5
KEPT = 32
"""Steps of each size of batch that count; older ones were of another machine's mood."""
ENOUGH = 4
"""Steps of a size of batch from which its median counts."""
FEW_TOKENS = 32
"""Steps that prefill less tell of nothing but their overhead."""
IDLE_S = 2.0
"""Longer than that is no step but a pause."""


class Pace:
    """`limit`: the engine's largest batch. Batches are kept by their powers of two: 1, 2-3, 4-7, …"""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._steps: dict[int, deque[float]] = {}
        self._prefills: deque[float] = deque(maxlen=KEPT)

    def step(self, batch: int, prefilled: int, seconds: float) -> None:
        """One step of the engine: `batch` requests ran in it, of whose prompts it prefilled so many tokens."""
        if batch < 1 or not 0 < seconds < IDLE_S:
            return
        size = batch.bit_length() - 1
        if not prefilled:
            self._steps.setdefault(size, deque(maxlen=KEPT)).append(seconds)
        elif prefilled >= FEW_TOKENS:
            decode = self._known().get(1 << size, 0.0)
            self._prefills.append(prefilled / max(seconds - decode, seconds / 10))

    def _known(self) -> dict[int, float]:
        """Seconds of a step by the smallest batch of its power of two."""
        return {1 << size: median(s) for size, s in sorted(self._steps.items()) if len(s) >= ENOUGH}

    @property
    def step_s(self) -> float:
        """Seconds of a decode step with one trajectory; 0 as long as only larger batches have been seen."""
        known = self._known()
        return known.get(1) or known.get(2) or 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before the first prefill of note."""
        return median(self._prefills) if self._prefills else 0.0

    @property
    def batch_limit(self) -> int:
        """The batch at which a step takes 1.5 times that of one trajectory, between two sizes that were seen by
        straight interpolation; the engine's limit where no size seen is as slow, or the smallest ones are unknown."""
        one = self.step_s
        if not one:
            return self.limit
        below, at = 1, one
        for batch, seconds in self._known().items():
            if seconds >= KNEE * one:
                share = (KNEE * one - at) / (seconds - at) if seconds > at else 1.0
                return max(1, min(self.limit, round(below + share * (batch - below))))
            below, at = batch, seconds
        return self.limit
