"""The tiny fixture model: a two-layer Llama with a tokenizer of characters, taught to reverse words, badly.

It is trained on a noisy teacher (half of the answers are shuffled), so that it starts at about 0.3 exact answers and
reinforcement learning has something to do. Built from a seed on one thread: the same bits on every build on one kind
of machine, and about 20 s.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<unknown>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=>:?., \n"
LETTERS = "abcdefghij"
WORD_LENGTHS = (3, 5)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + '<eos>' }}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

HIDDEN, LAYERS, HEAD = 128, 2, 32
STEPS, BATCH, LEARNING_RATE, WARMUP = 400, 64, 2e-3, 40
NOISE = 0.5


def build(folder: Path, seed: int = 0) -> None:
    """Write a Hugging Face folder. torch's generator and number of threads are as before afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            tokenizer = make_tokenizer()
            make: Any = LlamaForCausalLM
            model = make(_config(tokenizer))
            _teach(model, tokenizer, random.Random(seed))
        finally:
            torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> Any:
    """One token a character; no token is added at either end."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unknown>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def word(generator: random.Random) -> str:
    return "".join(generator.choice(LETTERS) for _ in range(generator.randint(*WORD_LENGTHS)))


def _config(tokenizer: Any) -> Any:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD,
        num_key_value_heads=HIDDEN // HEAD,
        head_dim=HEAD,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _teach(model: Any, tokenizer: Any, generator: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 - step / STEPS)
        ids, labels = _lesson(tokenizer, generator)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _lesson(tokenizer: Any, generator: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, int64 [BATCH, L]; labels are -100 on the question and on padding."""
    questions, answers = [], []
    for _ in range(BATCH):
        letters = word(generator)
        answer = list(reversed(letters))
        if generator.random() < NOISE:
            answer = generator.sample(letters, len(letters))
        questions.append(tokenizer.encode(f"<user>reverse {letters}<assistant>"))
        answers.append(tokenizer.encode("".join(answer) + "<eos>"))
    longest = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    ids = torch.full((BATCH, longest), tokenizer.pad_token_id)
    labels = torch.full((BATCH, longest), -100)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        labels[row, len(question) : end] = torch.tensor(answer)
    return ids, labels
