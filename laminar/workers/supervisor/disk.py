"""A disk that fills while a run works: it is told in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar.buffer.space import free_bytes, space_at

LOW_BYTES = 64 << 20
"""Below this a run is about to stand still: a checkpoint of a small model, or etcd's next log file, needs as much."""
LOOK_AGAIN_S = 5.0
Tell = Callable[[str], None]


async def watch_disk(folder: Path, tell: Tell, *, low_bytes: int = LOW_BYTES, look_s: float = LOOK_AGAIN_S) -> None:
    """For ever: tell when there is little space left below `folder`, and when there is enough again. A file system that
    does not say (a file server that is away) is told once, and asked again."""
    low = silent = False
    while True:
        try:
            free = await asyncio.to_thread(free_bytes, folder)
        except OSError as e:
            if not silent:
                tell(f"the file system at {folder} does not say how much space it has ({e.strerror or e}); asked again")
            silent = True
            await asyncio.sleep(look_s)
            continue
        silent = False
        if free < low_bytes and not low:
            low = True
            tell(f"{space_at(folder, free)}; free space: what cannot be written waits, and nothing is lost")
        elif free >= 2 * low_bytes and low:
            low = False
            tell(f"there is space again at {folder}: {free >> 20} MiB free")
        await asyncio.sleep(look_s)
