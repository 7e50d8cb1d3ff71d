"""What a trained step leaves behind: one row a trajectory, one set of metrics. Pure functions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from laminar.buffer.steps import DecidedBatch
from laminar.workers.learning.base import Sample, StepResult

SAMPLE_COLUMNS = [
    "group", "sample", "prompt_ids", "token_ids", "policy_mask", "logprobs", "reward", "version", "finish_reason",
]  # fmt: skip
"""Of `experience`: all that `sample_of` reads."""


def sample_of(row: Mapping[str, Any]) -> Sample:
    """A row of a batch as the learner takes it."""
    return Sample(
        group=row["group"],
        sample=row["sample"],
        prompt_ids=row["prompt_ids"],
        token_ids=row["token_ids"],
        policy_mask=row["policy_mask"],
        behaviour_logprobs=row["logprobs"],
        reward=row["reward"],
        version=row["version"],
        truncated=row["finish_reason"] == "length",
    )


def step_rows(step: int, rows: Sequence[Mapping[str, Any]], result: StepResult) -> list[dict[str, Any]]:
    """Rows of the `steps` table, for the trajectories that were trained: not for those that only count in the mean."""
    versions = {(r["group"], r["sample"]): r["version"] for r in rows if r["use"] == "train"}
    return [
        {
            "step": step,
            "group": s.group,
            "sample": s.sample,
            "advantage": s.advantage,
            "staleness": step - versions[s.group, s.sample],
            "tokens": s.tokens,
            "mean_ratio": s.mean_ratio,
            "clip_fraction": s.clip_fraction,
            "policy_loss": s.policy_loss,
            "mean_logprob": s.mean_logprob,
            "commit_seq": -1,
        }
        for s in result.samples
        if (s.group, s.sample) in versions
    ]


def step_metrics(
    batch: DecidedBatch, rows: Sequence[Mapping[str, Any]], result: StepResult, *, version_before: int, started: float
) -> dict[str, float | None]:
    """The learner's metrics, and those of everything that the step consumed (retired groups included: the mean
    reward of trained groups alone would hide the ones without signal). None where a mean is over nothing."""
    ok = [r for r in rows if r["status"] == "ok"]
    lengths = [sum(r["policy_mask"]) for r in rows]
    staleness = [version_before - r["version"] for r in rows if r["version"] >= 0]
    reasons = Counter(batch.decision.retired.values())
    metrics: dict[str, float | None] = {
        **result.metrics,
        "reward_mean": mean([r["reward"] for r in ok]),
        "reward_std": deviation([r["reward"] for r in ok]),
        "response_length_mean": mean(lengths),
        "response_length_max": float(max(lengths)) if lengths else None,
        "truncated_share": mean([float(r["finish_reason"] == "length") for r in rows]),
        "staleness_mean": mean(staleness),
        "staleness_max": float(max(staleness)) if staleness else None,
        "groups_trained": float(len(batch.decision.trained)),
        "groups_no_signal": float(reasons["no_signal"]),
        "groups_error": float(reasons["error"]),
        "error_share": mean([float(r["status"] != "ok") for r in rows]),
        "train_s": started,
    }
    for age, count in sorted(Counter(staleness).items()):
        metrics[f"staleness/{age}"] = float(count)
    for name, value in reward_parts(ok).items():
        metrics[f"reward/{name}"] = value
    return metrics


def all_truncated(metrics: Mapping[str, float | None], max_tokens: int) -> str:
    """What to tell the user when no reply of a step could come to its end; empty if some did."""
    if metrics.get("truncated_share") != 1.0:
        return ""
    return (
        f"every reply was cut off before its end (sampling.max_tokens = {max_tokens}): the reward judges fragments; "
        "raise sampling.max_tokens, and rollout.max_model_len with it"
    )


def reward_parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean of each unweighted reward part over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in json.loads(row["reward_parts"] or "{}").items():
            values.setdefault(name, []).append(value)
    return {name: mean(v) for name, v in sorted(values.items())}


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    middle = mean(values)
    return None if middle is None else (sum((v - middle) ** 2 for v in values) / len(values)) ** 0.5
