"""Takes in connections without keeping the loop from anything else: heartbeats and lease keep-alives run there too.

    a connection ──▶ accept up to `BATCH` ──▶ begin each ──▶ one turn of the loop ──▶ pause ──▶ accept …

As long as the kernel has connections in store, `sock_accept` returns without giving the loop a turn; so each batch is
followed by one, and by a pause in proportion to what it took. Connections that come faster wait in the kernel's
backlog, and who finds that full is asked to come again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

BACKLOG = 128
"""Connections that the kernel keeps meanwhile: few enough that the last of them is accepted within its deadline."""
BATCH = 32
"""Connections accepted in one turn of the loop: a millisecond's work."""
SHARE = 0.25
"""Of the loop's time that accepting, and the first turn of what it begins, may take. Of the processor's time: where
others have that, a turn that was waited for is none that accepting took."""
LONGEST_PAUSE_S = 0.05
"""A turn that something else made long is not paid for in full: whoever proves the secret comes in soon."""
RETRY_S = 0.1
"""Seconds after which accepting is tried again when it fails, as for want of descriptors."""
TELL_S = 10.0
"""Seconds between two words about that: it may go on for long."""


def pause_after(busy_s: float) -> float:
    """Seconds to leave the loop to others after a turn of `busy_s`."""
    return min(busy_s * (1 / SHARE - 1), LONGEST_PAUSE_S)


async def accept_all(
    listener: socket.socket, begin: Callable[[socket.socket, Any], None], failed: Callable[[str], None]
) -> None:
    """For ever, give each connection of a non-blocking `listener` and its address to `begin`, which owns it then and
    must be short. `failed` is told, now and then, why none can be accepted for now."""
    loop = asyncio.get_running_loop()
    told_at = -TELL_S
    while True:
        try:
            first = await loop.sock_accept(listener)
            began = time.thread_time()
            begin(*first)
            for _ in range(BATCH - 1):
                begin(*listener.accept())
        except BlockingIOError:
            pass  # all of them are accepted
        except OSError as e:
            if loop.time() - told_at >= TELL_S:
                told_at = loop.time()
                failed(f"cannot accept a connection: {e.strerror}")
            await asyncio.sleep(RETRY_S)
            continue
        await asyncio.sleep(0)
        await asyncio.sleep(pause_after(time.thread_time() - began))
