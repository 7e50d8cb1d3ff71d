"""Repack in whole runs of the real workers: tails move, and whoever dies in whatever moment of it, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mutations import hand_over_without_claim

from laminar.buffer.coordination import Change
from laminar.buffer.records import Claim, LeaderRecord, Load, Move, Moves
from laminar.config import Config, config_from
from laminar.simulator import cluster, run
from laminar.simulator.cluster import Cluster
from laminar.simulator.environment import SimHost
from laminar.simulator.faults import Plan
from laminar.simulator.oracle import process_id
from laminar.simulator.process import SimProcess
from laminar.simulator.run import Outcome, describe, simulate
from laminar.workers.environments.base import Prompt, Score, Transcript

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
    return next((p for p in cluster.processes if p.pid == process_id(worker) and not p.dead), None)


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
    plans: list[str] = []

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
                plans.append(owner)
                await cluster.outside.put(keys.moves(owner), record.dump())
        await asyncio.sleep(8.0)
        left.extend(kv.key for kv in cluster.etcd.page(keys.moves_root, "", 100, 0).items)

    outcome = simulated(2, mislead, steps=10, repack_interval=0.0)
    assert not outcome.problems and outcome.moved == 0, describe(outcome)
    assert plans and not left


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
    assert outcome.interrupted > 0


def test_a_target_that_is_told_to_leave_hands_on_what_has_just_come_to_it(simulated: Simulated) -> None:
    """A move is no death, nor is a graceful stop, wherever the trajectory is at that moment."""
    deaths: list[int] = []
    left: list[str] = []

    async def follow(cluster: Cluster) -> None:
        async def came(change: Change) -> None:
            worker = change.key.split("/")[-2]
            process = process_of(cluster, worker)
            if change.kv is not None and process is not None and not left:
                left.append(worker)
                next(s for s in cluster.slots if s.process is process).stop.set()

        async def claimed(change: Change) -> None:
            if change.kv is not None:
                deaths.append(Claim.parse(change.kv.value).deaths)

        await asyncio.gather(
            changes(cluster, cluster.keys.inbox_root, came), changes(cluster, cluster.keys.claims, claimed)
        )

    for seed in range(4):
        outcome = simulated(seed, follow)
        assert not outcome.problems, describe(outcome)
        assert max(deaths) == 0, describe(outcome)
        if left:
            return
    pytest.fail("nothing moved in four runs")


def test_a_slow_reward_does_not_keep_a_rollout_from_the_newest_version(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is scored needs no engine any more."""
    real = SimHost.score

    async def score(host: SimHost, prompt: Prompt, transcript: Transcript) -> Score:
        await asyncio.sleep(3.0)
        return await real(host, prompt, transcript)

    monkeypatch.setattr(SimHost, "score", score)
    ahead: list[str] = []

    async def watch(cluster: Cluster) -> None:
        async def reported(change: Change) -> None:
            worker = change.key.rsplit("/", 1)[-1]
            if change.kv is None:
                return
            claims = [Claim.parse(kv.value) for kv in cluster.etcd.page(cluster.keys.claims, "", 1000, 0).items]
            if any(c.version < Load.parse(change.kv.value).version for c in claims if c.owner == worker):
                ahead.append(worker)

        await changes(cluster, cluster.keys.load("rollout", ""), reported)

    outcome = simulated(0, watch, repack_interval=0.0, long_tails=False)
    assert not outcome.problems, describe(outcome)
    assert ahead


def test_a_slow_rollout_is_noticed_and_draws_nothing_any_more(simulated: Simulated) -> None:
    """From the reports of real workers, which take new versions and evaluate all the time."""
    slowed: list[SimProcess | None] = []
    rested: list[str] = []
    drawn: list[str] = []

    async def slow_down(cluster: Cluster) -> None:
        async def rests(change: Change) -> None:
            rested.append(change.key.rsplit("/", 1)[-1])

        async def claimed(change: Change) -> None:
            if change.kv is not None and change.kv.create_revision == change.kv.mod_revision and rested:
                drawn.append(Claim.parse(change.kv.value).owner)

        following = asyncio.gather(
            changes(cluster, cluster.keys.rests_root, rests), changes(cluster, cluster.keys.claims, claimed)
        )
        await asyncio.sleep(3.0)
        slot = cluster.living("rollout")[0]
        assert slot.engine is not None
        slot.engine.step_s = (1.0, 2.0)
        slowed.append(slot.process)
        await following

    outcome = simulated(0, slow_down, steps=25, rollouts=4, repack_interval=0.0)
    assert not outcome.problems, describe(outcome)
    assert outcome.rested == 1 and process_id(rested[0]) == (slowed[0] and slowed[0].pid)
    assert drawn and rested[0] not in drawn


@pytest.mark.slow
def test_a_hand_over_that_does_not_compare_the_claim_is_noticed(simulated: Simulated) -> None:
    """By rollouts that are told to leave again and again: some of what they hand over is being registered just then."""

    async def leave(cluster: Cluster) -> None:
        while not cluster.over:
            await asyncio.sleep(0.6)
            for slot in cluster.living("rollout")[:1]:
                slot.stop.set()

    def problems(seed: int) -> list[str]:
        return simulated(seed, leave, steps=8, long_tails=False).problems

    assert not problems(0)
    with hand_over_without_claim():
        assert any(problems(seed) for seed in range(100))
