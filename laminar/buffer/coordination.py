"""The small interface to etcd: get, put, transactions, watches and leases.

Two implementations keep one contract (`tests/contract/test_coordination.py`): `etcd.EtcdCoordination`
and `memory.MemoryCoordination`. Everything that decides ownership is built from these few calls.

A call that raises `CoordinationUnavailable` may still have committed. Callers put a value unique to
themselves into every write and read it back before they try again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MAX_TXN_OPERATIONS = 128
"""etcd's default limit of compares or operations in one transaction (each list is counted alone)."""
MAX_REQUEST_BYTES = 1_572_864 - 512
"""etcd's default limit of one request is 1.5 MiB; with authentication it counts the user's name too."""


@dataclass(frozen=True)
class KeyValue:
    key: str
    value: str
    create_revision: int
    mod_revision: int
    lease: int = 0


@dataclass(frozen=True)
class Snapshot:
    """All keys under a prefix (sorted by key) as they were at one revision."""

    items: tuple[KeyValue, ...]
    revision: int


class Field(Enum):
    CREATE = "create_revision"
    MOD = "mod_revision"
    VALUE = "value"


@dataclass(frozen=True)
class Compare:
    """`field` of `key` equals `target`. A missing key has create_revision 0 and mod_revision 0."""

    key: str
    field: Field
    target: int | str


def absent(key: str) -> Compare:
    return Compare(key, Field.CREATE, 0)


def created_at(key: str, revision: int) -> Compare:
    return Compare(key, Field.CREATE, revision)


def unchanged(kv: KeyValue) -> Compare:
    return Compare(kv.key, Field.MOD, kv.mod_revision)


@dataclass(frozen=True)
class Put:
    key: str
    value: str
    lease: int = 0


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Get:
    key: str


Operation = Put | Delete | Get


@dataclass(frozen=True)
class Transaction:
    """If all compares hold, do `success`, else do `failure`; atomically, at one revision."""

    compare: tuple[Compare, ...]
    success: tuple[Operation, ...]
    failure: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class TransactionResult:
    """`gets` holds the answers of the executed branch's Get operations, in order (None: no such key)."""

    succeeded: bool
    revision: int
    gets: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True)
class Change:
    """One key's change, in revision order: `kv` is None when the key was deleted."""

    key: str
    kv: KeyValue | None
    revision: int


@dataclass(frozen=True)
class Listing:
    """The whole prefix again: at the start of a watch, and after a gap. Replace what you cached."""

    snapshot: Snapshot


WatchEvent = Listing | Change


class Coordination(Protocol):
    """Async; every call has a deadline and raises `CoordinationUnavailable` when it passes."""

    async def get(self, key: str) -> KeyValue | None: ...

    async def range(self, prefix: str, *, page: int = 1000) -> Snapshot:
        """Read a prefix in pages pinned at one revision (re-listed if that was compacted meanwhile)."""
        ...

    async def put(self, key: str, value: str, *, lease: int = 0) -> int:
        """Return the revision. Idempotent for equal values, so implementations retry it."""
        ...

    async def delete(self, key: str) -> bool: ...

    async def transact(self, transaction: Transaction) -> TransactionResult:
        """Never retried here: the caller knows how to read back. Raises `CoordinationError` beyond etcd's limits."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A `Listing`, then each `Change` exactly once in revision order; a new `Listing` after a compaction gap.
        Survives reconnects; ends only when the iterator is closed (`aclose`)."""
        ...

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        """Create a lease: its id and the TTL in seconds that the server gave."""
        ...

    async def keep_alive(self, lease: int) -> float:
        """Refresh once; the new TTL in seconds, 0 when the lease is gone."""
        ...

    async def revoke(self, lease: int) -> None: ...

    async def close(self) -> None: ...


def all_reads(keys: Sequence[str]) -> Transaction:
    """Read several keys at one revision."""
    return Transaction((), tuple(Get(k) for k in keys))
