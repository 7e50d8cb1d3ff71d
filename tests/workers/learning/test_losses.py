from __future__ import annotations

import math

import pytest
import torch

from laminar.workers.learning.losses import entropy, kl_k3, policy_loss, token_weights

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def rows(*values):
    return torch.tensor([list(v) for v in values], dtype=torch.float32)


def gradient(logprobs, behaviour, advantages, mask, weights=None, **settings):
    logprobs = logprobs.clone().requires_grad_()
    result = policy_loss(logprobs, behaviour, torch.tensor(advantages), mask, **CLIP, **settings)
    (result.token_loss * (1.0 if weights is None else weights)).sum().backward()
    return result, logprobs.grad


def test_ppo_clip_by_hand():
    """Ratios 1.5, 1.1 and 0.5 under advantages +1 and -1: the minimum of the kept and the clipped product."""
    logprobs = rows([math.log(1.5), math.log(1.1), math.log(0.5)] * 1, [math.log(1.5), math.log(1.1), math.log(0.5)])
    mask = torch.ones(2, 3, dtype=torch.bool)
    result, slope = gradient(logprobs, torch.zeros(2, 3), [1.0, -1.0], mask, loss="ppo_clip")
    assert result.token_loss.tolist() == [pytest.approx([-1.28, -1.1, -0.5]), pytest.approx([1.5, 1.1, 0.8])]
    assert result.clipped.tolist() == [[True, False, False], [False, False, True]]
    assert slope.tolist() == [pytest.approx([0.0, -1.1, -0.5]), pytest.approx([1.5, 1.1, 0.0])]


def test_gspo_clips_whole_sequences():
    """The sequence's ratio is exp(mean log-ratio): sqrt(1.5 x 0.9) is inside the clip, though 1.5 is not."""
    logprobs = rows([math.log(1.5), math.log(0.9)], [math.log(1.5), math.log(1.5)])
    mask = torch.ones(2, 2, dtype=torch.bool)
    weights = token_weights(mask, "sequence", tokens=4, sequences=2)
    result, slope = gradient(logprobs, torch.zeros(2, 2), [1.0, 1.0], mask, weights, loss="gspo")
    inside = (1.5 * 0.9) ** 0.5
    assert result.token_loss.tolist() == [pytest.approx([-inside] * 2), pytest.approx([-1.28] * 2)]
    assert result.clipped.tolist() == [[False, False], [True, True]]
    # d/dlogp of the mean over 2 sequences of -ratio: each of its 2 tokens carries half of the sequence's slope.
    assert slope.tolist() == [pytest.approx([-inside / 4] * 2), pytest.approx([0.0, 0.0])]


def test_gspo_ignores_tokens_outside_the_mask():
    logprobs = rows([math.log(1.2), 5.0])
    result, slope = gradient(logprobs, torch.zeros(1, 2), [1.0], torch.tensor([[True, False]]), loss="gspo")
    assert result.token_loss.tolist() == [pytest.approx([-1.2, 0.0])]
    assert slope[0, 1] == 0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs = rows([math.log(1.5), math.log(0.5), -1.0])
    result, slope = gradient(logprobs, rows([0.0, 0.0, -1.0]), [2.0], torch.ones(1, 3, dtype=torch.bool), loss="cispo")
    assert slope.tolist() == [pytest.approx([-2.56, -1.6, -2.0])]
    assert result.clipped.tolist() == [[True, True, False]]


def test_truncated_importance_sampling_caps_the_weight():
    """Ratios 3 and 0.5 under a cap of 2: weights 2 and 0.5 on a policy gradient without a clip."""
    logprobs = rows([math.log(3.0), math.log(0.5)])
    mask = torch.ones(1, 2, dtype=torch.bool)
    result, slope = gradient(logprobs, torch.zeros(1, 2), [1.0], mask, loss="ppo_clip", importance_cap=2.0)
    assert slope.tolist() == [pytest.approx([-2.0, -0.5])]
    assert result.ratio.tolist() == [pytest.approx([3.0, 0.5])]
    assert result.clipped.tolist() == [[True, False]]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_on_policy_all_losses_are_the_policy_gradient(loss):
    logprobs = rows([-1.0, -2.0], [-0.5, 0.0])
    mask = torch.tensor([[True, True], [True, False]])
    _, slope = gradient(logprobs, logprobs, [1.5, -2.0], mask, loss=loss)
    assert slope.tolist() == [pytest.approx([-1.5, -1.5]), pytest.approx([2.0, 0.0])]


def test_extreme_ratios_stay_finite():
    result, slope = gradient(rows([0.0]), rows([-500.0]), [-1.0], torch.ones(1, 1, dtype=torch.bool), loss="ppo_clip")
    assert bool(result.token_loss.isfinite().all())
    assert bool(slope.isfinite().all())


def test_what_lies_outside_the_mask_cannot_matter():
    """Padding may hold anything, even NaN logprobs, without reaching the loss or its gradient."""
    mask = torch.tensor([[True, False]])
    result, slope = gradient(rows([-1.0, 0.0]), rows([-1.0, float("nan")]), [1.0], mask, loss="ppo_clip")
    assert result.token_loss.tolist() == [[-1.0, 0.0]]
    assert slope.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_an_empty_response_enters_no_mean(aggregation):
    """Case 14: a group with one empty response weighs its tokens as if the response were not there."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    with_empty = torch.cat([mask, torch.zeros(1, 3, dtype=torch.bool)])
    weights = token_weights(with_empty, aggregation, tokens=3, sequences=2)
    assert torch.equal(weights[:2], token_weights(mask, aggregation, tokens=3, sequences=2))
    assert float(weights[2].sum()) == 0
    assert float(weights.sum()) == pytest.approx(1)


def test_nothing_but_empty_responses_is_no_division_by_zero():
    """Case 47: every response is empty."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for aggregation in ("token", "sequence"):
        assert float(token_weights(mask, aggregation, tokens=0, sequences=0).sum()) == 0


def test_sequence_aggregation_weighs_sequences_equally():
    mask = torch.tensor([[True, True], [True, False]])
    weights = token_weights(mask, "sequence", tokens=3, sequences=2)
    assert weights.tolist() == [[0.25, 0.25], [0.5, 0.0]]


def test_k3_estimates_the_kl_divergence():
    """Its mean under p over a small vocabulary is KL(p || q), and no term is negative."""
    p = torch.log_softmax(torch.tensor([0.1, 1.0, -0.7]), 0)
    q = torch.log_softmax(torch.tensor([0.5, 0.2, -0.1]), 0)
    terms = kl_k3(p[None], q[None], torch.ones(1, 3, dtype=torch.bool))[0]
    assert float(terms.min()) >= 0
    assert float((p.exp() * terms).sum()) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-6)


def test_entropy_of_known_distributions():
    uniform = torch.full((1, 4), -math.log(4))
    certain = torch.tensor([[0.0, float("-inf"), float("-inf"), float("-inf")]])
    assert entropy(torch.cat([uniform, certain])).tolist() == pytest.approx([math.log(4), 0.0])
