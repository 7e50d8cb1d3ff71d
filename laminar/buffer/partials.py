"""Partial responses: what is durable of trajectories that are not finished.

    owner ──flush──▶ partials/<worker>/<n>.arrows ──read_partials──▶ rows by (group, sample, term) ──assemble──▶ Partial

Each worker appends to a log of its own, one batch a flush. A log rotates: live rows are carried forward into a new
segment as one batch, so a reader sees all of them or none. Rows say where they begin (`offset`), and a later row
that begins lower replaces what stood there; a prompt row begins the trajectory anew. Whatever instant the owner
dies at, the rows that are left assemble to a prefix of what it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from laminar.buffer.keys import trajectory_name
from laminar.buffer.schema import PARTIALS
from laminar.buffer.segments import SegmentContents, SegmentWriter, load_segment, segment_of
from laminar.buffer.storage import FileInfo, NotFound, Storage
from laminar.errors import StoreError

log = logging.getLogger(__name__)

ROTATE_BYTES = 64 << 20
ROTATE_S = 600.0
THREAD_ROWS = 2_000
"""From so many rows on they are decoded in a thread: fewer take less than a millisecond."""
READ_TRIES = 5
ROLES = ("prompt", "policy", "environment")


@dataclass(slots=True)
class PartialRow:
    """One row of schema PARTIALS, under the same names; times in UTC microseconds.

    Its owner may add tokens until it is appended to a log; afterwards nobody changes it.

    `offset` counts the tokens after the prompt that stand before these. `logprobs` is as long as `token_ids` where
    the role is 'policy', else empty. `environment_state` is None where the row does not change it.
    """

    group: int
    sample: int
    term: int
    turn: int
    offset: int
    role: str
    token_ids: list[int]
    logprobs: list[float]
    version: int
    digest: str
    worker: str
    finish_reason: str | None
    turn_state: str
    environment_state: str | None
    started_at: int
    at: int


@dataclass(frozen=True)
class Span:
    """Policy tokens from `start` on (after the prompt) were written by `worker` under `version` of digest `digest`."""

    start: int
    version: int
    worker: str
    digest: str


@dataclass
class Partial:
    """A trajectory so far. `token_ids`, `policy_mask` and `logprobs` (0 where the policy did not write) are as long.

    `gap_at`: rows after this many tokens are lost, so that what the log says later could not be used; else None.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    policy_mask: list[bool]
    logprobs: list[float]
    spans: list[Span]
    turn: int
    turn_state: str
    environment_state: str | None
    finish_reason: str | None
    started_at: int
    gap_at: int | None = None


TrajectoryTerm = tuple[int, int, int]
"""(group, sample, term)"""


@dataclass(frozen=True)
class PartialRows:
    """What a worker's log holds of the trajectories that were asked for. `rows` are in the order of writing; `damage`
    names what could not be read, of whomever (a torn end is normal and not damage); `bytes` is the size of the log."""

    rows: dict[TrajectoryTerm, list[PartialRow]]
    damage: list[str] = field(default_factory=list)
    bytes: int = 0


