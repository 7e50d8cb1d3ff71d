"""What changed between two versions of one layout, without loss: which words, and by how much. Pure.

    base, new ── as 16-bit words ──▶ changed?   one bit a word ─────────────┐
                              └────▶ new - base of the changed, modulo 2^16 ┴─ zstd ──▶ encoded ──▶ base + … = new

A step at the learning rates of RL moves few bfloat16 weights, and those mostly to a neighbour: few bits are set, and
their differences take few values. Words are compared and added as whole numbers, so that NaN payloads, -0.0 and tensors
of any other type come out as they were. Both ends of a transfer work on the bytes of one piece.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy
import pyarrow

from laminar.errors import WeightsError

HEAD = struct.Struct(">III")
"""Changed words, bytes of the compressed bits, bytes of the compressed differences; then the odd last byte, if any."""
BLOCK = 1 << 19
"""Words that are compared at once: what that needs beside them stays in the processor's cache."""


class DeltaError(WeightsError):
    """What came is not the difference of a piece to the base that was named."""


def encode(base: memoryview, new: memoryview, *, limit: int) -> bytes | None:
    """What makes `new` of `base`, in at most `limit` bytes; None if that is too little. Both have the same length, at
    most 1 GiB. Mostly without the interpreter's lock."""
    before, after = _words(base), _words(new)
    bits, differences = [], []
    for start in range(0, before.size, BLOCK):
        old, now = before[start : start + BLOCK], after[start : start + BLOCK]
        changed = old != now
        bits.append(numpy.packbits(changed))
        differences.append((now - old)[changed])
    moved = numpy.concatenate(differences) if differences else numpy.zeros(0, "<u2")
    if moved.size // 8 > limit:
        return None  # no compressor makes less than a bit of a difference that is not 0
    positions = _compressed(numpy.concatenate(bits)) if bits else b""
    values = _compressed(_by_planes(moved))
    size = HEAD.size + len(positions) + len(values) + new.nbytes % 2
    if size > limit:
        return None
    head = HEAD.pack(moved.size, len(positions), len(values))
    return b"".join([head, positions, values, new[new.nbytes & ~1 :]])


def apply(base: memoryview, target: memoryview, encoded: bytes | bytearray) -> None:
    """Makes `target` what `encode` was given as new; `base` is not changed and may not overlap it. Raises DeltaError;
    then `target` holds anything. Allocates in proportion to `target`, whatever `encoded` says."""
    words = target.nbytes // 2
    if base.nbytes != target.nbytes or len(encoded) < HEAD.size:
        raise DeltaError(f"a difference of {len(encoded)} bytes for {target.nbytes} on a base of {base.nbytes}")
    count, bits_size, values_size = HEAD.unpack_from(encoded)
    if count > words or HEAD.size + bits_size + values_size + target.nbytes % 2 != len(encoded):
        raise DeltaError(f"a difference of {len(encoded)} bytes does not consist of what it says")
    parts = memoryview(encoded)[HEAD.size :]
    changed = numpy.unpackbits(_expanded(parts[:bits_size], -(-words // 8)), count=words).view(bool)
    if int(numpy.count_nonzero(changed)) != count:
        raise DeltaError(f"a difference has {count} values for another number of positions")
    moved = _from_planes(_expanded(parts[bits_size : bits_size + values_size], 2 * count))
    before, after = _words(base), _words(target)
    done = 0
    for start in range(0, words, BLOCK):
        where = numpy.flatnonzero(changed[start : start + BLOCK])
        block = after[start : start + BLOCK]
        block[:] = before[start : start + BLOCK]
        block[where] += moved[done : done + where.size]
        done += where.size
    target[target.nbytes & ~1 :] = parts[bits_size + values_size :]


def _words(data: memoryview) -> Any:
    """Little-endian 16-bit words; an odd last byte is left out."""
    return numpy.frombuffer(data[: data.nbytes & ~1], "<u2")


def _by_planes(words: Any) -> Any:
    """All low bytes, then all high ones: a neighbour's differences are 1 or 65535, whose bytes repeat."""
    return words.view(numpy.uint8).reshape(-1, 2).T.copy()


def _from_planes(data: Any) -> Any:
    return data.reshape(2, -1).T.copy().reshape(-1).view("<u2")


@cache
def _codec() -> Any:
    return pyarrow.Codec("zstd", compression_level=1)


def _compressed(data: Any) -> bytes:
    return bytes(_codec().compress(data, asbytes=True))


def _expanded(data: memoryview, size: int) -> Any:
    try:
        return numpy.frombuffer(_codec().decompress(data, decompressed_size=size), numpy.uint8)
    except (OSError, ValueError) as e:
        raise DeltaError(f"a difference does not unpack into {size} bytes: {e}") from e
