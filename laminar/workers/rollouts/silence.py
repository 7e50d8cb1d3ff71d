"""A limit on how long a stream may be silent, at the cost of one clock reading for each sign of life."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Silence:
    """Use as an async context manager and call `heard` at each sign of life. The block ends with TimeoutError once
    nothing was heard for `limit_s` seconds of the loop's time, unless `excused()` knows of a reason to go on waiting.
    """

    def __init__(self, limit_s: float, excused: Callable[[], bool]) -> None:
        self.limit_s = limit_s
        self.excused = excused
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._heard_at = self._loop.time()
        self._look: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        self._heard_at = self._loop.time()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.heard()
        self._look = self._loop.call_later(self.limit_s, self._judge)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._look is not None:
            self._look.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _judge(self) -> None:
        left = self._heard_at + self.limit_s - self._loop.time()
        if left <= 0 and not self.excused():
            self._timeout.reschedule(self._loop.time())
        else:
            self._look = self._loop.call_later(left if left > 0 else self.limit_s, self._judge)
