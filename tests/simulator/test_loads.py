"""Leases that are lost while weights are loaded: the engine outlives them, and so does its load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from laminar.buffer.records import EvaluationRequest, Load, WeightsHead
from laminar.config import Config, config_from
from laminar.simulator import cluster as clusters
from laminar.simulator import run
from laminar.simulator.cluster import Cluster
from laminar.simulator.engine import SimEngine
from laminar.simulator.faults import Plan
from laminar.simulator.run import describe, quiet, simulate
from laminar.workers.context import Member, Run, joined
from laminar.workers.engines.base import WeightSource
from laminar.workers.rollouts import rollout_lives

Simulated = Callable[[bool, Callable[["Striking"], Awaitable[None]]], None]


class Striking(Cluster):
    """One rollout. It loses its lease in the first load of a version that is older, or newer, than what it holds."""

    async def create(self) -> None:
        await super().create()
        self.loading, self.may_end, self.ended, self.left = (asyncio.Event() for _ in range(4))
        self.script = asyncio.create_task(self.strike())

    async def strike(self) -> None:
        await self.loading.wait()
        [worker] = self.lives()
        kv = self.etcd.get(worker)
        assert kv is not None
        self.etcd.revoke(kv.lease)

    def lives(self) -> list[str]:
        return [kv.key for kv in self.etcd.page(self.keys.workers("rollout"), "", 100, 0).items]

    def newest(self) -> int:
        kv = self.etcd.get(self.keys.weights)
        return WeightsHead.parse(kv.value).version if kv else -1

    def reported(self) -> list[int]:
        """The versions that rollouts say to hold."""
        return [Load.parse(kv.value).version for kv in self.etcd.page(self.keys.load("rollout", ""), "", 9, 0).items]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    def simulated(older: bool, script: Callable[[Striking], Awaitable[None]]) -> None:
        made: list[Striking] = []
        real = SimEngine._replace_weights

        async def slow(self: SimEngine, source: WeightSource) -> None:
            [cluster] = made
            wanted = self.version == cluster.newest() if older else 0 <= self.version < source.version
            struck = wanted and source.version != self.version and not cluster.loading.is_set()
            if struck:
                cluster.loading.set()
                await cluster.may_end.wait()
            await real(self, source)
            if struck:
                cluster.ended.set()

        class Scripted(Striking):
            async def create(self) -> None:
                await super().create()
                made.append(self)
                self.side = asyncio.create_task(script(self))  # type: ignore[arg-type]

        values: dict[str, Any] = {
            "seed": 3, "rollouts": 1, "trainers": 1, "relays": 1, "max_turns": 1, "max_staleness": 0,
            "on_version_lost": "continue", "fsync": True, "faults": (),
        }  # fmt: skip

        @asynccontextmanager
        async def join(run: Run, kind: Any) -> AsyncIterator[Member]:
            if kind == "rollout" and made[0].loading.is_set():
                made[0].left.set()
                if not older:
                    await made[0].ended.wait()
            async with joined(run, kind) as member:
                yield member

        base = clusters.run_config

        def config(plan: Plan) -> Config:
            values = base(plan).model_dump(mode="json")
            return config_from(values | {"relay": values["relay"] | {"retain": 8}})

        monkeypatch.setattr(clusters, "run_config", config)
        monkeypatch.setattr(run, "draw_plan", lambda *_, **__: Plan(**values))
        monkeypatch.setattr(run, "Cluster", Scripted)
        monkeypatch.setattr(SimEngine, "_replace_weights", slow)
        monkeypatch.setattr(rollout_lives, "joined", join)
        outcome = simulate(3)
        ended = made.pop().ended.is_set()
        with quiet():
            """What was kept of the run until now goes."""
        assert ended
        assert not outcome.problems, describe(outcome)

    return simulated


def test_the_next_life_names_the_weights_that_a_load_without_a_caller_brought(simulated: Simulated) -> None:
    """It joins after the load has ended: version and digest are both those of the new weights."""

    async def script(cluster: Striking) -> None:
        await cluster.left.wait()
        cluster.may_end.set()

    simulated(False, script)


def test_the_next_life_waits_for_a_load_that_goes_on(simulated: Simulated) -> None:
    """An older version, to be evaluated, is on its way into the engine: what was drawn meanwhile, under the newest that
    the engine holds yet, would be written by the older one."""

    async def script(cluster: Striking) -> None:
        for _ in range(1000):
            if cluster.newest() > 0 and cluster.reported() == [cluster.newest()]:
                break
            await asyncio.sleep(0.01)
        first = cluster.relays[0].holdings.get(0).info
        request = f"{cluster.keys.evaluations}{0:09d}"
        await cluster.outside.put(request, EvaluationRequest(version=0, digest=first.digest).dump())
        await cluster.loading.wait()
        [trainer] = cluster.living("trainer")
        assert trainer.process is not None
        trainer.process.stop()
        await cluster.outside.delete(request)  # somebody else has evaluated it
        await cluster.left.wait()
        await asyncio.sleep(2.0)
        cluster.may_end.set()
        trainer.process.cont()

    simulated(True, script)
