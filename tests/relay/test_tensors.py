"""torch tensors over a flat buffer."""

from __future__ import annotations

import warnings

import pytest
import torch

from laminar.errors import WeightsError
from laminar.relay.layout import ITEM_BYTES
from laminar.relay.tensors import DTYPES, copy_into, layout_of, views


def test_every_dtype_and_shape_comes_back_bit_for_bit() -> None:
    tensors = {name: torch.randint(0, 2, (3, 5)).to(DTYPES[name]) for name in ITEM_BYTES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "transposed": torch.randn(4, 6).T}
    layout = layout_of(tensors)
    buffer = memoryview(bytearray(layout.total_bytes))
    copy_into(buffer, layout, tensors)
    back = views(buffer, layout)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_share_memory_and_do_not_warn_about_read_only_buffers() -> None:
    tensors = {"w": torch.arange(10.0)}
    layout = layout_of(tensors)
    data = bytearray(layout.total_bytes)
    copy_into(memoryview(data), layout, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = views(memoryview(data).toreadonly(), layout)["w"]
    data[:4] = torch.tensor([42.0]).numpy().tobytes()
    assert view[0] == 42


def test_floating_point_is_cast_while_copying_and_integers_are_not() -> None:
    tensors = {"w": torch.tensor([1.00390625, 2.0]), "ids": torch.tensor([3])}
    layout = layout_of(tensors, torch.bfloat16)
    buffer = memoryview(bytearray(layout.total_bytes))
    copy_into(buffer, layout, tensors)
    back = views(buffer, layout)
    assert back["w"].dtype == torch.bfloat16 and torch.equal(back["w"], tensors["w"].bfloat16())
    assert back["ids"].dtype == torch.int64


def test_parameters_that_require_gradients_can_be_published() -> None:
    model = torch.nn.Linear(3, 2)
    layout = layout_of(dict(model.named_parameters()))
    copy_into(memoryview(bytearray(layout.total_bytes)), layout, dict(model.named_parameters()))


def test_a_wrong_layout_is_named_and_nothing_is_copied() -> None:
    layout = layout_of({"a": torch.ones(4), "b": torch.ones(4)})
    data = bytearray(layout.total_bytes)
    with pytest.raises(WeightsError, match="'b'"):
        copy_into(memoryview(data), layout, {"a": torch.ones(4)})
    with pytest.raises(WeightsError, match=r"'b' has shape \(5,\), the layout says \(4,\)"):
        copy_into(memoryview(data), layout, {"a": torch.ones(4), "b": torch.ones(5)})
    assert not any(data)
    with pytest.raises(WeightsError, match="too few"):
        views(memoryview(bytes(8)), layout)
    with pytest.raises(WeightsError, match="complex64"):
        layout_of({"z": torch.zeros(2, dtype=torch.complex64)})
