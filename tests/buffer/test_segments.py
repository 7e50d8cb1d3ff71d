"""Segments: what is written comes back; what was damaged is never taken for data."""

from __future__ import annotations

import io
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.segments import (
    END,
    SegmentContents,
    SegmentWriter,
    encode,
    load_segment,
    read_segment,
    segment_of,
)
from laminar.buffer.storage import LocalStorage, MemoryStorage, Storage
from laminar.errors import CorruptSegment, StoreError

SCHEMA = pa.schema(
    [
        ("group", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.bool_())),
        ("text", pa.string()),
    ]
)


def batch(seed: int, rows: int = 5) -> pa.RecordBatch:
    draw = random.Random(seed)
    return pa.RecordBatch.from_pylist(
        [
            {
                "group": draw.randrange(1 << 40),
                "token_ids": [draw.randrange(-1, 50_000) for _ in range(draw.randrange(40))],
                "logprobs": [-draw.random() for _ in range(3)],
                "mask": [draw.random() < 0.5 for _ in range(9)],
                "text": draw.choice([None, "", "reply ✓" * 3]),
            }
            for _ in range(rows)
        ],
        schema=SCHEMA,
    )


BATCHES = [batch(i) for i in range(6)]
WHOLE = encode(SCHEMA, BATCHES)


def ends_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [len(encode(SCHEMA, batches[:n])) - len(END) for n in range(len(batches) + 1)]


def is_prefix(contents: SegmentContents, batches: list[pa.RecordBatch] = BATCHES) -> bool:
    return list(contents.batches) == batches[: len(contents.batches)]


def test_batches_come_back_bit_for_bit() -> None:
    """Case 12: a logprob of -0.00012345 survives in float32."""
    exact = pa.RecordBatch.from_pylist(
        [{"group": 1, "token_ids": [], "logprobs": [-0.00012345], "mask": [], "text": None}], schema=SCHEMA
    )
    contents = read_segment(encode(SCHEMA, [*BATCHES, exact]), SCHEMA, complete=True)
    assert list(contents.batches) == [*BATCHES, exact]
    assert contents.closed and contents.torn_at is None and contents.damage is None
    assert np.float32(contents.batches[-1]["logprobs"][0][0].as_py()) == np.float32(-0.00012345)


def test_sliced_and_empty_batches_come_back() -> None:
    batches = [BATCHES[0].slice(2, 2), BATCHES[1].slice(0, 0), pa.RecordBatch.from_pylist([], schema=SCHEMA)]
    assert list(read_segment(encode(SCHEMA, batches), SCHEMA).batches) == batches


def test_equal_batches_give_equal_bytes() -> None:
    assert encode(SCHEMA, BATCHES) == WHOLE


def test_other_readers_open_a_segment() -> None:
    assert pl.read_ipc_stream(io.BytesIO(WHOLE)).height == 30
    assert pa.ipc.open_stream(WHOLE).read_all().num_rows == 30


def test_none_of_500_flipped_bits_passes_silently() -> None:
    draw = random.Random(7)
    for _ in range(500):
        at, bit = draw.randrange(len(WHOLE)), draw.randrange(8)
        data = bytearray(WHOLE)
        data[at] ^= 1 << bit
        contents = read_segment(bytes(data), SCHEMA, strict=False)
        assert is_prefix(contents)
        assert contents.damage is not None or contents.torn_at is not None
        with pytest.raises(CorruptSegment):
            read_segment(bytes(data), SCHEMA, complete=True)


