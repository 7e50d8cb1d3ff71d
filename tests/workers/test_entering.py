"""The start of a run makes the store and etcd agree on where the store is."""

from __future__ import annotations

import socket
from pathlib import Path

import pyarrow as pa
import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import RunManifest
from laminar.buffer.schema import PROMPTS
from laminar.buffer.storage import LocalStorage
from laminar.clock import SystemClock
from laminar.config import Config, config_from
from laminar.errors import ConfigError
from laminar.workers import local
from laminar.workers.context import Run, open_run
from laminar.workers.local import _enter
from laminar.workers.supervisor import run_etcd
from laminar.workers.supervisor.preparation import Plan

PRINTS = Fingerprints(model="a", tokenizer="b", template="c", prompts="d", held_out="e")
ROWS = pa.Table.from_pylist([{"prompt_index": 0, "prompt": "what", "metadata": "{}", "source": "t"}], schema=PROMPTS)


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

    file, _ = await _enter(plan(tmp_path / "here", "http://old:9000"), coordination, keys)
    first = await manifest()
    assert (first.store, first.storage["endpoint_url"]) == (str(tmp_path / "here"), "http://old:9000")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = plan(tmp_path / "there", "http://new:9000")
    await _enter(Plan(**{**vars(moved), "existing": file}), coordination, keys)
    second = await manifest()
    assert (second.store, second.storage["endpoint_url"]) == (str(tmp_path / "there"), "http://new:9000")
    assert (second.store_id, second.generation) == (first.store_id, first.generation)
    await coordination.close()


async def test_workers_that_stayed_are_told_of_a_changed_config(tmp_path: Path) -> None:
    coordination, keys = MemoryCoordination(MemoryEtcd()), Keys("resumed")

    async def enter(existing: RunFile | None, steps: int) -> tuple[RunFile, Run]:
        config = config_from({"run": {"name": "resumed", "max_steps": steps}, "model": {"path": "m"}})
        storage = LocalStorage(tmp_path)
        file, _ = await _enter(
            Plan(config, storage, Path("m"), ROWS, PROMPTS.empty_table(), "", PRINTS, existing), coordination, keys
        )
        return file, await open_run(coordination, "resumed", SystemClock())

    file, first = await enter(None, 40)
    file, same = await enter(file, 40)
    _, longer = await enter(file, 80)
    assert first.config_digest == same.config_digest != "" and longer.config_digest != first.config_digest
    assert (first.config.run.max_steps, longer.config.run.max_steps) == (40, 80)
    await coordination.close()


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
