"""Shared mappings: aligned, read-only where asked, and never gone under a view."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from laminar.relay.layout import Layout
from laminar.relay.mapping import HUGE_PAGE, SharedMapping
from laminar.relay.tensors import views

SIZE = HUGE_PAGE + 4096
LAYOUT = Layout.from_tensors({"w": ("uint8", (SIZE,))})


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mappings_of(fd: int) -> int:
    inode = os.fstat(fd).st_ino
    with open("/proc/self/maps") as maps:
        return sum(f" {inode} " in line for line in maps if "memfd:test" in line)


def test_a_mapping_lies_at_a_huge_page_and_shows_the_file(fd: int) -> None:
    writer, reader = SharedMapping(fd, SIZE, writable=True), SharedMapping(fd, SIZE, writable=False)
    writer.use_huge_pages()
    writer.populate()
    writer.buffer[-1] = 7
    assert reader.buffer[-1] == 7 and reader.buffer.readonly and reader.buffer.nbytes == SIZE
    assert views(reader.buffer, LAYOUT)["w"].data_ptr() % HUGE_PAGE == 0
    for mapping in (writer, reader):
        mapping.close()
        mapping.close()
    assert mappings_of(fd) == 0


@pytest.mark.parametrize("kind", ["slice", "tensor", "cast"])
def test_a_view_outlives_the_close_and_its_end_unmaps(fd: int, kind: str) -> None:
    mapping = SharedMapping(fd, SIZE, writable=True)
    mapping.buffer[5] = 42
    view: memoryview | torch.Tensor
    if kind == "tensor":
        view = views(mapping.buffer, LAYOUT)["w"][2:]
    else:
        view = mapping.buffer[2:] if kind == "slice" else mapping.buffer.cast("B", (SIZE,))[2:]
    with pytest.raises(BufferError):
        mapping.close()
    assert view[3] == 42 and mappings_of(fd) == 1
    del view
    mapping.close()
    assert mappings_of(fd) == 0


def test_a_forgotten_mapping_is_unmapped_by_the_garbage_collector(fd: int) -> None:
    mapping = SharedMapping(fd, SIZE, writable=False)
    assert mappings_of(fd) == 1
    del mapping
    assert mappings_of(fd) == 0


def test_more_than_the_file_holds_or_writing_through_a_read_only_descriptor_is_refused(fd: int) -> None:
    with pytest.raises(OSError, match="are more than the"):
        SharedMapping(fd, SIZE + 1, writable=False)
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        SharedMapping(reader, SIZE, writable=True)
    os.close(reader)
    assert mappings_of(fd) == 0


def test_a_process_may_end_with_tensors_over_a_mapping() -> None:
    program = f"""
import os
from laminar.relay.mapping import SharedMapping
from laminar.relay.layout import Layout
from laminar.relay.tensors import views
fd = os.memfd_create("test")
os.ftruncate(fd, {SIZE})
mapping = SharedMapping(fd, {SIZE}, writable=True)
tensors = views(mapping.buffer, Layout.from_tensors({{"w": ("uint8", ({SIZE},))}}))
class Late:
    def __del__(self, tensor=tensors["w"]):
        tensor.fill_(1)
late = Late()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
