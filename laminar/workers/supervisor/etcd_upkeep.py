"""Keeping the etcd of `laminar run` within its space: nobody else administers it.

It drops old revisions by itself every ten minutes (`etcd_process.FLAGS`), but its file never shrinks, and once it has
reached its quota it takes no writes until its history is compacted, its file defragmented and the alarm lifted. An etcd
that somebody else runs is left alone: others may use it, and need its history.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from laminar.clock import Clock
from laminar.errors import CoordinationError

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""So long, and some moments, writes fail once the quota is reached; their writers try again for 15 s."""
NEARLY_FULL = 0.8
"""Share of the quota at which space is freed before the quota is reached."""
SMALL_BYTES = 64 << 20
"""Below this nothing is gained by a smaller file."""
AGAIN_S = 60.0
"""Least seconds between two tries at freeing space: if little is freed, the content itself is that large."""


class Need(Enum):
    NOTHING = "nothing"
    DEFRAGMENT = "half of its file is free space"
    COMPACT = "its quota is nearly reached"
    RECOVER = "its quota is exhausted"


def need(*, db_size: int, in_use: int, quota: int, full: bool) -> Need:
    """What to do for an etcd whose file has `db_size` bytes, `in_use` of them used."""
    if full:
        return Need.RECOVER
    if db_size > NEARLY_FULL * quota:  # etcd counts free pages of its file too
        return Need.COMPACT
    if db_size > SMALL_BYTES and in_use < db_size / 2:
        return Need.DEFRAGMENT
    return Need.NOTHING


class Maintained(Protocol):
    """What of `EtcdCoordination` this needs."""

    async def status(self) -> dict[str, str | int]: ...

    async def full_members(self) -> list[int]: ...

    async def compact(self, revision: int) -> None: ...

    async def defragment(self) -> None: ...


class Upkeep:
    """`quota` is etcd's --quota-backend-bytes; `tell` shows one line to the user."""

    def __init__(self, etcd: Maintained, quota: int, clock: Clock, tell: Callable[[str], None]) -> None:
        self.etcd = etcd
        self.quota = quota
        self.clock = clock
        self.tell = tell
        self._not_before = 0.0

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except CoordinationError as e:
                log.warning("etcd could not be looked after, trying again in %.0f s: %s", LOOK_S, e)
            await self.clock.sleep(LOOK_S)

    async def look(self) -> Need:
        """Look once, and do what is needed."""
        status = await self.etcd.status()
        size = int(status["db_size"])
        full = bool(await self.etcd.full_members())
        found = need(db_size=size, in_use=int(status["in_use"]), quota=self.quota, full=full)
        if found is Need.NOTHING or (not full and self.clock.monotonic() < self._not_before):
            return Need.NOTHING
        if found is Need.RECOVER:
            self.tell(f"etcd's space quota of {self.quota} bytes is exhausted (its file has {size}): freeing space")
        self._not_before = self.clock.monotonic() + AGAIN_S
        if found is not Need.DEFRAGMENT:
            await self.etcd.compact(int(status["revision"]))
        await self.etcd.defragment()
        left = int((await self.etcd.status())["db_size"])
        log.info("defragmented etcd (%s): its file had %d bytes, has %d", found.value, size, left)
        if found is Need.RECOVER:
            self.tell(f"etcd takes writes again: its file has {left} of {self.quota} bytes")
        if left > NEARLY_FULL * self.quota:
            log.error(
                "etcd's content alone has %d of its quota of %d bytes: lower trainer.max_ahead_groups, or "
                "use an etcd of your own with a larger --quota-backend-bytes", left, self.quota,
            )  # fmt: skip
        return found

