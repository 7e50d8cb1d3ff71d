"""The server side of the in-process etcd: revisions, history, leases, compaction, subscriptions.

What it keeps of the real one, each checked against it in `tests/contract`: the revision starts at 1 and grows by
one for each transaction that changes anything; a transaction sees its own writes; a missing key equals no value;
the keys of a lease vanish at one revision; a compaction at R keeps reads at R and drops deletions up to R, so that
a subscription from R on misses them; a restart keeps the data, ends every stream and gives each lease its full time
again.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from laminar.buffer.coordination import (
    Change,
    Compare,
    Delete,
    Field,
    Get,
    KeyValue,
    Operation,
    Put,
    Transaction,
    TransactionResult,
)
from laminar.errors import CoordinationError, CoordinationUnavailable, LeaseLost

MINIMUM_TTL_S = 2.0
"""etcd's own at its default election timeout."""


class Compacted(CoordinationUnavailable):
    """The revision asked for has been compacted away: list again."""


@dataclass(frozen=True)
class Page:
    items: tuple[KeyValue, ...]
    more: bool
    revision: int


@dataclass
class Lease:
    ttl_s: float
    keys: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class Subscription:
    """A stream of changes under a prefix, one tuple a revision."""

    def __init__(self, server: MemoryEtcd, prefix: str) -> None:
        self.prefix = prefix
        self._server = server
        self._queue: asyncio.Queue[tuple[Change, ...] | None] = asyncio.Queue()

    def offer(self, changes: Iterable[Change]) -> None:
        mine = tuple(c for c in changes if c.key.startswith(self.prefix))
        if mine:
            self._queue.put_nowait(mine)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def next(self) -> tuple[Change, ...] | None:
        """None at the end of the stream."""
        return await self._queue.get()

    def close(self) -> None:
        self._server.subscriptions.pop(self, None)


