from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.config import TrainerConfig
from laminar.errors import LaminarError
from laminar.relay.tensors import views
from laminar.workers.learning.schedule import learning_rate
from laminar.workers.models import fingerprint, tensor_names

MIXED = [[(5, 1.0), (3, 0.0), (7, 0.0)], [(4, 1.0), (6, 0.0)], [(2, 0.5), (9, 1.0), (1, 0.0), (4, 0.0)]]


def assert_same_gradients(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=tolerance * scale, rtol=tolerance, msg=name)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.2)])
def test_identical_weights_give_ratio_one_at_any_temperature(learner_of, batch_of, dtype, tolerance):
    """Case 9: temperature 0.6, identical weights on both sides: importance ratio 1."""
    learner = learner_of(temperature=0.6, dtype=dtype)
    metrics = learner.train(batch_of(MIXED, temperature=0.6)).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=tolerance)
    assert metrics["ratio_min"] == pytest.approx(1, abs=2 * tolerance)
    assert metrics["ratio_max"] == pytest.approx(1, abs=2 * tolerance)
    assert metrics["kl_engine_trainer"] == pytest.approx(0, abs=tolerance)


def test_another_temperature_would_not(learner_of, batch_of):
    metrics = learner_of(temperature=1.0).train(batch_of(MIXED, temperature=0.6)).metrics
    assert metrics["ratio_max"] - metrics["ratio_min"] > 0.5


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_sharing_and_cutting_change_no_gradient(gradients_of, batch_of, loss, aggregation):
    """Shared prompts, plain, one micro-batch or many: the loss is normalised over the whole step."""
    batch = batch_of(MIXED)
    settings = {"loss": loss, "aggregation": aggregation}
    whole = gradients_of(batch, **settings)
    for variation in (
        {"micro_batch_tokens": 24},
        {"share_prompts": False},
        {"share_prompts": False, "micro_batch_tokens": 16},
    ):
        assert_same_gradients(gradients_of(batch, **settings, **variation), whole)


def test_the_order_of_the_batch_does_not_matter(gradients_of, batch_of):
    batch = batch_of(MIXED)
    assert_same_gradients(gradients_of(batch[::-1]), gradients_of(batch))


def test_the_gradient_is_the_policy_gradient(gradients_of, batch_of, model_folder):
    """On-policy: the mean over all tokens of -A grad log p, computed here the plain way."""
    batch = batch_of([[(3, 1.0), (2, 0.0)]])
    found = gradients_of(batch, advantage="dr_grpo")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loss = 0.0
    for sample, advantage in zip(batch, (0.5, -0.5), strict=True):
        logits = model(input_ids=torch.tensor([[*sample.prompt_ids, *sample.token_ids]])).logits[0]
        distribution = torch.log_softmax(logits, -1)
        for i, token in enumerate(sample.token_ids):
            loss = loss - advantage * distribution[len(sample.prompt_ids) - 1 + i, token] / 5
    loss.backward()
    assert_same_gradients(found, {name: p.grad for name, p in model.named_parameters()})


def test_environment_tokens_are_context_not_targets(gradients_of, batch_of):
    """What an environment wrote gets no gradient of its own; what comes after the last policy token none at all."""
    batch = [dataclasses.replace(s, policy_mask=[True, False, True]) for s in batch_of([[(3, 1.0), (3, 0.0)]])]
    longer = [
        dataclasses.replace(
            s,
            token_ids=[*s.token_ids, 9, 9],
            policy_mask=[*s.policy_mask, False, False],
            behaviour_logprobs=[*s.behaviour_logprobs, 0.0, 0.0],
        )
        for s in batch
    ]
    assert_same_gradients(gradients_of(longer), gradients_of(batch))


def test_an_empty_response_enters_no_token_mean(learner_of, batch_of):
    """Case 14: it keeps its place in the group's baseline; its own figures are None."""
    result = learner_of().train(batch_of([[(4, 1.0), (0, 0.0), (3, 0.0)]]))
    assert result.metrics["tokens"] == 7
    assert result.metrics["empty_responses"] == 1
    assert result.samples[1].mean_ratio is None
    assert result.samples[1].tokens == 0
    assert [s.advantage for s in result.samples] == pytest.approx([1.1545, -0.5773, -0.5773], abs=1e-3)


def test_nothing_but_empty_responses(learner_of, batch_of, weights_of):
    """Case 47: every response is empty: metrics are None, nothing crashes, nothing moves."""
    learner = learner_of()
    before = weights_of(learner)
    metrics = learner.train(batch_of([[(0, 1.0), (0, 0.0)]])).metrics
    for name in (
        "policy_loss",
        "entropy",
        "ratio_mean",
        "ratio_min",
        "clip_fraction",
        "kl_engine_trainer",
        "grad_norm",
    ):
        assert metrics[name] is None
    assert metrics["tokens"] == 0
    assert (learner.version, weights_of(learner)) == (1, before)


