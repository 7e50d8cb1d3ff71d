from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from laminar.workers.learning import forward
from laminar.workers.learning.forward import (
    CELL_BYTES,
    SHORT_BYTES,
    Prompted,
    attention_for,
    can_share_prompts,
    score,
)

PROMPTS = [[7, 8, 9], [11, 12, 13, 14, 15, 16], [20, 21]]
OWNERS = [0, 0, 1, 2, 2, 2]
RESPONSES = torch.tensor(
    [[5, 6, 7, 8], [9, 0, 0, 0], [10, 11, 12, 0], [13, 14, 0, 0], [15, 16, 17, 18], [19, 20, 21, 0]]
)
MASK = torch.tensor(
    [[1, 0, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0]], dtype=torch.bool
)
"""Groups of two, one and three; prompts of different lengths; environment tokens inside and before the policy's."""

SHARED = [Prompted(p, [i for i, owner in enumerate(OWNERS) if owner == n]) for n, p in enumerate(PROMPTS)]
PLAIN = [Prompted(PROMPTS[owner], [i]) for i, owner in enumerate(OWNERS)]


@pytest.fixture(params=["eager", "sdpa"])
def model(model_folder, request, monkeypatch):
    if request.param == "sdpa":
        monkeypatch.setattr(forward, "SHORT_BYTES", 0)
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def scored(model, prompts, temperature=0.7):
    """Scores, and the gradients of a weighted sum of the logprobs by parameter name."""
    model.zero_grad()
    scores = score(model, prompts, RESPONSES, MASK, temperature=temperature)
    (scores.logprobs * torch.linspace(-1, 1, 24).view(6, 4)).sum().backward()
    return scores, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("prompts", [SHARED, PLAIN], ids=["shared", "plain"])
def test_logprobs_are_those_of_each_sequence_alone(model, reference_logprobs, prompts):
    """Case 9: log_softmax(logits / temperature), whatever the padding and the company."""
    scores, _ = scored(model, prompts)
    for row, owner in enumerate(OWNERS):
        expected = reference_logprobs(PROMPTS[owner], RESPONSES[row].tolist(), 0.7)
        for column in range(4):
            wanted = expected[column] if MASK[row, column] else 0.0
            assert float(scores.logprobs.detach()[row, column]) == pytest.approx(wanted, abs=2e-5)


def test_sharing_prompts_changes_neither_scores_nor_gradients(model):
    shared, shared_gradients = scored(model, SHARED)
    plain, plain_gradients = scored(model, PLAIN)
    torch.testing.assert_close(shared.logprobs, plain.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared.entropy, plain.entropy, atol=1e-5, rtol=1e-5)
    assert shared_gradients.keys() == plain_gradients.keys()
    for name, expected in plain_gradients.items():
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(shared_gradients[name], expected, atol=1e-4, rtol=1e-4, msg=name)


def test_rows_need_not_lie_in_the_order_of_their_prompts(model):
    order = [3, 0, 5, 2, 1, 4]
    place = {row: n for n, row in enumerate(order)}
    moved = [Prompted(p.prompt_ids, [place[row] for row in p.rows]) for p in SHARED]
    result = score(model, moved, RESPONSES[order], MASK[order], temperature=0.7)
    torch.testing.assert_close(result.logprobs, scored(model, SHARED)[0].logprobs[order], atol=1e-5, rtol=1e-5)


def test_responses_of_one_token_need_no_second_pass(model, reference_logprobs):
    result = score(
        model, [Prompted([7, 8], [0, 1])], torch.tensor([[5], [6]]), torch.ones(2, 1, dtype=torch.bool), temperature=1.0
    )
    expected = [reference_logprobs([7, 8], [token], 1.0) for token in (5, 6)]
    torch.testing.assert_close(result.logprobs.detach(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_only_full_attention_shares_prompts():
    size = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    assert can_share_prompts(LlamaForCausalLM(LlamaConfig(**size)))
    assert not can_share_prompts(MistralForCausalLM(MistralConfig(**size, sliding_window=8)))
    assert can_share_prompts(MistralForCausalLM(MistralConfig(**size, sliding_window=None)))


def test_short_sequences_take_plain_attention_on_a_cpu_and_long_ones_do_not():
    config = SimpleNamespace(num_attention_heads=8, num_hidden_layers=4)
    config.get_text_config = lambda: config
    cells = SHORT_BYTES // (8 * 4 * CELL_BYTES)
    assert attention_for(config, torch.device("cpu"), cells) == "eager"
    assert attention_for(config, torch.device("cpu"), cells + 1) == "sdpa"
    assert attention_for(config, torch.device("cuda"), 1) == "sdpa"
