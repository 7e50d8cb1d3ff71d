"""Time as worker code sees it, so that a simulator can replace it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for deadlines, UTC microseconds for records, and sleeping."""

    def monotonic(self) -> float: ...

    def now_us(self) -> int: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The running event loop's clock and the host's wall clock."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def now_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