def test_the_denominator_counts_what_is_trained(learner_of, gradients_of, batch_of):
    """Case 49: three truncated and one stopped, the truncated masked: only the stopped one's tokens count.

    Case 52: the masked ones keep their place in the baseline, so that the one left has the advantage it had."""
    stopped, *others = batch_of([[(4, 1.0), (6, 0.0), (6, 0.0), (6, 0.0)]])
    batch = [stopped, *(dataclasses.replace(s, truncated=True) for s in others)]
    result = learner_of(mask_truncated=True).train(batch)
    assert result.metrics["tokens"] == 4
    assert result.metrics["truncated_share"] == 0.75
    assert result.samples[0].advantage == pytest.approx(0.75 / (0.5 + 1e-4))
    # The mean over 4 tokens of -A x 1: with masked tokens in the denominator it would be a quarter or less of it.
    assert result.metrics["policy_loss"] == pytest.approx(-result.samples[0].advantage, rel=1e-4)
    assert [s.mean_ratio is None for s in result.samples] == [False, True, True, True]


def test_equal_rewards_are_counted_and_not_trained(learner_of, batch_of, weights_of):
    """Case 42: rewards 1, 1, 1, 1: a counted no-signal group; a step of nothing else makes a version, no update."""
    learner = learner_of()
    before = weights_of(learner)
    metrics = learner.train(batch_of([[(3, 1.0)] * 4])).metrics
    assert metrics["no_signal_groups"] == 1
    assert metrics["grad_norm"] is None
    assert metrics["reward_mean"] == 1
    assert (learner.version, weights_of(learner)) == (1, before)


def test_skipping_groups_without_signal_saves_compute_only(gradients_of, learner_of, batch_of):
    """Computed or skipped, it is the same gradient: neither their loss nor their KL is in it."""
    batch = batch_of([*MIXED, [(5, 0.0), (2, 0.0)]])
    settings = {"kl_coefficient": 0.1, "importance_cap": 2.0}
    skipped = gradients_of(batch, **settings)
    assert_same_gradients(gradients_of(batch, skip_no_signal=False, **settings), skipped)
    computed = learner_of(skip_no_signal=False).train(batch)
    assert computed.samples[-1].mean_ratio == pytest.approx(1, abs=1e-4)
    assert learner_of().train(batch).samples[-1].mean_ratio is None


@pytest.mark.parametrize(("aggregation", "share"), [("token", 15 / 22), ("sequence", 3 / 5)])
def test_groups_without_signal_count_in_the_mean_unless_they_are_replaced(gradients_of, batch_of, aggregation, share):
    """Their loss of 0 is part of the step: 15 of its 22 tokens, 3 of its 5 trajectories have an advantage."""
    with_signal = [(5, 1.0), (3, 0.0), (7, 0.0)]
    alone = batch_of([with_signal])
    both = [*alone, *(dataclasses.replace(s, group=9) for s in batch_of([[(5, 0.0), (2, 0.0)]], seed=3))]
    settings = {"aggregation": aggregation, "max_grad_norm": 1e9}
    replaced = gradients_of(both, no_signal="replace", **settings)
    assert_same_gradients(replaced, gradients_of(alone, **settings))
    counted = gradients_of(both, no_signal="count", **settings)
    assert_same_gradients(counted, {name: gradient * share for name, gradient in replaced.items()})


def test_a_step_without_any_trajectory_makes_a_version(learner_of, weights_of):
    learner = learner_of()
    before = weights_of(learner)
    result = learner.train([])
    assert (learner.version, result.samples, result.metrics["reward_mean"]) == (1, [], None)
    assert weights_of(learner) == before


def test_learning_raises_what_was_rewarded(learner_of, batch_of):
    learner = learner_of()
    batch = batch_of(MIXED)
    first, last = [learner.train(batch) for _ in range(4)][::3]
    for before, after in zip(first.samples, last.samples, strict=True):
        assert math.copysign(1, after.mean_logprob - before.mean_logprob) == math.copysign(1, before.advantage)
    assert first.metrics["clip_fraction"] == 0
    assert last.metrics["clip_fraction"] > 0


def test_the_engine_is_compared_on_fresh_weights_only(learner_of, batch_of):
    """Of stale trajectories the difference is staleness, not a disagreement of engine and trainer."""
    learner = learner_of()
    batch = batch_of(MIXED)
    assert learner.train(batch).metrics["kl_engine_trainer"] is not None
    assert learner.train(batch).metrics["kl_engine_trainer"] is None
    fresh = [dataclasses.replace(s, version=2) for s in batch[:3]]
    assert learner.train([*fresh, *batch[3:]]).metrics["kl_engine_trainer"] > 0


def test_kl_to_the_initial_policy_grows_and_pulls_back(learner_of, batch_of):
    batch = batch_of(MIXED)
    found = {}
    for coefficient in (1e-6, 2.0):
        learner = learner_of(kl_coefficient=coefficient)
        found[coefficient] = [learner.train(batch).metrics["kl_reference"] for _ in range(5)]
    assert found[1e-6][0] == pytest.approx(0, abs=1e-6)
    assert 0 < found[2.0][-1] < found[1e-6][-1]


