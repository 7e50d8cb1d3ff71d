"""Runs that end almost at once, or for want of prompts: every process leaves, and every group is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryEtcd
from laminar.buffer.records import TrainerHead
from laminar.config import Config, config_from
from laminar.simulator import cluster, run
from laminar.simulator.cluster import Cluster
from laminar.simulator.faults import Kind, Plan
from laminar.simulator.run import Outcome, describe, simulate

Ended = tuple[Outcome, TrainerHead]


@pytest.fixture
def end_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`end_of(prompts, section={…})`: a run without faults of so many prompts and with these values in its config."""

    def end_of(prompts: int, seed: int = 5, **sections: dict[str, Any]) -> Ended:
        etcds: list[MemoryEtcd] = []
        base = cluster.run_config

        def config(plan: Plan) -> Config:
            values = base(plan).model_dump(mode="json")
            return config_from({name: {**values[name], **sections.get(name, {})} for name in values})

        class Seen(Cluster):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                etcds.append(self.etcd)

        monkeypatch.setattr(cluster, "PROMPT_ROWS", prompts)
        monkeypatch.setattr(cluster, "run_config", config)
        monkeypatch.setattr(run, "Cluster", Seen)
        outcome = simulate(seed, without=frozenset(Kind) - {Kind.COMPACTION})
        kv = etcds[0].get(Keys(cluster.RUN, 1).trainer)
        assert kv is not None
        return outcome, TrainerHead.parse(kv.value)

    return end_of


def test_two_steps_in_total_end_cleanly(end_of: Callable[..., Ended]) -> None:
    """Case 20: 2 steps and an environment that answers at once: rollouts and trainer both end."""
    outcome, head = end_of(40, run={"max_steps": 2})
    assert not outcome.problems, describe(outcome)
    assert (head.state, head.step) == ("done", 2)


@pytest.mark.parametrize("last_batch", ["train", "retire"])
def test_five_prompts_in_batches_of_four_are_all_accounted_for(end_of: Callable[..., Ended], last_batch: str) -> None:
    """Case 21: 5 prompts, one epoch, batches of 4: the run ends, and says what happened to the rest."""
    steps = []
    for seed in (5, 6, 7):
        outcome, head = end_of(
            5, seed, run={"epochs": 1}, trainer={"groups_per_step": 4, "last_batch": last_batch, "max_ahead_groups": 8}
        )
        # The oracle's other runs never end for want of prompts.
        assert [p for p in outcome.problems if not p.startswith("steps recorded: ")] == [], describe(outcome)
        assert (head.state, head.consumed_groups) == ("done", 5)
        assert head.reason == "every prompt of every epoch has been drawn and has ended"
        steps.append(head.step)
    # By chance a fifth group has no signal, and is no step of its own; not in all of the three.
    assert max(steps) == (2 if last_batch == "train" else 1)
