"""The in-process twin of etcd, with the same semantics and with faults that can be injected.

`MemoryEtcd` is the server that the clients of a test or simulation share; `MemoryCoordination` is one client.
Time is that of the running event loop and chance comes from the `random.Random` that is passed in, so a run on a
loop with virtual time is deterministic.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum
from typing import NoReturn, TypeVar

from laminar.buffer import requests
from laminar.buffer.coordination import (
    Change,
    Delete,
    Get,
    KeyValue,
    Listing,
    Put,
    Snapshot,
    Transaction,
    TransactionResult,
    WatchEvent,
)
from laminar.buffer.memory_server import Compacted, MemoryEtcd, Subscription
from laminar.errors import CoordinationUnavailable

__all__ = ["Fault", "Faults", "MemoryCoordination", "MemoryEtcd"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Fault(Enum):
    """What can happen to one request; its caller sees CoordinationUnavailable each time."""

    FAIL_BEFORE = "fail_before"
    """Refused at once: nothing was done."""
    DROP_REPLY = "drop_reply"
    """Done, but the reply never comes."""
    LATE = "late"
    """Done after the caller has given up waiting."""


class Faults:
    """The network between one client and the server.

    Probabilities are of one request each. `delay_s` is the range of the one-way delay, drawn uniformly for each
    request, reply and batch of watched changes. `script` forces the next requests of one kind, whatever the odds.
    """

    def __init__(
        self,
        source: random.Random,
        *,
        fail_before: float = 0.0,
        drop_reply: float = 0.0,
        late: float = 0.0,
        delay_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.source = source
        self.fail_before = fail_before
        self.drop_reply = drop_reply
        self.late = late
        self.delay_s = delay_s
        self.partitioned = False
        self.injected: dict[Fault, int] = dict.fromkeys(Fault, 0)
        self._script: dict[str, deque[Fault | None]] = {}

    def script(self, request: str, *faults: Fault | None) -> None:
        """For the next calls of `request` ("get", "range", "put", "delete", "transact", "watch", "grant",
        "keep_alive", "revoke"), in this order; None lets one through."""
        self._script.setdefault(request, deque()).extend(faults)

    def partition(self) -> None:
        """Cut the client off: requests and replies under way are lost too."""
        self.partitioned = True

    def heal(self) -> None:
        self.partitioned = False

    def draw(self, request: str) -> Fault | None:
        fault = self._draw(request)
        if fault is not None:
            self.injected[fault] += 1
        return fault

    def delay(self) -> float:
        low, high = self.delay_s
        return low if low == high else self.source.uniform(low, high)

    def _draw(self, request: str) -> Fault | None:
        scripted = self._script.get(request)
        if scripted:
            return scripted.popleft()
        if not (self.fail_before or self.drop_reply or self.late):
            return None
        chance = self.source.random()
        for fault, share in (
            (Fault.FAIL_BEFORE, self.fail_before),
            (Fault.DROP_REPLY, self.drop_reply),
            (Fault.LATE, self.late),
        ):
            if chance < share:
                return fault
            chance -= share
        return None


class MemoryCoordination:
    """One client of a `MemoryEtcd`; same retries and limits as `EtcdCoordination`."""

    def __init__(
        self, server: MemoryEtcd, faults: Faults | None = None, *, timeout_s: float = 2.0, retry_s: float = 15.0
    ) -> None:
        self.server = server
        self.faults = faults or Faults(random.Random(0))
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._closed = False
        self._subscriptions: dict[Subscription, None] = {}

    async def get(self, key: str) -> KeyValue | None:
        requests.check_key(key)
        return await self._retried("get", key, lambda: self.server.get(key))

    async def range(self, prefix: str, *, page: int = 1000) -> Snapshot:
        """All keys under `prefix` at one revision, read `page` keys at a time."""
        return await self._retry(lambda: self._range_once(prefix, page), f"range of {prefix}")

    async def put(self, key: str, value: str, *, lease: int = 0) -> int:
        """Raises LeaseLost if the lease is gone."""
        requests.check_put(key, value)
        transaction = Transaction((), (Put(key, value, lease),))
        return (await self._retried("put", key, lambda: self.server.transact(transaction))).revision

    async def delete(self, key: str) -> bool:
        """Whether the key was there; after a lost reply False can also mean that the first attempt deleted it."""
        requests.check_key(key)
        transaction = Transaction((), (Get(key), Delete(key)))
        result = await self._retried("delete", key, lambda: self.server.transact(transaction))
        return result.gets[0] is not None

    async def transact(self, transaction: Transaction) -> TransactionResult:
        requests.check_transaction(transaction)
        first = (*transaction.compare, *transaction.success, *transaction.failure)[0].key
        return await self._call("transact", first, lambda: self.server.transact(transaction))

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        seen: int | None = None
        backoff = requests.Backoff(self.faults.source)
        while True:
            subscription: Subscription | None = None
            try:
                if seen is None:
                    snapshot = await self.range(prefix)
                    seen = snapshot.revision
                    yield Listing(snapshot)
                subscription = await self._subscribe(prefix, seen)
                while (batch := await self._next_batch(subscription)) is not None:
                    backoff.reset()
                    if batch[-1].revision <= seen:  # asked for from `seen` on, as the real client does
                        continue
                    seen = batch[-1].revision
                    for change in batch:
                        yield change
            except Compacted as error:
                log.info("watch of %s: changes after %s were compacted, listing again (%s)", prefix, seen, error)
                seen = None
            except CoordinationUnavailable as error:
                log.info("watch of %s: interrupted after revision %s, resuming (%s)", prefix, seen, error)
            finally:
                if subscription is not None:
                    self._subscriptions.pop(subscription, None)
                    subscription.close()
            await asyncio.sleep(backoff.next())

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        return await self._retried("grant", f"a lease of {ttl_s:g} s", lambda: self.server.grant(ttl_s))

    async def keep_alive(self, lease: int) -> float:
        """One attempt; the caller repeats it and keeps the deadline."""
        return await self._call("keep_alive", f"lease {lease:x}", lambda: self.server.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        """A lease that is gone already is revoked."""
        await self._retried("revoke", f"lease {lease:x}", lambda: self.server.revoke(lease))

    async def close(self) -> None:
        self._closed = True
        for subscription in self._subscriptions:
            subscription.end()

    def abandon(self) -> None:
        """The client's process died: its streams are gone, nobody reads them."""
        self._closed = True
        for subscription in self._subscriptions:
            subscription.close()

    async def _retry(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return await requests.retry(call, what, self._retry_s, self.faults.source)

    async def _retried(self, request: str, subject: str, operation: Callable[[], T]) -> T:
        return await self._retry(lambda: self._call(request, subject, operation), f"{request} of {subject}")

    async def _call(self, request: str, subject: str, operation: Callable[[], T]) -> T:
        """One request over the network: there, the operation, and back."""
        self._check_open()
        what = f"{request} of {subject}"
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._timeout_s
        fault = self.faults.draw(request)
        there = self.faults.delay()
        if fault is Fault.FAIL_BEFORE:
            await asyncio.sleep(0)
            raise CoordinationUnavailable(f"{what}: the connection was refused")
        if fault is Fault.LATE or there >= self._timeout_s:
            # In a context of its own: what is under way arrives even if its sender has died.
            late = max(there, self._timeout_s) + self.faults.delay()
            loop.call_later(late, self._arrive_late, operation, what, context=contextvars.Context())
            await self._time_out(give_up, what)
        await asyncio.sleep(there)
        if self.faults.partitioned:
            await self._time_out(give_up, what)
        if not self.server.running:
            raise CoordinationUnavailable(f"{what}: the connection was refused, etcd is down")
        result = operation()
        back = self.faults.delay()
        if fault is Fault.DROP_REPLY or loop.time() + back >= give_up:
            await self._time_out(give_up, what)
        await asyncio.sleep(back)
        if self.faults.partitioned:
            await self._time_out(give_up, what)
        return result

    def _arrive_late(self, operation: Callable[[], object], what: str) -> None:
        if self.faults.partitioned or not self.server.running:
            return
        try:
            operation()
        except Exception as error:  # the server's answer to a caller who no longer listens
            log.debug("%s: refused after its caller gave up: %s", what, error)

    async def _time_out(self, at: float, what: str) -> NoReturn:
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        raise CoordinationUnavailable(f"{what}: no answer in {self._timeout_s:g} s")

    def _check_open(self) -> None:
        if self._closed:
            raise requests.closed("the in-process etcd")

    async def _range_once(self, prefix: str, page: int) -> Snapshot:
        items: list[KeyValue] = []
        after, revision = "", 0
        while True:
            at, key = revision, after
            answer = await self._call("range", prefix, lambda: self.server.page(prefix, key, page, at))  # noqa: B023
            revision = answer.revision
            items.extend(answer.items)
            if not answer.more:
                return Snapshot(tuple(items), revision)
            after = answer.items[-1].key

    async def _subscribe(self, prefix: str, seen: int) -> Subscription:
        made: list[Subscription] = []

        def subscribe() -> Subscription:
            made.append(self.server.subscribe(prefix, seen))
            return made[-1]

        try:
            subscription = await self._call("watch", prefix, subscribe)
        except BaseException:
            for unused in made:
                unused.close()
            raise
        self._subscriptions[subscription] = None
        return subscription

    async def _next_batch(self, subscription: Subscription) -> tuple[Change, ...] | None:
        """None when the stream broke: the server restarted, or the network did not let a change through."""
        batch = await subscription.next()
        delay = self.faults.delay()
        if delay:
            await asyncio.sleep(delay)
        self._check_open()
        return None if self.faults.partitioned else batch
