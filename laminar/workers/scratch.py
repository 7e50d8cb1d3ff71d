"""Folders of a process's own, for large files on their way: gone at the end of the block, or, if the process was
killed in it, when the next process of this host makes one of the same kind.

A lock that each holds on its folder, which the kernel drops when it dies, tells who lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

OLD_S = 86_400.0
"""Where folders cannot be locked (some network file systems), one that was not changed for a day is nobody's."""


@contextmanager
def scratch(parent: Path, prefix: str, *, kind: str = "") -> Iterator[Path]:
    """A new folder `prefix…` in `parent`, which is made; whether it is still there at the end does not matter. First,
    those in `parent` whose names begin with `kind` (`prefix` if that is empty) and whose process has died are removed.
    Raises OSError. Blocks."""
    folder, lock = _begin(parent, prefix, kind)
    try:
        yield folder
    finally:
        _end(folder, lock)


@asynccontextmanager
async def scratch_folder(parent: Path, prefix: str, *, kind: str = "") -> AsyncIterator[Path]:
    """As `scratch`, without blocking."""
    folder, lock = await asyncio.to_thread(_begin, parent, prefix, kind)
    try:
        yield folder
    finally:
        await asyncio.to_thread(_end, folder, lock)


def _begin(parent: Path, prefix: str, kind: str) -> tuple[Path, int]:
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{kind or prefix}*"):
        _remove_if_left(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Before it is locked another process may take it for left over.
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock) is not False and folder.exists():
                return folder, lock
            os.close(lock)


def _end(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return  # another process was first, or it is another user's
    try:
        free = _lock(handle)
        if free or (free is None and time.time() - os.fstat(handle).st_mtime > OLD_S):
            log.info("removing %s, whose process has died", folder)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Whether it was free, and is this process's now; None where folders cannot be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