def test_a_flip_before_valid_data_is_corruption_and_says_where() -> None:
    ends = ends_of(BATCHES)
    for number in range(5):
        data = bytearray(WHOLE)
        data[(ends[number] + ends[number + 1]) // 2] ^= 4
        with pytest.raises(CorruptSegment, match=rf"byte {ends[number]} fails.*byte {ends[number + 1]} begins"):
            read_segment(bytes(data), SCHEMA, name="partials/w/0.arrows")
        assert len(read_segment(bytes(data), SCHEMA, strict=False).batches) == number


def test_a_flip_in_a_length_before_valid_data_is_corruption() -> None:
    ends = ends_of(BATCHES)
    for at in (ends[2] + 4, ends[2] + 6, ends[2]):
        data = bytearray(WHOLE)
        data[at] ^= 0x10
        with pytest.raises(CorruptSegment, match=f"byte {ends[2]}"):
            read_segment(bytes(data), SCHEMA)


def test_a_flip_in_a_last_batch_that_is_all_there_is_corruption() -> None:
    data = bytearray(WHOLE[: -len(END)])
    data[-100] ^= 1
    with pytest.raises(CorruptSegment, match="is there to its end and fails its checksum"):
        read_segment(bytes(data), SCHEMA)


def test_every_torn_end_gives_the_batches_before_it() -> None:
    ends = ends_of(BATCHES)
    for length in range(0, len(WHOLE)):
        contents = read_segment(WHOLE[:length], SCHEMA)
        assert len(contents.batches) == max(0, sum(end <= length for end in ends) - 1)
        assert is_prefix(contents)
        if length in ends:
            assert contents.torn_at is None
        else:
            assert contents.torn_at == max([0, *(end for end in ends if end < length)])


def test_a_file_that_was_published_whole_may_not_be_torn_even_between_batches() -> None:
    for length in (0, 100, *ends_of(BATCHES)):
        with pytest.raises(CorruptSegment, match="its end is missing"):
            read_segment(WHOLE[:length], SCHEMA, complete=True)


@pytest.mark.parametrize("sector", [512, 4096])
def test_zeroed_tails_end_the_segment_and_zeroed_pages_are_corruption(sector: int) -> None:
    batches = [batch(i, rows=60) for i in range(8)]
    data = encode(SCHEMA, batches)[: -len(END)]
    ends = ends_of(batches)
    for start in range(0, len(data) - sector, sector):
        tail = read_segment(data[:start] + bytes(len(data) - start), SCHEMA)
        assert is_prefix(tail, batches) and tail.torn_at in (0, *ends)
        assert len(tail.batches) == max(0, sum(end <= start for end in ends) - 1)
        if start + sector < ends[-2]:
            with pytest.raises(CorruptSegment):
                read_segment(data[:start] + bytes(sector) + data[start + sector :], SCHEMA)


def test_a_lost_a_doubled_and_a_swapped_batch_break_the_sequence() -> None:
    ends = ends_of(BATCHES)
    head, parts = WHOLE[: ends[0]], [WHOLE[a:b] for a, b in pairwise(ends)]
    for order in ([0, 1, 3, 4, 5], [0, 1, 1, 2], [1, 0, 2], [1]):
        with pytest.raises(CorruptSegment, match="expected was"):
            read_segment(head + b"".join(parts[i] for i in order), SCHEMA)


def test_nothing_follows_the_end_and_no_second_stream_is_appended() -> None:
    for extra in (b"x", WHOLE):
        with pytest.raises(CorruptSegment, match="follow the end mark"):
            read_segment(WHOLE + extra, SCHEMA)
    with pytest.raises(CorruptSegment):
        read_segment(WHOLE[: -len(END)] + WHOLE, SCHEMA)


def test_random_bytes_are_no_segment() -> None:
    with pytest.raises(CorruptSegment):
        read_segment(b"PAR1" + bytes(range(256)), SCHEMA)


def test_another_schema_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"group int64.*expected were.*commit_seq int64"):
        read_segment(WHOLE, EXPERIENCE)
    with pytest.raises(StoreError, match="does not fit"):
        encode(EXPERIENCE, BATCHES)


@pytest.fixture(params=["local", "twin", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return LocalStorage(tmp_path)
    return MemoryStorage(supports_append=request.param == "twin")


async def load(storage: Storage, path: str) -> SegmentContents:
    return await load_segment(storage, path, SCHEMA, await storage.list("partials/w"))


async def test_appended_batches_come_back_from_files_and_from_objects(storage: Storage) -> None:
    path = "partials/w/000003.arrows"
    writer = SegmentWriter(storage, path, SCHEMA, sync=True)
    for number, one in enumerate(BATCHES, 1):
        await writer.append(one)
        contents = await load(storage, path)
        assert list(contents.batches) == BATCHES[:number] and contents.damage is None
    await writer.close()
    assert {segment_of(f.path) for f in await storage.list("")} == {path}
    assert writer.bytes > 0 and writer.batches == 6
    with pytest.raises(StoreError, match="new segment"):
        await writer.append(BATCHES[0])


async def test_a_missing_or_torn_object_is_reported() -> None:
    storage = MemoryStorage(supports_append=False)
    path = "partials/w/0.arrows"
    writer = SegmentWriter(storage, path, SCHEMA, sync=True)
    for one in BATCHES:
        await writer.append(one)
    files = [f.path for f in await storage.list("")]
    await storage.delete(files[4])
    contents = await load(storage, path)
    assert list(contents.batches) == BATCHES[:4] and "object 4 is missing" in (contents.damage or "")
    await storage.write(files[2], (await storage.read(files[2]))[:300], overwrite=True)
    contents = await load(storage, path)
    assert list(contents.batches) == BATCHES[:2] and files[2] in (contents.damage or "")


async def test_after_a_failed_append_a_writer_takes_no_more() -> None:
    storage = MemoryStorage()
    writer = SegmentWriter(storage, "s.arrows", SCHEMA, sync=True)
    await writer.append(BATCHES[0])
    storage.capacity = storage.used_bytes + 10
    with pytest.raises(StoreError, match="no space"):
        await writer.append(BATCHES[1])
    storage.capacity = None
    with pytest.raises(StoreError, match="go on in a new segment"):
        await writer.append(BATCHES[1])
