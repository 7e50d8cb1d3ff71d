"""What shapes a step can be changed between two steps, and is all that a replay needs to know."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re

import pytest

from laminar.config import TrainerConfig
from laminar.errors import ConfigError
from laminar.workers.learning import learner as learner_module
from laminar.workers.learning import loading, schedule
from laminar.workers.learning.settings import LEARNER_FIELDS, SETTINGS, settings_of, with_settings

MIXED = [[(5, 1.0), (3, 0.0), (7, 0.0)], [(4, 1.0), (6, 0.0)]]
OTHER = {
    "trainer.learning_rate": 1e-2, "trainer.betas": [0.8, 0.9], "trainer.weight_decay": 0.1, "trainer.clip_high": 0.01,
    "trainer.loss": "cispo", "trainer.advantage": "rloo", "trainer.kl_coefficient": 0.1, "trainer.max_grad_norm": 0.1,
    "sampling.temperature": 0.7, "trainer.share_prompts": False,
}  # fmt: skip


def test_all_that_the_learner_reads_of_the_config_is_recorded():
    """A value that shapes a step and is not recorded would be today's at a replay."""
    source = "".join(inspect.getsource(module) for module in (learner_module, loading, schedule))
    read = set(re.findall(r"config\.(\w+)", source)) & TrainerConfig.model_fields.keys()
    assert read and read <= set(LEARNER_FIELDS)
    assert read == set(LEARNER_FIELDS), "and nothing else is"


def test_settings_survive_json(learner_of):
    settings = learner_of().settings
    assert set(settings) == set(SETTINGS)
    assert json.loads(json.dumps(settings)) == settings
    config, temperature = with_settings(TrainerConfig(), 1.0, settings)
    assert settings_of(config, temperature) == settings


def test_a_configured_learner_is_one_that_began_so(learner_of, batch_of, weights_of):
    """Another learning rate, moments, loss, temperature, KL: two steps of one kind, then two of the other."""
    batches = [batch_of(MIXED, seed=n) for n in range(4)]
    changed, plain = learner_of(), learner_of()
    for batch in batches[:2]:
        changed.train(batch)
        plain.train(batch)
    before = plain.settings
    changed.configure(OTHER)
    assert {**before, **OTHER} == changed.settings
    for batch in batches[2:]:
        changed.train(batch)
    fields = {k.removeprefix("trainer."): v for k, v in OTHER.items() if k.startswith("trainer.")}
    began_so = learner_of(temperature=0.7, **fields)
    began_so.configure(before)
    for batch in batches[:2]:
        began_so.train(batch)
    began_so.configure(OTHER)
    for batch in batches[2:]:
        began_so.train(batch)
    assert weights_of(changed) == weights_of(began_so) != weights_of(plain)


def test_what_shapes_no_step_is_refused(learner_of):
    with pytest.raises(ConfigError, match=r"trainer\.groups_per_step does not shape an optimizer step"):
        learner_of().configure({"trainer.groups_per_step": 4})
    with pytest.raises(ConfigError, match="learning_rate"):
        learner_of().configure({"trainer.learning_rate": -1})


# -- fresh trajectories -----------------------------------------------------------------------------------------


def test_fresh_trajectories_are_compared_and_train_nothing(learner_of, batch_of, weights_of):
    """Under the weights that the step starts from: 0 for logprobs that are these weights' own; no bit changes."""
    fresh = batch_of([[(4, 0.0), (6, 1.0)], [(3, 0.0), (0, 0.0)]], seed=9)
    stale = [dataclasses.replace(s, version=-1) for s in batch_of(MIXED)]
    measured, plain = learner_of(), learner_of()
    found = measured.train(stale, lambda: fresh)
    expected = plain.train(stale)
    assert found.metrics["kl_engine_trainer"] == pytest.approx(0, abs=1e-6)
    assert found.metrics["kl_engine_trainer_trajectories"] == 4
    assert (expected.metrics["kl_engine_trainer"], expected.metrics["kl_engine_trainer_trajectories"]) == (None, 0)
    assert found.samples == expected.samples and weights_of(measured) == weights_of(plain)


def test_the_estimate_is_that_of_the_batchs_own_rows(learner_of, batch_of):
    """One definition: the same trajectories in the batch or beside it, shared prompts or one by one."""
    off = [
        dataclasses.replace(s, behaviour_logprobs=[x - 0.3 for x in s.behaviour_logprobs])
        for s in batch_of([[(4, 0.0), (6, 1.0)], [(3, 0.0)]], seed=9)
    ]
    inside = learner_of(skip_no_signal=False).train(off).metrics
    stale = [dataclasses.replace(s, version=-1, group=s.group + 10) for s in batch_of(MIXED)]
    for settings in ({}, {"share_prompts": False}, {"micro_batch_tokens": 16}):
        beside = learner_of(**settings).train(stale, lambda: off).metrics
        assert beside["kl_engine_trainer"] == pytest.approx(inside["kl_engine_trainer"], rel=1e-4)
        assert beside["kl_engine_trainer"] == pytest.approx(0.0499, abs=0.001)


def test_a_batch_with_fresh_rows_asks_for_no_others(learner_of, batch_of):
    def never():
        raise AssertionError("asked")

    assert learner_of().train(batch_of(MIXED), never).metrics["kl_engine_trainer_trajectories"] == 5


def test_nothing_was_finished_in_time(learner_of, batch_of):
    stale = [dataclasses.replace(s, version=-1) for s in batch_of(MIXED)]
    metrics = learner_of().train(stale, tuple).metrics
    assert (metrics["kl_engine_trainer"], metrics["kl_engine_trainer_trajectories"]) == (None, 0)
