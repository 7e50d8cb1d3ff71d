"""What travels between a leading learner and its rank processes: a JSON object, and bytes beside it, no pickle.

    leader                                          rank process
    {call: "start", rank, ranks, …}         ->
                                            <-      {}                            its model is loaded
    {call, …}  [samples as Arrow]           ->                                    the same to every rank, in order
                                            <-      {…} | {refused: message}      refused: what the leader refuses too
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from laminar.workers.learning.base import Sample

HEADER = struct.Struct("!QQ")
SAMPLES = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("token_ids", pa.list_(pa.int64())),
        ("policy_mask", pa.list_(pa.bool_())),
        ("behaviour_logprobs", pa.list_(pa.float64())),
        ("reward", pa.float64()),
        ("version", pa.int64()),
        ("truncated", pa.bool_()),
    ]
)


def write_frame(stream: BinaryIO, message: Mapping[str, Any], payload: bytes | pa.Buffer = b"") -> None:
    """`stream`: unbuffered. Raises OSError if nobody reads it any more."""
    text = json.dumps(message).encode("ascii")
    for part in (HEADER.pack(len(text), len(payload)), text, payload):
        view = memoryview(part)
        while view:
            view = view[stream.write(view) :]


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """None at the end of the stream, also in the middle of a frame: whoever wrote it has died."""
    header = _exactly(stream, HEADER.size)
    if header is None:
        return None
    text_bytes, payload_bytes = HEADER.unpack(header)
    text, payload = _exactly(stream, text_bytes), _exactly(stream, payload_bytes)
    if text is None or payload is None:
        return None
    message: dict[str, Any] = json.loads(text)
    return message, payload


def _exactly(stream: BinaryIO, count: int) -> bytes | None:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def pack_samples(samples: Sequence[Sample]) -> pa.Buffer:
    batch = pa.RecordBatch.from_pylist([vars(sample) for sample in samples], schema=SAMPLES)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SAMPLES) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unpack_samples(payload: bytes) -> list[Sample]:
    with pa.ipc.open_stream(payload) as reader:
        return [Sample(**row) for row in reader.read_all().to_pylist()]
