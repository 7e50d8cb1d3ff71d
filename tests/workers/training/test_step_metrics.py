"""What a step leaves: one row a trained trajectory, and metrics that are null where a mean is over nothing."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.records import BatchDecision
from laminar.buffer.schema import STEPS
from laminar.buffer.steps import BATCH, DecidedBatch
from laminar.workers.learning.base import SampleStats, StepResult
from laminar.workers.training.step_metrics import deviation, mean, reward_parts, sample_of, step_metrics, step_rows


def row(group: int, sample: int, **changes: Any) -> dict[str, Any]:
    return {
        "group": group, "sample": sample, "prompt_ids": [1, 2], "token_ids": [5, 6, 7],
        "policy_mask": [True, False, True], "logprobs": [-0.5, 0.0, -1.0], "version": 3, "finish_reason": "stop",
        "status": "ok", "reward": float(sample), "reward_parts": "{}", "use": "train", **changes,
    }  # fmt: skip


def metrics(rows: list[dict[str, Any]], **retired: str) -> dict[str, float | None]:
    groups = {int(g.removeprefix("g")): reason for g, reason in retired.items()}
    trained = sorted({r["group"] for r in rows} - groups.keys())
    decision = BatchDecision(step=4, file="f", sha256="s", trained=trained, retired=groups, decided_by="t")
    batch = DecidedBatch(decision, pa.Table.from_batches([], schema=BATCH))
    result = StepResult([], {"policy_loss": 0.25, "entropy": None})
    return step_metrics(batch, rows, result, version_before=4, started=1.5)


def test_the_learners_metrics_and_those_of_the_batch() -> None:
    found = metrics([row(0, 0), row(0, 1, finish_reason="length", version=2)])
    assert found == {
        "policy_loss": 0.25, "entropy": None, "reward_mean": 0.5, "reward_std": 0.5, "response_length_mean": 2.0,
        "response_length_max": 2.0, "truncated_share": 0.5, "staleness_mean": 1.5, "staleness_max": 2.0,
        "staleness/1": 1.0, "staleness/2": 1.0, "groups_trained": 1.0, "groups_no_signal": 0.0, "groups_error": 0.0,
        "error_share": 0.0, "train_s": 1.5,
    }  # fmt: skip


def test_the_environments_tokens_are_no_response() -> None:
    assert metrics([row(0, 0, policy_mask=[True, False, False])])["response_length_mean"] == 1.0


def test_retired_groups_count_in_the_mean_reward() -> None:
    """The mean over trained groups alone would hide the ones without signal."""
    found = metrics([row(0, 0), row(0, 1), row(1, 0, reward=1.0), row(1, 1, reward=1.0)], g1="no_signal")
    assert (found["reward_mean"], found["groups_trained"], found["groups_no_signal"]) == (0.75, 1.0, 1.0)


def test_groups_that_only_count_in_the_mean_leave_no_rows_among_the_trained() -> None:
    stats = [SampleStats(g, s, 0.5 - g / 2, 2, 1.0, 0.0, 0.1, -0.5) for g in (0, 1) for s in (0, 1)]
    rows = [row(0, 0), row(0, 1), row(1, 0, use="no_signal"), row(1, 1, use="no_signal")]
    assert [(r["group"], r["sample"]) for r in step_rows(4, rows, StepResult(stats))] == [(0, 0), (0, 1)]


def test_errors_have_no_reward_and_are_counted() -> None:
    failed = row(1, 0, status="reward_error", reward=None, version=-1, token_ids=[], policy_mask=[], logprobs=[])
    found = metrics([row(0, 1), failed], g1="error")
    assert (found["reward_mean"], found["error_share"], found["groups_error"]) == (1.0, 0.5, 1.0)
    assert found["staleness_max"] == 1.0, "a trajectory without tokens has no version, and no age"


def test_empty_responses_are_null_where_nothing_is_averaged() -> None:
    """Case 47: every response is empty: metrics are null, nothing crashes."""
    empty = [
        row(0, s, token_ids=[], policy_mask=[], logprobs=[], version=-1, status="reward_error", reward=None)
        for s in range(2)
    ]
    found = metrics(empty)
    assert found["reward_mean"] is found["reward_std"] is found["staleness_mean"] is found["staleness_max"] is None
    assert (found["response_length_mean"], found["response_length_max"], found["error_share"]) == (0.0, 0.0, 1.0)
    assert json.loads(json.dumps(found)) == found
    nothing = metrics([])
    assert nothing["response_length_mean"] is nothing["truncated_share"] is nothing["error_share"] is None


def test_parts_are_told_apart_and_are_not_weighted() -> None:
    """Case 46: reward weights 1 and 0.1: the logged total is the weighted one, the parts apart."""
    parts = json.dumps({"exact": 1.0, "format": 0.5})
    found = metrics([row(0, 0, reward=1.05, reward_parts=parts), row(0, 1, reward=0.0, reward_parts='{"exact": 0.0}')])
    assert found["reward_mean"] == pytest.approx(0.525)
    assert (found["reward/exact"], found["reward/format"]) == (0.5, 0.5)


def test_parts_of_failed_rewards_do_not_count() -> None:
    failed = row(0, 1, status="reward_error", reward=None, reward_parts='{"exact": 9}')
    assert metrics([row(0, 0, reward_parts='{"exact": 1}'), failed])["reward/exact"] == 1.0
    assert reward_parts([row(0, 0, reward_parts=None), row(0, 1, reward_parts="")]) == {}


def test_a_batchs_row_as_the_learner_takes_it() -> None:
    sample = sample_of(row(2, 1, finish_reason="length"))
    assert (sample.group, sample.sample, sample.reward, sample.version, sample.truncated) == (2, 1, 1.0, 3, True)
    assert sample.behaviour_logprobs == [-0.5, 0.0, -1.0] and not sample_of(row(2, 1)).truncated


def test_each_trained_trajectory_leaves_a_row_that_the_table_takes() -> None:
    """Case 29: a row has its id, group and sample."""
    rows = [row(0, 0, version=2), row(0, 1), row(1, 0)]
    stats = [
        SampleStats(0, 1, 0.7, 2, 1.01, 0.0, 0.1, -0.75),
        SampleStats(0, 0, -0.7, 0, None, None, None, None),
    ]
    left = step_rows(4, rows, StepResult(stats))
    assert [(r["step"], r["group"], r["sample"], r["staleness"]) for r in left] == [(4, 0, 1, 1), (4, 0, 0, 2)]
    table = pa.Table.from_pylist(left, schema=STEPS).to_pylist()
    assert table[1]["mean_ratio"] is None and table[0]["advantage"] == pytest.approx(0.7)


def test_means_over_nothing_are_none() -> None:
    assert mean([]) is deviation([]) is None
    assert mean([1.0, 2.0]) == 1.5 and deviation([1.0, 3.0]) == 1.0 and deviation([5.0]) == 0.0
