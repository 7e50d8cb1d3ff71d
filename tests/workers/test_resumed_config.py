"""A resume may change the config while workers on other hosts stay: they begin anew under it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from world import KEYS, World

from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.records import RunManifest
from laminar.buffer.session import Election
from laminar.errors import ConfigChanged
from laminar.workers import main
from laminar.workers.training.trainer_lives import trainer_main


def manifest(config: str, store: str = "s") -> str:
    return RunManifest(run="run", store=store, store_id="i", generation=1, format_version=1, config=config).dump()


async def test_a_worker_notices_a_changed_config_and_nothing_else() -> None:
    world = World()
    member = await world.member("rollout", "rollout-1")
    watching = asyncio.create_task(member.until_changed())
    put = member.run.coordination.put
    for same in (manifest(""), manifest("", store="elsewhere")):  # the worker joined before manifests told the config
        await put(KEYS.manifest, same)
        await asyncio.sleep(0.02)
    assert not watching.done()
    await put(KEYS.manifest, manifest("d1"))
    with pytest.raises(ConfigChanged, match="run 'run' was resumed with another config: rollout-1 begins anew"):
        await asyncio.wait_for(watching, 5)
    await member.session.close()


async def test_a_standby_does_not_wait_for_its_election_with_an_old_config() -> None:
    """Elected at the Ctrl-C that comes before the resume, it would keep the old learning rate and the old end."""
    world = World()
    leader, standby = await world.member("trainer", "trainer-1"), await world.member("trainer", "trainer-2")
    await Election(leader.run.coordination, leader.session, KEYS.leader("trainer"), "trainer-1").campaign()
    await leader.run.coordination.put(KEYS.manifest, manifest(""))
    nothing: Any = None
    standing_by = asyncio.create_task(trainer_main(standby.run, standby, object, nothing, nothing))
    await asyncio.sleep(0.05)
    await leader.run.coordination.put(KEYS.manifest, manifest("d2"))
    with pytest.raises(ConfigChanged):
        await asyncio.wait_for(standing_by, 5)
    for member in (leader, standby):
        await member.session.close()


def test_the_process_begins_anew_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody need start the workers of other hosts: it becomes the same command, in the same process."""
    begun: list[Any] = []

    async def changed(*args: Any) -> int:
        raise ConfigChanged("another config")

    def become(path: str, command: list[str]) -> None:
        begun.append((path, command))
        raise SystemExit(0)

    monkeypatch.setattr(main, "_run_worker", changed)
    monkeypatch.setattr(main.os, "execv", become)
    with pytest.raises(SystemExit):
        main.run_worker("rollout", access=EtcdAccess(("node1:2379",)), run="my-run")
    arguments = ["-m", "laminar.cli", "worker", "rollout", "--etcd", "node1:2379", "--run", "my-run"]
    assert begun == [(sys.executable, [sys.executable, *arguments])]
