"""What every engine asks of a request before it takes it: a bad one must not reach the model, where it would end the
engine for all others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laminar.errors import EngineError

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises temperatures in (0, 0.01) to 0.01, so that logprobs would be of another distribution."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses more."""


def token_budget(
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float,
    stop_token_ids: Sequence[int],
    max_model_len: int,
    vocabulary: int,
) -> int:
    """The tokens that may be generated: `max_tokens`, less if the model's length ends before. Raises EngineError."""
    room = max_model_len - len(token_ids)
    if not token_ids or room < 1:
        raise EngineError(
            f"request {request_id} has a prompt of {len(token_ids)} tokens; 1 to {max_model_len - 1} leave room for a "
            f"reply within max_model_len = {max_model_len}"
        )
    if max_tokens < 1:
        raise EngineError(f"request {request_id} asks for max_tokens = {max_tokens}; it must be at least 1")
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE):
        raise EngineError(
            f"request {request_id} asks for temperature {temperature}; use 0 (greedy) or "
            f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise EngineError(
            f"request {request_id} has token {bad}, outside the model's vocabulary of {vocabulary}: the tokenizer "
            "belongs to another model"
        )
    if any(not 0 <= token < vocabulary for token in stop_token_ids):
        raise EngineError(
            f"request {request_id} has stop tokens {list(stop_token_ids)}, not all inside the vocabulary of "
            f"{vocabulary}"
        )
    return min(max_tokens, room)


def finite(request_id: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> list[float]:
    """`logprobs` as a list. Raises EngineError unless there is one finite logprob for each token."""
    if len(logprobs) != len(token_ids):
        raise EngineError(
            f"request {request_id} got {len(token_ids)} tokens but {len(logprobs)} logprobs: the engine must return "
            "the logprob of every sampled token"
        )
    for token, logprob in zip(token_ids, logprobs, strict=True):
        if not math.isfinite(logprob):
            raise EngineError(
                f"request {request_id} got logprob {logprob} for token {token}: the weights or the kernels give "
                "non-finite numbers; look at the trainer's gradient norm, or use model.dtype = 'float32'"
            )
    return list(logprobs)
