"""The files of a registered segment: the first, and for what nothing can make again a second copy.

    incoming/<table>/<segment>.arrow          the segment
    incoming/copies/<table>/<segment>.arrow   its copy, of `steps` and `step_metrics`

A trajectory is generated again and an evaluation asked for again; what a step left is not trained again once the step
is recorded. A copy counts through the first file's name only: who lists `incoming/<table>/` finds each row once. Both
are durable before the segment is registered. The copy is deleted before the first file, so that a first file that is
missing while its copy is there is always damage.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from laminar.buffer.experience import incoming_path
from laminar.buffer.records import Incoming
from laminar.buffer.segments import encode, read_segment
from laminar.buffer.storage import NotFound, Storage
from laminar.errors import CorruptSegment, StoreError

COPIED = ("steps", "step_metrics")
"""Tables whose rows are made once."""
FIRST, COPIES = "incoming/", "incoming/copies/"


@dataclass(frozen=True)
class IncomingRows:
    """All registered rows. `instead`: why they are the copy's, for the log; empty if the first file is sound."""

    batches: tuple[pa.RecordBatch, ...]
    instead: str = ""


def copy_path(path: str) -> str:
    """Where the copy of a segment lies: `path` is the first file's."""
    return COPIES + path.removeprefix(FIRST)


def first_path(path: str) -> str:
    """Of the segment that a file under incoming/ belongs to."""
    return FIRST + path.removeprefix(COPIES) if path.startswith(COPIES) else path


async def write_copied(storage: Storage, table: str, segment: str, rows: pa.Table, worker: str) -> Incoming:
    """Make the rows durable twice; they count once what is returned is registered. Replaces files of this name."""
    data = encode(rows.schema, rows.combine_chunks().to_batches())
    path = incoming_path(table, segment)
    copy = copy_path(path)
    for file in (path, copy):
        await storage.write(file, data, overwrite=True)
    return Incoming(table=table, path=path, rows=rows.num_rows, worker=worker, copied_to=copy)


async def read_incoming(storage: Storage, incoming: Incoming, schema: pa.Schema) -> IncomingRows:
    """The registered rows, from the copy if the first file cannot be read.

    Raises NotFound if no file is there, CorruptSegment if what is there is damaged, and StoreError if one of the files
    cannot be read for now: nothing is lost then.
    """
    try:
        return IncomingRows(await _read(storage, incoming, incoming.path, schema))
    except StoreError as e:
        first = e
    if not incoming.copied_to:
        raise first
    try:
        batches = await _read(storage, incoming, incoming.copied_to, schema)
    except StoreError as e:
        raise _both(first, e) from first
    wrong = f"{incoming.path} is missing" if isinstance(first, NotFound) else str(first)
    return IncomingRows(batches, f"{wrong}; its copy is used")


async def delete_incoming(storage: Storage, incoming: Incoming) -> None:
    """Once the segment is not registered any more."""
    for path in reversed(incoming.files):
        await storage.delete(path)


async def _read(storage: Storage, incoming: Incoming, path: str, schema: pa.Schema) -> tuple[pa.RecordBatch, ...]:
    contents = read_segment(await storage.read(path), schema, complete=True, name=path)
    rows = sum(b.num_rows for b in contents.batches)
    if rows != incoming.rows:
        raise CorruptSegment(f"{path} is damaged: it holds {rows} of {incoming.rows} registered rows")
    return contents.batches


def _both(first: StoreError, copy: StoreError) -> StoreError:
    for error in (first, copy):
        if not isinstance(error, NotFound | CorruptSegment):
            return error
    if isinstance(first, NotFound) and isinstance(copy, NotFound):
        return first
    return CorruptSegment(f"{first}; nor can its copy be read: {copy}")
