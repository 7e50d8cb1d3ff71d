"""Moves durable incoming segments into the committed tables: the one committer's state machine.

    idle ──intent──▶ announced ──table commit──▶ committed ──unregister──▶ idle
          (etcd: target V+1, key, segments)      (Lance)     (etcd: head, incoming keys deleted)

The intent is written under the committer's leadership before the table is touched, and names the version that
the commit will have. A successor resolves what it finds (`resolve`): the key is in the table's history ->
unregister; the target is still free -> commit the same rows under the same key; the target was taken by something
else -> the intent is void. So rows enter a table exactly once, whichever instant a committer dies at.
`commit_seq` numbers rows from the head's row count on, in the intent's order: a repeated commit gives equal rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from laminar.buffer.claims import reissued
from laminar.buffer.coordination import Coordination, Delete, KeyValue, Operation, Put, Transaction, absent, unchanged
from laminar.buffer.incoming import delete_incoming, read_incoming
from laminar.buffer.keys import Keys, parse_trajectory
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import Incoming, Intent, TableHead
from laminar.buffer.session import transact_or_read_back
from laminar.buffer.storage import NotFound, Storage
from laminar.buffer.table import Table, TargetTaken
from laminar.errors import CorruptSegment, Fenced, StoreError

log = logging.getLogger(__name__)

MAX_SEGMENTS = 100
COMPACT_EVERY = 200
"""Commits, of any committer's life, after which a table is compacted: it has a few files for each commit since."""
COMPACT_AGAIN_AFTER = 20
"""Commits, after a compaction that failed."""
KEEP_VERSIONS = 20


class Resolution(Enum):
    UNREGISTER = "its key is in the table's history"
    COMMIT = "its target is still free"
    VOID = "its target was taken by something else"


def resolve(intent: Intent, found_at: int | None, table_version: int) -> Resolution:
    """What a committer must do about an announced commit, from the table alone. `table_version` was read before the
    look for its key: what became of a target that was taken by then is final, what comes later is refused."""
    if found_at is not None:
        return Resolution.UNREGISTER
    return Resolution.COMMIT if table_version < intent.target else Resolution.VOID


@dataclass(frozen=True)
class Registered:
    id: str
    kv: KeyValue
    incoming: Incoming


