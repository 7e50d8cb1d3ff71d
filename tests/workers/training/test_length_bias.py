"""The lengths of what is consumed, against those of what is finished."""

from __future__ import annotations

import pyarrow as pa
import pytest

from laminar.workers.training.length_bias import LengthBias, policy_tokens


def masks(*rows: list[bool] | None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows[i : i + 2], pa.list_(pa.bool_())) for i in range(0, len(rows), 2)])


def test_policy_tokens_are_counted_list_by_list() -> None:
    assert policy_tokens(masks([True, False, True], [], None, [False], [True])) == [2, 0, 0, 0, 1]
    assert policy_tokens(pa.chunked_array([], pa.list_(pa.bool_()))) == []


def test_a_trainer_that_saw_the_short_ones_first_says_so() -> None:
    bias = LengthBias()
    bias.finished(masks([True] * 2, [True] * 2, [True] * 8))
    metrics = bias.consumed([{"policy_mask": [True, True, False]}, {"policy_mask": [True, True]}])
    assert metrics == {"length_finished_mean": 4.0, "length_consumed_mean": 2.0, "length_bias": -0.5}
    assert bias.consumed([{"policy_mask": [True] * 8}])["length_bias"] == pytest.approx(0.0)


def test_nothing_gives_none() -> None:
    assert LengthBias().consumed([]) == {
        "length_finished_mean": None, "length_consumed_mean": None, "length_bias": None,
    }  # fmt: skip
