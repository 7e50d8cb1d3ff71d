"""Blocks of a tensor, and where their bytes lie: compared with numpy's own slicing."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import WeightsError
from laminar.relay.blocks import Block
from laminar.relay.layout import Layout, TensorSpec


@st.composite
def boxes(draw: st.DrawFn) -> tuple[TensorSpec, Block]:
    """A tensor of up to four dimensions behind another one, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    layout = Layout.from_tensors({"a": ("uint8", (3,)), "w": ("float32", shape)})
    start = tuple(draw(st.integers(0, side)) for side in shape)
    size = tuple(draw(st.integers(0, side - at)) for side, at in zip(shape, start, strict=True))
    return layout.tensors[1], Block(start, size)


@given(boxes())
def test_the_byte_ranges_of_a_block_are_those_of_its_elements(box: tuple[TensorSpec, Block]) -> None:
    spec, block = box
    buffer = numpy.zeros(spec.offset + spec.nbytes, numpy.uint8)
    whole = buffer[spec.offset :].view(numpy.float32).reshape(spec.shape)
    whole[block.slices] = numpy.frombuffer(b"\xff" * 4, numpy.float32)[0]
    ranges = list(block.byte_ranges(spec))
    assert sum(nbytes for _, nbytes in ranges) == block.nbytes(spec) == int(buffer.sum()) // 255
    for offset, nbytes in ranges:
        assert nbytes > 0 and bool((buffer[offset : offset + nbytes] == 255).all())
    ends = [offset + nbytes for offset, nbytes in ranges]
    assert all(end <= offset for end, (offset, _) in zip(ends, ranges[1:], strict=False)), "ascending, none twice"


def test_whole_rows_are_one_range_and_columns_one_a_row() -> None:
    (spec,) = Layout.from_tensors({"w": ("bfloat16", (6, 10))}).tensors
    assert list(Block.along(spec.shape, 0, 2, 3).byte_ranges(spec)) == [(40, 60)]
    assert list(Block.along(spec.shape, 1, 5, 5).byte_ranges(spec)) == [(20 * row + 10, 10) for row in range(6)]
    assert list(Block.whole(spec.shape).byte_ranges(spec)) == [(0, 120)]


@pytest.mark.parametrize("block", [Block((5, 0), (2, 10)), Block((0,), (6,)), Block((0, -1), (6, 2))], ids=str)
def test_a_block_beyond_its_tensor_is_refused(block: Block) -> None:
    (spec,) = Layout.from_tensors({"w": ("bfloat16", (6, 10))}).tensors
    with pytest.raises(WeightsError, match=r"is not within 'w' of \(6, 10\)"):
        list(block.byte_ranges(spec))
