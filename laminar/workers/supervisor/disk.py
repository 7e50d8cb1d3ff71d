"""A disk that fills while a run works: it is told in time, and what needs space waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar.buffer.files import StorageFull
from laminar.buffer.space import free_bytes, space_at
from laminar.workers.patience import STORE_WAIT_S
from laminar.workers.supervisor.etcd_process import EtcdProcess

LOW_BYTES = 64 << 20
"""Below this a run is about to stand still: a checkpoint of a small model, or etcd's next log file, needs as much."""
LOOK_AGAIN_S = 5.0
Tell = Callable[[str], None]


async def watch_disk(folder: Path, tell: Tell, *, low_bytes: int = LOW_BYTES, look_s: float = LOOK_AGAIN_S) -> None:
    """For ever: tell when there is little space left below `folder`, and when there is enough again."""
    low = False
    while True:
        free = await asyncio.to_thread(free_bytes, folder)
        if free < low_bytes and not low:
            low = True
            tell(f"{space_at(folder, free)}; free space: what cannot be written waits, and nothing is lost")
        elif free >= 2 * low_bytes and low:
            low = False
            tell(f"there is space again at {folder}: {free >> 20} MiB free")
        await asyncio.sleep(look_s)


async def restarted(
    etcd: EtcdProcess, tell: Tell, *, wait_s: float = STORE_WAIT_S, look_s: float = LOOK_AGAIN_S
) -> None:
    """Start an etcd that has ended again, on the same data. While the disk is full it waits, `wait_s` seconds at most;
    then it raises StorageFull. Raises CoordinationError if etcd does not start for another reason."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    waiting = False
    while True:
        try:
            await etcd.restart()
        except StorageFull as e:
            if loop.time() >= deadline:
                raise
            if not waiting:
                tell(f"etcd cannot go on: {e}, or free it now: the run waits for {wait_s / 60:.0f} min")
            waiting = True
            await asyncio.sleep(look_s)
        else:
            if waiting:
                tell("there is space again, and etcd serves")
            return
