"""Storage for a writer that waits while the disk is full, instead of dying of it: nothing is lost, and once there is
space it goes on where it stood."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from laminar.buffer.files import Storage, StorageFull
from laminar.buffer.outage import Outage
from laminar.clock import Clock
from laminar.errors import StoreError

log = logging.getLogger(__name__)
T = TypeVar("T")

SPACE_WAIT_S = 600.0
"""How long a run waits for somebody to free space; then it ends, and the same command resumes it."""
LOOK_AGAIN_S = 1.0


def patient(storage: Storage, clock: Clock, *, wait_s: float = SPACE_WAIT_S) -> Storage:
    """`storage` whose `write` is tried again each second while there is no space, for `wait_s` seconds; then it raises
    StorageFull."""
    return cast(Storage, _Patient(storage, clock, wait_s))


class _Patient:
    def __init__(self, storage: Storage, clock: Clock, wait_s: float) -> None:
        self._storage = storage
        self._clock = clock
        self._wait_s = wait_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        await patiently(
            self._clock, path, lambda: self._storage.write(path, data, overwrite=overwrite), wait_s=self._wait_s
        )


async def patiently(
    clock: Clock, what: str, write: Callable[[], Awaitable[T]], *, on: type[StoreError] = StorageFull,
    wait_s: float = SPACE_WAIT_S,
) -> T:  # fmt: skip
    """Repeat `write` while it raises `on`, for `wait_s` seconds at most; then raise it."""
    outage = Outage()
    while True:
        try:
            result = await write()
        except on as e:
            now = clock.monotonic()
            if (since := outage.failed(now)) is not None:
                log.error("%s cannot be written, it is tried again for %.0f s more: %s", what, wait_s - since, e)
            if outage.lasts(now) >= wait_s:
                log.error("%s could not be written for %.0f s, which is the limit", what, wait_s)
                raise
            await clock.sleep(LOOK_AGAIN_S)
        else:
            if (lasted := outage.over(clock.monotonic())) is not None:
                log.info("%s is written after %.1f s", what, lasted)
            return result
