"""The twins as one process reaches them: every call goes through the process's gate, and its own faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from laminar.buffer.coordination import KeyValue, Snapshot, Transaction, TransactionResult, WatchEvent
from laminar.buffer.files import FileInfo, StorageFull
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.memory_files import MemoryStorage
from laminar.buffer.memory_table import MemoryTable
from laminar.errors import StoreError
from laminar.simulator.process import SimProcess

T = TypeVar("T")


class EtcdPort:
    """One process's connection to etcd."""

    def __init__(self, process: SimProcess, server: MemoryEtcd, faults: Faults) -> None:
        self.process = process
        self.faults = faults
        self.client = MemoryCoordination(server, faults)
        process.on_death.append(self.client.abandon)

    async def get(self, key: str) -> KeyValue | None:
        return await self.process.gate(lambda: self.client.get(key))

    async def range(self, prefix: str, *, page: int = 1000) -> Snapshot:
        return await self.process.gate(lambda: self.client.range(prefix, page=page))

    async def put(self, key: str, value: str, *, lease: int = 0) -> int:
        return await self.process.gate(lambda: self.client.put(key, value, lease=lease))

    async def delete(self, key: str) -> bool:
        return await self.process.gate(lambda: self.client.delete(key))

    async def transact(self, transaction: Transaction) -> TransactionResult:
        return await self.process.gate(lambda: self.client.transact(transaction))

    def watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        return self.client.watch(prefix)

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        return await self.process.gate(lambda: self.client.grant(ttl_s))

    async def keep_alive(self, lease: int) -> float:
        return await self.process.gate(lambda: self.client.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self.process.gate(lambda: self.client.revoke(lease))

    async def close(self) -> None:
        await self.client.close()


class StorageFaults:
    """What the store's file system does to one process. `full`: no space; `failing`: probability that a call fails
    before it did anything; `delay_s`: range of a call's duration."""

    def __init__(self, source: random.Random, delay_s: tuple[float, float] = (0.0005, 0.005)) -> None:
        self.source = source
        self.delay_s = delay_s
        self.failing = 0.0
        self.full = False
        self.injected = 0

    def check(self, verb: str, path: str) -> None:
        """Raises StoreError, as the storage would."""
        writes = verb in ("write", "append")
        if self.full and writes:
            self.injected += 1
            raise StorageFull(f"cannot write {path}: no space; free space")
        if self.failing and self.source.random() < self.failing:
            self.injected += 1
            raise StoreError(f"cannot {verb} {path}: input/output error")


class StoragePort:
    """One process's view of the store's files."""

    def __init__(self, process: SimProcess, disk: MemoryStorage, faults: StorageFaults) -> None:
        self.process = process
        self.disk = disk
        self.faults = faults
        self.url = disk.url
        self.local = disk.local
        self.supports_append = disk.supports_append

    def absolute(self, path: str) -> str:
        return self.disk.absolute(path)

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        await self._call("write", path, lambda: self.disk.write(path, data, overwrite=overwrite))

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        process = self.process
        if process.crash is not None and process.crash[0] == process.calls + 1 and len(data) > 1:
            # A process that dies in an append leaves any part of it.
            part = data[: self.faults.source.randrange(1, len(data))]
            await self._call("append", path, lambda: self.disk.append(path, part, sync=sync))
        await self._call("append", path, lambda: self.disk.append(path, data, sync=sync))

    async def read(self, path: str) -> bytes:
        return await self._call("read", path, lambda: self.disk.read(path))

    async def exists(self, path: str) -> bool:
        return await self._call("exists", path, lambda: self.disk.exists(path))

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        return await self._call("list", prefix, lambda: self.disk.list(prefix, temporary=temporary))

    async def delete(self, path: str) -> None:
        await self._call("delete", path, lambda: self.disk.delete(path))

    async def delete_tree(self, path: str) -> None:
        await self._call("delete_tree", path, lambda: self.disk.delete_tree(path))

    async def free_bytes(self) -> int | None:
        return await self._call("free_bytes", "", self.disk.free_bytes)

    async def probe(self) -> None:
        await self._call("probe", "", self.disk.probe)

    async def _call(self, verb: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        async def slow() -> T:
            await _pause(self.process, self.faults)
            self.faults.check(verb, path)
            return await call()

        return await self.process.gate(slow)


class TablePort:
    """One process's view of a committed table. Opening it sets an unreadable newest version aside: Lance's is passed
    over until the next commit does so, which its users cannot tell from this."""

    def __init__(
        self, process: SimProcess, table: MemoryTable, faults: StorageFaults, unanswered: dict[MemoryTable, int]
    ) -> None:
        """`unanswered`: the version of each table whose commit was made and not acknowledged; a power cut may make it
        unreadable."""
        self.process = process
        self.table = table
        self.faults = faults
        self.unanswered = unanswered
        self.schema = table.schema
        table.repair()

    async def version(self) -> int:
        return await self._call("version", self.table.version)

    async def commit(self, rows: pa.Table, *, target: int, key: str) -> int:
        async def commit() -> int:
            version = await self.table.commit(rows, target=target, key=key)
            self.unanswered[self.table] = version
            await _pause(self.process, self.faults)
            self.unanswered.pop(self.table, None)
            return version

        return await self._call("write", commit)

    async def find(self, key: str, *, within: int = 100) -> int | None:
        async def find() -> int | None:
            found = await self.table.find(key, within=within)
            if found is not None and found >= self.unanswered.get(self.table, found):
                self.unanswered.pop(self.table, None)  # what is found is durable
            return found

        return await self._call("read", find)

    async def count(self) -> int:
        return await self._call("read", self.table.count)

    async def read(
        self, columns: Sequence[str] | None = None, filter: str | None = None, limit: int | None = None
    ) -> pa.Table:
        return await self._call("read", lambda: self.table.read(columns, filter, limit))

    async def scan_since(self, commit_seq: int, columns: Sequence[str] | None = None) -> pa.Table:
        return await self._call("read", lambda: self.table.scan_since(commit_seq, columns))

    async def compact(self, *, keep: int) -> int:
        return await self._call("write", lambda: self.table.compact(keep=keep))

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        async def slow() -> T:
            await _pause(self.process, self.faults)
            self.faults.check(verb, "the table")
            return await call()

        return await self.process.gate(slow)


async def _pause(process: SimProcess, faults: StorageFaults) -> None:
    await asyncio.sleep(faults.source.uniform(*faults.delay_s))
