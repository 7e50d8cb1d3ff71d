"""The model of Laminar agrees with the workers themselves on a small cluster, and both repeat."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.errors import ConfigError
from laminar.simulator.scale.compare import run_policy
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.real import run_real, says_real
from laminar.simulator.scale.settings import settings_from
from laminar.workers.managing.repacking import Repacker


def job(**sections: dict[str, Any]) -> Job:
    values: dict[str, Any] = {
        "cluster": {"gpus": 12},
        "job": {"groups_per_step": 16, "samples_per_prompt": 4, "steps": 5, "warmup_steps": 3, "mini_batches": 4},
        "rollout": {"max_running": 16, "gpus": 6},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Job.of(settings_from(values))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laminar", "laminar-interrupt"])
def test_the_model_agrees_with_the_workers_themselves(name: str) -> None:
    modelled, real = run_policy(name, job()), run_real(name, job())
    assert real.tokens_per_s == pytest.approx(modelled.tokens_per_s, rel=0.15), (real, modelled)
    assert real.generated_per_s == pytest.approx(modelled.generated_per_s, rel=0.15)
    assert real.staleness_mean == pytest.approx(modelled.staleness_mean, abs=0.6)
    assert real.kv_share == pytest.approx(modelled.kv_share, abs=0.1)
    assert (real.moved > 0) == (modelled.moved > 0)


@pytest.mark.slow
def test_the_workers_give_the_same_for_the_same_seed() -> None:
    small = job(job={"steps": 2, "warmup_steps": 1})
    assert run_real("laminar", small) == run_real("laminar", small)


@pytest.mark.slow
def test_several_turns_and_environments_with_the_workers_themselves() -> None:
    acting = job(environment={"turns": 2, "median_s": 5.0, "reward_s": 1.0}, job={"steps": 2, "warmup_steps": 1})
    real, modelled = run_real("laminar", acting), run_policy("laminar", acting)
    assert real.tokens_per_s == pytest.approx(modelled.tokens_per_s, rel=0.25), (real, modelled)


def test_what_waits_for_a_slow_reward_holds_no_rollout_in_model_and_workers() -> None:
    """It takes room alone: rollouts go on to newer versions beside it."""
    slow = job(
        rollout={"max_running": 32}, environment={"reward_s": 60.0}, lengths={"median": 400.0},
        job={"steps": 2, "warmup_steps": 2, "max_tokens": 4096},
    )  # fmt: skip
    real, modelled = run_real("laminar", slow), run_policy("laminar", slow)
    assert real.tokens_per_s == pytest.approx(modelled.tokens_per_s, rel=0.1), (real, modelled)
    assert real.rollout_idle == pytest.approx(modelled.rollout_idle, abs=0.1), (real, modelled)
    assert real.staleness_mean == pytest.approx(modelled.staleness_mean, abs=0.3)


def test_turns_wait_as_often_and_cost_as_much_anew_in_model_and_workers() -> None:
    """The environment hears the last turn too; who was with it while weights were swapped has no cache any more."""
    acting = job(
        rollout={"max_running": 32}, environment={"turns": 4, "median_s": 10.0}, lengths={"median": 400.0},
        job={"steps": 2, "warmup_steps": 2, "max_tokens": 4096},
    )  # fmt: skip
    real, modelled = run_real("laminar-interrupt", acting), run_policy("laminar-interrupt", acting)
    assert real.step_s == pytest.approx(modelled.step_s, rel=0.1), (real, modelled)
    assert real.refilled_tokens == pytest.approx(modelled.refilled_tokens, rel=0.2), (real, modelled)


def test_weights_take_their_way_for_those_that_wait_for_them_in_model_and_workers() -> None:
    """20 s of the minute of a step: rollouts and trainer take turns."""
    slow = job(
        costs={"version_bytes": 50e9, "bytes_per_s": 2.5e9, "load_s": 0.5}, lengths={"median": 400.0},
        job={"steps": 2, "warmup_steps": 1, "max_tokens": 4096, "max_staleness": 0},
    )  # fmt: skip
    real, modelled = run_real("laminar", slow), run_policy("laminar", slow)
    assert modelled.step_s > 40
    assert real.step_s == pytest.approx(modelled.step_s, rel=0.1), (real, modelled)


def test_trajectories_shorter_than_their_turns_end_in_model_and_workers() -> None:
    short = job(
        environment={"turns": 4, "median_s": 10.0}, lengths={"median": 2.0}, job={"steps": 1, "warmup_steps": 1}
    )  # fmt: skip
    real, modelled = run_real("laminar", short), run_policy("laminar", short)
    assert real.step_s == pytest.approx(modelled.step_s, rel=0.25), (real, modelled)


@pytest.mark.slow
def test_none_of_equal_engines_is_sent_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token stands for 256: one engine had made 2 of them where others would have made 9, and rested for minutes."""
    rests: list[str] = []
    send = Repacker._send_to_rest

    async def sent(self: Repacker, worker: str, reason: str) -> None:
        rests.append(reason)
        await send(self, worker, reason)

    monkeypatch.setattr(Repacker, "_send_to_rest", sent)
    rewards = job(
        environment={"reward_s": 250.0}, job={"steps": 4, "warmup_steps": 1, "max_ahead_groups": 96}
    )  # fmt: skip
    run_real("laminar-off", rewards)
    assert not rests


def test_what_is_simplified_is_said() -> None:
    assert "one simulated token stands for 256 tokens" in says_real(job())
    assert "each token is one" in says_real(job(job={"max_tokens": 64}))


def test_a_policy_that_the_workers_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="laminar-off"):
        run_real("laminar-batch", job())
