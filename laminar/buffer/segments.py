"""Arrow IPC segments: what many writers append, each to files of its own, and what a reader may trust of them.

    segment = schema message, batch 0, batch 1, … [end mark]       any Arrow IPC reader opens it
    message = length, header with {crc32c, seq}, body

Each message carries in its custom metadata the CRC32C of all its own bytes, taken with the eight digits of the
CRC itself set to zero: a flipped bit anywhere, lengths and padding included, is found before Arrow looks inside.
Batches also carry their sequence number, so that a lost one is noticed.

A reader stops at the first batch that is torn, fails its CRC or breaks the sequence. A torn *end* is normal after
a crash (`torn_at`); damage before valid data, or within data that is all there, raises `CorruptSegment`. A segment
that ends exactly after a batch looks whole, since the next batch may not have been written yet: files that are
published at once are read with `complete=True`, which asks for the end mark.

On storage without appends a segment `x.arrows` is the objects `x-000000.arrows`, `x-000001.arrows`, …, one batch
each; `load_segment` gives the same rows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import google_crc32c
import pyarrow as pa

from laminar.buffer.files import SECTOR_BYTES, FileInfo, Storage
from laminar.errors import CorruptSegment, StoreError

CONTINUATION = b"\xff\xff\xff\xff"
END = CONTINUATION + bytes(4)
NO_CRC = b"0x00000000"
CRC_VALUE = re.compile(rb"\x0a\x00\x00\x00(0x[0-9a-f]{8})\x00")
"""The CRC as flatbuffers hold a string: its length, ten characters, a zero."""
READ_AT_ONCE = 16
"""Objects of one segment: an object store takes tens of milliseconds to answer, however small the object."""
OBJECT_SUFFIX = re.compile(r"-\d{6,}(?=\.arrows$)")


@dataclass(frozen=True)
class SegmentContents:
    """`batches` are checked. `torn_at`: byte at which a torn end begins. `damage`: what else is wrong, and where
    (only when read with `strict=False`). `closed`: the writer ended the segment."""

    batches: tuple[pa.RecordBatch, ...]
    torn_at: int | None = None
    damage: str | None = None
    closed: bool = False


class SegmentWriter:
    """Appends batches to one segment. After an error it refuses further ones: the file's end is unsure."""

    def __init__(self, storage: Storage, path: str, schema: pa.Schema, sync: bool) -> None:
        """`path` ends in `.arrows` and must be new. `sync`: each append is durable when it returns."""
        self.storage = storage
        self.path = path
        self.schema = schema
        self.sync = sync
        self.batches = 0
        self.bytes = 0
        self._open = True

    async def append(self, batch: pa.RecordBatch) -> None:
        """Write one batch. Raises StoreError if it could not be written, or an earlier one could not."""
        if not self._open:
            raise StoreError(f"segment {self.path} is closed, or an append to it failed; go on in a new segment")
        message = _batch_message(self.schema, batch, self.batches)
        self._open = False
        if self.storage.supports_append:
            data = message if self.batches else _schema_message(self.schema) + message
            await self.storage.append(self.path, data, sync=self.sync)
        else:
            data = _schema_message(self.schema) + message + END
            await self.storage.write(object_path(self.path, self.batches), data)
        self._open = True
        self.batches += 1
        self.bytes += len(data)

    async def close(self) -> None:
        """Write the end mark. A segment without one is read just as well."""
        if self._open and self.batches and self.storage.supports_append:
            self._open = False
            await self.storage.append(self.path, END, sync=self.sync)
        self._open = False


def object_path(path: str, seq: int) -> str:
    return f"{path.removesuffix('.arrows')}-{seq:06d}.arrows"


def segment_of(path: str) -> str:
    """The segment that a file belongs to: itself, or the one that it is an object of."""
    return OBJECT_SUFFIX.sub("", path)


