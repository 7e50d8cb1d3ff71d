"""The start of a run makes the store and etcd agree on where the store is."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.coordination import KeyValue
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, read_run, write_run
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import RunManifest, TrainerHead
from laminar.buffer.schema import PROMPTS
from laminar.buffer.storage import LocalStorage
from laminar.clock import SystemClock
from laminar.config import Config, config_from
from laminar.errors import ConfigError, Fenced
from laminar.workers import local
from laminar.workers.context import Run, open_run
from laminar.workers.supervisor import entering, run_etcd
from laminar.workers.supervisor.entering import enter, head_going_on
from laminar.workers.supervisor.exclusion import Supervision, only_supervisor
from laminar.workers.supervisor.preparation import Plan

PRINTS = Fingerprints(model="a", tokenizer="b", template="c", prompts="d", held_out="e")
ROWS = pa.Table.from_pylist([{"prompt_index": 0, "prompt": "what", "metadata": "{}", "source": "t"}], schema=PROMPTS)


async def entered(plan: Plan, coordination: MemoryCoordination) -> RunFile:
    keys = Keys(plan.config.run.name)
    async with only_supervisor(coordination, keys, SystemClock(), 10.0) as hold:
        file, _ = await enter(plan, coordination, keys, hold)
    return file


async def test_a_store_that_has_moved_is_found_by_its_workers(tmp_path: Path) -> None:
    """They open what etcd's manifest names, so a resume from another place, or by another address, writes it anew."""
    coordination, keys = MemoryCoordination(MemoryEtcd()), Keys("moved")

    def plan(folder: Path, endpoint: str) -> Plan:
        config = config_from(
            {"run": {"name": "moved"}, "model": {"path": "m"}, "storage": {"endpoint_url": endpoint}}
        )
        return Plan(config, LocalStorage(folder), Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, None)

    async def manifest() -> RunManifest:
        kv = await coordination.get(keys.manifest)
        assert kv is not None
        return RunManifest.parse(kv.value)

    file = await entered(plan(tmp_path / "here", "http://old:9000"), coordination)
    first = await manifest()
    assert (first.store, first.storage["endpoint_url"]) == (str(tmp_path / "here"), "http://old:9000")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = plan(tmp_path / "there", "http://new:9000")
    await entered(replace(moved, existing=file), coordination)
    second = await manifest()
    assert (second.store, second.storage["endpoint_url"]) == (str(tmp_path / "there"), "http://new:9000")
    assert (second.store_id, second.generation) == (first.store_id, first.generation)
    await coordination.close()


async def test_workers_that_stayed_are_told_of_a_changed_config(tmp_path: Path) -> None:
    coordination = MemoryCoordination(MemoryEtcd())

    async def enter(existing: RunFile | None, steps: int) -> tuple[RunFile, Run]:
        config = config_from({"run": {"name": "resumed", "max_steps": steps}, "model": {"path": "m"}})
        storage = LocalStorage(tmp_path)
        plan = Plan(config, storage, Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, existing)
        file = await entered(plan, coordination)
        return file, await open_run(coordination, "resumed", SystemClock())

    file, first = await enter(None, 40)
    file, same = await enter(file, 40)
    _, longer = await enter(file, 80)
    assert first.config_digest == same.config_digest != "" and longer.config_digest != first.config_digest
    assert (first.config.run.max_steps, longer.config.run.max_steps) == (40, 80)
    await coordination.close()


HEAD = TrainerHead(step=4, decided=4, checkpoint=4, consumed_groups=8, state="done", reason="4 steps", by="t/1")


def test_only_a_run_that_has_ended_and_may_go_on_gets_another_head() -> None:
    assert head_going_on(None, 9) is None and head_going_on(HEAD, 4) is None
    assert head_going_on(HEAD.model_copy(update={"state": "running"}), 9) is None
    for head, steps in ((HEAD, 9), (HEAD.model_copy(update={"state": "failed"}), 4)):
        again, other = head_going_on(head, steps), head_going_on(head, steps)
        assert again is not None and other is not None and again.by != other.by, "each of them knows its own"
        assert again == HEAD.model_copy(update={"state": "running", "reason": "", "by": again.by})


class Ended:
    """A run of four steps that is done, and is about to be entered again with nine; `between` happens once this start
    has read the trainer's head."""

    def __init__(self, folder: Path) -> None:
        self.server = MemoryEtcd()
        self.etcd = MemoryCoordination(self.server)
        self.storage = LocalStorage(folder)
        self.keys = Keys("ended")
        self.between: Callable[[], Awaitable[Any]] | None = None
        self.reads = 0

    def plan(self, steps: int, existing: RunFile | None) -> Plan:
        config = config_from({"run": {"name": "ended", "max_steps": steps}, "model": {"path": "m"}})
        return Plan(config, self.storage, Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, existing)

    async def put_head(self, **changes: Any) -> None:
        await self.etcd.put(self.keys.trainer, HEAD.model_copy(update=changes).dump())

    async def head(self) -> TrainerHead:
        kv = await self.etcd.get(self.keys.trainer)
        assert kv is not None
        return TrainerHead.parse(kv.value)

    async def manifest(self) -> RunManifest:
        kv = await self.etcd.get(self.keys.manifest)
        assert kv is not None
        return RunManifest.parse(kv.value)

    async def enter(self) -> Keys:
        self.file = await entered(self.plan(4, None), self.etcd)
        await self.put_head()
        client = Interrupted(self)
        async with only_supervisor(client, self.keys, SystemClock(), 10.0) as self.hold:
            _, keys = await enter(self.plan(9, self.file), client, self.keys, self.hold)
        return keys


