"""Carries a recovery out: whatever instant it dies at, the old state stands, or the new one, and it can begin again.

    1  `recovering` is held under a lease: one recovery at a time, and no worker joins meanwhile
    2  whoever still works is fenced out: leases are revoked, and each table gets an empty version, so that what a
       committer had announced finds its target taken
    3  the store is read, the plan made; segments of which only some rows count are written anew
    4  the keys of a new generation are written; nobody reads them yet
    5  run.json, then the manifest name the new generation: this is the moment at which it counts
    6  the keys of older generations are deleted

An attempt that died leaves files and keys that nothing refers to, and the next one takes another generation.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from laminar.buffer.coordination import (
    Coordination,
    Delete,
    KeyValue,
    Operation,
    Put,
    Transaction,
    absent,
    created_at,
    unchanged,
)
from laminar.buffer.keys import Keys, generation_of
from laminar.buffer.manifest import RunFile, write_run
from laminar.buffer.records import RunManifest
from laminar.buffer.recovery import Known, Recovery, records
from laminar.buffer.segments import encode
from laminar.buffer.session import Session, transact_or_read_back
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table, TargetTaken
from laminar.errors import ConfigError, Fenced, StoreError

log = logging.getLogger(__name__)

LEASE_S = 15.0
BATCH = 100
"""Keys of one transaction; etcd's limit is 128."""
BATCH_BYTES = 512 << 10
FENCE_TRIES = 10

MakePlan = Callable[[Known, int], Awaitable[Recovery]]
"""Reads the store and plans for this generation."""


def next_generation(file: RunFile, manifest: RunManifest | None, items: Iterable[KeyValue]) -> int:
    """Above any that run.json, the manifest or a key of this run names."""
    numbers = [generation_of(kv.key) or 0 for kv in items]
    return 1 + max([file.generation, manifest.generation if manifest else 0, *numbers])


class Rebuilder:
    """One attempt at a recovery, under a lease of its own; `lock` is what it holds of the run."""

    def __init__(
        self, coordination: Coordination, storage: Storage, tables: Mapping[str, Table], file: RunFile,
        manifest: RunManifest, session: Session, lock: KeyValue,
    ) -> None:  # fmt: skip
        self.coordination = coordination
        self.storage = storage
        self.tables = tables
        self.file = file
        self.manifest = manifest
        self.session = session
        self.lock = lock

    @classmethod
    async def begin(
        cls, coordination: Coordination, storage: Storage, tables: Mapping[str, Table], file: RunFile,
        manifest: RunManifest,
    ) -> Rebuilder:  # fmt: skip
        """`manifest` is what etcd shall say of the run, but for its generation. Raises ConfigError if another recovery
        of this run is at work."""
        key, value = Keys(file.run).recovering, secrets.token_hex(8)
        session = await Session.open(coordination, LEASE_S)

        async def committed() -> bool:
            kv = await coordination.get(key)
            return kv is not None and kv.value == value

        try:
            put = Put(key, value, session.lease)
            await transact_or_read_back(coordination, Transaction((absent(key),), (put,)), committed=committed)
            lock = await coordination.get(key)
            if lock is None or lock.value != value:
                raise ConfigError(
                    f"another recovery of run {file.run!r} is at work ({key} in etcd); if it has died, its lease ends "
                    f"within {LEASE_S:.0f} s: try again then"
                )
        except BaseException:
            await session.close()
            raise
        return cls(coordination, storage, tables, file, manifest, session, lock)

    async def close(self) -> None:
        await self.session.close()

    async def rebuild(self, make_plan: MakePlan) -> tuple[Recovery, Keys]:
        """Returns what was rebuilt, and the keys of the generation that the run has now. Raises Fenced if this
        attempt lost its lease: nothing of it counts then."""
        root = Keys(self.file.run)
        items = (await self.coordination.range(root.root)).items
        manifest = next((kv for kv in items if kv.key == root.manifest), None)
        old = RunManifest.parse(manifest.value) if manifest else None
        keys = Keys(self.file.run, next_generation(self.file, old, items))
        await self._fence(items, keys.generation)
        known = Known()
        if old is not None:
            before = Keys(self.file.run, old.generation)
            known = Known.of((await self.coordination.range(before.prefix)).items, before)
        recovery = await make_plan(known, keys.generation)
        for segment in recovery.segments:
            if segment.rewritten is not None:
                batches = segment.rewritten.combine_chunks().to_batches()
                data = encode(segment.rewritten.schema, batches)
                for path in segment.incoming().files:
                    await self.storage.write(path, data, overwrite=True)
        await self._put(records(recovery, keys))
        await write_run(self.storage, self.file.model_copy(update={"generation": keys.generation}), overwrite=True)
        await self._switch(keys, manifest)
        await self._sweep(keys)
        return recovery, keys

    async def _fence(self, items: Iterable[KeyValue], generation: int) -> None:
        """After this nobody of an older generation can write: not to etcd, nor to a table."""
        leases = {kv.lease for kv in items if kv.lease and generation_of(kv.key) is not None}
        for lease in sorted(leases):
            await self.coordination.revoke(lease)
        if leases:
            log.warning("revoked the leases of %d workers of older generations", len(leases))
        for name, table in self.tables.items():
            await _take_next_version(name, table, f"recovery/{generation}/{self.lock.value}")

    async def _put(self, operations: Sequence[Operation]) -> None:
        for part in _parts(operations):
            await self._write(part)

    async def _write(self, operations: Sequence[Operation], also: Sequence[KeyValue] = ()) -> None:
        last = operations[-1]

        async def committed() -> bool:
            kv = await self.coordination.get(last.key)
            return kv is not None and kv.value == last.value if isinstance(last, Put) else kv is None

        guards = (created_at(self.lock.key, self.lock.create_revision), *(unchanged(kv) for kv in also))
        if not await transact_or_read_back(
            self.coordination, Transaction(guards, tuple(operations)), committed=committed
        ):
            raise Fenced(f"this recovery lost {self.lock.key}: nothing of it counts; run `laminar recover` again")

    async def _switch(self, keys: Keys, old: KeyValue | None) -> None:
        record = self.manifest.model_copy(update={"generation": keys.generation})
        await self._write([Put(keys.manifest, record.dump())], [old] if old else [])

    async def _sweep(self, keys: Keys) -> None:
        found = (await self.coordination.range(keys.root)).items
        await self._put([Delete(kv.key) for kv in found if generation_of(kv.key) not in (None, keys.generation)])


async def _take_next_version(name: str, table: Table, key: str) -> None:
    for _ in range(FENCE_TRIES):
        try:
            await table.commit(table.schema.empty_table(), target=await table.version() + 1, key=key)
            return
        except TargetTaken as e:
            log.info("the table %s went on while it was fenced: %s", name, e)
    raise StoreError(
        f"the table {name} gets new versions all the time ({FENCE_TRIES} tries to fence it off): a committer of "
        "another etcd is at work on this store; stop it"
    )


def _parts(operations: Sequence[Operation]) -> list[list[Operation]]:
    """As many as fit into one transaction each."""
    parts: list[list[Operation]] = []
    size = 0
    for operation in operations:
        more = len(operation.key) + (len(operation.value.encode()) if isinstance(operation, Put) else 0)
        if not parts or len(parts[-1]) == BATCH or size + more > BATCH_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(operation)
        size += more
    return parts
