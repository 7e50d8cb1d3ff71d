"""The whole learner on a real, if tiny, task: reversing words. Synchronous: what it shows is that it learns."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laminar.workers.learning import tiny
from laminar.workers.learning.base import Sample
from laminar.workers.models import resolve_model

PROMPTS, SAMPLES, LONGEST, EOS = 16, 8, 8, 1


@torch.no_grad()
def rollout(folder, tokenizer, generator: random.Random, version: int) -> list[Sample]:
    """One group a word, sampled by transformers at temperature 1, with the logprobs of what was sampled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = []
    for group in range(PROMPTS):
        word = tiny.word(generator)
        prompt = tokenizer.encode(f"<user>reverse {word}<assistant>")
        output = model.generate(
            torch.tensor([prompt] * SAMPLES), do_sample=True, top_k=0, max_new_tokens=LONGEST, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        distribution = torch.stack(output.logits, 1).log_softmax(-1)
        for sample, tokens in enumerate(output.sequences[:, len(prompt) :].tolist()):
            tokens = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
            logprobs = [float(distribution[sample, i, token]) for i, token in enumerate(tokens)]
            right = tokenizer.decode(tokens, skip_special_tokens=True) == word[::-1]
            batch.append(
                Sample(group, sample, prompt, tokens, [True] * len(tokens), logprobs, float(right), version,
                       truncated=tokens[-1] != EOS)
            )  # fmt: skip
    return batch


@pytest.mark.slow
def test_the_tiny_model_learns_to_reverse_words(learner_of, tmp_path):
    folder = resolve_model("tiny-reverse")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    learner = learner_of(folder, learning_rate=3e-4)
    generator = random.Random(10_000)
    torch.manual_seed(0)
    rewards = []
    for step in range(15):
        result = learner.train(rollout(folder, tokenizer, generator, step))
        assert result.metrics["kl_engine_trainer"] < 1e-6
        assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-3)
        rewards.append(result.metrics["reward_mean"])
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        learner.export(folder)
    assert sum(rewards[-4:]) / 4 - sum(rewards[:4]) / 4 >= 0.08, rewards