def encode(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bytes:
    """A whole segment, with its end mark. Equal batches give equal bytes under one release of pyarrow."""
    messages = [_batch_message(schema, batch, seq) for seq, batch in enumerate(batches)]
    return b"".join([_schema_message(schema), *messages, END])


def read_segment(
    data: bytes,
    schema: pa.Schema,
    *,
    strict: bool = True,
    complete: bool = False,
    first_seq: int = 0,
    name: str = "segment",
) -> SegmentContents:
    """Check and decode a segment; the batches share `data`'s memory.

    Raises CorruptSegment for damage other than a torn end, saying where; with `strict=False` the valid prefix
    comes back with the report in `damage`. `complete`: the file was published at once, so that a torn end or a
    missing end mark is damage too. A schema other than `schema` raises in either case.
    """
    found = _scan(data, first_seq)
    damage, torn_at = found.damage, found.torn_at
    if complete and not found.closed and damage is None:
        damage, torn_at = f"it was published whole, but its end is missing from byte {found.valid_bytes} on", None
    if damage is not None:
        damage = f"{name} ({len(data)} bytes, {len(found.ends)} good batches): {damage}"
        if strict:
            raise CorruptSegment(damage)
    return SegmentContents(tuple(_decode(data, found, schema, name)), torn_at, damage, found.closed)


async def load_segment(storage: Storage, path: str, schema: pa.Schema, files: Iterable[FileInfo]) -> SegmentContents:
    """Read a segment from its file or its objects, whichever `files` (a listing of its folder) holds.

    Never raises for damage: the valid prefix comes back with the report in `damage`.
    """
    mine = sorted(f.path for f in files if segment_of(f.path) == path)
    if mine == [path]:
        return read_segment(await storage.read(path), schema, strict=False, name=path)
    batches: list[pa.RecordBatch] = []
    read: list[bytes] = []
    for seq, name in enumerate(mine):
        if name != object_path(path, seq):
            return SegmentContents(tuple(batches), None, f"{path}: object {seq} is missing, {name} is there")
        if not read:
            read = await asyncio.gather(*(storage.read(n) for n in mine[seq : seq + READ_AT_ONCE]))
        contents = read_segment(read.pop(0), schema, strict=False, complete=True, first_seq=seq, name=name)
        batches += contents.batches
        if contents.damage:
            return SegmentContents(tuple(batches), None, contents.damage)
    return SegmentContents(tuple(batches))


@dataclass(frozen=True)
class _Scan:
    schema_end: int
    ends: tuple[int, ...]
    torn_at: int | None
    damage: str | None
    closed: bool

    @property
    def valid_bytes(self) -> int:
        return self.ends[-1] if self.ends else self.schema_end


def _scan(data: bytes, first_seq: int) -> _Scan:
    """Walk the messages without decoding any; says how far they are good and what ends them."""
    buffer = pa.py_buffer(data)
    schema_end, ends, at = 0, list[int](), 0
    while True:
        if data[at : at + 8] == END and schema_end:
            extra = len(data) - at - 8
            damage = f"{extra} bytes follow the end mark at byte {at}" if extra else None
            return _Scan(schema_end, tuple(ends), None, damage, True)
        if at == len(data) and schema_end:
            return _Scan(schema_end, tuple(ends), None, None, False)
        end = _valid_end(buffer, at)
        kind, seq = _kind(buffer, at, end) if end is not None else ("", None)
        expected = ("record batch", first_seq + len(ends)) if schema_end else ("schema", None)
        if end is None or (kind, seq) != expected:
            torn, damage = _judge(buffer, at, end, seq, expected[1])
            return _Scan(schema_end, tuple(ends), torn, damage, False)
        if schema_end:
            ends.append(end)
        else:
            schema_end = end
        at = end


def _judge(
    buffer: pa.Buffer, at: int, end: int | None, seq: int | None, expected: int | None
) -> tuple[int | None, str | None]:
    """A torn end (where) or damage (what) of the message at `at`, which is not the good one expected there."""
    if end is not None:
        return None, f"at byte {at} comes batch {seq}, expected was {'the schema' if expected is None else expected}"
    later = next(_valid_messages_after(buffer, at), None)
    if later is not None:
        return None, f"the message at byte {at} fails its checksum or is cut short, and byte {later} begins a valid one"
    stated = _stated_end(buffer, at)
    tail = bytes(buffer.slice(max(at, buffer.size - SECTOR_BYTES)))
    if stated is None or stated > buffer.size or not any(tail):
        return at, None
    return None, f"the message at byte {at} is there to its end and fails its checksum"


def _valid_messages_after(buffer: pa.Buffer, at: int) -> Iterator[int]:
    data = memoryview(buffer).tobytes()
    position = data.find(CONTINUATION, at + 1)
    while position >= 0:
        if _valid_end(buffer, position) is not None:
            yield position
        position = data.find(CONTINUATION, position + 1)


def _stated_end(buffer: pa.Buffer, at: int) -> int | None:
    """Where the message at `at` says that it ends; None if it does not say."""
    prefix = bytes(buffer.slice(at, min(8, buffer.size - at)))
    if len(prefix) < 8 or prefix[:4] != CONTINUATION:
        # A message that is there but does not begin like one: damage, unless it is a torn write's zeros or stump.
        return None if len(prefix) < 8 or not any(prefix) else at
    header_bytes = int.from_bytes(prefix[4:], "little", signed=True)
    if header_bytes <= 0 or at + 8 + header_bytes > buffer.size:
        return None
    try:
        reader = pa.BufferReader(buffer.slice(at))
        pa.ipc.read_message(reader)
        return at + int(reader.tell())
    except (pa.ArrowInvalid, OSError, EOFError):
        return None


def _valid_end(buffer: pa.Buffer, at: int) -> int | None:
    """The end of the message at `at` if its checksum holds."""
    prefix = bytes(buffer.slice(at, min(8, max(0, buffer.size - at))))
    if len(prefix) < 8 or prefix[:4] != CONTINUATION:
        return None
    header_end = at + 8 + int.from_bytes(prefix[4:], "little", signed=True)
    if not at + 8 < header_end <= buffer.size:
        return None
    crc = CRC_VALUE.search(bytes(buffer.slice(at + 8, header_end - at - 8)))
    if crc is None:
        return None
    end = _stated_end(buffer, at)
    if end is None or _crc(buffer, at, at + 8 + crc.start(1), end) != int(crc[1], 16):
        return None
    return end


def _crc(buffer: pa.Buffer, start: int, crc_at: int, end: int) -> int:
    value = google_crc32c.extend(0, bytes(buffer.slice(start, crc_at - start)))
    value = google_crc32c.extend(value, NO_CRC)
    after = crc_at + len(NO_CRC)
    return int(google_crc32c.extend(value, buffer.slice(after, end - after)))


def _kind(buffer: pa.Buffer, at: int, end: int) -> tuple[str, int | None]:
    message = pa.ipc.read_message(pa.BufferReader(buffer.slice(at, end - at)))
    seq = re.search(rb"\x0a\x00\x00\x00([0-9]{10})\x00", bytes(message.metadata))
    return message.type, int(seq[1]) if seq else None


def _decode(data: bytes, found: _Scan, schema: pa.Schema, name: str) -> list[pa.RecordBatch]:
    if not found.schema_end:
        return []
    reader = pa.ipc.open_stream(pa.py_buffer(data).slice(0, found.valid_bytes))
    if not reader.schema.equals(schema, check_metadata=False):
        raise StoreError(
            f"{name} has the columns {_names(reader.schema)}, expected were {_names(schema)}: it was written by "
            "another version of Laminar, or is no segment of this table"
        )
    return [reader.read_next_batch().replace_schema_metadata(schema.metadata) for _ in found.ends]


def _names(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def _schema_message(schema: pa.Schema) -> bytes:
    return _sealed(_stream(schema).getvalue().to_pybytes()[: -len(END)])


def _batch_message(schema: pa.Schema, batch: pa.RecordBatch, seq: int) -> bytes:
    if not batch.schema.equals(schema, check_metadata=False):
        raise StoreError(f"a batch with the columns {_names(batch.schema)} does not fit a segment of {_names(schema)}")
    stream = _stream(schema, batch, {"seq": f"{seq:010d}", "crc32c": NO_CRC.decode()}).getvalue()
    reader = pa.BufferReader(stream)
    pa.ipc.read_message(reader)
    start = int(reader.tell())
    return _sealed(stream.slice(start, stream.size - start - len(END)).to_pybytes())


def _stream(
    schema: pa.Schema, batch: pa.RecordBatch | None = None, metadata: dict[str, str] | None = None
) -> pa.BufferOutputStream:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema.with_metadata({"crc32c": NO_CRC.decode()})) as writer:
        if batch is not None:
            writer.write_batch(batch, custom_metadata=metadata)
    return sink


def _sealed(message: bytes) -> bytes:
    """The message with its CRC in the place of the zeros."""
    header_end = 8 + int.from_bytes(message[4:8], "little")
    places = [m.start(1) for m in CRC_VALUE.finditer(message, 8, header_end)]
    if len(places) != 1:
        raise StoreError(f"a message has {len(places)} places for its checksum, expected was one; report this as a bug")
    crc = b"0x%08x" % _crc(pa.py_buffer(message), 0, places[0], len(message))
    return message[: places[0]] + crc + message[places[0] + len(crc) :]
