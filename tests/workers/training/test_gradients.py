"""Gradients that are not finite end a run that its user can mend; replayed steps are no new failures."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryCoordination
from laminar.errors import LaminarError
from laminar.workers.training.gradients import Gradients

MakeWorld = Callable[..., Awaitable[Any]]
KEYS = Keys("run", 1)
BAD = {"skipped_nonfinite": 1.0, "grad_norm": None}
GOOD = {"skipped_nonfinite": 0.0, "grad_norm": 0.5}
IDLE = {"skipped_nonfinite": 0.0, "grad_norm": None}


@pytest.mark.parametrize(
    ("steps", "fails"),
    [([BAD] * 2, False), ([BAD] * 3, True), ([BAD, BAD, GOOD, BAD], False), ([BAD, IDLE, BAD, BAD], True)],
)
def test_three_in_a_row_are_too_many(steps: list[dict[str, float | None]], fails: bool) -> None:
    gradients = Gradients()
    for metrics in steps:
        gradients.trained(metrics)
    assert ("in 3 steps in a row (limit 3)" in gradients.failure()) == fails


def overflow_at(life: Any, *steps: int) -> None:
    """These steps have no finite gradient, as their recorded batches and settings give it in every life."""
    learner = life.trainer.learner
    update = learner._update

    def overflown() -> Any:
        if learner.version in steps:
            for master in learner.parameters.masters.values():
                master.grad = torch.full_like(master, math.inf)
        return update()

    learner._update = overflown


async def test_a_run_that_failed_of_its_gradients_goes_on_with_other_settings(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """The third is trained and recorded before the run ends: a restart, which replays all three under their recorded
    settings, gets past them. One more bad step afterwards is the first of its life."""
    world = await make_world(checkpoint_every=100)
    life = await world.life(checkpoint_every=100)
    overflow_at(life, 0, 1, 2)
    with pytest.raises(LaminarError, match="3 steps in a row"):
        await life.trainer.run()
    head = world.head()
    assert (head.state, head.decided, head.step) == ("failed", 3, 3)
    assert "lower trainer.learning_rate" in head.reason
    await life.kill()

    again = head.model_copy(update={"state": "running", "reason": ""})
    await MemoryCoordination(world.server).put(KEYS.trainer, again.dump())
    life = await world.life(checkpoint_every=100, learning_rate=1e-5)
    overflow_at(life, 0, 1, 2, 3)
    with caplog.at_level(logging.ERROR):
        await life.trainer.run()
    assert "replay_drift" not in caplog.text
    assert world.head().state == "done"
    metrics = {r["step"]: json.loads(r["metrics"]) for r in await world.rows("step_metrics")}
    assert [metrics[s]["skipped_nonfinite"] for s in range(5)] == [1, 1, 1, 1, 0]


async def test_a_batch_that_the_learner_refuses_ends_the_run(make_world: MakeWorld) -> None:
    """Each restart would refuse it too."""
    world = await make_world()
    life = await world.life()

    def refuse(*args: Any) -> Any:
        raise LaminarError("trajectory 0-1 has a token beyond the vocabulary")

    life.trainer.learner.train = refuse
    with pytest.raises(LaminarError):
        await life.trainer.run()
    assert (world.head().state, world.head().decided) == ("failed", 1)
    assert world.head().reason == "step 0 cannot be trained: trajectory 0-1 has a token beyond the vocabulary"
