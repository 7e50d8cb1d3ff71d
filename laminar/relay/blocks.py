"""Which part of each tensor a process of several has, or needs, and where its bytes lie in a version. Pure.

    trainer of n processes ── each copies its blocks ──▶ one arena ──▶ version ◀── each reads its blocks ── engine of m

A block is a box of a tensor. What is sharded over processes is sharded in boxes: FSDP deals out the first dimension,
tensor parallelism that or the second. The flat layout does not know of either, so that n and m need not agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.errors import WeightsError
from laminar.relay.layout import ITEM_BYTES, TensorSpec


@dataclass(frozen=True)
class Block:
    """Elements `start[d]` to `start[d] + shape[d] - 1` of each dimension d of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        return cls((0,) * len(shape), shape)

    @classmethod
    def along(cls, shape: tuple[int, ...], dimension: int, start: int, size: int) -> Block:
        """All of a tensor of `shape`, but only `size` of `dimension`, from `start` on."""
        at = tuple(start if d == dimension else 0 for d in range(len(shape)))
        return cls(at, tuple(size if d == dimension else side for d, side in enumerate(shape)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes a tensor to give the block as a view."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def nbytes(self, spec: TensorSpec) -> int:
        return math.prod(self.shape) * ITEM_BYTES[spec.dtype]

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightsError unless it lies within the tensor."""
        fits = len(self.shape) == len(spec.shape) == len(self.start) and all(
            0 <= start and 0 <= size and start + size <= side
            for start, size, side in zip(self.start, self.shape, spec.shape, strict=True)
        )
        if not fits:
            raise WeightsError(f"a block at {self.start} of {self.shape} is not within {spec.name!r} of {spec.shape}")

    def byte_ranges(self, spec: TensorSpec) -> Iterator[tuple[int, int]]:
        """(offset, nbytes) in the flat buffer of each stretch of consecutive bytes, ascending: one for a block of whole
        rows, one a row for a block of columns. Raises WeightsError as `check`."""
        self.check(spec)
        if 0 in self.shape:
            return
        # From the last dimension that is cut on, elements are consecutive.
        cut = max((d for d, side in enumerate(spec.shape) if self.shape[d] != side), default=0)
        steps = [math.prod(spec.shape[d + 1 :]) * ITEM_BYTES[spec.dtype] for d in range(len(spec.shape))]
        length = self.shape[cut] * steps[cut] if spec.shape else ITEM_BYTES[spec.dtype]
        first = spec.offset + sum(start * step for start, step in zip(self.start, steps, strict=True))
        for row in range(math.prod(self.shape[:cut])):
            offset = first
            for d in reversed(range(cut)):
                row, index = divmod(row, self.shape[d])
                offset += index * steps[d]
            yield offset, length