class PartialLog:
    """A worker's log. One task at a time may call it."""

    def __init__(
        self,
        storage: Storage,
        worker: str,
        *,
        sync: bool,
        rotate_bytes: int = ROTATE_BYTES,
        rotate_s: float = ROTATE_S,
    ) -> None:
        self.storage = storage
        self.worker = worker
        self.sync = sync
        self.rotate_bytes = rotate_bytes
        self.rotate_s = rotate_s
        self.superseded: list[str] = []
        """Segments whose live rows stand in a newer one. Rows of trajectories that were handed over and not yet
        copied by their new owner may stand here alone: see `discard_superseded`."""
        self._current: list[str] = []
        self._next = 0
        self._writer: SegmentWriter | None = None
        self._opened_at = 0.0

    @property
    def bytes(self) -> int:
        """Size of the segment that is being written."""
        return self._writer.bytes if self._writer else 0

    async def append(self, rows: Sequence[PartialRow]) -> None:
        """Write rows as one batch; durable on return if `sync`. Raises StoreError: then none of them counts, and the
        same call may be made again (it goes to a new segment)."""
        if not rows:
            return
        batch = to_batch(rows)
        writer = self._writer or self._open()
        self._writer = None
        await writer.append(batch)
        self._writer = writer

    def due_for_rotation(self) -> bool:
        """Whether the segment has reached 64 MiB or 10 minutes."""
        if self._writer is None:
            return False
        age = asyncio.get_running_loop().time() - self._opened_at
        return self._writer.bytes >= self.rotate_bytes or age >= self.rotate_s

    async def rotate(self, live_rows: Sequence[PartialRow]) -> list[str]:
        """Go on in a new segment that begins with all rows of every live trajectory, as one batch. Returns the
        superseded segments; they are kept until `discard_superseded`. If it raises, the old segments still count."""
        old, self._current = self._current, []
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                await writer.close()
            await self.append(live_rows)
        except BaseException:
            self._current = old + self._current
            raise
        self.superseded += old
        return list(self.superseded)

    async def discard_superseded(self) -> None:
        """Delete superseded segments. Only when each claim whose `source` is this worker belongs to a trajectory that
        is live here: then nobody else will read them."""
        while self.superseded:
            await delete_segment(self.storage, self.superseded[0])
            self.superseded.pop(0)

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()

    def _open(self) -> SegmentWriter:
        path = f"{folder_of(self.worker)}/{self._next:06d}.arrows"
        self._next += 1
        self._current.append(path)
        self._opened_at = asyncio.get_running_loop().time()
        return SegmentWriter(self.storage, path, PARTIALS, self.sync)


def folder_of(worker: str) -> str:
    return f"partials/{worker}"


async def delete_segment(storage: Storage, path: str) -> None:
    for file in await storage.list(path.rsplit("/", 1)[0]):
        if segment_of(file.path) == path:
            await storage.delete(file.path)


async def read_partials(
    storage: Storage, worker: str, wanted: Collection[TrajectoryTerm] | None = None
) -> PartialRows:
    """The rows of a worker's log, of those trajectories that are `wanted` (None: of all); none if it wrote none. Damage
    is reported, never raised. A log that rotates while it is read is read again; raises StoreError if that does not
    end."""
    for _ in range(READ_TRIES):
        try:
            return await _read_once(storage, worker, wanted)
        except NotFound as e:
            log.info("the log of %s has rotated, reading it again: %s", worker, e)
    raise StoreError(f"the partial log of {worker} lost segments during each of {READ_TRIES} readings; try again later")


async def _read_once(storage: Storage, worker: str, wanted: Collection[TrajectoryTerm] | None) -> PartialRows:
    files: list[FileInfo] = await storage.list(folder_of(worker))
    result = PartialRows({}, bytes=sum(f.size for f in files))
    for path in sorted({segment_of(f.path) for f in files}):
        contents: SegmentContents = await load_segment(storage, path, PARTIALS, files)
        if contents.damage is not None:
            result.damage.append(contents.damage)
            log.error("partial log of %s: %s; what follows there is lost", worker, contents.damage)
        if sum(batch.num_rows for batch in contents.batches) > THREAD_ROWS:
            await asyncio.to_thread(_add_rows, result, contents, wanted)
        else:
            _add_rows(result, contents, wanted)
    return result


def _add_rows(result: PartialRows, contents: SegmentContents, wanted: Collection[TrajectoryTerm] | None) -> None:
    table = pa.Table.from_batches(contents.batches, PARTIALS)
    if wanted is not None:
        # Before anything becomes an object of Python: who adopts a few wants little of what an hour of many wrote.
        groups = pa.array({group for group, _, _ in wanted}, PARTIALS.field("group").type)
        table = table.filter(pc.is_in(table["group"], value_set=groups))
    for batch in table.combine_chunks().to_batches():
        for row in from_batch(batch):
            key = (row.group, row.sample, row.term)
            if wanted is None or key in wanted:
                result.rows.setdefault(key, []).append(row)


