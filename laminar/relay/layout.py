"""Where each tensor of a version lies in one flat buffer, and how the bytes are checked.

The order is canonical (sorted by name) and offsets are 64-byte aligned, so that equal tensors give equal layouts
and equal digests on every host. Checksums are BLAKE3, 32 bytes a chunk. They name a version across hosts, and they are
all that keeps somebody on the way from changing weights: chunks are sent without a tag. XXH3 takes a fifth of the time
(48 against 226 ms of a core a GiB) and would keep out accidents only. The 4-5 GB/s a core are the relay's, not the
trainer's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import blake3

from laminar.errors import WeightsError

ALIGNMENT = 64
MAX_TENSORS = 200_000
MAX_NAME = 512
MAX_DIMENSIONS = 16
MAX_BYTES = 1 << 46
"""64 TiB: beyond any host's memory; a larger figure is nonsense from the wire, not a model."""

ITEM_BYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `dtype` is torch's name without its prefix, `offset` and `nbytes` count bytes in the flat buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """All tensors of a version, sorted by name; `digest` is the SHA-256 (hex) of the canonical JSON."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    digest: str

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Layout:
        """Lay out `{name: (dtype, shape)}`. Raises WeightsError for a bad dtype or shape, or no bytes."""
        if not 0 < len(tensors) <= MAX_TENSORS:
            raise WeightsError(f"a layout of {len(tensors)} tensors: it needs 1 to {MAX_TENSORS}")
        specs = []
        end = 0
        for name in sorted(tensors):
            dtype, shape = tensors[name]
            nbytes = _tensor_bytes(name, dtype, tuple(shape))
            specs.append(TensorSpec(name, dtype, tuple(shape), end, nbytes))
            end = _aligned(end + nbytes)
        if not 0 < end <= MAX_BYTES:
            raise WeightsError(f"a layout of {len(tensors)} tensors has {end} bytes: it needs 1 to {MAX_BYTES}")
        frozen = tuple(specs)
        return cls(frozen, end, _digest(frozen, end))

    def to_json(self) -> dict[str, Any]:
        rows = [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in self.tensors]
        return {"tensors": rows, "total_bytes": self.total_bytes, "digest": self.digest}

    @classmethod
    def from_json(cls, data: object) -> Layout:
        """Read what `to_json` wrote. Raises WeightsError unless it is exactly the canonical layout of its tensors.

        Rebuilding and comparing leaves no room for overlaps, wrong sizes, other orders or a false digest.
        """
        rows = data.get("tensors") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(rows, list):
            raise WeightsError("a layout is not an object with a list 'tensors'")
        if len(rows) > MAX_TENSORS:
            raise WeightsError(f"a layout of {len(rows)} tensors is over the limit of {MAX_TENSORS}")
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for row in rows:
            name, dtype, shape = _checked_row(row)
            if name in tensors:
                raise WeightsError(f"tensor {name!r} is twice in the layout")
            tensors[name] = (dtype, shape)
        layout = cls.from_tensors(tensors)
        if layout.to_json() != data:
            raise WeightsError(
                f"a layout of {len(rows)} tensors is not canonical: expected {layout.total_bytes} bytes and digest "
                f"{layout.digest[:12]}, got {data.get('total_bytes')!r} and {str(data.get('digest'))[:12]}; "
                "build it with Layout.from_tensors"
            )
        return layout

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) of the alignment gaps: no tensor's bytes, so they must be zero for equal digests."""
        for spec in self.tensors:
            end = spec.offset + spec.nbytes
            if _aligned(end) != end:
                yield end, _aligned(end) - end


def checksums(buffer: memoryview, chunk_bytes: int, *, threads: int = 1) -> list[bytes]:
    """BLAKE3 of each chunk of `buffer` (the last may be shorter), 32 bytes each. Releases the GIL while hashing."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes = {chunk_bytes} must be at least 1")
    flat = buffer.cast("B")
    starts = range(0, flat.nbytes, chunk_bytes)

    def one(start: int) -> bytes:
        return bytes(blake3.blake3(flat[start : start + chunk_bytes]).digest())

    if threads <= 1 or len(starts) <= 1:
        return [one(start) for start in starts]
    with ThreadPoolExecutor(threads, thread_name_prefix="checksum") as pool:
        return list(pool.map(one, starts))


def version_digest(layout: Layout, sums: Sequence[bytes]) -> str:
    """The digest (hex, 64 characters) of a version: over the layout's digest and all chunk checksums.

    It depends on the chunk size, which is therefore one for all relays of a run.
    """
    hasher = blake3.blake3(bytes.fromhex(layout.digest))
    for checksum in sums:
        hasher.update(checksum)
    return str(hasher.hexdigest())


def verify(buffer: memoryview, layout: Layout, chunk_bytes: int, digest: str, *, threads: int = 1) -> None:
    """Raises WeightsError unless the first `layout.total_bytes` of `buffer` are the version named by `digest`."""
    if buffer.nbytes < layout.total_bytes:
        raise WeightsError(f"{buffer.nbytes} bytes are too few for a layout of {layout.total_bytes} bytes")
    found = version_digest(layout, checksums(buffer[: layout.total_bytes], chunk_bytes, threads=threads))
    if found != digest:
        raise WeightsError(
            f"{layout.total_bytes} bytes of weights have digest {found[:12]} but {digest[:12]} was promised; "
            "pull the version again"
        )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if not name or len(name) > MAX_NAME:
        raise WeightsError(f"a tensor name of {len(name)} characters: 1 to {MAX_NAME} are allowed")
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(sorted(ITEM_BYTES))}")
    if len(shape) > MAX_DIMENSIONS or any(side < 0 or side > MAX_BYTES for side in shape):
        raise WeightsError(f"tensor {name!r} has shape {shape}: at most {MAX_DIMENSIONS} sides, each 0 to {MAX_BYTES}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes > MAX_BYTES:
        raise WeightsError(f"tensor {name!r} has {nbytes} bytes, over the limit of {MAX_BYTES}")
    return nbytes


def _digest(tensors: tuple[TensorSpec, ...], total_bytes: int) -> str:
    rows = [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes] for t in tensors]
    canonical = json.dumps([ALIGNMENT, total_bytes, rows], separators=(",", ":"), ensure_ascii=True)
    return sha256(canonical.encode("ascii")).hexdigest()


def _checked_row(row: object) -> tuple[str, str, tuple[int, ...]]:
    if not isinstance(row, list) or len(row) != 5:
        raise WeightsError("a tensor of the layout is not [name, dtype, shape, offset, nbytes]")
    name, dtype, shape, offset, nbytes = row
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise WeightsError("a tensor of the layout has a name, dtype or shape of the wrong type")
    if any(type(number) is not int for number in (*shape, offset, nbytes)):
        raise WeightsError(f"tensor {name[:MAX_NAME]!r} has a size that is not a whole number")
    return name, dtype, tuple(shape)
