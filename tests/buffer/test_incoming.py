"""What a step left lies in two files until it is committed: whichever is damaged, each row is there once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from laminar.buffer.commits import TableCommitter
from laminar.buffer.coordination import Put, Transaction
from laminar.buffer.incoming import copy_path, first_path
from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryEtcd
from laminar.buffer.schema import STEP_METRICS, TABLES
from laminar.buffer.steps import StepLog
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.errors import StoreError

KEYS = Keys("run")
Start = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Steps:
    """A trainer that has recorded one step, and the committer of one of its tables."""

    def __init__(self, start: Start, table: str) -> None:
        self.start = start
        self.name = table
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.table = MemoryTable(TABLES[table])
        self.files = tuple(f"{folder}/{table}/t-step-000000000.arrow" for folder in ("incoming", "incoming/copies"))

    @classmethod
    async def make(cls, start: Start, table: str) -> Steps:
        made = cls(start, table)
        trainer = await start(made.server, KEYS, "t", "trainer")
        made.log = StepLog(trainer.coordination, KEYS, trainer.ledger, made.storage)
        await made.log.record(0, "t", [STEP_ROW], {}, 1, "d1", 0)
        return made

    async def committer(self) -> TableCommitter:
        actor = await self.start(self.server, KEYS, "c", "committer")
        return TableCommitter(
            self.name, TABLES[self.name], self.table, actor.coordination, KEYS, actor.ledger, self.storage
        )

    def registered(self) -> bool:
        return self.server.get(KEYS.incoming(self.name, "step-000000000")) is not None

    async def left(self) -> list[str]:
        return [f.path for f in await self.storage.list("incoming") if f.path in self.files]


STEP_ROW = {
    "step": 0, "group": 0, "sample": 0, "advantage": 0.5, "staleness": 0, "tokens": 2, "mean_ratio": 1.0,
    "clip_fraction": None, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": -1,
}  # fmt: skip
OF_STEPS = pytest.mark.parametrize("table", ["steps", "step_metrics"])
HOW = pytest.mark.parametrize("how", ["flipped", "missing", "truncated"])


@HOW
@pytest.mark.parametrize("which", [0, 1], ids=["first", "copy"])
@OF_STEPS
async def test_what_a_step_left_is_committed_from_the_file_that_is_sound(
    start: Start, table: str, which: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = await Steps.make(start, table)
    await steps.storage.spoil(how, steps.files[which])
    assert await (await steps.committer()).run_once() == 1
    assert await steps.table.count() == 1 and not steps.registered() and await steps.left() == []
    said = [r.getMessage() for r in caplog.records if "its copy is used" in r.getMessage()]
    assert len(said) == (which == 0) and all(steps.files[0] in text for text in said), "once, though it is read twice"


@HOW
@OF_STEPS
async def test_what_a_step_left_is_lost_with_both_of_its_files(
    start: Start, table: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = await Steps.make(start, table)
    await steps.storage.spoil(how, *steps.files)
    assert await (await steps.committer()).run_once() == 0
    assert await steps.table.count() == 0 and not steps.registered()
    assert "its 1 rows are lost" in caplog.text and steps.files[0] in caplog.text


@OF_STEPS
@pytest.mark.parametrize("damaged", [0, 1], ids=["first", "copy"])
async def test_a_file_that_cannot_be_read_for_now_is_no_lost_one(start: Start, table: str, damaged: int) -> None:
    """The other is damaged: whether the rows are lost is known once the disk answers again."""
    steps = await Steps.make(start, table)
    await steps.storage.spoil("flipped", steps.files[damaged])

    def failing(verb: str, path: str) -> None:
        if verb == "read" and path == steps.files[1 - damaged]:
            raise StoreError(f"cannot read {path}: input/output error")

    steps.storage.fault = failing
    committer = await steps.committer()
    with pytest.raises(StoreError, match="input/output error"):
        await committer.run_once()
    assert steps.registered()
    steps.storage.fault = None
    assert await committer.run_once() == 1


@OF_STEPS
async def test_a_first_file_that_the_disk_does_not_give_is_read_from_its_copy(start: Start, table: str) -> None:
    steps = await Steps.make(start, table)

    def failing(verb: str, path: str) -> None:
        if verb == "read" and path == steps.files[0]:
            raise StoreError(f"cannot read {path}: input/output error")

    steps.storage.fault = failing
    assert await (await steps.committer()).run_once() == 1


@OF_STEPS
async def test_a_segment_of_before_there_were_copies_is_committed(start: Start, table: str) -> None:
    steps = await Steps.make(start, table)
    key = KEYS.incoming(table, "step-000000000")
    kv = steps.server.get(key)
    assert kv is not None
    record = json.loads(kv.value)
    await steps.storage.delete(record.pop("copied_to"))
    steps.server.transact(Transaction((), (Put(key, json.dumps(record)),)))
    assert await (await steps.committer()).run_once() == 1 and await steps.left() == []


# -- the files ----------------------------------------------------------------------------------------------------


@OF_STEPS
async def test_both_files_are_durable_before_they_are_registered(start: Start, table: str) -> None:
    steps = Steps(start, table)
    trainer = await start(steps.server, KEYS, "t", "trainer")
    real, there = trainer.coordination.transact, list[list[str]]()

    async def transact(transaction: Transaction) -> Any:
        there.append(await steps.left())
        return await real(transaction)

    trainer.coordination.transact = transact
    await StepLog(trainer.coordination, KEYS, trainer.ledger, steps.storage).record(0, "t", [STEP_ROW], {}, 1, "d", 0)
    assert there == [sorted(steps.files)]
    assert await steps.storage.read(steps.files[0]) == await steps.storage.read(steps.files[1])


def test_a_copy_lies_where_nobody_who_lists_its_table_finds_it() -> None:
    path = "incoming/steps/t-step-000000000.arrow"
    assert copy_path(path) == "incoming/copies/steps/t-step-000000000.arrow"
    assert first_path(copy_path(path)) == first_path(path) == path


@OF_STEPS
async def test_the_copy_is_deleted_first(start: Start, table: str) -> None:
    """Else a reader that finds the first file committed and gone would take its copy for the rest of a damaged one."""
    steps = await Steps.make(start, table)
    deleted: list[str] = []
    steps.storage.fault = lambda verb, path: deleted.append(path) if verb == "delete" else None
    await (await steps.committer()).run_once()
    assert deleted == [steps.files[1], steps.files[0]]


# -- digests ------------------------------------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize("spoiled", [(0,), (1,), (0, 1)], ids=["first", "copy", "both"])
async def test_the_digest_of_a_version_is_known_as_long_as_one_file_is_sound(
    start: Start, spoiled: tuple[int, ...], how: str
) -> None:
    steps = await Steps.make(start, "step_metrics")
    await steps.storage.spoil(how, *(steps.files[n] for n in spoiled))
    assert await steps.log.digests(MemoryTable(STEP_METRICS)) == ({} if len(spoiled) == 2 else {1: "d1"})
