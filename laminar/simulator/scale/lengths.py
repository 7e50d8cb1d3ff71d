"""How long trajectories become: drawn from a log-normal distribution or from a recorded file, by (group, sample) and
seed alone, so that all policies, and the real workers, generate the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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

    @property
    def untold(self) -> str:
        """How many recorded lengths no trajectory may have, and what becomes of them; empty if there are none."""
        cut = 0 if self.recorded is None else int((self.recorded > self.longest).sum())
        if self.recorded is None or not cut:
            return ""
        return (
            f"lengths.trace: {cut:,} of {len(self.recorded):,} lengths are above job.max_tokens = {self.longest:,}, up "
            f"to {self.recorded.max():,.12g}, and are cut to that; raise job.max_tokens to have them as recorded"
        )

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
    """The positive numbers of a column of a .parquet or .jsonl file. Raises ConfigError, and so for one that is not
    finite."""
    name = f"lengths.trace = {str(path)!r}"
    try:
        if path.suffix == ".parquet":
            values = _parquet_column(path, column)
        elif path.suffix == ".jsonl":
            values = _jsonl_column(path, column)
        else:
            raise ConfigError(f"{name} must be a .parquet or .jsonl file; convert it, or name another")
    except OSError as e:
        raise ConfigError(f"{name} cannot be read: {e}; correct the path, which is relative to the TOML file") from e
    except ValueError as e:
        raise ConfigError(f"{name} cannot be read: {e}; correct the file, or name another") from e
    lengths = []
    for place, value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not _is_finite(value):
            raise ConfigError(
                f"{name} has {_shown(value)} in its column {column!r}, {place}: a length is a finite number; correct "
                "it, or leave it out"
            )
        if value > 0:
            lengths.append(value)
    if not lengths:
        raise ConfigError(
            f"{name} has no positive number in its column {column!r}, of {len(values)} rows; set lengths.column to the "
            "column of the lengths"
        )
    return np.array(lengths, dtype=float)


def _parquet_column(path: Path, column: str) -> list[tuple[str, Any]]:
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    if column not in names:
        raise ConfigError(
            f"lengths.trace = {str(path)!r} has no column {column!r}; set lengths.column to one of {', '.join(names)}"
        )
    values = pq.read_table(path, columns=[column])[column].to_pylist()
    return [(f"row {number}", value) for number, value in enumerate(values, 1)]


def _jsonl_column(path: Path, column: str) -> list[tuple[str, Any]]:
    result = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ValueError(f"line {number} is no JSON ({e})") from e
        result.append((f"line {number}", row.get(column) if isinstance(row, dict) else None))
    return result


def _is_finite(value: float) -> bool:
    """Of a number that an array can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: float) -> str:
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else str(value)
