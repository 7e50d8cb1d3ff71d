"""A prefix of etcd kept in memory by a watch, and a way to wait until it says something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from laminar.buffer.coordination import Coordination, KeyValue, Listing
from laminar.errors import CoordinationUnavailable

FIRST_LISTING_S = 30.0


class Bell:
    """Rung by whoever changes something; one task waits for it. A ring before the wait is not lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until rung, at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        finally:
            self._event.clear()


class Mirror:
    """`items` holds the prefix as of the last event; each event rings `bell`. Use as an async context manager."""

    def __init__(
        self, coordination: Coordination, prefix: str, *, exact: bool = False, bell: Bell | None = None
    ) -> None:
        self.coordination = coordination
        self.prefix = prefix
        self.exact = exact
        self.items: dict[str, KeyValue] = {}
        self.synced = asyncio.Event()
        self.bell = bell or Bell()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name=f"mirror {self.prefix}")
        if not await self.wait_for(self.synced.is_set, FIRST_LISTING_S):
            raise CoordinationUnavailable(f"etcd did not list {self.prefix} within {FIRST_LISTING_S:g} s")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Raise what ended the watch: from then on `items` would be taken for true and be old."""
        if self._error is not None:
            raise self._error

    @property
    def only(self) -> KeyValue | None:
        """The one key that an exact mirror watches. Raises as `check`."""
        self.check()
        return self.items.get(self.prefix)

    async def _follow(self) -> None:
        events = self.coordination.watch(self.prefix)
        try:
            async for event in events:
                if isinstance(event, Listing):
                    self.items = {kv.key: kv for kv in event.snapshot.items if self._wanted(kv.key)}
                    self.synced.set()
                elif self._wanted(event.key):
                    if event.kv is None:
                        self.items.pop(event.key, None)
                    else:
                        self.items[event.key] = event.kv
                self._notify()
        except Exception as e:
            self._error = e
            self._notify()
            raise

    def _wanted(self, key: str) -> bool:
        return not self.exact or key == self.prefix

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.bell.ring()

    async def wait_for(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """True when the predicate holds; False when `timeout_s` seconds passed."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate():
                    self.check()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
