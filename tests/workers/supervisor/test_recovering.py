"""`laminar recover` refuses where nothing is lost, says what it would do, and old workers do not come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from laminar.buffer.coordination import Put, Transaction
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, read_run, write_run
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.partials import Partial, PartialLog, PartialRow, Span
from laminar.buffer.records import Cursor, RunManifest, SupervisorRecord
from laminar.buffer.schema import TABLES
from laminar.buffer.session import Session
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.clock import SystemClock
from laminar.errors import ConfigError, StoreError
from laminar.workers.context import Run, joined, open_run
from laminar.workers.supervisor.recovering import recover, run_recover

NAME = "my-run"
KEYS = Keys(NAME)
CONFIG = {"run": {"name": NAME}, "model": {"path": "tiny-reverse"}, "sampling": {"samples_per_prompt": 2}}


class Store:
    """One trajectory is finished, another has 7 durable tokens; a third and a fourth left no trace."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.tables = {name: MemoryTable(schema) for name, schema in TABLES.items()}
        self.server = MemoryEtcd()
        self.etcd = MemoryCoordination(self.server)

    async def make(self) -> Store:
        prints = Fingerprints(model="a", tokenizer="b", template="c", prompts="d", held_out="e")
        file = RunFile(
            run=NAME, created_at_us=0, config=CONFIG, model_folder="m", prompts=9, held_out=0, fingerprints=prints
        )
        await write_run(self.storage, file)
        span = Span(0, 0, "w", "d" * 64)
        partial = Partial([1], [5], [True], [-0.5], [span], 0, "scoring", None, "stop", 0)
        finished = Finished(
            group=0, sample=0, prompt_index=0, epoch=0, partial=partial, finish_reason="stop", status="ok", error="",
            reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
        )  # fmt: skip
        await write_incoming(self.storage, "w", "w-0", [finished])
        row = ("w", None, "generating", None, 0, 0)
        prompt = PartialRow(1, 0, 1, 0, 0, "prompt", [1], [], 0, "d" * 64, *row)
        written = PartialRow(1, 0, 1, 0, 0, "policy", [5] * 7, [-0.5] * 7, 0, "d" * 64, *row)
        await PartialLog(self.storage, "w", sync=True).append([prompt, written])
        return self

    async def known_to_etcd(self, **changes: Any) -> None:
        file = await read_run(self.storage)
        record = RunManifest(
            run=NAME, store=self.storage.url, store_id=file.store_id, generation=file.generation, format_version=1
        )
        await self.etcd.put(KEYS.manifest, record.model_copy(update=changes).dump())
        await self.etcd.put(KEYS.cursor, Cursor(next=2, by="w").dump())

    async def recover(self, *, force: bool = False, dry_run: bool = False) -> str:
        return await recover(
            self.etcd, self.storage, self.tables, await read_run(self.storage), force=force, dry_run=dry_run
        )

    async def open(self) -> Run:
        return await open_run(self.etcd, NAME, SystemClock(), self.storage)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    made = await Store().make()
    yield made
    await made.etcd.close()


async def test_what_goes_on_and_what_is_lost_is_said(store: Store) -> None:
    """Case 30: what is lost is counted, what goes on is told by its length."""
    lines = (await store.recover()).splitlines()
    for expected in (
        "run        my-run, generation 2",
        "etcd       it knows nothing of the run",
        "drawn      2 groups, 0 of them consumed",
        "durable    rows registered again: 1 of experience",
        "in flight  3 trajectories",
        "           1 go on from their logs (mean 7.0 tokens, longest 7)",
        "lost       2 begin anew, nothing of them was durable",
        "trainer    0 steps decided, 0 recorded, checkpoint none",
        "weights    version 0 (dddddddddddd)",
    ):
        assert expected in lines, "\n".join(lines)


async def test_a_dry_run_says_the_same_and_writes_nothing(store: Store) -> None:
    before = dict(store.storage._files)
    said = await store.recover(dry_run=True)
    assert said.splitlines()[-1] == "dry run: nothing was written" and "in flight  3 trajectories" in said
    assert store.storage._files == before and (await store.etcd.range("/")).items == ()
    assert [t._versions for t in store.tables.values()] == [[], [], [], []]


async def test_a_run_at_work_is_left_alone_unless_forced(store: Store) -> None:
    await store.known_to_etcd()
    async with joined(await store.open(), "rollout") as member:
        with pytest.raises(ConfigError, match=f"is at work: {member.id} \\(alive in etcd: 1\\)"):
            await store.recover()
        assert "generation 2" in await store.recover(force=True)
        assert (await store.etcd.range(KEYS.prefix)).items == (), "nothing of the old generation is left"


async def test_a_laminar_run_that_waits_for_its_workers_is_at_work_too(store: Store) -> None:
    await store.known_to_etcd()
    session = await Session.open(store.etcd, 10)
    record = SupervisorRecord(host="node1", pid=7, place="p", began="b", started_at_us=0)
    await store.etcd.transact(Transaction((), (Put(KEYS.supervisor, record.dump(), session.lease),)))
    with pytest.raises(ConfigError, match="laminar run, pid 7 on node1"):
        await store.recover()
    await store.recover(force=True)
    assert await store.etcd.get(KEYS.supervisor) is not None, "it is of no generation, and finds the new one"
    await session.close()


async def test_a_sound_etcd_is_left_alone_unless_forced(store: Store) -> None:
    await store.known_to_etcd()
    with pytest.raises(ConfigError, match="nothing is to be recovered: etcd knows run 'my-run' and is not behind"):
        await store.recover()
    said = await store.recover(force=True)
    assert "etcd       sound, and rebuilt all the same" in said
    with pytest.raises(ConfigError, match="nothing is to be recovered"):
        await store.recover()


async def test_the_etcd_of_another_store_is_never_touched(store: Store) -> None:
    await store.known_to_etcd(store_id="another")
    with pytest.raises(ConfigError, match="id another"):
        await store.recover(force=True)
    assert (await store.etcd.range("/")).items[-1].key == KEYS.manifest


async def test_an_etcd_of_before_the_last_recovery_is_refused_and_rebuilt(store: Store) -> None:
    await store.recover()
    await store.known_to_etcd(generation=1)
    with pytest.raises(StoreError, match=r"in generation 1, its store is in generation 2: .*`laminar recover"):
        await store.open()
    assert "it is of generation 1, the store of generation 2" in await store.recover()
    assert (await store.open()).keys.generation == 3


async def test_a_worker_of_a_generation_that_has_ended_must_start_anew(store: Store) -> None:
    """A rollout keeps its engine when its lease is lost, and would join under keys that nobody reads."""
    await store.known_to_etcd()
    old = await store.open()
    await store.recover(force=True)
    with pytest.raises(StoreError, match="joined in generation 1, etcd has generation 2 now: this worker must"):
        async with joined(old, "rollout"):
            pass
    async with joined(await store.open(), "rollout") as member:
        assert member.membership.key.startswith(Keys(NAME, 2).workers_root)


async def test_a_worker_that_etcd_has_forgotten_must_start_anew(store: Store) -> None:
    await store.known_to_etcd()
    run = await store.open()
    await store.etcd.delete(KEYS.manifest)
    with pytest.raises(StoreError, match="etcd has nothing of it now"):
        async with joined(run, "rollout"):
            pass


def test_without_etcd_data_a_dry_run_starts_no_etcd(tmp_path: Path, make_store: Any) -> None:
    root = make_store(NAME)
    said = run_recover(str(root), {}, [], force=False, dry_run=True)
    assert "etcd       its data are not there" in said and not (root / "etcd").exists()
