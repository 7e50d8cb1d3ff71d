"""A small random Llama (tied embeddings, grouped keys) in a Hugging Face folder, and batches for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from laminar.config import TrainerConfig
from laminar.workers.learning.base import Sample
from laminar.workers.learning.learner import TorchLearner
from laminar.workers.learning.tiny import make_tokenizer

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def save_random_model(folder: Path, *, seed: int = 0, layers: int = 2) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.2,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("other-model"), layers=1)


@pytest.fixture(scope="session")
def reference_logprobs(model_folder: Path) -> Callable[[Sequence[int], Sequence[int], float], list[float]]:
    """Logprobs of tokens after a prompt, one sequence at a time: the plainest way to compute them."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    @torch.no_grad()
    def compute(prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> list[float]:
        if not tokens:
            return []
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        distribution = torch.log_softmax(logits / temperature, -1)
        return [float(distribution[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]

    return compute


@pytest.fixture
def learner_of(model_folder: Path) -> Callable[..., TorchLearner]:
    def make(
        folder: Path = model_folder, *, temperature: float = 1.0, dtype: str = "float32", kind: Any = TorchLearner,
        **settings: Any,
    ) -> TorchLearner:  # fmt: skip
        config = TrainerConfig(**{"learning_rate": 1e-3, **settings})
        return kind(folder, config, temperature=temperature, dtype=dtype)

    return make


@pytest.fixture
def batch_of(reference_logprobs: Any) -> Callable[..., list[Sample]]:
    """`batch_of([[(length, reward), ...], ...])`: a group a list, random tokens, behaviour logprobs of the model."""

    def make(groups: list[list[tuple[int, float]]], *, seed: int = 0, **settings: Any) -> list[Sample]:
        temperature = settings.pop("temperature", 1.0)
        generator = random.Random(seed)
        batch = []
        for group, members in enumerate(groups):
            prompt = [generator.randrange(5, 50) for _ in range(generator.randint(2, 9))]
            for sample, (length, reward) in enumerate(members):
                tokens = [generator.randrange(5, 50) for _ in range(length)]
                logprobs = reference_logprobs(prompt, tokens, temperature)
                batch.append(
                    Sample(group, sample, prompt, tokens, [True] * length, logprobs, reward, version=0, **settings)
                )
        return batch

    return make


class RecordingLearner(TorchLearner):
    """Keeps the gradients of the last step, as they are before clipping."""

    gradients: dict[str, torch.Tensor]

    def _update(self) -> dict[str, float | None]:
        self.gradients = {name: m.grad.clone() for name, m in self.parameters.masters.items() if m.grad is not None}
        return super()._update()


@pytest.fixture
def gradients_of(learner_of: Any) -> Callable[..., dict[str, torch.Tensor]]:
    """Gradients of one step on `batch` under the settings given."""

    def compute(batch: list[Sample], **settings: Any) -> dict[str, torch.Tensor]:
        learner = learner_of(kind=RecordingLearner, **settings)
        learner.train(batch)
        return learner.gradients

    return compute


@pytest.fixture
def weights_of() -> Callable[[TorchLearner], bytes]:
    """The published bytes of a learner."""

    def read(learner: TorchLearner) -> bytes:
        buffer = bytearray(learner.layout.total_bytes)
        learner.stage()
        learner.write_weights(memoryview(buffer))
        return bytes(buffer)

    return read
