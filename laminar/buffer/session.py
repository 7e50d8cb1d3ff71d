"""Who is alive and who leads: leases, worker keys, elections, and transactions whose reply may be lost.

    Session      a lease that is kept alive; whether it still holds is decided by the local clock alone
    Membership   workers/<kind>/<id> under the session's lease; its guard goes into every write of the worker
    Election     leaders/<role> under the session's lease, one holder at a time; Leadership is one term of it

Invariants. (1) `alive` turns False before etcd can give the lease's keys to somebody else, even if this process was
paused or cut off: the deadline counts from when the last successful refresh was *sent*. (2) Once lost, a session
never comes back. (3) A guard compares the create_revision of the actor's key, so that nothing of a former life
commits.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

from laminar.buffer.coordination import (
    Change,
    Compare,
    Coordination,
    Delete,
    KeyValue,
    Listing,
    Put,
    Transaction,
    WatchEvent,
    absent,
    created_at,
    unchanged,
)
from laminar.buffer.keys import Keys
from laminar.buffer.outage import Outage
from laminar.buffer.records import LeaderRecord, WorkerRecord
from laminar.buffer.requests import Backoff
from laminar.errors import CoordinationError, CoordinationFull, CoordinationUnavailable, LeaseLost

log = logging.getLogger(__name__)
T = TypeVar("T")

SAFETY_MARGIN = 0.1
"""Share of the TTL by which this side gives up earlier than etcd."""
READ_BACK_S = 2.0
"""Least time for reading back after the last attempt of a transaction."""


class Session:
    """A lease and the task that keeps it alive: a refresh each third of its TTL, repeated quickly when it fails."""

    def __init__(
        self,
        coordination: Coordination,
        lease: int,
        ttl_s: float,
        sent_at: float,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self.coordination = coordination
        self.lease = lease
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.reason = ""
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._refreshed_at = sent_at
        self._last_error = "none"
        self._outage = Outage()
        self._task = self._loop.create_task(self._keep_alive(), name=f"keep-alive of lease {lease:x}")
        self._task.add_done_callback(self._ended)

    @classmethod
    async def open(
        cls, coordination: Coordination, ttl_s: float, *, on_lost: Callable[[str], None] | None = None
    ) -> Session:
        """Take a lease of `ttl_s` seconds (etcd may give more). `on_lost(reason)` runs once, if it is lost before
        `close`. Raises CoordinationUnavailable."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        lease, given = await coordination.grant(ttl_s)
        if loop.time() - sent_at > given / 3:
            # The grant took several attempts, so its time of sending is no measure: refresh at once.
            sent_at = loop.time()
            given = await coordination.keep_alive(lease)
            if given <= 0:
                raise CoordinationUnavailable(f"lease {lease:x} of {ttl_s:g} s ended before its first refresh")
        return cls(coordination, lease, given, sent_at, on_lost)

    @property
    def deadline(self) -> float:
        """The loop's time until which the lease certainly holds."""
        return self._refreshed_at + self.ttl_s * (1 - SAFETY_MARGIN)

    @property
    def alive(self) -> bool:
        return not self.lost.is_set() and self._loop.time() < self.deadline

    def require(self) -> None:
        """Raise LeaseLost unless the lease certainly holds."""
        if not self.alive:
            self._lose(self._silence())
            raise LeaseLost(f"lease {self.lease:x} is lost: {self.reason}")

    async def close(self) -> None:
        """Stop refreshing and revoke the lease: its keys vanish at once. If etcd is unavailable they expire. Sets
        `lost` (with reason "closed") for whoever still waits on it, without calling `on_lost`."""
        if not self.lost.is_set():
            self.reason = "closed"
            self.lost.set()
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            await self.coordination.revoke(self.lease)
        except CoordinationUnavailable as error:
            log.warning("lease %x could not be revoked, it expires within %g s: %s", self.lease, self.ttl_s, error)

    async def _keep_alive(self) -> None:
        next_at = self._refreshed_at + self.ttl_s / 3
        while True:
            await asyncio.sleep(max(0.0, min(next_at, self.deadline) - self._loop.time()))
            sent_at = self._loop.time()
            if sent_at >= self.deadline:
                return self._lose(self._silence())
            attempt_s = min(2.0, self.ttl_s / 4)
            try:
                async with asyncio.timeout_at(min(sent_at + attempt_s, self.deadline)):
                    given = await self.coordination.keep_alive(self.lease)
            except TimeoutError:
                self._last_error = f"no answer in {attempt_s:.2g} s"
            except CoordinationError as error:
                self._last_error = str(error)
            else:
                if given <= 0:
                    return self._lose("etcd says that the lease has expired or was revoked")
                if self._loop.time() < self.deadline:
                    self._refreshed_at, self.ttl_s = sent_at, given
                    next_at = sent_at + given / 3
                if (lasted := self._outage.over(self._loop.time())) is not None:
                    log.info("lease %x is refreshed again after %.1f s", self.lease, lasted)
                continue
            if self._outage.failed(self._loop.time()) is not None:
                log.warning(
                    "lease %x was not refreshed (%s), %.1f s are left", self.lease, self._last_error, self.left_s
                )
            next_at = self._loop.time() + min(0.25, self.ttl_s / 10)

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - self._loop.time())

    def _silence(self) -> str:
        silent = self._loop.time() - self._refreshed_at
        return f"not refreshed for {silent:.1f} s of its {self.ttl_s:g} s (last error: {self._last_error})"

    def _lose(self, reason: str) -> None:
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        log.error("lease %x is lost: %s", self.lease, reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._lose("its keep-alive was cancelled")
        elif error := task.exception():
            log.error("lease %x: the keep-alive failed", self.lease, exc_info=error)
            self._lose(f"its keep-alive failed: {error!r}")


async def transact_or_read_back(
    coordination: Coordination,
    transaction: Transaction,
    *,
    committed: Callable[[], Awaitable[bool]],
    deadline_s: float = 15.0,
) -> bool:
    """Run a transaction until its outcome is known; True if it took effect.

    `committed` reads back whether it did, by a value that only this caller can have written. Raises
    CoordinationUnavailable after `deadline_s`: the outcome is then unknown.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    backoff: Backoff | None = None
    attempts = 0
    while True:
        attempts += 1
        try:
            result = await coordination.transact(transaction)
            # An earlier attempt may have committed, and so be what made this one's compares fail.
            return result.succeeded or (attempts > 1 and await committed())
        except CoordinationUnavailable as unavailable:
            error = unavailable
        try:
            async with asyncio.timeout(max(READ_BACK_S, deadline - loop.time())):
                if await committed():
                    return True
        except (CoordinationUnavailable, TimeoutError) as unread:
            log.debug("a transaction could not be read back yet: %s", unread)
        # Seeded by the content, which is unique to its writer: writers spread, and a simulation can be repeated.
        backoff = backoff or Backoff(random.Random(repr(transaction)))
        wait = backoff.next()
        if loop.time() + wait >= deadline:
            if isinstance(error, CoordinationFull):
                raise error
            raise CoordinationUnavailable(
                f"a transaction of {len(transaction.success)} operations has no known outcome after {deadline_s:g} s "
                f"and {attempts} attempts; last: {error}. Read back before trying again"
            ) from error
        await asyncio.sleep(wait)


class Membership:
    """A worker's key, `workers/<kind>/<id>`, under its lease."""

    def __init__(self, key: str, create_revision: int) -> None:
        self.key = key
        self.create_revision = create_revision

    @classmethod
    async def join(
        cls, session: Session, coordination: Coordination, keys: Keys, record: WorkerRecord,
        manifest: KeyValue | None = None,
    ) -> Membership:  # fmt: skip
        """Not while the run is recovered, nor if its `manifest` has changed. Raises CoordinationUnavailable then,
        CoordinationError if another worker has this id, LeaseLost if the session has ended."""
        key = keys.worker(record.kind, record.id)
        same_life = (absent(keys.recovering), *([unchanged(manifest)] if manifest else []))
        kv = await _create(session, coordination, key, record.dump(), same_life)
        if kv is None:
            raise CoordinationUnavailable(f"{key} was not created: run {keys.run!r} is being recovered; join anew")
        if not _is_ours(kv, session, record.dump()):
            raise CoordinationError(f"{key} is taken by {kv.value}; a worker's id must be new at each start")
        return cls(key, kv.create_revision)

    def guard(self) -> Compare:
        return created_at(self.key, self.create_revision)


async def _create(
    session: Session, coordination: Coordination, key: str, value: str, also: Sequence[Compare] = ()
) -> KeyValue | None:
    """Put `key` under the lease unless it exists, or another compare fails; what is there afterwards."""
    session.require()

    async def committed() -> bool:
        kv = await coordination.get(key)
        return kv is not None and _is_ours(kv, session, value)

    put = Put(key, value, session.lease)
    await transact_or_read_back(coordination, Transaction((absent(key), *also), (put,)), committed=committed)
    return await coordination.get(key)


def _is_ours(kv: KeyValue, session: Session, value: str) -> bool:
    return kv.lease == session.lease and kv.value == value


class Election:
    """One candidate for a leader key. `worker_id` must be new at each start of a worker."""

    def __init__(self, coordination: Coordination, session: Session, key: str, worker_id: str) -> None:
        self.coordination = coordination
        self.session = session
        self.key = key
        self._value = LeaderRecord(worker=worker_id).dump()

    async def campaign(self) -> Leadership:
        """Wait until this candidate leads; a watch tells when the key is free. Raises LeaseLost if the session ends
        first. No deadline of its own: a standby may wait for the whole run; cancel it to give up."""
        self.session.require()
        kv = await _or_lost(self.session, self._win())
        log.info("%s: elected at revision %d", self.key, kv.create_revision)
        return Leadership(self.coordination, self.session, self.key, kv.create_revision)

    async def _win(self) -> KeyValue:
        while True:
            try:
                return await self._stand()
            except CoordinationUnavailable as error:
                log.warning("%s: standing again, while the lease holds: %s", self.key, error)

    async def _stand(self) -> KeyValue:
        holder: str | None = None
        async with aclosing(_watch(self.coordination, self.key)) as events:
            async for event in events:
                seen, kv = _state_of(event, self.key)
                if not seen:
                    continue
                if kv is None:
                    kv = await _create(self.session, self.coordination, self.key, self._value)
                if kv is not None and _is_ours(kv, self.session, self._value):
                    return kv
                if kv is not None and kv.value != holder:
                    holder = kv.value
                    log.info("%s: standing by, the leader is %s", self.key, LeaderRecord.parse(holder).worker)
        raise CoordinationError(f"{self.key}: the watch of the election ended")


class Leadership:
    """One term as leader: from the creation of the key to its deletion or the end of the session."""

    def __init__(self, coordination: Coordination, session: Session, key: str, create_revision: int) -> None:
        self.key = key
        self.create_revision = create_revision
        self.lost = asyncio.Event()
        self.reason = ""
        self._coordination = coordination
        self._session = session
        self._task = asyncio.create_task(self._observe(), name=f"leadership of {key}")
        self._task.add_done_callback(self._ended)

    @property
    def held(self) -> bool:
        return self._session.alive and not self.lost.is_set()

    def guard(self) -> Compare:
        return created_at(self.key, self.create_revision)

    async def resign(self) -> None:
        """Let another candidate lead. Raises CoordinationUnavailable if etcd cannot be told."""
        self._lose("resigned")
        self._task.cancel()
        await asyncio.wait([self._task])

        async def committed() -> bool:
            kv = await self._coordination.get(self.key)
            return kv is None or kv.create_revision != self.create_revision

        transaction = Transaction((self.guard(),), (Delete(self.key),))
        await transact_or_read_back(self._coordination, transaction, committed=committed)

    async def _observe(self) -> None:
        try:
            self._lose(await _or_lost(self._session, self._until_replaced()))
        except LeaseLost as error:
            self._lose(str(error))

    async def _until_replaced(self) -> str:
        async with aclosing(_watch(self._coordination, self.key)) as events:
            async for event in events:
                seen, kv = _state_of(event, self.key)
                if seen and (kv is None or kv.create_revision != self.create_revision):
                    return f"{self.key} was " + ("deleted" if kv is None else f"taken over by {kv.value}")
        return f"the watch of {self.key} ended"

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            log.info("%s: no longer leader: %s", self.key, reason)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._lose("its watch was cancelled")
        elif error := task.exception():
            self._lose(f"its watch failed: {error!r}")


async def _or_lost(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or LeaseLost as soon as the session has ended."""
    working = asyncio.create_task(work)
    lost = asyncio.create_task(session.lost.wait())
    try:
        await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
        if session.lost.is_set():
            raise LeaseLost(f"lease {session.lease:x} is lost: {session.reason}")
        return await working
    finally:
        for task in (working, lost):
            task.cancel()
        await asyncio.gather(working, lost, return_exceptions=True)


def _watch(coordination: Coordination, key: str) -> AsyncGenerator[WatchEvent, None]:
    # Both implementations are generators; the interface promises the iterator only.
    return cast(AsyncGenerator[WatchEvent, None], coordination.watch(key))


def _state_of(event: WatchEvent, key: str) -> tuple[bool, KeyValue | None]:
    """Whether the event tells of this very key (a watch covers all keys that begin with it), and its value."""
    match event:
        case Listing(snapshot=snapshot):
            return True, next((kv for kv in snapshot.items if kv.key == key), None)
        case Change(key=changed, kv=kv):
            return changed == key, kv
