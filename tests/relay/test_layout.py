"""Layouts: canonical, checked, and the same on every host; checksums and digests of what lies in them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import WeightsError
from laminar.relay.layout import ALIGNMENT, ITEM_BYTES, Layout, checksums, verify, version_digest

TENSORS = {"w.b": ("bfloat16", (3, 5)), "w.a": ("float32", (7,)), "scale": ("float32", ()), "none": ("int64", (0, 4))}


def test_tensors_lie_in_the_order_of_their_names_at_aligned_offsets() -> None:
    layout = Layout.from_tensors(TENSORS)
    assert [(t.name, t.offset, t.nbytes) for t in layout.tensors] == [
        ("none", 0, 0),
        ("scale", 0, 4),
        ("w.a", 64, 28),
        ("w.b", 128, 30),
    ]
    assert layout.total_bytes == 192
    assert list(layout.gaps()) == [(4, 60), (92, 36), (158, 34)]


def test_hash_seed_does_not_change_layout_or_digest() -> None:
    """Case 7: tensor names iterated with PYTHONHASHSEED=0 and 1 give the same layout and the same digest."""
    program = (
        "import json; from laminar.relay.layout import Layout\n"
        "names = {f'layer.{i}.weight' for i in range(50)}\n"
        "print(json.dumps(Layout.from_tensors({n: ('bfloat16', (3, len(n))) for n in names}).to_json()))"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert seen[0] == seen[1] and json.loads(seen[0])["digest"]


def test_the_relay_needs_no_torch() -> None:
    program = (
        "import sys, laminar.relay.server, laminar.relay.client, laminar.relay.chain, laminar.relay.transport.base\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
tensor_maps = st.dictionaries(
    st.text(min_size=1, max_size=20), st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=20
)


@given(tensor_maps)
def test_every_layout_survives_json_and_never_overlaps(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    try:
        layout = Layout.from_tensors(tensors)
    except WeightsError as e:
        assert "0 bytes" in str(e)
        return
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    end = 0
    for spec in layout.tensors:
        assert spec.offset % ALIGNMENT == 0 and spec.offset >= end
        end = spec.offset + spec.nbytes
    assert end <= layout.total_bytes
    assert sum(t.nbytes for t in layout.tensors) + sum(n for _, n in layout.gaps()) == layout.total_bytes


def broken(change: str) -> Any:
    data: Any = copy.deepcopy(Layout.from_tensors(TENSORS).to_json())
    rows = data["tensors"]
    if change == "overlap":
        rows[3][3] = 64
    elif change == "size":
        rows[2][4] = 1 << 40
    elif change == "order":
        rows.reverse()
    elif change == "twice":
        rows.append(rows[0])
    elif change == "dtype":
        rows[2][1] = "pickle"
    elif change == "negative side":
        rows[2][2] = [-7]
    elif change == "many sides":
        rows[2][2] = [1] * 17
    elif change == "huge side":
        rows[2][2] = [1 << 62]
    elif change == "boolean side":
        rows[1][2] = [True]
    elif change == "long name":
        rows[0][0] = "n" * 600
    elif change == "total":
        data["total_bytes"] += 64
    elif change == "digest":
        data["digest"] = "0" * 64
    elif change == "extra":
        data["more"] = 1
    elif change == "row":
        rows[0] = "scale"
    elif change == "empty":
        data["tensors"] = []
    elif change == "list":
        data = rows
    return data


@pytest.mark.parametrize(
    "change",
    (
        "overlap,size,order,twice,dtype,total,digest,extra,row,empty,list,negative side,many sides,huge side,"
        "boolean side,long name"
    ).split(","),
)
def test_a_layout_from_the_wire_is_refused_unless_canonical(change: str) -> None:
    with pytest.raises(WeightsError):
        Layout.from_json(broken(change))


def test_a_layout_without_bytes_is_refused() -> None:
    with pytest.raises(WeightsError, match="0 bytes"):
        Layout.from_tensors({"none": ("float32", (0,))})


@pytest.mark.parametrize("threads", [1, 3])
def test_each_flipped_bit_changes_the_digest(threads: int) -> None:
    layout = Layout.from_tensors({"w": ("uint8", (1000,))})
    data = bytearray(layout.total_bytes)
    digest = version_digest(layout, checksums(memoryview(data), 256))
    verify(memoryview(data), layout, 256, digest, threads=threads)
    for place in range(0, layout.total_bytes, 97):
        data[place] ^= 1
        with pytest.raises(WeightsError, match="pull the version again"):
            verify(memoryview(data), layout, 256, digest, threads=threads)
        data[place] ^= 1


def test_the_digest_depends_on_the_layout_too() -> None:
    data = memoryview(bytes(1024))
    wide, flat = Layout.from_tensors({"w": ("uint8", (4, 256))}), Layout.from_tensors({"w": ("uint8", (1024,))})
    sums = checksums(data, 256)
    assert len(sums) == 4 and version_digest(wide, sums) != version_digest(flat, sums)


def test_too_few_bytes_are_an_error_of_their_own() -> None:
    layout = Layout.from_tensors({"w": ("uint8", (1000,))})
    with pytest.raises(WeightsError, match="too few"):
        verify(memoryview(bytes(64)), layout, 256, "")
