"""What every implementation of `Coordination` does around a request: etcd's limits, and retries with back-off."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from laminar.buffer.coordination import (
    MAX_REQUEST_BYTES,
    MAX_TXN_OPERATIONS,
    Delete,
    Operation,
    Put,
    Transaction,
)
from laminar.errors import CoordinationError, CoordinationFull, CoordinationUnavailable

log = logging.getLogger(__name__)

OPERATION_OVERHEAD = 32
"""Bytes of framing of one key-value operation in a request, rounded up."""

T = TypeVar("T")


class Backoff:
    """Waits of 50 ms that double to 1 s, each between half and one and a half times that, so that clients spread."""

    def __init__(self, source: random.Random, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._source = source
        self._first = first_s
        self._most = most_s
        self._next = first_s

    def reset(self) -> None:
        self._next = self._first

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        wait = self._next * (0.5 + self._source.random())
        self._next = min(self._next * 2, self._most)
        return wait


async def retry(call: Callable[[], Awaitable[T]], what: str, within_s: float, source: random.Random) -> T:
    """Repeat a call that is safe to repeat while etcd is unavailable; the last attempt begins `within_s` seconds in.

    A wait is cut short at the limit, so that an outage that ends before it is always seen to have ended.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    backoff = Backoff(source)
    attempts = 0
    while True:
        attempts += 1
        try:
            return await call()
        except CoordinationUnavailable as error:
            wait = min(backoff.next(), started + within_s - loop.time())
            if wait <= 0:
                if isinstance(error, CoordinationFull):
                    raise
                raise CoordinationUnavailable(
                    f"{what}: no answer in {loop.time() - started:.1f} s, {attempts} attempts, limit {within_s:g} s; "
                    f"last: {error}. Check that etcd runs and is reachable"
                ) from error
            log.debug("%s: attempt %d failed (%s), again in %.2f s", what, attempts, error, wait)
        await asyncio.sleep(wait)


def closed(name: str) -> CoordinationError:
    return CoordinationError(f"the client of {name} has been closed")


def check_key(key: str) -> None:
    if not key:
        raise CoordinationError("a key in etcd must not be empty")


def check_put(key: str, value: str) -> None:
    """Raise CoordinationError if the request would be larger than etcd takes."""
    check_key(key)
    _check_size(_bytes(Put(key, value)), f"put of {key}")


def check_transaction(transaction: Transaction) -> None:
    """Raise CoordinationError for what etcd would refuse: too many operations or bytes, one key written twice."""
    first = _first_key(transaction)
    what = f"transaction on {first}"
    for name, entries in (
        ("compares", transaction.compare),
        ("success operations", transaction.success),
        ("failure operations", transaction.failure),
    ):
        if len(entries) > MAX_TXN_OPERATIONS:
            raise CoordinationError(
                f"{what}: {len(entries)} {name}, etcd takes {MAX_TXN_OPERATIONS} at most; split it into several"
            )
    for branch in (transaction.success, transaction.failure):
        _check_written_once(branch, what)
    for compare in transaction.compare:
        check_key(compare.key)
    size = sum(OPERATION_OVERHEAD + len(c.key.encode()) + len(str(c.target).encode()) for c in transaction.compare)
    _check_size(size + sum(_bytes(o) for o in (*transaction.success, *transaction.failure)), what)


def _first_key(transaction: Transaction) -> str:
    for entries in (transaction.compare, transaction.success, transaction.failure):
        if entries:
            return entries[0].key
    raise CoordinationError("an empty transaction says nothing; give it a compare or an operation")


def _check_written_once(operations: tuple[Operation, ...], what: str) -> None:
    put: set[str] = set()
    deleted: set[str] = set()
    for operation in operations:
        check_key(operation.key)
        if isinstance(operation, Put):
            if operation.key in put or operation.key in deleted:
                raise CoordinationError(f"{what}: writes {operation.key} twice, etcd takes one write of a key")
            put.add(operation.key)
        elif isinstance(operation, Delete):
            if operation.key in put:
                raise CoordinationError(f"{what}: puts and deletes {operation.key}, etcd takes one write of a key")
            deleted.add(operation.key)


def _bytes(operation: Operation) -> int:
    value = len(operation.value.encode()) if isinstance(operation, Put) else 0
    return OPERATION_OVERHEAD + len(operation.key.encode()) + value


def _check_size(size: int, what: str) -> None:
    if size > MAX_REQUEST_BYTES:
        raise CoordinationError(
            f"{what}: {size} bytes, etcd takes {MAX_REQUEST_BYTES} in one request; etcd holds pointers, put the data "
            "into the store"
        )
