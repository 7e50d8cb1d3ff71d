"""Reading vLLM's outputs, without an engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from laminar.errors import EngineError
from laminar.workers.engines.vllm_output import chunk_of, sampled_logprobs


def output(token_ids: list[int], logprobs: object, finish_reason: str | None = None) -> SimpleNamespace:
    completion = SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason=finish_reason)
    return SimpleNamespace(outputs=[completion])


def entry(logprob: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=logprob)


def flat(*positions: dict[int, float]) -> object:
    logprobs = pytest.importorskip("vllm.logprobs")
    result = logprobs.FlatLogprobs()
    for position in positions:
        result.append({token: logprobs.Logprob(value, rank=1) for token, value in position.items()})
    return result


def test_the_logprob_is_of_the_sampled_token_not_of_the_first() -> None:
    """Case 11: the engine returns logprobs {7: -0.1, 3: -2.0}; token 3 was sampled: -2.0."""
    assert sampled_logprobs([3], [{7: entry(-0.1), 3: entry(-2.0)}]) == [-2.0]
    assert sampled_logprobs([3, 7], flat({7: -0.1, 3: -2.0}, {7: -0.3})) == [-2.0, -0.3]


def test_a_slice_of_flat_logprobs_is_read_from_its_own_start() -> None:
    whole = flat({1: -1.0}, {2: -2.0, 9: -0.5}, {3: -3.0})
    assert sampled_logprobs([2, 3], whole[1:]) == [-2.0, -3.0]  # type: ignore[index]


def test_small_logprobs_keep_their_digits() -> None:
    """Case 12: logprob -0.00012345 survives."""
    assert chunk_of("r", output([4], [{4: entry(-0.00012345)}])).logprobs == [-0.00012345]


@pytest.mark.parametrize("logprobs", [None, [], [{}], [{5: SimpleNamespace(logprob=-1.0)}], [{4: entry(math.nan)}]])
def test_missing_logprobs_are_an_error_by_name(logprobs: object) -> None:
    """Case 13: an engine that returns no logprobs is a named error, not NaN later."""
    with pytest.raises(EngineError, match="request r got"):
        chunk_of("r", output([4], logprobs))


def test_minus_infinity_is_not_a_logprob_of_a_sampled_token() -> None:
    with pytest.raises(EngineError, match="-inf"):
        chunk_of("r", output([4], [{4: entry(-math.inf)}]))


def test_an_empty_last_chunk_needs_no_logprobs() -> None:
    chunk = chunk_of("r", output([], None, "abort"))
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ([], [], "abort")


def test_a_finish_reason_that_is_none_of_ours_is_an_error() -> None:
    with pytest.raises(EngineError, match="'error'"):
        chunk_of("r", output([], None, "error"))
