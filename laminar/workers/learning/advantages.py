"""Advantages: from the rewards of a step's trajectories to one number a trajectory. Pure functions on tensors.

A group is found by its number, never by its place in the batch: groups may have any sizes and any order. The
baseline of a group is over *all* its trajectories, also those that the loss leaves out (empty or masked as
truncated): what is filtered later does not move the others' baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laminar.errors import LaminarError

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]

STD_EPSILON = 1e-4
"""Added to a standard deviation before dividing by it: a group of nearly equal rewards is not blown up."""


@dataclass(frozen=True)
class Advantages:
    """`values`: float32 [N], in the order of the rewards. `no_signal`: groups whose advantages are all exactly zero."""

    values: Tensor
    no_signal: frozenset[int]


def grpo(rewards: Tensor, members: Tensor) -> Tensor:
    """(r - mean) / (std + eps) within the group, std with n - 1. Shao et al. 2024, arXiv 2402.03300, section 4.1.2.

    `rewards`: float [N]; `members`: int64 [N], 0..G-1, the group of each; the same holds for the other estimators.
    """
    centred = rewards - _group_mean(rewards, members)
    counts = _counts(members)
    variance = _group_sum(centred.square(), members) / (counts - 1).clamp(min=1)
    return centred / (variance.sqrt()[members] + STD_EPSILON)


def dr_grpo(rewards: Tensor, members: Tensor) -> Tensor:
    """r - mean within the group; dividing would favour groups of small spread. Liu et al. 2025, arXiv 2503.20783."""
    return rewards - _group_mean(rewards, members)


def rloo(rewards: Tensor, members: Tensor) -> Tensor:
    """r - mean of the group's *other* rewards = n / (n - 1) (r - mean). Ahmadian et al. 2024, arXiv 2402.14740."""
    counts = _counts(members)
    scale = counts / (counts - 1).clamp(min=1)
    return (rewards - _group_mean(rewards, members)) * scale[members]


def reinforce_plus_plus(rewards: Tensor, members: Tensor) -> Tensor:
    """(r - mean) / (std + eps) over the whole step, groups ignored. Hu et al. 2025, arXiv 2501.03262.

    The only estimator for groups of one. A step of one trajectory has no baseline and gets 0.
    """
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + STD_EPSILON)


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
}


def compute_advantages(estimator: Estimator, rewards: Tensor, groups: Tensor) -> Advantages:
    """`rewards`: float [N], finite; `groups`: int64 [N], the group number of each.

    Equal rewards give exact zeros, whatever the rounding of their mean: within the group for the group baselines,
    over the whole step for reinforce++. A group of one equals its own baseline: no signal under a group baseline.
    Raises LaminarError for a reward that is not finite.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise LaminarError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be two equal rows")
    bad = (~rewards.isfinite()).nonzero().flatten()
    if len(bad):
        at = int(bad[0])
        raise LaminarError(
            f"group {int(groups[at])} has the reward {float(rewards[at])}; rewards must be finite, "
            "a failed reward belongs into the status"
        )
    # In float64: sums over a group must not depend on how many other groups share the batch.
    exact = rewards.to(torch.float64)
    numbers, members = torch.unique(groups, return_inverse=True)
    values = ESTIMATORS[estimator](exact, members)
    baseline_of = torch.zeros_like(members) if estimator == "reinforce++" else members
    values = torch.where(_all_equal(exact, baseline_of), 0.0, values).to(torch.float32)
    silent = torch.ones(len(numbers), dtype=torch.bool)
    silent[members[values != 0]] = False
    return Advantages(values, frozenset(numbers[silent].tolist()))


def _counts(members: Tensor) -> Tensor:
    return torch.bincount(members)


def _group_sum(values: Tensor, members: Tensor) -> Tensor:
    return torch.zeros(len(_counts(members)), dtype=values.dtype).index_add(0, members, values)


def _group_mean(values: Tensor, members: Tensor) -> Tensor:
    return (_group_sum(values, members) / _counts(members))[members]


def _all_equal(values: Tensor, members: Tensor) -> Tensor:
    """bool [N]: the value's group holds one value only."""
    size = len(_counts(members))
    highest = torch.full((size,), -torch.inf, dtype=values.dtype).scatter_reduce(0, members, values, "amax")
    lowest = torch.full((size,), torch.inf, dtype=values.dtype).scatter_reduce(0, members, values, "amin")
    return (highest == lowest)[members]