class Interrupted(MemoryCoordination):
    def __init__(self, run: Ended) -> None:
        super().__init__(run.server)
        self.run = run

    async def get(self, key: str) -> KeyValue | None:
        found = await super().get(key)
        if key == self.run.keys.trainer:
            self.run.reads += 1
            if self.run.between is not None and self.run.reads == 1:
                await self.run.between()
        return found


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    return Ended(tmp_path)


async def test_a_run_that_was_done_goes_on_with_more_steps(ended: Ended) -> None:
    await ended.enter()
    head = await ended.head()
    assert (head.state, head.decided, head.reason) == ("running", 4, "") and ended.reads == 1


async def test_what_a_trainer_writes_while_its_run_is_entered_is_not_overwritten(ended: Ended) -> None:
    ended.between = lambda: ended.put_head(decided=5, step=5, by="t/2")
    await ended.enter()
    head = await ended.head()
    assert (head.state, head.decided, head.step) == ("running", 5, 5) and ended.reads == 2


async def test_a_start_that_was_stopped_for_longer_than_its_lease_changes_nothing(ended: Ended) -> None:
    """Another `laminar run` took over meanwhile, and its trainer is at work."""

    async def overtaken() -> None:
        assert ended.hold.session is not None
        ended.server.revoke(ended.hold.session.lease)
        other = Supervision(ended.etcd, ended.keys, SystemClock(), 10.0)
        await other.claim()
        await ended.put_head(decided=7, step=6, state="running", reason="", by="t/9")

    ended.between = overtaken
    with pytest.raises(Fenced, match="lost its hold on run 'ended': it was stopped, or cut off from etcd, for longer"):
        await ended.enter()
    head, file = await ended.head(), await read_run(ended.storage)
    assert (head.decided, head.by) == (7, "t/9")
    assert file.config["run"]["max_steps"] == 4 and (await ended.manifest()).config == file.config_digest


async def test_a_start_that_loses_its_hold_after_it_has_written_run_json_changes_nothing_in_etcd(
    ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = entering.write_plan

    async def late(plan: Plan, clock: SystemClock, step: int) -> RunFile:
        file = await real(plan, clock, step)
        if plan.existing is not None:
            assert ended.hold.session is not None
            ended.server.revoke(ended.hold.session.lease)
        return file

    monkeypatch.setattr(entering, "write_plan", late)
    with pytest.raises(Fenced):
        await ended.enter()
    assert await ended.head() == HEAD and (await ended.manifest()).config == ended.file.config_digest


async def test_a_generation_that_a_recovery_has_begun_meanwhile_is_not_taken_back(ended: Ended) -> None:
    async def recovered() -> None:
        manifest = await ended.manifest()
        await ended.etcd.put(ended.keys.manifest, manifest.model_copy(update={"generation": 2}).dump())
        await ended.etcd.put(Keys("ended", 2).trainer, HEAD.dump())

    ended.between = recovered
    keys = await ended.enter()
    assert keys.generation == (await ended.manifest()).generation == 2
    kv = await ended.etcd.get(Keys("ended", 2).trainer)
    assert kv is not None and TrainerHead.parse(kv.value).state == "running"
    assert (await ended.head()).state == "done", "nobody reads what the old generation says"


async def test_a_run_json_that_was_changed_since_the_plan_was_made_is_not_overwritten(ended: Ended) -> None:
    async def recovered() -> None:
        file = await read_run(ended.storage)
        await write_run(ended.storage, file.model_copy(update={"generation": 2}), overwrite=True)

    ended.between = recovered
    with pytest.raises(ConfigError, match=r"run\.json is not what it was when this start began: another"):
        await ended.enter()
    assert (await read_run(ended.storage)).generation == 2 and (await ended.head()).state == "done"


def test_a_run_that_ends_within_its_warm_up_is_told_of_it(tmp_path: Path) -> None:
    """It is no error: a quick look at a config takes a step or two."""

    def said(steps: int) -> str:
        config = config_from({"run": {"max_steps": steps}, "model": {"path": "m"}, "trainer": {"warmup_steps": 5}})
        plan = Plan(config, LocalStorage(tmp_path), Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, None)
        return plan.describe()

    assert "trainer.warmup_steps = 5 is not below run.max_steps = 5" in said(5) and "warmup" not in said(6)


@pytest.mark.parametrize("fault", ["etcd", "port"])
def test_what_a_run_cannot_reach_is_told_before_it_writes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def planned(config: Config) -> Plan:
        return Plan(config, LocalStorage(tmp_path / "store"), Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, None)

    monkeypatch.setattr(local, "plan_run", planned)
    monkeypatch.setattr(run_etcd, "REACH_ETCD_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        changed = {"etcd": {"coordination": {"endpoints": [f"127.0.0.1:{port}"]}}, "port": {"relay": {"port": port}}}
        config = config_from({"run": {"name": "a-run"}, "model": {"path": "m"}, **changed[fault]})
        with pytest.raises(ConfigError, match={"etcd": "no etcd answers at", "port": r"in use; .*relay\.port"}[fault]):
            local.run(config, text="", dry_run=False, plain=True)
    assert not list(tmp_path.iterdir())
