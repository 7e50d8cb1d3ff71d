"""The prompt pool: what is asked, and in which order.

    raw rows ──validate_rows──▶ rows + report ──PromptPool.create──▶ prompts.lance (written once) ──open──▶ workers

The order of drawing is a pure function of (seed, size): group *n* is position `n % size` of epoch `n // size`, and
each epoch has a permutation of its own. It is made from integer arithmetic alone, so that no release of a library
can change what a resumed run draws next.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import PROMPTS
from laminar.buffer.table import TargetTaken
from laminar.errors import ConfigError, StoreError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MAX_EXAMPLES = 3
TEXT_COLUMNS = tuple(f.name for f in PROMPTS if f.name != "prompt_index")


class PromptPool:
    """The prompts of a run in memory (an Arrow table of schema PROMPTS, `prompt_index` 0 … size - 1 in order)."""

    def __init__(self, rows: pa.Table) -> None:
        """Raises StoreError if `rows` are not numbered from 0 on, ConfigError if there are none."""
        if not rows.num_rows:
            raise ConfigError("the prompt pool is empty; check prompts.source and what it leaves out")
        rows = rows.select(PROMPTS.names).cast(PROMPTS).sort_by("prompt_index").combine_chunks()
        indices = rows["prompt_index"].to_numpy()
        if not np.array_equal(indices, np.arange(len(indices))):
            raise StoreError(
                f"the prompt pool's {len(indices)} rows are not numbered 0 to {len(indices) - 1}, but from "
                f"{indices[0]} to {indices[-1]}; rows are missing or doubled"
            )
        self.rows = rows
        self.fingerprint = fingerprint(rows)

    @classmethod
    async def create(cls, uri: str, rows: pa.Table, *, storage_options: dict[str, str] | None = None) -> PromptPool:
        """Write the pool to the Lance data set `uri` (`storage.absolute("prompts.lance")`). A pool that is there
        already is opened if it is the same; raises ConfigError, naming both fingerprints, if it is not."""
        pool = await asyncio.to_thread(cls, rows)
        table = LanceTable(uri, PROMPTS, fsync=True, storage_options=storage_options)
        if await table.version() == 0:
            try:
                await table.commit(pool.rows, target=1, key=pool.fingerprint)
                return pool
            except TargetTaken:
                pass  # another process was first: compare with what it wrote
        there = await cls.open(uri, storage_options=storage_options)
        if there.fingerprint != pool.fingerprint:
            raise ConfigError(
                f"the store's prompt pool has fingerprint {there.fingerprint[:16]} and {len(there)} prompts, the "
                f"config's {pool.fingerprint[:16]} and {len(pool)}: a run keeps its prompts; use a new run for others"
            )
        return there

    @classmethod
    async def open(cls, uri: str, *, storage_options: dict[str, str] | None = None) -> PromptPool:
        """Raises StoreError if there is no pool at `uri`."""
        table = LanceTable(uri, PROMPTS, fsync=True, storage_options=storage_options)
        if await table.version() == 0:
            raise StoreError(f"there is no prompt pool at {uri}; `laminar run CONFIG` writes it")
        return await asyncio.to_thread(cls, await table.read())

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def row(self, prompt_index: int) -> dict[str, Any]:
        """The prompt's columns by name; text columns may be None. Raises IndexError beyond the pool."""
        if not 0 <= prompt_index < len(self):
            raise IndexError(f"prompt_index {prompt_index} is beyond the pool's {len(self)} prompts")
        values: dict[str, Any] = self.rows.slice(prompt_index, 1).to_pylist()[0]
        return values


