"""Rows of a .jsonl or .parquet file, from any place that fsspec opens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from laminar.errors import ConfigError

LeaveOut = Callable[[str, str], None]
"""(reason, place): counts a row that cannot be read."""


def read_rows(path: str, leave_out: LeaveOut) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each readable row. Raises ConfigError if the file cannot be opened or is of another kind."""
    if path.endswith(".jsonl"):
        return _jsonl(path, leave_out)
    if path.endswith(".parquet"):
        return _parquet(path)
    raise ConfigError(f"prompts.dataset = {path!r}: only .jsonl and .parquet files are read")


def _jsonl(path: str, leave_out: LeaveOut) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with fsspec.open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"line {number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError:
                    leave_out("not UTF-8", place)
                    continue
                except (ValueError, RecursionError):
                    leave_out("not JSON", place)
                    continue
                if isinstance(row, dict):
                    yield place, row
                else:
                    leave_out("not a JSON object", place)
    except OSError as error:
        raise ConfigError(f"the prompts file {path} cannot be read: {error}") from error


def _parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with fsspec.open(path, "rb") as file:
            index = 0
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"row {index}", row
                    index += 1
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"the prompts file {path} cannot be read: {error}") from error
