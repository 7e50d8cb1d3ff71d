"""What each policy of the simulated cluster must keep, whatever it costs; and what is to be seen of them."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from laminar.errors import ConfigError
from laminar.simulator.scale.barriers import Barriers
from laminar.simulator.scale.compare import run_policy, split_of
from laminar.simulator.scale.costs import published_costs
from laminar.simulator.scale.flowing import Flowing
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Outcome
from laminar.simulator.scale.policies import POLICIES, Pipeline
from laminar.simulator.scale.published import GPUS, MODELS
from laminar.simulator.scale.rollout import Rollout
from laminar.simulator.scale.settings import settings_from


def job(**sections: dict[str, Any]) -> Job:
    values: dict[str, Any] = {
        "cluster": {"gpus": 16},
        "job": {"groups_per_step": 12, "samples_per_prompt": 4, "steps": 3, "warmup_steps": 2, "mini_batches": 4},
        "rollout": {"max_running": 16, "gpus": 6},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Job.of(settings_from(values))


@pytest.mark.parametrize("name", POLICIES)
def test_each_group_is_trained_once_and_equal_seeds_give_equal_outcomes(name: str) -> None:
    flows = POLICIES[name].pipeline is Pipeline.FLOWING
    simulation = (Flowing if flows else Barriers)(name, job(), split_of(name, job()))
    outcome = simulation.run()
    assert outcome == run_policy(name, job())
    trained = [group for batch in simulation.batches for group in batch]
    assert len(trained) == len(set(trained)) == 12 * len(simulation.batches)
    assert sum(outcome.staleness.values()) == 3 * 12 * 4
    for share in (outcome.rollout_idle, outcome.trainer_idle, outcome.kv_share):
        assert 0 <= share <= 1, outcome
    assert all(0 <= share <= 1 for _, share in outcome.kv_over_time)
    if isinstance(simulation, Flowing):
        drawn = set(range(simulation.cursor))
        unfinished, complete = set(simulation.trainer.missing), set(simulation.trainer.opened.complete())
        assert drawn == set(trained) | unfinished | complete, "a drawn group is trained, complete or open"
        assert len(drawn) == len(trained) + len(unfinished) + len(complete)
        owned = [key for rollout in simulation.rollouts for key in rollout.live]
        assert len(owned) == len(set(owned)) == sum(simulation.trainer.missing.values()), "each has one owner"


def test_another_seed_gives_another_outcome() -> None:
    assert run_policy("laminar", job()).tokens_per_s != run_policy("laminar", job(job={"seed": 1})).tokens_per_s


def test_who_waits_for_whom_shows_in_the_staleness() -> None:
    assert run_policy("synchronous", job()).staleness_max == 0
    assert run_policy("stream", job()).staleness_max == 0
    one_step = run_policy("one-step", job())
    assert set(one_step.staleness) == {1}
    assert run_policy("laminar", job(job={"max_staleness": 0})).staleness_mean <= 1
    assert run_policy("laminar", job()).staleness_mean > 0


def test_what_waits_for_a_slow_trainer_does_not_get_old() -> None:
    """Beside what is under way, here as much as a batch."""
    slow: dict[str, Any] = {
        "costs": {"train_tokens_per_s": 300.0}, "job": {"steps": 6}, "rollout": {"max_running": 8}
    }  # fmt: skip
    ahead, laminar = (run_policy(name, job(**slow)) for name in ("laminar-ahead", "laminar"))
    assert ahead.trainer_idle == laminar.trainer_idle == 0
    assert laminar.staleness_mean < ahead.staleness_mean - 0.7, "2.3 and 3.2"
    assert laminar.staleness_below(3) > 2 * ahead.staleness_below(3), "0.72 and 0.28"
    assert laminar.tokens_per_s == pytest.approx(ahead.tokens_per_s, rel=0.03)


def test_in_turns_each_gpu_generates_or_trains_or_waits_for_the_slowest() -> None:
    outcome = run_policy("synchronous", job())
    assert outcome.rollout_idle == outcome.trainer_idle > 0.1
    assert outcome.rollout_gpus == outcome.trainer_gpus == 16


def test_without_tails_there_is_nothing_to_pack() -> None:
    outcome = run_policy("laminar", job(lengths={"sigma": 0.0}))
    assert outcome.moved == 0


class Watched(Flowing):
    """Tells how long each rollout had been behind when it took a newer version, or is behind at the end."""

    def __init__(self, name: str, job: Job) -> None:
        super().__init__(name, job, split_of(name, job))
        self.behind_s: list[float] = []

    def _behind_s(self, rollout: Rollout) -> float:
        return self.now - self.published_at[rollout.version + 1]

    def _take_version(self, rollout: Rollout, version: int, *, swap: bool) -> None:
        self.behind_s.append(self._behind_s(rollout))
        super()._take_version(rollout, version, swap=swap)

    def measured(self) -> tuple[Outcome, float]:
        outcome = self.run()
        late = [self._behind_s(r) for r in self.rollouts if r.version < self.trainer.version]
        return outcome, fmean(self.behind_s + late)


@pytest.mark.parametrize("seed", range(3))
def test_with_long_tails_repack_moves_and_rollouts_come_sooner_to_new_work(seed: int) -> None:
    """Many small steps: versions come often, and rollouts share them while they drain. Without repack each waits for
    its own longest."""
    tails = job(
        cluster={"gpus": 48}, rollout={"gpus": 32, "max_running": 48},
        job={"groups_per_step": 64, "steps": 8, "max_ahead_groups": 640, "seed": seed},
    )  # fmt: skip
    off, off_behind_s = Watched("laminar-off", tails).measured()
    on, on_behind_s = Watched("laminar", tails).measured()
    assert off.moved == 0 < on.moved
    assert on.refilled_tokens > off.refilled_tokens, "its price"
    assert on_behind_s < 0.25 * off_behind_s, "75 to 85 s, and 11 to 13"
    assert on.generated_per_s > 2 * off.generated_per_s, "three times as much"
    assert on.tokens_per_s > off.tokens_per_s


def test_interrupted_trajectories_pay_with_computing_their_cache_anew() -> None:
    partial = run_policy("partial", job())
    assert partial.refilled_tokens > 0 and partial.moved == 0
    assert partial.kv_share > run_policy("one-step", job()).kv_share


def test_without_relays_the_trainer_and_all_rollouts_stop_for_an_exchange_of_weights() -> None:
    """5 s on the way, in steps of 20: what is measured of the weights counts for all policies."""
    slow = job(rollout={"gpus": 4}, costs={"version_bytes": 50e9, "bytes_per_s": 10e9, "load_s": 0.5})
    assert run_policy("one-step", slow).step_s > run_policy("one-step", job(rollout={"gpus": 4})).step_s + 3
    together, relays = run_policy("partial", slow), run_policy("laminar-interrupt", slow)
    assert together.rollout_idle == relays.rollout_idle == 0
    assert together.generated_per_s < 0.9 * relays.generated_per_s


def test_a_job_in_which_nothing_ends_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"laminar: nothing has ended for 1000000 s of simulated time"):
        run_policy("laminar", job(costs={"prefill_tokens_per_s": 1e-5}))


def test_turns_and_environments_take_their_time() -> None:
    plain = run_policy("laminar", job())
    acting = run_policy("laminar", job(environment={"turns": 3, "median_s": 20.0, "sigma": 0.5, "reward_s": 1.0}))
    assert acting.step_s > plain.step_s
    sync = run_policy("synchronous", job(environment={"turns": 3, "median_s": 20.0, "reward_s": 1.0}))
    assert sync.step_s > run_policy("synchronous", job()).step_s + 3 * 20, "the environment hears the last turn too"


def test_the_split_balances_generation_and_training() -> None:
    free: dict[str, Any] = {"rollout": {"gpus": 0}, "job": {"groups_per_step": 48, "mini_batches": 1}}
    for name in ("laminar", "one-step"):
        slow_training = split_of(name, job(costs={"train_tokens_per_s": 500.0}, **free))
        fast_training = split_of(name, job(costs={"train_tokens_per_s": 50_000.0}, **free))
        assert slow_training.rollout_gpus < fast_training.rollout_gpus
        assert slow_training.rollout_gpus + slow_training.trainer_gpus == 16


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.gpus = 15 leaves 1 of 16 GPUs"):
        split_of("laminar", job(rollout={"gpus": 15}))
    with pytest.raises(ConfigError, match=r"rollout\.gpus = 6 is no multiple of 4"):
        split_of("laminar", job(model={"name": "qwen2.5-32b"}, cluster={"gpus": 32}, rollout={"gpus": 6}))
    with pytest.raises(ConfigError, match=r"cluster\.gpus = 16 are too few"):
        split_of("laminar", job(model={"name": "qwen2.5-72b"}, rollout={"gpus": 0}))
    with pytest.raises(ConfigError, match="KV cache"):
        job(model={"name": "qwen2.5-72b", "tensor_parallel": 2})
    with pytest.raises(ConfigError, match="leaves none"):
        job(rollout={"gpus": 16})
    with pytest.raises(ConfigError, match=r"model\.name = 'measured' needs costs\.decode"):
        job(model={"name": "measured"})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"tensor_parallel": 3}}, r"tensor_parallel = 3: qwen2\.5-7b has 28 heads and 4 .* are 1, 2, 4$"),
        ({"model": {"tensor_parallel": 8}}, r"tensor_parallel = 8: qwen2\.5-7b has 28 heads"),
        ({"model": {"tensor_parallel": 16}}, r"tensor_parallel = 16 is more than cluster\.gpus_per_machine = 8"),
        (
            {"model": {"name": "qwen2.5-72b"}, "cluster": {"gpus": 64, "gpus_per_machine": 4}},
            r"= 8 is more than .* = 4",
        ),
        (
            {"model": {"tensor_parallel": 2}, "cluster": {"gpus_per_machine": 5}},
            r"leaves 1 of the 5 GPUs of each machine",
        ),
    ],
)
def test_gpus_that_cannot_share_a_model_are_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job(**sections)


def test_a_few_gpus_of_a_larger_machine_may_hold_a_model() -> None:
    for gpus, size in ((6, 2), (4, 4), (6, 4)):
        assert (
            job(model={"tensor_parallel": size}, cluster={"gpus": gpus}, rollout={"gpus": 0}).costs.tensor_parallel
            == size
        )


def test_in_turns_the_training_state_must_fit_too() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpus = 2 are too few: the trainer's state takes 3"):
        split_of("synchronous", job(cluster={"gpus": 2}, rollout={"gpus": 0}))


def test_gpus_without_an_engine_are_idle_while_others_generate() -> None:
    """32B, four GPUs an engine: two of ten have none."""
    sizes: dict[str, Any] = {"model": {"name": "qwen2.5-32b"}, "rollout": {"gpus": 0}}
    ten = run_policy("synchronous", job(cluster={"gpus": 10}, **sizes | {"costs": {"train_tokens_per_s": 1e12}}))
    assert ten.rollouts == 2 and ten.rollout_idle > 0.2


def test_copies_of_kv_heads_take_their_place_in_the_cache() -> None:
    model, gpu = MODELS["qwen2.5-7b"], GPUS["h800"]
    two, four, eight = (published_costs(model, gpu, size) for size in (2, 4, 8))
    assert four.kv_tokens > 2 * two.kv_tokens
    assert eight.kv_tokens < 1.1 * four.kv_tokens, "as many heads on each GPU"
    assert eight.decode.kv_s == pytest.approx(four.decode.kv_s)


def test_a_sequence_is_shared_by_the_gpus_of_a_machine_in_training() -> None:
    small, large = (job(cluster={"gpus": 64, "gpus_per_machine": n}).train_s(range(12), 32) for n in (4, 8))
    assert small > 1.5 * large, "the longest sequence is what it waits for"
