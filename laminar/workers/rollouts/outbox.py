"""The two ways out of a rollout: partial responses to its log, finished trajectories to `incoming`.

`Flusher`: one append (and fsync) each `flush_interval`, or sooner when somebody waits for durability.
`Finisher`: gathers what is ready, makes one segment durable, and registers it in one guarded transaction.
Storage that refuses (a full disk) is tried again with back-off: what waits stays in memory, nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from laminar.buffer.claims import MAX_FINISH, Held
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.ledger import Ledger
from laminar.buffer.outage import Outage
from laminar.buffer.partials import PartialLog, PartialRow
from laminar.buffer.records import Incoming
from laminar.buffer.storage import Storage
from laminar.clock import Clock
from laminar.errors import StoreError
from laminar.workers.rollouts.trajectory import Trajectory

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""How long a wanted flush or finish waits for others to share its fsync."""
FIRST_RETRY_S = 0.1
MAX_RETRY_S = 5.0

T = TypeVar("T")


class Flusher:
    """Owns the partial log. `live()` gives the trajectories whose rows it writes, `unread()` those that were handed to
    others and may have to be read from it still."""

    def __init__(
        self, partials: PartialLog, live: Callable[[], Iterable[Trajectory]], clock: Clock, *, interval_s: float,
        enabled: bool, unread: Callable[[], Iterable[Trajectory]] = tuple,
    ) -> None:  # fmt: skip
        self.partials = partials
        self.live = live
        self.unread = unread
        self.clock = clock
        self.interval_s = interval_s
        self.enabled = enabled
        self.flushes = 0
        self._wanted = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    async def durable(self) -> None:
        """Return once everything that is pending now is in the log."""
        if not self.enabled:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._wanted.set()
        await future

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.interval_s):
                    await self._wanted.wait()
                await self.clock.sleep(GATHER_S)
            except TimeoutError:
                pass
            await self.flush()

    async def flush(self) -> None:
        self._wanted.clear()
        waiters, self._waiters = self._waiters, []
        rows = [row for t in list(self.live()) for row in t.take_pending()]
        if rows and self.enabled:
            await self._append(rows)
        for future in waiters:
            if not future.done():
                future.set_result(None)

    async def _append(self, rows: list[PartialRow]) -> None:
        await until_written(self.clock, "the partial log", lambda: self.partials.append(rows))
        self.flushes += 1
        if self.partials.due_for_rotation():
            now = self.clock.now_us()
            carried = [row for t in (*self.live(), *self.unread()) for row in t.all_rows(now)]
            await until_written(self.clock, "the partial log", lambda: self.partials.rotate(carried))
            # Every claim whose source is this worker is live here, or carried: what was superseded has no other reader.
            try:
                await self.partials.discard_superseded()
            except StoreError as e:
                log.warning("superseded segments of the partial log stay until the next rotation: %s", e)


async def until_written(clock: Clock, what: str, write: Callable[[], Awaitable[T]]) -> T:
    """Try again with back-off as long as storage refuses (a full disk, a network store that is away)."""
    pause = FIRST_RETRY_S
    outage = Outage()
    while True:
        try:
            result = await write()
        except StoreError as e:
            if (since := outage.failed(clock.monotonic())) is not None:
                log.error("%s cannot be written (for %.0f s now), it is tried again and again: %s", what, since, e)
            await clock.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_S)
        else:
            if (lasted := outage.over(clock.monotonic())) is not None:
                log.info("%s is written after %.1f s", what, lasted)
            return result


@dataclass(frozen=True)
class Done:
    held: Held
    finished: Finished


class Finisher:
    """Hands finished trajectories to the committer. `on_end` is told of each trajectory that has left this worker."""

    def __init__(self, storage: Storage, ledger: Ledger, clock: Clock, on_end: Callable[[Done], None]) -> None:
        self.storage = storage
        self.ledger = ledger
        self.clock = clock
        self.on_end = on_end
        self.queue: asyncio.Queue[Done] = asyncio.Queue()
        self.segments = 0
        self.busy = False

    def put(self, done: Done) -> None:
        self.queue.put_nowait(done)

    @property
    def idle(self) -> bool:
        return self.queue.empty() and not self.busy

    async def run(self) -> None:
        while True:
            first = await self.queue.get()
            self.busy = True
            await self.clock.sleep(GATHER_S)
            batch = [first]
            while not self.queue.empty() and len(batch) < MAX_FINISH:
                batch.append(self.queue.get_nowait())
            await self._register(batch)
            for done in batch:
                self.on_end(done)
            self.busy = False

    async def _register(self, batch: list[Done]) -> None:
        """One segment and one transaction; rows whose claims were lost meanwhile are left out of the next try."""
        while batch:
            rows = [d.finished for d in batch]
            segment, incoming = await until_written(self.clock, "a finished segment", partial(self._write, rows))
            remaining = {h.id for h in await self.ledger.finish([d.held for d in batch], segment, incoming)}
            if remaining:
                log.warning(
                    "%d of %d trajectories went to others before they were registered; the rest is written again",
                    len(batch) - len(remaining),
                    len(batch),
                )
            batch = [d for d in batch if d.held.id in remaining]

    async def _write(self, rows: list[Finished]) -> tuple[str, Incoming]:
        """Each try has a name of its own: what a failed one left behind is never registered."""
        segment = f"{self.ledger.name}-{self.segments:06d}"
        self.segments += 1
        return segment, await write_incoming(self.storage, self.ledger.name, segment, rows)
