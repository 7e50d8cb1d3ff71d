"""torch's view of a flat buffer. The only module of the relay that imports torch: relays themselves need none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy
import torch

from laminar.errors import WeightsError
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
    if targets.keys() != tensors.keys():
        odd = sorted(targets.keys() ^ tensors.keys())
        raise WeightsError(f"{len(odd)} tensors are not in both the layout and the model, such as {odd[0]!r}")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(tensors[name].shape)}, the layout says {tuple(target.shape)}"
            )
    for name, target in targets.items():
        target.copy_(tensors[name])
