"""A simulated learner: its weights are a hash over all that it was trained on, in order.

Equal state and batch give equal weights, as with the real one under deterministic settings; so a replay that trains
anything else, or twice, shows in the digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from laminar.relay.layout import Layout
from laminar.relay.writing import Invitation
from laminar.workers.learning.base import Sample, SampleStats, StepResult

STATE = "state.json"
BYTES = 64


class SimLearner:
    """`states` is told the weights of each version that any learner of the run ever had: one, if all is well."""

    def __init__(self, states: dict[int, set[str]]) -> None:
        self.states = states
        self._version = 0
        self._settings: dict[str, Any] = {}
        self._weights = hashlib.sha512(b"the initial model").digest()
        self._layout = Layout.from_tensors({"weights": ("uint8", [BYTES])})

    @property
    def version(self) -> int:
        return self._version

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    def configure(self, settings: Mapping[str, Any]) -> None:
        self._settings = {**self._settings, **settings}

    def train(self, batch: Sequence[Sample], fresh: Callable[[], Sequence[Sample]] | None = None) -> StepResult:
        state = hashlib.sha512(self._weights + json.dumps(self._settings, sort_keys=True).encode())
        for s in batch:
            state.update(json.dumps([s.group, s.sample, list(s.token_ids), s.reward, s.version]).encode())
        self._weights = state.digest()
        self._version += 1
        self.states.setdefault(self._version, set()).add(self._weights.hex())
        mean = sum(s.reward for s in batch) / len(batch) if batch else 0.0
        samples = [
            SampleStats(s.group, s.sample, s.reward - mean, sum(s.policy_mask), 1.0, 0.0, 0.0, -1.0) for s in batch
        ]
        return StepResult(samples, {"loss": 0.0, "grad_norm": 1.0})

    def stage(self) -> float:
        return 0.0

    @property
    def writers(self) -> int:
        return 1

    def write_weights(self, buffer: memoryview, invitation: Invitation | None = None) -> int:
        buffer[:BYTES] = self._weights
        return BYTES

    def save(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps([self._version, self._weights.hex()]), encoding="utf-8")

    def load(self, folder: Path) -> None:
        version, weights = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self._version, self._weights = version, bytes.fromhex(weights)

    def verify(self, folder: Path) -> None:
        json.loads((folder / STATE).read_text(encoding="utf-8"))

    def export(self, folder: Path) -> None:
        self.save(folder)

    def close(self) -> None:
        """All of it is in this process."""
