"""How long trajectories become: drawn from a log-normal distribution or from a recorded file, by (group, sample) and
seed alone, so that all policies, and the real workers, generate the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from laminar.errors import ConfigError

BLOCK = 256
"""Groups that are drawn at once."""


class Lengths:
    """Policy tokens of each trajectory, from 1 to `longest`. `recorded`: lengths to draw from instead."""

    def __init__(
        self, *, samples: int, longest: int, seed: int, median: float, sigma: float, recorded: np.ndarray | None = None
    ) -> None:
        self.samples = samples
        self.longest = longest
        self.seed = seed
        self.median = median
        self.sigma = sigma
        self.recorded = recorded
        self._blocks: dict[int, list[list[int]]] = {}

    def of(self, group: int, sample: int) -> int:
        return self._block(group // BLOCK)[group % BLOCK][sample]

    def of_groups(self, groups: Iterable[int]) -> np.ndarray:
        """Of all samples of these groups: int64 of shape (groups, samples)."""
        return np.array([self._block(g // BLOCK)[g % BLOCK] for g in groups], dtype=np.int64)

    def _block(self, number: int) -> list[list[int]]:
        if number not in self._blocks:
            self._blocks[number] = self._draw(np.random.default_rng([self.seed, number]), BLOCK).tolist()
        return self._blocks[number]

    def _draw(self, source: np.random.Generator, groups: int) -> np.ndarray:
        size = (groups, self.samples)
        if self.recorded is not None:
            drawn = source.choice(self.recorded, size=size)
        else:
            drawn = np.rint(source.lognormal(np.log(self.median), self.sigma, size=size))
        return np.clip(drawn, 1, self.longest).astype(np.int64)

    def mean(self) -> float:
        """Of many."""
        return float(self._many().mean())

    def context(self, prompt_tokens: int) -> float:
        """Tokens in the KV cache of a trajectory that is met at any time of generation: long ones are met for longer,
        half-grown on average."""
        many = self._many().astype(float)
        return prompt_tokens + float((many**2).mean() / many.mean()) / 2

    def _many(self) -> np.ndarray:
        return self._draw(np.random.default_rng([self.seed, 1 << 40]), 4096)


def read_trace(path: Path, column: str) -> np.ndarray:
    """The positive numbers of a column of a .parquet or .jsonl file. Raises ConfigError."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            if column not in pq.read_schema(path).names:
                raise ConfigError(f"lengths.trace = {str(path)!r} has no column {column!r} (lengths.column)")
            values = pq.read_table(path, columns=[column])[column].to_pylist()
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            values = [row.get(column) if isinstance(row, dict) else None for row in rows]
        else:
            raise ConfigError(f"lengths.trace = {str(path)!r} must be a .parquet or .jsonl file")
    except (OSError, ValueError) as e:
        raise ConfigError(f"lengths.trace = {str(path)!r} cannot be read: {e}") from e
    lengths = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    if not lengths:
        raise ConfigError(f"lengths.trace = {str(path)!r} has no positive number in its column {column!r}")
    return np.array(lengths, dtype=float)
