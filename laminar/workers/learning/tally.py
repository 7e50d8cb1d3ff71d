"""Counts of one step, gathered micro-batch by micro-batch: what the metrics and the rows of `steps` are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laminar.workers.learning.base import Sample, SampleStats


@dataclass(frozen=True)
class RowSums:
    """Sums over the scored tokens of one trajectory; `engine_kl` is the estimate of KL(engine || trainer)."""

    tokens: float
    ratio: float
    ratio_min: float
    ratio_max: float
    clipped: float
    loss: float
    weighted_loss: float
    logprob: float
    entropy: float
    engine_kl: float
    reference_kl: float


@dataclass
class Tally:
    """Rows by their index in the step's batch. Only computed rows are in it: the others have nothing to mean over."""

    rows: dict[int, RowSums] = field(default_factory=dict)

    def add(
        self,
        indexes: Sequence[int],
        mask: Tensor,
        *,
        ratio: Tensor,
        clipped: Tensor,
        loss: Tensor,
        weights: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
        engine_kl: Tensor,
        reference_kl: Tensor,
    ) -> None:
        """All tensors [N, T], 0 outside `mask` where they are summed; one transfer from the device."""

        def total(values: Tensor) -> Tensor:
            return torch.where(mask, values.detach(), 0).to(torch.float64).sum(1)

        columns = [
            total(mask),
            total(ratio),
            torch.where(mask, ratio, torch.inf).amin(1).to(torch.float64),
            torch.where(mask, ratio, -torch.inf).amax(1).to(torch.float64),
            total(clipped),
            total(loss),
            total(loss * weights),
            total(logprobs),
            total(entropy),
            total(engine_kl),
            total(reference_kl),
        ]
        for index, values in zip(indexes, torch.stack(columns, 1).tolist(), strict=True):
            self.rows[index] = RowSums(*values)

    def engine_kl(self, fresh: Iterable[int]) -> tuple[float | None, int]:
        """Mean over the tokens of those rows (None without any), and how many of them were computed. `fresh`: indexes
        of rows sampled under the very weights trained; of others the difference would be staleness."""
        rows = [self.rows[index] for index in fresh if index in self.rows]
        return _over(math.fsum(r.engine_kl for r in rows), sum(r.tokens for r in rows)), len(rows)

    def metrics(self, *, with_reference: bool) -> dict[str, float | None]:
        """Means over all scored tokens of the step."""
        rows = list(self.rows.values())
        tokens = sum(r.tokens for r in rows)
        metrics = {
            "policy_loss": math.fsum(r.weighted_loss for r in rows) if rows else None,
            "entropy": _over(math.fsum(r.entropy for r in rows), tokens),
            "kl_behaviour": _over(math.fsum(r.engine_kl for r in rows), tokens),
            "ratio_mean": _over(math.fsum(r.ratio for r in rows), tokens),
            "ratio_min": min((r.ratio_min for r in rows), default=None),
            "ratio_max": max((r.ratio_max for r in rows), default=None),
            "clip_fraction": _over(math.fsum(r.clipped for r in rows), tokens),
        }
        if with_reference:
            metrics["kl_reference"] = _over(math.fsum(r.reference_kl for r in rows), tokens)
        return metrics

    def stats(self, index: int, sample: Sample, advantage: float) -> SampleStats:
        row = self.rows.get(index)
        return SampleStats(
            group=sample.group,
            sample=sample.sample,
            advantage=advantage,
            tokens=sum(map(bool, sample.policy_mask)),
            mean_ratio=_over(row.ratio, row.tokens) if row else None,
            clip_fraction=_over(row.clipped, row.tokens) if row else None,
            policy_loss=_over(row.loss, row.tokens) if row else None,
            mean_logprob=_over(row.logprob, row.tokens) if row else None,
        )


def batch_metrics(batch: Sequence[Sample]) -> dict[str, float | None]:
    """Of all trajectories given to the step, trained or not; lengths in policy tokens. None over nothing."""
    rewards = torch.tensor([s.reward for s in batch], dtype=torch.float64)
    lengths = [sum(map(bool, s.policy_mask)) for s in batch]
    return {
        "reward_mean": float(rewards.mean()) if batch else None,
        "reward_std": float(rewards.std(correction=0)) if batch else None,
        "response_length_mean": _over(sum(lengths), len(batch)),
        "response_length_max": float(max(lengths)) if batch else None,
        "truncated_share": _over(sum(s.truncated for s in batch), len(batch)),
        "empty_responses": float(sum(length == 0 for length in lengths)),
    }


def _over(total: float, count: float) -> float | None:
    return total / count if count else None
