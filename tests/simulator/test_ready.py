"""A trainer that is slower than its rollouts: how much waits for it, in whole runs of the real workers."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import Any

import pytest

from laminar.buffer.records import Cursor, TrainerHead
from laminar.config import Config, config_from
from laminar.simulator import cluster as clusters
from laminar.simulator import run
from laminar.simulator.cluster import Cluster
from laminar.simulator.faults import NEVER_READY, Kind, Plan
from laminar.simulator.run import describe, simulate
from laminar.workers import trainer
from laminar.workers.training.stepping import TrainedStep

TRAIN_S, AHEAD = 15.0, 20


class Watched(Cluster):
    """Notes, in the middle of each step's training, how many groups are drawn and not consumed."""

    waiting: list[int]

    async def create(self) -> None:
        await super().create()
        type(self).waiting = []
        self.watch = asyncio.create_task(self.note())

    async def note(self) -> None:
        while True:
            await asyncio.sleep(TRAIN_S / 2)
            head, cursor = self.etcd.get(self.keys.trainer), self.etcd.get(self.keys.cursor)
            if head and cursor and (at := TrainerHead.parse(head.value)).decided > 2:
                self.waiting.append(Cursor.parse(cursor.value).next - at.consumed_groups)


@pytest.mark.parametrize("max_ready", [0, NEVER_READY])
def test_while_a_batch_waits_for_a_slow_trainer_nothing_more_is_drawn(
    monkeypatch: pytest.MonkeyPatch, max_ready: int
) -> None:
    base = clusters.run_config

    def config(plan: Plan) -> Config:
        values = base(plan).model_dump(mode="json")
        values["trainer"] |= {"max_ahead_groups": AHEAD}
        values["run"] |= {"max_steps": 16}
        return config_from(values)

    values: dict[str, Any] = {
        "seed": 3, "rollouts": 1, "trainers": 1, "relays": 1, "max_turns": 1, "max_staleness": None,
        "on_version_lost": "continue", "fsync": True, "faults": (), "max_ready_groups": max_ready,
    }  # fmt: skip
    at_once = trainer.train_decided

    async def slowly(*given: Any, **options: Any) -> TrainedStep:
        await asyncio.sleep(TRAIN_S)
        return await at_once(*given, **options)

    monkeypatch.setattr(trainer, "train_decided", slowly)
    monkeypatch.setattr(clusters, "run_config", config)
    monkeypatch.setattr(run, "draw_plan", lambda *_, **__: Plan(**values))
    monkeypatch.setattr(run, "Cluster", Watched)
    outcome = simulate(3, without=frozenset(Kind))
    assert not outcome.problems, describe(outcome)
    drawn = Watched.waiting[:8]  # before the last steps, for which there is nothing left to draw
    if max_ready:
        assert max(drawn) == AHEAD and fmean(drawn) > 0.8 * AHEAD
    else:  # beside a batch, what is drawn until the manager tells of it, and what the rollout holds
        assert max(drawn) < 0.7 * AHEAD and fmean(drawn) < 0.4 * AHEAD
