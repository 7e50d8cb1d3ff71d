"""Decided batches: what a step means, for ever; and the rows that a trained step leaves.

`batches/<step>-<boot id>.arrow` holds all rows that the step consumes, with `use` = 'train' or the reason of
retiring; it is written once, before one transaction makes it the batch of that step. The decision is copied beside
it as JSON, so that a replay needs no etcd. `incoming/steps/step-<n>` and `incoming/step_metrics/step-<n>` are
registered in the transaction that raises the trainer's `step`: a replayed step adds nothing twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from laminar.buffer.coordination import Coordination, KeyValue, Operation, Put, Transaction, absent, unchanged
from laminar.buffer.experience import incoming_path
from laminar.buffer.keys import Keys, step_name
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import BatchDecision, Incoming, TrainerHead
from laminar.buffer.schema import EXPERIENCE, TABLES
from laminar.buffer.segments import encode, read_segment
from laminar.buffer.session import transact_or_read_back
from laminar.buffer.storage import AlreadyExists, Storage
from laminar.errors import CorruptSegment, StoreError

BATCH = EXPERIENCE.append(pa.field("use", pa.string()))


@dataclass(frozen=True)
class DecidedBatch:
    decision: BatchDecision
    rows: pa.Table

    def of_use(self, use: str) -> list[dict[str, Any]]:
        return [r for r in self.rows.to_pylist() if r["use"] == use]


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

    async def decide(self, step: int, rows: pa.Table, trained: Sequence[int], retired: dict[int, str]) -> DecidedBatch:
        """Write the batch file, then make it the batch of `step`; raises `consumed_groups` in the same transaction."""
        head, _ = await self.head()
        if head.decided != step:
            raise StoreError(f"batch {step} cannot be decided: {head.decided} batches are decided")
        decision = await self._write_batch(f"{step:09d}", step, rows, trained, retired)
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

    async def close(self, rows: pa.Table, retired: dict[int, str], reason: str) -> None:
        """End the run: what is left over is retired by a record of its own, in the transaction that says `done`."""
        head, _ = await self.head()
        puts: list[Operation] = []
        if retired:
            decision = await self._write_batch(f"closing-{head.decided:09d}", head.decided, rows, [], retired)
            puts = [Put(f"{self.keys.closings}{step_name(head.decided)}", decision.dump())]
            path = f"batches/closing-{head.decided:09d}.json"
            await self.storage.write(path, decision.dump().encode(), overwrite=True)
        consumed = head.consumed_groups + len(retired)
        await self.change_head(puts, state="done", reason=reason, consumed_groups=consumed, to_retire=0)

    async def _write_batch(
        self, name: str, step: int, rows: pa.Table, trained: Sequence[int], retired: dict[int, str]
    ) -> BatchDecision:
        path = f"batches/{name}-{self.ledger.name}.arrow"
        data = encode(BATCH, rows.cast(BATCH).combine_chunks().to_batches())
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
        """What earlier endings of the run retired: a run that was done may have been given more steps."""
        return [BatchDecision.parse(kv.value) for kv in (await self.coordination.range(self.keys.closings)).items]

    async def copy_decision(self, decision: BatchDecision) -> None:
        await self.storage.write(f"{decision_path(decision.step)}", decision.dump().encode(), overwrite=True)

    async def decision(self, step: int) -> BatchDecision:
        kv = await self.coordination.get(self.keys.batch(step))
        if kv is not None:
            return BatchDecision.parse(kv.value)
        return await read_decision(self.storage, step)

    async def read(self, step: int) -> DecidedBatch:
        return await read_batch(self.storage, await self.decision(step))

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

    async def _register(self, table: str, step: int, boot: str, rows: Sequence[dict[str, Any]]) -> Put:
        schema = TABLES[table]
        name = "initial" if step < 0 else f"step-{step:09d}"
        path = incoming_path(table, f"{boot}-{name}")
        batch = pa.RecordBatch.from_pylist(list(rows), schema=schema)
        await self.storage.write(path, encode(schema, [batch]), overwrite=True)
        incoming = Incoming(table=table, path=path, rows=len(rows), worker=boot)
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


async def read_decision(storage: Storage, step: int) -> BatchDecision:
    """From the copy beside the batch file."""
    try:
        return BatchDecision.parse((await storage.read(decision_path(step))).decode())
    except FileNotFoundError as e:
        raise StoreError(f"no decision of step {step} in etcd nor at {decision_path(step)}") from e


async def read_batch(storage: Storage, decision: BatchDecision) -> DecidedBatch:
    """Raises CorruptSegment if the file is not byte for byte what was decided."""
    data = await storage.read(decision.file)
    digest = hashlib.sha256(data).hexdigest()
    if digest != decision.sha256:
        raise CorruptSegment(
            f"{decision.file} has sha256 {digest[:16]}…, decided was {decision.sha256[:16]}…; "
            f"restore the file, step {decision.step} cannot be trained without it"
        )
    contents = read_segment(data, BATCH, complete=True)
    return DecidedBatch(decision, pa.Table.from_batches(contents.batches, schema=BATCH))