def test_warm_up_is_linear_then_constant(learner_of, batch_of):
    learner = learner_of(warmup_steps=4, learning_rate=1e-4)
    batch = batch_of([[(2, 1.0), (2, 0.0)]])
    rates = [learner.train(batch).metrics["learning_rate"] for _ in range(6)]
    assert rates == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4, 1e-4])


def test_the_rate_falls_along_half_a_cosine_after_the_warm_up():
    config = TrainerConfig(warmup_steps=2, learning_rate=1e-4, decay_steps=4, decay_to=0.2)
    rates = [learning_rate(config, step) for step in range(9)]
    assert rates[:3] == pytest.approx([0.5e-4, 1e-4, 1e-4])
    assert rates[4] == pytest.approx(0.6e-4), "half way between the peak and what is left"
    assert rates[2] > rates[3] > rates[4] > rates[5] > rates[6]
    assert rates[6:] == pytest.approx([0.2e-4] * 3)


def test_updates_without_a_finite_norm_are_skipped(learner_of, batch_of, weights_of):
    """However many come in a row: the batches are decided, so a restart must get through them too."""
    learner = learner_of(advantage="dr_grpo", learning_rate=1e-6)
    good = batch_of([[(3, 1.0), (3, 0.0)]])
    overflow = [dataclasses.replace(s, reward=s.reward * 3e38) for s in good]
    before = weights_of(learner)
    result = learner.train(overflow)
    assert (result.metrics["skipped_nonfinite"], result.metrics["grad_norm"]) == (1, None)
    assert (learner.version, weights_of(learner)) == (1, before)
    assert learner.train(good).metrics["skipped_nonfinite"] == 0
    before = weights_of(learner)
    assert [learner.train(overflow).metrics["skipped_nonfinite"] for _ in range(4)] == [1] * 4
    assert (learner.version, weights_of(learner)) == (6, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_steps_give_the_same_bits(learner_of, batch_of, weights_of, dtype):
    def two_steps():
        learner = learner_of(dtype=dtype, micro_batch_tokens=40)
        return [learner.train(batch_of(MIXED, seed=s)).samples for s in (0, 1)], weights_of(learner)

    assert two_steps() == two_steps()


def test_masters_keep_what_bfloat16_rounds_away(learner_of, batch_of):
    """Updates of 1e-6 are below bfloat16's resolution at these weights: the masters move, the published hardly."""
    learner = learner_of(dtype="bfloat16", learning_rate=1e-6)
    masters = {name: m.detach().clone() for name, m in learner.parameters.masters.items()}
    published = {name: t.clone() for name, t in learner.parameters.published.items()}
    learner.train(batch_of(MIXED))
    learner.stage()
    total = sum(m.numel() for m in masters.values())
    assert all(m.dtype == torch.float32 for m in learner.parameters.masters.values())
    assert sum(int((learner.parameters.masters[name] != m).sum()) for name, m in masters.items()) > 0.9 * total
    assert sum(int((learner.parameters.published[name] != t).sum()) for name, t in published.items()) < 0.1 * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_those_of_the_export(learner_of, batch_of, weights_of, model_folder, tmp_path, dtype):
    """Hugging Face names, the tied head once, the bytes that `from_pretrained` reads; the tokenizer untouched."""
    learner = learner_of(dtype=dtype)
    learner.train(batch_of(MIXED))
    published = views(memoryview(bytearray(weights_of(learner))), learner.layout)
    learner.export(tmp_path)
    assert published.keys() == tensor_names(tmp_path)
    assert "lm_head.weight" not in published
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    for name, tensor in published.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, exported[name])
    assert AutoTokenizer.from_pretrained(tmp_path).encode("abc") == AutoTokenizer.from_pretrained(model_folder).encode(
        "abc"
    )
    before, after = fingerprint(model_folder), fingerprint(tmp_path)
    assert (before.tokenizer, before.template) == (after.tokenizer, after.template)


def test_staging_casts_once(learner_of, batch_of, weights_of):
    learner = learner_of(dtype="bfloat16")
    before = weights_of(learner)
    learner.train(batch_of(MIXED))
    assert learner.stage() >= 0
    after = weights_of(learner)
    assert after != before
    learner.stage()
    assert weights_of(learner) == after


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_ids": [5, 6]}, "trajectory 0-0 has 2 tokens, 3 mask entries and 3 logprobs"),
        ({"behaviour_logprobs": [-1.0, float("nan"), -1.0]}, "behaviour logprob nan at token 1"),
        ({"prompt_ids": []}, "trajectory 0-0 has an empty prompt"),
        ({"token_ids": [5, 6, 5000]}, "outside the model's vocabulary of"),
        ({"sample": 1}, "trajectory 0-1 is twice in the batch"),
        ({"reward": float("inf")}, "group 0 has the reward inf"),
    ],
)
def test_a_malformed_trajectory_is_named(learner_of, batch_of, change, message):
    batch = batch_of([[(3, 1.0), (3, 0.0)]])
    learner = learner_of()
    with pytest.raises(LaminarError, match=message):
        learner.train([dataclasses.replace(batch[0], **change), batch[1]])
    assert learner.version == 0