def to_batch(rows: Sequence[PartialRow]) -> pa.RecordBatch:
    """Raises StoreError naming the trajectory if a row breaks its contract."""
    for row in rows:
        _check(row)
    columns = [pa.array([getattr(r, f.name) for r in rows], f.type) for f in PARTIALS]
    return pa.RecordBatch.from_arrays(columns, schema=PARTIALS)


def from_batch(batch: pa.RecordBatch) -> list[PartialRow]:
    columns = [_values(batch.column(f.name)) for f in fields(PartialRow)]
    return [PartialRow(*row) for row in zip(*columns, strict=True)]


def _values(column: pa.Array) -> list[Any]:
    """As `to_pylist`, by way of numpy where that is several times as fast; timestamps as microseconds."""
    if pa.types.is_list(column.type) and not column.null_count:
        flat, ends = column.flatten().to_numpy().tolist(), column.value_lengths().to_numpy().cumsum().tolist()
        return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count and not pa.types.is_string(column.type):
        return list(column.to_pylist())
    return list(column.to_numpy(zero_copy_only=False).tolist())


def _check(row: PartialRow) -> None:
    expected = len(row.token_ids) if row.role == "policy" else 0
    if row.role not in ROLES:
        wrong = f"the role {row.role!r}; known are {', '.join(ROLES)}"
    elif len(row.logprobs) != expected:
        wrong = f"{len(row.token_ids)} tokens and {len(row.logprobs)} logprobs, expected were {expected}"
    elif row.offset < 0 or (row.role == "prompt" and row.offset):
        wrong = f"the offset {row.offset}"
    else:
        return
    name = trajectory_name(row.group, row.sample)
    raise StoreError(f"a {row.role!r} row of trajectory {name} at offset {row.offset} has {wrong}")


def assemble(rows: Sequence[PartialRow]) -> Partial:
    """The trajectory that one owner's rows of one term describe, in the order of writing.

    A row at an offset that is already reached replaces everything from there on; one beyond what is there is left
    out, with all that follows, until a row connects again (`gap_at`). No row, or none that connects, gives an empty
    trajectory. Raises StoreError for rows of several trajectories or terms, or rows that contradict themselves.
    """
    if len(owners := {(r.group, r.sample, r.term) for r in rows}) > 1:
        raise StoreError(f"rows of {len(owners)} trajectories or terms cannot be one partial: {sorted(owners)[:4]}")
    partial = Partial([], [], [], [], [], 0, "generating", None, None, rows[0].started_at if rows else 0)
    seen_prompt = False
    for row in rows:
        _check(row)
        if row.role == "prompt":
            seen_prompt = True
            partial = Partial(list(row.token_ids), [], [], [], [], 0, "generating", None, None, row.started_at)
        elif not seen_prompt or row.offset > len(partial.token_ids):
            partial.gap_at = len(partial.token_ids)
            continue
        else:
            _apply(partial, row)
        partial.turn = row.turn
        partial.turn_state = row.turn_state
        partial.finish_reason = row.finish_reason
        if row.environment_state is not None:
            partial.environment_state = row.environment_state
    return partial


def _apply(partial: Partial, row: PartialRow) -> None:
    partial.gap_at = None
    if row.offset < len(partial.token_ids):
        for tokens in (partial.token_ids, partial.policy_mask, partial.logprobs):
            del tokens[row.offset :]
        while partial.spans and partial.spans[-1].start >= row.offset:
            partial.spans.pop()
    policy = row.role == "policy"
    if policy and row.token_ids:
        writer = (row.version, row.worker, row.digest)
        last = partial.spans[-1] if partial.spans else None
        if last is None or (last.version, last.worker, last.digest) != writer:
            partial.spans.append(Span(row.offset, *writer))
    partial.token_ids += row.token_ids
    partial.policy_mask += [policy] * len(row.token_ids)
    partial.logprobs += row.logprobs if policy else [0.0] * len(row.token_ids)