class MemoryEtcd:
    """`history` bounds the revisions kept: older ones are compacted as real clusters do by the clock."""

    def __init__(self, *, history: int = 100_000) -> None:
        self.revision = 1
        self.compacted = 0
        self.running = True
        # A dict for its order: a set would deliver in the order of addresses, other in each process.
        self.subscriptions: dict[Subscription, None] = {}
        self._history = history
        self._names: list[str] = []
        self._versions: dict[str, list[Change]] = {}
        self._log: list[tuple[Change, ...]] = []
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0x10

    def get(self, key: str) -> KeyValue | None:
        versions = self._versions.get(key)
        return versions[-1].kv if versions else None

    def page(self, prefix: str, after: str, limit: int, revision: int) -> Page:
        """At most `limit` keys under `prefix` that follow `after`, as of `revision` (0: now). Raises Compacted."""
        at = revision or self.revision
        if at < self.compacted:
            raise Compacted(f"range of {prefix}: revision {at} has been compacted, up to {self.compacted}")
        first = bisect.bisect_right(self._names, after) if after else bisect.bisect_left(self._names, prefix)
        items: list[KeyValue] = []
        for index in range(first, len(self._names)):
            name = self._names[index]
            if not name.startswith(prefix):
                break
            kv = self._as_of(name, at)
            if kv is None:
                continue
            if len(items) == limit:
                return Page(tuple(items), True, at)
            items.append(kv)
        return Page(tuple(items), False, at)

    def transact(self, transaction: Transaction) -> TransactionResult:
        succeeded = all(self._holds(c) for c in transaction.compare)
        operations = transaction.success if succeeded else transaction.failure
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseLost(
                    f"put of {operation.key}: requested lease {operation.lease:x} not found; the lease has expired or "
                    "was revoked"
                )
        gets, changes = self._apply(operations)
        self._publish(changes)
        return TransactionResult(succeeded, self.revision, gets)

    def grant(self, ttl_s: float) -> tuple[int, float]:
        if ttl_s <= 0:
            raise CoordinationError(f"a lease of {ttl_s:g} s cannot be granted, its time must be positive")
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = Lease(max(MINIMUM_TTL_S, float(math.ceil(ttl_s))))
        return lease, self._refresh(lease)

    def keep_alive(self, lease: int) -> float:
        return self._refresh(lease) if lease in self._leases else 0.0

    def revoke(self, lease: int) -> None:
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        if ended.timer is not None:
            ended.timer.cancel()
        _, changes = self._apply(tuple(Delete(key) for key in sorted(ended.keys)))
        self._publish(changes)

    def compact(self, revision: int) -> None:
        """Forget what was superseded before `revision`."""
        if revision > self.revision:
            raise CoordinationError(f"compaction at revision {revision}: etcd is at {self.revision} only")
        if revision <= self.compacted:
            return
        self.compacted = revision
        for name in list(self._versions):
            versions = self._versions[name]
            keep = max(0, bisect.bisect_right(versions, revision, key=lambda c: c.revision) - 1)
            if versions[keep].revision <= revision and versions[keep].kv is None:
                keep += 1
            del versions[:keep]
            if not versions:
                del self._versions[name]
        self._names = sorted(self._versions)
        alive = {(c.key, c.revision) for versions in self._versions.values() for c in versions}
        first = bisect.bisect_right(self._log, revision, key=lambda batch: batch[0].revision)
        at = tuple(c for batch in self._log[max(0, first - 1) : first] for c in batch if (c.key, c.revision) in alive)
        del self._log[:first]
        if at and at[0].revision == revision:
            self._log.insert(0, at)

    def subscribe(self, prefix: str, start: int) -> Subscription:
        """Changes from revision `start` on. Raises Compacted if some of them may be gone."""
        if start < self.compacted:
            raise Compacted(f"watch of {prefix}: revision {start} has been compacted, up to {self.compacted}")
        subscription = Subscription(self, prefix)
        first = bisect.bisect_left(self._log, start, key=lambda batch: batch[0].revision)
        for batch in self._log[first:]:
            subscription.offer(batch)
        self.subscriptions[subscription] = None
        return subscription

    def leases(self) -> list[int]:
        """Those that live, oldest first."""
        return list(self._leases)

    def stop(self) -> None:
        """No request is served, no lease ends, every stream breaks."""
        self.running = False
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
        for subscription in self.subscriptions:
            subscription.end()
        self.subscriptions = {}

    def start(self) -> None:
        self.running = True
        for lease in self._leases:
            self._refresh(lease)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _as_of(self, name: str, revision: int) -> KeyValue | None:
        versions = self._versions[name]
        index = bisect.bisect_right(versions, revision, key=lambda c: c.revision)
        return versions[index - 1].kv if index else None

    def _holds(self, compare: Compare) -> bool:
        kv = self.get(compare.key)
        match compare.field:
            case Field.VALUE:
                return kv is not None and kv.value == compare.target
            case Field.CREATE:
                return (kv.create_revision if kv else 0) == compare.target
            case Field.MOD:
                return (kv.mod_revision if kv else 0) == compare.target

    def _apply(self, operations: tuple[Operation, ...]) -> tuple[tuple[KeyValue | None, ...], list[Change]]:
        revision = self.revision + 1
        gets: list[KeyValue | None] = []
        changes: list[Change] = []
        for operation in operations:
            before = self.get(operation.key)
            match operation:
                case Get():
                    gets.append(before)
                case Put(key=key, value=value, lease=lease):
                    kv = KeyValue(key, value, before.create_revision if before else revision, revision, lease)
                    changes.append(self._write(Change(key, kv, revision), before))
                case Delete(key=key) if before is not None:
                    changes.append(self._write(Change(key, None, revision), before))
        if changes:
            self.revision = revision
        return tuple(gets), changes

    def _write(self, change: Change, before: KeyValue | None) -> Change:
        if before is not None and before.lease in self._leases:
            self._leases[before.lease].keys.discard(change.key)
        if change.kv is not None and change.kv.lease:
            self._leases[change.kv.lease].keys.add(change.key)
        if change.key not in self._versions:
            self._versions[change.key] = []
            bisect.insort(self._names, change.key)
        self._versions[change.key].append(change)
        return change

    def _publish(self, changes: list[Change]) -> None:
        if not changes:
            return
        batch = tuple(changes)
        self._log.append(batch)
        for subscription in self.subscriptions:
            subscription.offer(batch)
        if len(self._log) > 2 * self._history:
            self.compact(self.revision - self._history)

    def _refresh(self, lease: int) -> float:
        state = self._leases[lease]
        if state.timer is not None:
            state.timer.cancel()
        # In a context of its own: the server's timers are nobody's of the clients that a simulator kills or stops.
        state.timer = asyncio.get_running_loop().call_later(
            state.ttl_s, self.revoke, lease, context=contextvars.Context()
        )
        return state.ttl_s
