"""The committer's process goes on as long as it leads, whatever is away for a while."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.partials import Partial
from laminar.buffer.records import Incoming, WorkerRecord
from laminar.buffer.schema import STEP_METRICS, TABLES
from laminar.buffer.segments import encode
from laminar.buffer.session import Election, Leadership, Membership, Session
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.workers.committer import commit_always
from laminar.workers.committer_lives import CommitterLives, keep_committer
from laminar.workers.context import Member, Run
from laminar.workers.machine import this_machine

KEYS = Keys("run")


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class World:
    """A committer that leads, and a writer with a network of its own."""

    def __init__(self) -> None:
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.tables = {name: MemoryTable(schema) for name, schema in TABLES.items()}
        self.writer = MemoryCoordination(self.server)

    async def lead(self) -> tuple[Member, Leadership]:
        self.faults = Faults(random.Random(0))
        coordination = MemoryCoordination(self.server, self.faults)
        session = await Session.open(coordination, 600)
        record = WorkerRecord(kind="committer", id="c", host="h", pid=1, started_at_us=0)
        membership = await Membership.join(session, coordination, KEYS, record)
        prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
        file = RunFile(
            run="run", created_at_us=0, config={}, model_folder="", prompts=1, held_out=0, fingerprints=prints
        )
        config = Config.model_validate({"model": {"path": "m"}})
        run = Run(coordination, KEYS, self.storage, file, config, SystemClock())
        leadership = await Election(coordination, session, KEYS.leader("committer"), "c").campaign()
        return Member(run, "c", session, membership, Ledger(coordination, KEYS, "c", membership)), leadership

    async def committing(self) -> asyncio.Task[None]:
        member, leadership = await self.lead()
        return asyncio.create_task(commit_always(member.run, member, leadership, lambda _, name: self.tables[name]))

    async def register(self, n: int) -> None:
        nothing = Partial([1], [], [], [], [], 0, "scoring", None, "stop", 0)
        row = Finished(
            group=n, sample=0, prompt_index=0, epoch=0, partial=nothing, finish_reason="stop", status="ok", error="",
            reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
        )  # fmt: skip
        incoming = await write_incoming(self.storage, "w", f"w-{n}", [row])
        await self.writer.put(KEYS.incoming("experience", f"w-{n}"), incoming.dump())

    async def register_metrics(self) -> None:
        row = {"step": 0, "version": 1, "digest": "d", "metrics": "{}", "at": 0, "commit_seq": -1}
        path = "incoming/step_metrics/t-0.arrow"
        await self.storage.write(path, encode(STEP_METRICS, [pa.RecordBatch.from_pylist([row], schema=STEP_METRICS)]))
        incoming = Incoming(table="step_metrics", path=path, rows=1, worker="t")
        await self.writer.put(KEYS.incoming("step_metrics", "t-0"), incoming.dump())


async def end(task: asyncio.Task[Any]) -> None:
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_etcd_that_is_away_for_a_minute_does_not_end_the_committer(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    committing = await world.committing()
    await world.register(0)
    await asyncio.sleep(1)
    assert await world.tables["experience"].count() == 1
    await world.register(1)
    world.faults.partition()
    await asyncio.sleep(60)
    assert await world.tables["experience"].count() == 1 and "trying again in" in caplog.text
    world.faults.heal()
    await asyncio.sleep(30)
    assert await world.tables["experience"].count() == 2 and await world.storage.list("incoming") == []
    await end(committing)


async def test_a_table_that_cannot_be_written_does_not_hold_up_the_others() -> None:
    world = World()
    world.tables["experience"].unreadable = True
    committing = await world.committing()
    await world.register(0)
    await world.register_metrics()
    await asyncio.sleep(30)
    assert await world.tables["step_metrics"].count() == 1
    world.tables["experience"].unreadable = False
    await asyncio.sleep(30)
    assert await world.tables["experience"].count() == 1
    await end(committing)


class DyingCommitter:
    """The first one is killed as it starts, the next one lives; each sees who leads when it starts."""

    pid = 1

    def __init__(self, world: World, leaders: list[bool]) -> None:
        self.world = world
        self.leaders = leaders

    async def start(self) -> None:
        self.leaders.append(await self.world.writer.get(KEYS.leader("committer")) is not None)

    async def wait(self) -> int:
        if len(self.leaders) > 1:
            await asyncio.Event().wait()
        return -9

    async def stop(self, *, grace_s: float) -> None: ...

    def said(self) -> list[str]:
        return []


@pytest.mark.parametrize("reachable", [True, False])
async def test_a_killed_committer_leads_no_longer_when_the_next_one_starts(reachable: bool) -> None:
    """Its relay revokes the lease, instead of having the successor wait until it expires; if etcd can be told."""
    world = World()
    member, _ = await world.lead()
    run = replace(member.run, machine=replace(this_machine(), host="h"))
    leaders: list[bool] = []
    if not reachable:
        world.faults.partition()
    keeping = asyncio.create_task(keep_committer(run, lambda: DyingCommitter(world, leaders), CommitterLives()))
    await asyncio.sleep(60)
    assert leaders == [True, not reachable]
    await end(keeping)
