"""A full disk, in one wording: where it is, how much is free, what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("no space left on device", "disk quota exceeded")


def free_bytes(folder: str | Path) -> int:
    """What may still be written below `folder` (which may not exist yet), in bytes. Raises OSError."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def says_full(error: BaseException | str) -> bool:
    """Whether an error, also one that a library has put into words, is about a full disk or quota."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    text = str(error).lower()
    return any(words in text for words in FULL_WORDS)


def space_at(folder: str | Path, free: int) -> str:
    return f"disk is full at {folder}: {free} bytes free"


def disk_full(folder: str | Path) -> str:
    """The message for a run that cannot go on without space."""
    return f"{space_at(folder, free_bytes(folder))}; free space and run the same command again"
