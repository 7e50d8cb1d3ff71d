"""Trains a decided batch: the one way in which a live step, a replay after a restart and `laminar replay` reach the
learner, so that all three come to the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laminar.buffer.steps import DecidedBatch
from laminar.workers.learning.base import Learner, Sample, StepResult
from laminar.workers.training.step_metrics import sample_of


@dataclass(frozen=True)
class TrainedStep:
    """`rows`: all of the batch, the retired ones too."""

    rows: list[dict[str, Any]]
    result: StepResult


async def train_decided(
    learner: Learner,
    batch: DecidedBatch,
    *,
    changes: Mapping[str, Any] | None = None,
    fresh: Callable[[], Sequence[Sample]] | None = None,
) -> TrainedStep:
    """One step of the learner, under the settings that were recorded with the decision, with `changes` to them."""
    settings = {**batch.decision.settings, **(changes or {})}
    rows = await asyncio.to_thread(batch.rows.to_pylist)

    def train() -> StepResult:
        learner.configure(settings)
        present = learner.settings.get("trainer.no_signal") == "count" or not learner.settings.get(
            "trainer.skip_no_signal", True
        )
        uses = ("train", "no_signal") if present else ("train",)
        samples = [sample_of(r) for r in rows if r["use"] in uses and r["status"] == "ok"]
        return learner.train(samples, fresh)

    return TrainedStep(rows, await asyncio.to_thread(train))
