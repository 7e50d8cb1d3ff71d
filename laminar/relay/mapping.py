"""Shared mappings of an arena, aligned so that huge pages can serve them, and never unmapped under a reader.

Python's own mmap places a mapping anywhere, and then the kernel maps an arena 4 KiB at a time: measured, that costs
1.5 times what reading the bytes costs. At a 2 MiB boundary, over huge pages, it costs next to nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
PROT_NONE = 0
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedMapping:
    """`nbytes` of the file `fd`, shared; `buffer` is a flat memoryview of bytes, read-only unless `writable`.

    Raises OSError if the kernel refuses (EACCES: writable over a read-only descriptor). `fd` may be closed afterwards.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        if nbytes > os.fstat(fd).st_size:
            raise OSError(f"{nbytes} bytes are more than the {os.fstat(fd).st_size} of the file")
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._address, start, length = _map_aligned(fd, nbytes, protection)
        memory = (ctypes.c_ubyte * nbytes).from_address(self._address)
        # Every view keeps `memory` alive, and only its end unmaps: no tensor can outlive its bytes.
        unmap = weakref.finalize(memory, _libc.munmap, start, length)
        # At exit tensors may still be in use, and the kernel takes the mapping anyway.
        unmap.atexit = False
        self._memory = weakref.ref(memory)
        whole = memoryview(memory).cast("B")
        self.buffer = whole if writable else whole.toreadonly()

    @property
    def address(self) -> int:
        """Where `buffer` begins in this process, for devices that are told addresses."""
        return self._address

    def close(self) -> None:
        """Unmap. Raises BufferError if views of `buffer` are alive: they stay valid, and the last one's end unmaps."""
        self.buffer.release()
        if self._memory() is not None:
            raise BufferError("views of a shared mapping are still alive")

    def populate(self) -> None:
        """Fault in all pages for writing, at once, without the GIL. Before Linux 5.14 they come one by one, as used."""
        _libc.madvise(self._address, self.nbytes, MADV_POPULATE_WRITE)

    def use_huge_pages(self) -> None:
        """Gather the file's allocated pages into huge ones, whatever sysfs says of shared memory by default.

        Where the kernel cannot (before 6.1, or memory too fragmented), small pages stay: slower, not wrong.
        """
        _libc.madvise(self._address, self.nbytes, MADV_COLLAPSE)

    def keep_from_children(self) -> None:
        """A child that is forked does not inherit the mapping."""
        _libc.madvise(self._address, self.nbytes, mmap.MADV_DONTFORK)


def _map_aligned(fd: int, nbytes: int, protection: int) -> tuple[int, int, int]:
    """(address of the file's first byte, start and length of all that is to be unmapped)."""
    length = nbytes + HUGE_PAGE
    start = _mmap(None, length, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
    address = -(-start // HUGE_PAGE) * HUGE_PAGE
    try:
        _mmap(address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        _libc.munmap(start, length)
        raise
    return address, start, length


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, length, protection, flags, fd, 0)
    if result is None or result == MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)
