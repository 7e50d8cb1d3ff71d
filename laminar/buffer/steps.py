"""Decided batches: what a step means, for ever; and the rows that a trained step leaves.

`batches/<step>-<boot id>.arrow` holds all rows that the step consumes, with `use` = 'train' or the reason of
retiring; it is written once, before one transaction makes it the batch of that step. The decision is copied beside
it as JSON, so that a replay needs no etcd. `incoming/steps/step-<n>` and `incoming/step_metrics/step-<n>`, each in two
files (`incoming.py`), are registered in the transaction that raises the trainer's `step`: a replayed step adds nothing
twice. Decisions of old steps move to the archive (`archive.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from laminar.buffer.archive import BLOCK, archived_before, archived_paths, block_path, read_archive, read_block
from laminar.buffer.coordination import Coordination, Delete, KeyValue, Operation, Put, Transaction, absent, unchanged
from laminar.buffer.incoming import read_incoming, write_copied
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import BatchDecision, Incoming, TrainerHead
from laminar.buffer.schema import EXPERIENCE, TABLES
from laminar.buffer.segments import encode, read_segment
from laminar.buffer.session import transact_or_read_back
from laminar.buffer.storage import AlreadyExists, NotFound, Storage
from laminar.buffer.table import Table
from laminar.errors import CorruptSegment, StoreError

log = logging.getLogger(__name__)

BATCH = EXPERIENCE.append(pa.field("use", pa.string()))
CLOSING = re.compile(r"batches/closing-(\d+)(?:-\d+)?\.json")
CHECKPOINT = re.compile(r"checkpoints/step-(\d+)/checkpoint\.json")


@dataclass(frozen=True)
class DecidedBatch:
    decision: BatchDecision
    rows: pa.Table


class StepLog:
    """The trainer's write-ahead log. `ledger.actor` is the trainer's leadership; every write is under it."""

    def __init__(self, coordination: Coordination, keys: Keys, ledger: Ledger, storage: Storage) -> None:
        self.coordination = coordination
        self.keys = keys
        self.ledger = ledger
        self.storage = storage
        # Several tasks of one trainer change different fields of the head: one read-modify-write at a time.
        self._changing = asyncio.Lock()

    async def head(self) -> tuple[TrainerHead, KeyValue | None]:
        kv = await self.coordination.get(self.keys.trainer)
        fresh = TrainerHead(step=0, decided=0, checkpoint=-1, consumed_groups=0, state="running")
        return (TrainerHead.parse(kv.value) if kv else fresh), kv

    async def change_head(
        self, also: Sequence[Operation] = (), absent_keys: Sequence[str] = (), **changes: Any
    ) -> TrainerHead:
        """Change fields of the head, with other writes, in one guarded transaction. Raises Fenced if replaced."""
        async with self._changing:
            return await self._change_head(also, absent_keys, changes)

    async def _change_head(
        self, also: Sequence[Operation], absent_keys: Sequence[str], changes: dict[str, Any]
    ) -> TrainerHead:
        head, kv = await self.head()
        new = head.model_copy(update={**changes, "by": self.ledger.nonce()})
        compares = (
            self.ledger.actor.guard(),
            unchanged(kv) if kv else absent(self.keys.trainer),
            *(absent(k) for k in absent_keys),
        )

        async def committed() -> bool:
            now, _ = await self.head()
            return now.by == new.by

        transaction = Transaction(compares, (Put(self.keys.trainer, new.dump()), *also))
        if not await transact_or_read_back(self.coordination, transaction, committed=committed):
            await self.ledger.check_fence()
            raise StoreError(f"the trainer's head changed under its leader ({head} -> {new}); restart the trainer")
        return new

    async def decide(
        self, step: int, rows: pa.Table, trained: Sequence[int], retired: dict[int, str],
        settings: Mapping[str, Any] | None = None,
    ) -> DecidedBatch:  # fmt: skip
        """Write the batch file, then make it the batch of `step`; raises `consumed_groups` in the same transaction.
        `settings`: see `BatchDecision.settings`."""
        head, _ = await self.head()
        if head.decided != step:
            raise StoreError(f"batch {step} cannot be decided: {head.decided} batches are decided")
        decision = await self._write_batch(f"{step:09d}", step, rows, trained, retired)
        decision = decision.model_copy(update={"settings": dict(settings or {})})
        key = self.keys.batch(step)
        await self.change_head(
            [Put(key, decision.dump())],
            [key],
            decided=step + 1,
            consumed_groups=head.consumed_groups + len(trained) + len(retired),
            to_retire=0,
        )
        await self.copy_decision(decision)
        return await self.read(step)

    async def end_drawing(self) -> None:
        """From now on no group is drawn: the cursor stands still until `begin_drawing`."""
        await self.change_head([Put(self.keys.closed, self.ledger.name)])

    async def begin_drawing(self) -> None:
        """A run that was closed, or about to be, goes on."""
        if await self.coordination.get(self.keys.closed) is not None:
            await self.change_head([Delete(self.keys.closed)])

    async def close(self, rows: pa.Table, retired: dict[int, str], reason: str) -> None:
        """End the run: what is left over is retired by a record of its own, in the transaction that says `done` and
        forbids draws. A run may be closed several times: it was given more steps, or more prompts, in between."""
        head, _ = await self.head()
        puts: list[Operation] = [Put(self.keys.closed, self.ledger.name)]
        new: list[str] = []
        if retired:
            before = sum(d.step == head.decided for d in await self.closings())
            name = f"{head.decided:09d}-{before:03d}"
            decision = await self._write_batch(f"closing-{name}", head.decided, rows, [], retired)
            new = [f"{self.keys.closings}{name}"]
            puts.append(Put(new[0], decision.dump()))
        consumed = head.consumed_groups + len(retired)
        await self.change_head(puts, new, state="done", reason=reason, consumed_groups=consumed, to_retire=0)
        if retired:
            await self.storage.write(closing_path(new[0]), decision.dump().encode(), overwrite=True)

    async def _write_batch(
        self, name: str, step: int, rows: pa.Table, trained: Sequence[int], retired: dict[int, str]
    ) -> BatchDecision:
        path = f"batches/{name}-{self.ledger.name}.arrow"
        data = encoded(rows)
        try:
            await self.storage.write(path, data)
        except AlreadyExists as e:
            if await self.storage.read(path) != data:
                raise StoreError(
                    f"{path} holds another batch, which may have been decided as step {step}: it is not replaced; "
                    "restart the trainer"
                ) from e
        return BatchDecision(
            step=step,
            file=path,
            sha256=hashlib.sha256(data).hexdigest(),
            trained=list(trained),
            retired=retired,
            decided_by=self.ledger.name,
        )

    async def closings(self) -> list[BatchDecision]:
        """What earlier endings of the run retired."""
        in_etcd = {kv.key: kv.value for kv in (await self.coordination.range(self.keys.closings)).items}
        return await read_closings(self.storage, in_etcd)

    async def decisions(self) -> list[BatchDecision]:
        """What each decided step means, in order. Writes the copies that a trainer had no time for."""
        in_etcd = [BatchDecision.parse(kv.value) for kv in (await self.coordination.range(self.keys.batches)).items]
        archived = [s.decision for s in await read_archive(self.storage)]
        copies = {f.path for f in await self.storage.list("batches") if f.path.endswith(".json")}
        known = {d.step: d for d in (*archived, *in_etcd)}
        for decision in in_etcd:
            if decision.step >= len(archived) and decision_path(decision.step) not in copies:
                await self.copy_decision(decision)
        return [known[step] for step in sorted(known)]

    async def copy_decision(self, decision: BatchDecision) -> None:
        await self.storage.write(f"{decision_path(decision.step)}", decision.dump().encode(), overwrite=True)

    async def decision(self, step: int) -> BatchDecision:
        kv = await self.coordination.get(self.keys.batch(step))
        if kv is not None:
            return BatchDecision.parse(kv.value)
        return await read_decision(self.storage, step)

    async def read(self, step: int, experience: Table | None = None) -> DecidedBatch:
        return await read_batch(self.storage, await self.decision(step), experience)

    async def record(
        self, step: int, boot: str, samples: Sequence[dict[str, Any]], metrics: dict[str, Any], version: int,
        digest: str, at_us: int, also: Sequence[Operation] = (),
    ) -> None:  # fmt: skip
        """Register the step's rows and raise `step`, with other writes, once: a step that is already recorded changes
        nothing."""
        head, _ = await self.head()
        if head.step > step:
            return
        row = _metrics_row(step, version, digest, metrics, at_us)
        puts: list[Operation] = [await self._register("step_metrics", step, boot, [row])]
        if samples:
            puts.append(await self._register("steps", step, boot, samples))
        await self.change_head([*puts, *also], step=step + 1)

    async def record_initial(self, boot: str, digest: str, at_us: int, also: Sequence[Operation] = ()) -> None:
        """Step -1 made version 0: so each published digest is in `step_metrics`. Once, by the head's `initial`, with
        other writes."""
        head, _ = await self.head()
        if not head.initial:
            row = _metrics_row(-1, 0, digest, {}, at_us)
            await self.change_head([await self._register("step_metrics", -1, boot, [row]), *also], initial=True)

    async def digests(self, metrics: Table) -> dict[int, str]:
        """The digest under which each recorded version was published; `metrics` is the committed `step_metrics`. A
        version that was not published is left out, and so is a row that cannot be read before it is committed."""
        rows: list[dict[str, Any]] = []
        # Registered first: what is committed meanwhile is in the table then.
        for kv in (await self.coordination.range(self.keys.incoming_table("step_metrics"))).items:
            try:
                found = await read_incoming(self.storage, Incoming.parse(kv.value), TABLES["step_metrics"])
            except NotFound:
                continue
            except CorruptSegment as e:
                log.warning("the digest in %s is not known: %s", kv.key, e)
                continue
            if found.instead:
                log.warning("%s", found.instead)
            rows += [row for batch in found.batches for row in batch.to_pylist()]
        rows += (await metrics.read(columns=["version", "digest"])).to_pylist()
        return {row["version"]: row["digest"] for row in rows if row["digest"]}

    async def _register(self, table: str, step: int, boot: str, rows: Sequence[dict[str, Any]]) -> Put:
        name = "initial" if step < 0 else f"step-{step:09d}"
        made = pa.Table.from_pylist(list(rows), schema=TABLES[table])
        incoming = await write_copied(self.storage, table, f"{boot}-{name}", made, boot)
        return Put(self.keys.incoming(table, name), incoming.dump())


def _metrics_row(step: int, version: int, digest: str, metrics: dict[str, Any], at_us: int) -> dict[str, Any]:
    return {
        "step": step,
        "version": version,
        "digest": digest,
        "metrics": json.dumps(metrics),
        "at": at_us,
        "commit_seq": -1,
    }


def decision_path(step: int) -> str:
    return f"batches/{step:09d}.json"


def closing_path(key: str) -> str:
    """Where the copy of a closing lies: `key` is its name in etcd."""
    return f"batches/closing-{key.rsplit('/', 1)[-1]}.json"


def oldest_checkpoint(paths: Iterable[str]) -> int:
    """The version of the oldest complete checkpoint, before which nothing is replayed; 0 if there is none."""
    return min((int(m[1]) for path in paths if (m := CHECKPOINT.fullmatch(path))), default=0)


async def read_decision(storage: Storage, step: int) -> BatchDecision:
    """From the copy beside the batch file, or from the archive."""
    try:
        return BatchDecision.parse((await storage.read(decision_path(step))).decode())
    except NotFound:
        pass
    try:
        archived = await read_block(storage, block_path(step))
    except NotFound as e:
        raise NotFound(f"no decision of step {step} in etcd, at {decision_path(step)} nor in the archive") from e
    return archived[step % BLOCK].decision


async def read_closings(storage: Storage, in_etcd: Mapping[str, str]) -> list[BatchDecision]:
    """Closings by key and value in etcd, and those whose key was removed: their steps are archived."""
    found = {closing_path(key): BatchDecision.parse(value) for key, value in in_etcd.items()}
    before = archived_before(await archived_paths(storage))
    for file in await storage.list("batches"):
        if (m := CLOSING.fullmatch(file.path)) and int(m[1]) < before and file.path not in found:
            found[file.path] = BatchDecision.parse((await storage.read(file.path)).decode())
    return [found[path] for path in sorted(found)]


async def read_batch(
    storage: Storage, decision: BatchDecision, experience: Table | None = None
) -> DecidedBatch:
    """A file that was removed since it was old, or is damaged, is made again from the experience, if that is given.
    Raises CorruptSegment if the batch is not byte for byte what was decided."""
    try:
        data = await storage.read(decision.file)
        wrong, remedy = "damaged", "restore the file"
    except NotFound:
        if experience is None:
            raise
        data, wrong = b"", "not there"
    digest = hashlib.sha256(data).hexdigest()
    if digest != decision.sha256 and experience is not None:
        if wrong == "damaged":
            log.error("%s is damaged: the batch is made again from the experience", decision.file)
        data = encoded(await batch_rows(experience, uses_of(decision)))
        digest = hashlib.sha256(data).hexdigest()
        remedy = f"its file is {wrong}, and the experience gives other bytes: restore the file"
    if digest != decision.sha256:
        raise CorruptSegment(
            f"{decision.file} has sha256 {digest[:16]}…, decided was {decision.sha256[:16]}…; "
            f"{remedy}, step {decision.step} cannot be trained without it"
        )
    contents = read_segment(data, BATCH, complete=True, name=decision.file)
    return DecidedBatch(decision, pa.Table.from_batches(contents.batches, schema=BATCH))


def encoded(rows: pa.Table) -> bytes:
    """A batch file's content. Equal rows give equal bytes."""
    return encode(BATCH, rows.cast(BATCH).combine_chunks().to_batches())


def uses_of(decision: BatchDecision) -> dict[int, str]:
    return {**dict.fromkeys(decision.trained, "train"), **decision.retired}


async def batch_rows(experience: Table, uses: Mapping[int, str]) -> pa.Table:
    """The committed rows of these groups, with how the step uses them; in an order that only they determine."""
    rows = await experience.read(filter=f"group IN ({', '.join(str(g) for g in uses)})")
    rows = rows.append_column("use", pa.array([uses[g] for g in rows["group"].to_pylist()], pa.string()))
    return rows.sort_by([("group", "ascending"), ("sample", "ascending")])