def fingerprint(rows: pa.Table) -> str:
    """SHA-256 (hex) of the rows' content, each as a line of JSON; independent of files, chunks and releases."""
    digest = hashlib.sha256()
    for batch in rows.select(PROMPTS.names).to_batches(max_chunksize=4096):
        for row in zip(*(batch.column(i).to_pylist() for i in range(batch.num_columns)), strict=True):
            digest.update(json.dumps(row, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def order(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """The permutation of an epoch: int64 [size], prompt indices in the order of drawing; read-only."""
    mask = (1 << 64) - 1
    state = _splitmix64(_splitmix64(np.array([seed & mask], np.uint64)) ^ np.uint64(epoch & mask))
    keys = _splitmix64(state + np.arange(size, dtype=np.uint64) * GOLDEN)
    permutation = np.argsort(keys, kind="stable").astype(np.int64)
    permutation.flags.writeable = False
    return permutation


def locate(group: int, size: int, seed: int) -> tuple[int, int, int]:
    """(epoch, position in it, prompt_index) of a group in a pool of `size` prompts."""
    epoch, position = divmod(group, size)
    return epoch, position, int(order(seed, epoch, size)[position])


@dataclass(frozen=True)
class PromptLimits:
    max_bytes: int = 1 << 20
    """UTF-8 bytes of all text of one row at most."""


@dataclass
class PromptReport:
    """What `validate_rows` left out: numbers by reason (a phrase that fits any number), and the first rows of each with
    an excerpt."""

    rows: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, place: str, value: Any) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append(f"{place}: {value!r:.60}")

    def describe(self) -> str:
        left_out = [f"{count} {reason} ({'; '.join(self.examples[reason])})" for reason, count in self.dropped.items()]
        usable = f"{self.kept} of {self.rows} prompts are usable"
        return f"{usable}; left out: {', '.join(left_out)}" if left_out else usable


def _numbered(row: int) -> str:
    return f"row {row}"


def validate_rows(
    raw: Iterable[Mapping[str, Any]], limits: PromptLimits | None = None, *, place: Callable[[int], str] = _numbered,
    content: Callable[[Mapping[str, Any]], str] = itemgetter("prompt"),
) -> tuple[pa.Table, PromptReport]:  # fmt: skip
    """Usable rows, numbered from 0 in their order, as a table of schema PROMPTS, and a report of the others.

    `prompt` may be text, UTF-8 bytes or a list of messages; `metadata` a mapping or JSON. `place` says where the n-th
    of `raw` stands in its source; of rows with the same `content` (of a row of text columns) the first is kept. Raises
    ConfigError if nothing is left.
    """
    limits = limits or PromptLimits()
    report = PromptReport()
    seen: set[bytes] = set()
    clean: list[dict[str, Any]] = []
    for number, source in enumerate(raw):
        report.rows += 1
        values = {name: source.get(name) for name in TEXT_COLUMNS}
        reason, row = _clean(values, limits)
        if reason is None and (digest := hashlib.sha256(content(row).encode()).digest()) in seen:
            reason = "the same as an earlier prompt"
        if reason is not None:
            report.drop(reason, place(number), values["prompt"])
            continue
        seen.add(digest)
        clean.append({"prompt_index": len(clean), **row})
    report.kept = len(clean)
    if not clean:
        raise ConfigError(f"the prompt pool is empty: {report.describe()}; check prompts.source and its columns")
    return pa.Table.from_pylist(clean, schema=PROMPTS), report


def _clean(values: dict[str, Any], limits: PromptLimits) -> tuple[str | None, dict[str, Any]]:
    """(why the row is not usable or None, its columns as text)."""
    if values["prompt"] is None:
        return "without a prompt", values
    try:
        row = {name: _text(value) for name, value in values.items()}
        size = sum(len(text.encode()) for text in row.values() if text is not None)
    except UnicodeError:
        return "not UTF-8", values
    if not (row["prompt"] or "").strip() or values["prompt"] == []:
        return "empty", row
    if isinstance(values["prompt"], list) and not all(map(_is_message, values["prompt"])):
        return "with a message that has no role or no text", row
    if size > limits.max_bytes:
        return f"of more than {limits.max_bytes} bytes", row
    metadata = row["metadata"] = row["metadata"] or "{}"
    return (None if _is_object(metadata) else "with metadata that are no JSON object"), row


def _is_message(value: Any) -> bool:
    """Chat templates fail on others, without saying whose they are. A call of a tool needs no text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list) or bool(value.get("tool_calls"))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