class TableCommitter:
    """Commits one table's incoming segments. `ledger.actor` is the committer's leadership."""

    def __init__(
        self, name: str, schema: pa.Schema, table: Table, coordination: Coordination, keys: Keys, ledger: Ledger,
        storage: Storage, *, compact_every: int = COMPACT_EVERY,
    ) -> None:  # fmt: skip
        self.name = name
        self.schema = schema
        self.table = table
        self.coordination = coordination
        self.keys = keys
        self.ledger = ledger
        self.storage = storage
        self.compact_every = compact_every
        self.compactions = 0
        self._compact_again_at = 0
        self._copies_used: set[str] = set()
        """First files of segments of which it was said that their copy is used: a commit reads each several times."""

    async def head(self) -> tuple[TableHead, KeyValue | None]:
        kv = await self.coordination.get(self.keys.head(self.name))
        return (TableHead.parse(kv.value) if kv else TableHead(lance_version=0, rows=0)), kv

    async def registered(self) -> list[Registered]:
        """Oldest first (by registration)."""
        prefix = self.keys.incoming_table(self.name)
        snapshot = await self.coordination.range(prefix)
        kvs = sorted(snapshot.items, key=lambda kv: kv.create_revision)
        return [Registered(kv.key[len(prefix) :], kv, Incoming.parse(kv.value)) for kv in kvs]

    async def run_once(self) -> int:
        """Resolve what is announced, then commit one batch of segments. Rows committed (0: nothing to do)."""
        head, kv = await self.head()
        waiting = await self.registered()
        if head.committing is not None:
            return await self._finish_announced(head, kv, waiting)
        if not waiting:
            return 0
        if head.lance_version >= max(head.compacted + self.compact_every, self._compact_again_at):
            await self._compact(head, kv)
            head, kv = await self.head()
        batch = await self._readable(waiting[:MAX_SEGMENTS])
        if not batch:
            return 0
        intent = Intent(
            target=await self.table.version() + 1, key=f"{self.ledger.nonce()}", segments=[r.id for r in batch]
        )
        announced = head.model_copy(update={"committing": intent})
        await self._put_head(announced, kv)
        head, kv = await self.head()
        return await self._finish_announced(head, kv, waiting)

    async def _put_head(self, head: TableHead, kv: KeyValue | None, *also: Operation) -> None:
        key = self.keys.head(self.name)
        transaction = Transaction(
            (self.ledger.actor.guard(), unchanged(kv) if kv else absent(key)), (Put(key, head.dump()), *also)
        )

        async def committed() -> bool:
            now = await self.coordination.get(key)
            return now is not None and now.value == head.dump()

        if not await transact_or_read_back(self.coordination, transaction, committed=committed):
            await self.ledger.check_fence()
            raise Fenced(f"the head of table {self.name!r} was changed by somebody else; this committer stands back")

    async def _finish_announced(self, head: TableHead, kv: KeyValue | None, waiting: Sequence[Registered]) -> int:
        intent, by_id = head.committing, {r.id: r for r in waiting}
        if intent is None or not by_id.keys() >= set(intent.segments):
            await self.ledger.check_fence()
            raise Fenced(f"what was announced of table {self.name!r} is resolved already; this committer stands back")
        segments = [by_id[s] for s in intent.segments]
        # In this order: a late commit that lands after the look at the version finds its target free no more than we
        # do, and one that landed before it is found. The other way round it could land in between, unseen.
        version = await self.table.version()
        found = await self.table.find(intent.key)
        if resolve(intent, found, version) is Resolution.COMMIT:
            found = await self._commit(intent, segments, head.rows)
        if found is None:
            log.warning("table %s: the announced commit %s is void: %s", self.name, intent.key, Resolution.VOID.value)
            await self._put_head(head.model_copy(update={"committing": None}), kv)
            return 0
        count = sum(s.incoming.rows for s in segments)
        await self._put_head(
            head.model_copy(update={"lance_version": found, "rows": head.rows + count, "committing": None}),
            kv,
            *(Delete(self.keys.incoming(self.name, s)) for s in intent.segments),
        )
        for segment in segments:
            await delete_incoming(self.storage, segment.incoming)
            self._copies_used.discard(segment.incoming.path)
        return count

    async def _commit(self, intent: Intent, segments: Sequence[Registered], first_seq: int) -> int | None:
        """The version that holds the announced rows; None if the target has become something else."""
        try:
            rows, key = await self._rows(segments, first_seq), intent.key
        except CorruptSegment as e:
            log.error("table %s: %s after its commit was announced", self.name, e)
            # Who announced it may only be slow, and have read it: the target is taken before the intent is given up.
            rows, key = self.schema.empty_table(), f"{intent.key}/void"
        await self.ledger.check_fence()
        try:
            found = await self.table.commit(rows, target=intent.target, key=key)
        except TargetTaken:
            return await self.table.find(intent.key)
        return found if key == intent.key else None

    async def _rows(self, segments: Sequence[Registered], first_seq: int) -> pa.Table:
        batches: list[pa.RecordBatch] = []
        for segment in segments:
            batches += await self._read(segment)
        rows = pa.Table.from_batches(batches, schema=self.schema)
        seq = pa.array(range(first_seq, first_seq + rows.num_rows), pa.int64())
        return rows.set_column(self.schema.get_field_index("commit_seq"), self.schema.field("commit_seq"), seq)

    async def _read(self, segment: Registered) -> list[pa.RecordBatch]:
        path = segment.incoming.path
        try:
            found = await read_incoming(self.storage, segment.incoming, self.schema)
        except NotFound as e:
            raise CorruptSegment(f"{path} is registered and not there: {e}") from e
        if found.instead and path not in self._copies_used:
            self._copies_used.add(path)
            log.error("table %s: %s", self.name, found.instead)
        return list(found.batches)

    async def _readable(self, segments: Sequence[Registered]) -> list[Registered]:
        """Those that can be read; what the others held is issued again, as far as that can be."""
        good: list[Registered] = []
        for segment in segments:
            try:
                await self._read(segment)
                good.append(segment)
            except CorruptSegment as e:
                log.error("table %s: %s; %s", self.name, e, _consequence(segment.incoming))
                await self._reissue(segment)
        return good

    async def _reissue(self, segment: Registered) -> None:
        claim = reissued(term=1, version=0)
        puts: list[Operation] = [
            Put(self.keys.claim(*parse_trajectory(name)), claim.dump()) for name in segment.incoming.trajectories
        ]
        if (request := segment.incoming.evaluation) is not None:
            puts.append(Put(f"{self.keys.evaluations}{request.version:09d}", request.dump()))
        await self.coordination.transact(
            Transaction((self.ledger.actor.guard(), unchanged(segment.kv)), (Delete(segment.kv.key), *puts))
        )

    async def _compact(self, head: TableHead, kv: KeyValue | None) -> None:
        """Compaction rewrites no row, so a late one by a replaced committer does no harm; only the intent that it
        overtakes becomes void and is announced anew."""
        try:
            version = await self.table.compact(keep=KEEP_VERSIONS)
        except StoreError as e:
            # Commits need less than a compaction: they go on where it has no space, or meets a damaged old file.
            self._compact_again_at = head.lance_version + COMPACT_AGAIN_AFTER
            log.error("table %s: not compacted, tried again in %d commits: %s", self.name, COMPACT_AGAIN_AFTER, e)
            return
        await self._put_head(head.model_copy(update={"lance_version": version, "compacted": version}), kv)
        self.compactions += 1
        log.info("table %s: compacted at version %d", self.name, version)


def _consequence(incoming: Incoming) -> str:
    if incoming.trajectories:
        return "its trajectories are generated again"
    if incoming.evaluation is not None:
        return f"version {incoming.evaluation.version} is evaluated again, if its weights are still there"
    return f"its {incoming.rows} rows are lost"
