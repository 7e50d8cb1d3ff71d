"""torch's view of a flat buffer. The only module of the relay that imports torch: relays themselves need none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from laminar.errors import WeightsError
from laminar.relay.blocks import Block
from laminar.relay.layout import ITEM_BYTES, Layout

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def layout_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Layout:
    """The layout of `tensors`; with `dtype`, floating-point tensors are laid out as that type (copying casts)."""
    described = {}
    for name, tensor in tensors.items():
        stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if stored not in NAMES:
            raise WeightsError(f"tensor {name!r} has dtype {stored}, which cannot be published")
        described[name] = (NAMES[stored], tuple(tensor.shape))
    return Layout.from_tensors(described)


def views(buffer: memoryview, layout: Layout) -> dict[str, torch.Tensor]:
    """`{name: tensor}` over `buffer`, zero-copy. They keep the buffer alive: drop them before it is closed.

    Over a read-only mapping, writing into a view ends the process with SIGSEGV: copy out of them only.
    """
    if buffer.nbytes < layout.total_bytes:
        raise WeightsError(f"{buffer.nbytes} bytes are too few for a layout of {layout.total_bytes} bytes")
    with warnings.catch_warnings():
        # torch warns that a read-only buffer gives writable tensors; the docstring says it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        # Not torch.frombuffer: it does not count as an export, so the memory could be unmapped under the tensors.
        flat = torch.from_numpy(numpy.frombuffer(buffer, dtype=numpy.uint8, count=layout.total_bytes))
    result = {}
    for spec in layout.tensors:
        raw = flat[spec.offset : spec.offset + spec.nbytes]
        result[spec.name] = raw.view(DTYPES[spec.dtype]).view(spec.shape)
    return result


@torch.no_grad()
def copy_into(buffer: memoryview, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into `buffer`, casting where the layout says another dtype, from any device.

    Raises WeightsError if names or shapes differ from the layout's; then nothing was copied.
    """
    targets = views(buffer, layout)
    _check_same(targets, tensors)
    for name, target in targets.items():
        target.copy_(tensors[name])


def own_block(tensor: torch.Tensor, rank: int) -> Block | None:
    """The block of `tensor` that this process, `rank` of those that share a model, is the one to write: its shard of a
    DTensor, as FSDP2's `fully_shard` makes them. None if another process has the same elements and writes them: rank 0
    writes what is not sharded. Raises WeightsError for a tensor that is not dealt out in boxes."""
    sharded: Any = tensor
    placements = getattr(sharded, "placements", None)
    if placements is None:
        return Block.whole(tuple(tensor.shape)) if rank == 0 else None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # A subclass is dealt out in turns, as FSDP over tensor parallelism does: that makes no boxes.
    if any(type(placement) not in (Replicate, Shard) for placement in placements):
        raise WeightsError(f"a tensor is placed as {placements}: only Replicate and Shard can be published")
    coordinate = sharded.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if any(at and isinstance(p, Replicate) for at, p in zip(coordinate, placements, strict=True)):
        return None
    shape, start = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, placements)
    return Block(tuple(start), tuple(shape))


@torch.no_grad()
def copy_blocks(buffer: memoryview, layout: Layout, tensors: Mapping[str, torch.Tensor], rank: int) -> int:
    """Copy what this process, `rank` of those that share a model, has to write of `tensors` into `buffer`, casting as
    `copy_into` does; the bytes that it wrote. Together the ranks write each byte of each tensor once.

    Raises WeightsError if names or shapes differ from the layout's; then nothing was copied."""
    targets = views(buffer, layout)
    _check_same(targets, tensors)
    written = 0
    for spec in layout.tensors:
        tensor = tensors[spec.name]
        block = own_block(tensor, rank)
        if block is None or 0 in block.shape:
            continue
        block.check(spec)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        targets[spec.name][block.slices].copy_(local)
        written += block.nbytes(spec)
    return written


def _check_same(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    if targets.keys() != tensors.keys():
        odd = sorted(targets.keys() ^ tensors.keys())
        raise WeightsError(f"{len(odd)} tensors are not in both the layout and the model, such as {odd[0]!r}")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(tensors[name].shape)}, the layout says {tuple(target.shape)}"
            )
