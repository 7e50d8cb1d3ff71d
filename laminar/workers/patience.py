"""A store for those who wait while it does not serve (a full disk, an object store or a file server that is away),
instead of dying of it: nothing is lost, and once it is there again they go on where they stood."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from laminar.buffer.files import AlreadyExists, NotFound, Storage, StorageFull
from laminar.buffer.outage import Outage
from laminar.buffer.table import Table, TargetTaken
from laminar.clock import Clock
from laminar.errors import CorruptSegment, StoreError

log = logging.getLogger(__name__)
T = TypeVar("T")

STORE_WAIT_S = 600.0
"""How long a run waits for its store, say for somebody to free space; then it ends, and the same command resumes it."""
LOOK_AGAIN_S = 1.0
ANSWERS = (AlreadyExists, NotFound, CorruptSegment, TargetTaken)
"""The store serves, and this is what it says."""
FILE_CALLS = ("write", "read", "exists", "list", "delete")
TABLE_CALLS = ("read", "scan_since", "count")


class StoreAway(StoreError):
    """The store did not serve for as long as a run waits."""


def patient(storage: Storage, clock: Clock, *, wait_s: float = STORE_WAIT_S) -> Storage:
    """`storage` whose calls are tried again each second while they are refused, as by `patiently`."""
    return cast(Storage, _Patient(storage, clock, wait_s, FILE_CALLS))


def patient_table(table: Table, clock: Clock, *, wait_s: float = STORE_WAIT_S) -> Table:
    """`table` whose reads are tried again each second while they are refused, as by `patiently`."""
    return cast(Table, _Patient(table, clock, wait_s, TABLE_CALLS))


class _Patient:
    def __init__(self, inner: Any, clock: Clock, wait_s: float, calls: tuple[str, ...]) -> None:
        self._inner = inner
        self._clock = clock
        self._wait_s = wait_s
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._inner, name)
        if name not in self._calls:
            return real

        async def call(*args: Any, **options: Any) -> Any:
            what = f"{name} {args[0] if args else ''}".rstrip()
            return await patiently(self._clock, what, lambda: real(*args, **options), wait_s=self._wait_s)

        return call


async def patiently(clock: Clock, what: str, call: Callable[[], Awaitable[T]], *, wait_s: float = STORE_WAIT_S) -> T:
    """Repeat `call` while the store refuses it, for `wait_s` seconds at most; then raise StorageFull or StoreAway. What
    is an answer of the store, such as NotFound, or a lack of permission, is raised at once."""
    outage = Outage()
    while True:
        try:
            result = await call()
        except StoreError as e:
            if not _may_pass(e):
                raise
            now = clock.monotonic()
            if (since := outage.failed(now)) is not None:
                log.error("%s: the store refuses, it is tried again for %.0f s more: %s", what, wait_s - since, e)
            if outage.lasts(now) >= wait_s:
                log.error("%s: the store refused for %.0f s, which is the limit", what, wait_s)
                if isinstance(e, StorageFull):
                    raise
                raise StoreAway(f"the store has not served for {wait_s:.0f} s, which is the limit: {e}") from e
            await clock.sleep(LOOK_AGAIN_S)
        else:
            if (lasted := outage.over(clock.monotonic())) is not None:
                log.info("%s: done after %.1f s", what, lasted)
            return result


def _may_pass(e: StoreError) -> bool:
    return not isinstance(e, (*ANSWERS, StoreAway)) and not isinstance(e.__cause__, PermissionError)
