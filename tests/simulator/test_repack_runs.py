"""Repack in whole runs of the real workers: tails move, and whoever dies in whatever moment of it, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from laminar.buffer.coordination import Change
from laminar.buffer.records import Claim, LeaderRecord, Move, Moves
from laminar.config import Config, config_from
from laminar.simulator import cluster, run
from laminar.simulator.cluster import Cluster
from laminar.simulator.faults import Plan
from laminar.simulator.process import SimProcess
from laminar.simulator.run import Outcome, describe, simulate

Script = Callable[[Cluster], Awaitable[None]]
Simulated = Callable[..., Outcome]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """`simulated(seed, script, steps=…, …)`: a run of long tails without seeded faults, beside which `script` runs."""

    def simulated(seed: int, script: Script | None = None, *, steps: int = 5, **changes: Any) -> Outcome:
        values: dict[str, Any] = {
            "seed": seed, "rollouts": 3, "trainers": 1, "relays": 1, "max_turns": 1, "max_staleness": None,
            "on_version_lost": "continue", "fsync": True, "faults": (), "repack_interval": 0.5, "long_tails": True,
        }  # fmt: skip

        class Scripted(Cluster):
            async def create(self) -> None:
                await super().create()
                if script is not None:
                    self.script = asyncio.create_task(script(self))  # type: ignore[arg-type]

        base = cluster.run_config

        def config(plan: Plan) -> Config:
            values = base(plan).model_dump(mode="json")
            return config_from(values | {"run": values["run"] | {"max_steps": steps}})

        monkeypatch.setattr(cluster, "run_config", config)
        monkeypatch.setattr(run, "draw_plan", lambda *_, **__: Plan(**(values | changes)))
        monkeypatch.setattr(run, "Cluster", Scripted)
        try:
            return simulate(seed)
        finally:
            monkeypatch.undo()

    return simulated


async def changes(cluster: Cluster, prefix: str, seen: Callable[[Change], Awaitable[None]]) -> None:
    subscription = cluster.etcd.subscribe(prefix, cluster.etcd.revision)
    while (batch := await subscription.next()) is not None:
        for change in batch:
            await seen(change)


def process_of(cluster: Cluster, worker: str) -> SimProcess | None:
    """By the process id in the worker's id."""
    pid = int(worker.split("-")[2])
    return next((p for p in cluster.processes if p.pid == pid and not p.dead), None)


def test_tails_move_and_nothing_is_lost(simulated: Simulated) -> None:
    outcomes = [simulated(seed) for seed in range(3)]
    for outcome in outcomes:
        assert not outcome.problems, describe(outcome)
    assert sum(o.moved for o in outcomes) > 0


def test_without_an_interval_nothing_moves(simulated: Simulated) -> None:
    outcome = simulated(0, repack_interval=0.0)
    assert not outcome.problems and outcome.moved == 0, describe(outcome)


@pytest.mark.parametrize("victim", ["source", "target", "manager"])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.06, 0.3])
def test_a_death_at_any_moment_of_a_move_loses_nothing(simulated: Simulated, victim: str, delay: float) -> None:
    """Whoever dies, so long after the plan was written: in the stop, the flush, the transactions, the adoption."""
    struck: list[str] = []

    async def strike(cluster: Cluster) -> None:
        async def seen(change: Change) -> None:
            if change.kv is None or len(struck) >= 3:
                return
            await asyncio.sleep(delay)
            worker = change.key.rsplit("/", 1)[-1]
            if victim == "target":
                worker = Moves.parse(change.kv.value).items[0].target
            elif victim == "manager" and (kv := cluster.etcd.get(cluster.keys.leader("manager"))):
                worker = LeaderRecord.parse(kv.value).worker
            if process := process_of(cluster, worker):
                struck.append(worker)
                cluster.say(f"{worker} is struck")
                process.kill()

        await changes(cluster, cluster.keys.moves_root, seen)

    for seed in range(3):
        outcome = simulated(seed, strike, relays=2)
        assert not outcome.problems, describe(outcome)
        if struck:
            return
    pytest.fail("no plan was written in three runs")


def test_a_plan_with_a_target_that_is_gone_moves_nothing(simulated: Simulated) -> None:
    """What is refused goes on where it runs, and the key does not stay."""
    left: list[str] = []

    async def mislead(cluster: Cluster) -> None:
        keys = cluster.keys
        for at in range(12):
            await asyncio.sleep(1.0)
            claims = [(kv.key, Claim.parse(kv.value)) for kv in cluster.etcd.page(keys.claims, "", 100, 0).items]
            owner = next((c.owner for _, c in claims if c.state == "generating"), "")
            names = [key.rsplit("/", 1)[-1] for key, c in claims if c.owner == owner]
            version = next((c.version for _, c in claims if c.owner == owner), 0)
            record = Moves(
                plan=f"test/{at}", version=version, deadline_us=0, seconds=5.0,
                items=[Move(trajectory=name, target="rollout-sim-1-gone") for name in names],
                targets={"rollout-sim-1-gone": 1},
            )  # fmt: skip
            if owner:
                await cluster.outside.put(keys.moves(owner), record.dump())
        await asyncio.sleep(8.0)
        left.extend(kv.key for kv in cluster.etcd.page(keys.moves_root, "", 100, 0).items)

    outcome = simulated(2, mislead, steps=10, repack_interval=0.0)
    assert not outcome.problems and outcome.moved == 0, describe(outcome)
    assert not left


def test_half_of_the_rollouts_leave_and_come_back(simulated: Simulated) -> None:
    """They hand over what they have; those that come back are given work within seconds."""
    worked: dict[str, float] = {}
    joined: dict[str, float] = {}

    async def leave(cluster: Cluster) -> None:
        async def claimed(change: Change) -> None:
            if change.kv is not None and (owner := Claim.parse(change.kv.value).owner):
                worked.setdefault(owner, cluster.loop.now)

        async def came(change: Change) -> None:
            if change.kv is not None:
                joined[change.key.rsplit("/", 1)[-1]] = cluster.loop.now

        following = [
            asyncio.create_task(changes(cluster, cluster.keys.claims, claimed)),
            asyncio.create_task(changes(cluster, cluster.keys.workers("rollout"), came)),
        ]
        await asyncio.sleep(4)
        for slot in cluster.living("rollout")[:2]:
            slot.stop.set()
        await asyncio.gather(*following)

    outcome = simulated(1, leave, steps=12, rollouts=4, long_tails=False)
    assert not outcome.problems, describe(outcome)
    late = {worker: at for worker, at in joined.items() if at > 4}
    assert len(late) == 2
    given = [worked[worker] - at for worker, at in late.items() if worker in worked]
    assert given and min(given) < 10, (given, late)


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_trajectories_span_versions_and_nothing_drains(simulated: Simulated, seed: int) -> None:
    outcome = simulated(seed, update="interrupt")
    assert not outcome.problems and outcome.moved == 0, describe(outcome)
