"""Who gets which GPUs. One rule for all policies that have two kinds: of the splits by eighths that were tried, the one
under which the policy itself is fastest.

How fast a split is depends on how tails, versions and admission meet, so it is tried: a few steps of the very
simulation, with a quarter of GPUs and trajectories where that many can be split by eighths, from half and half on in
the direction that is faster, until it gets slower. In turns there is nothing to split.

What a quarter of the job says is not quite what the whole does, and behind a slower split there may be a faster one:
7B on 256 GPUs gets 160 + 96, at which it is 5 % slower than with 128 + 128. `rollout.gpus` sets the split by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laminar.errors import ConfigError
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.policies import Pipeline, Policy

PARTS = 8


@dataclass(frozen=True)
class Split:
    """`rollouts` engines on `rollout_gpus`; in turns, all GPUs do both."""

    rollouts: int
    rollout_gpus: int
    trainer_gpus: int


def fixed_split(job: Job, policy: Policy) -> Split | None:
    """The split that needs no search: in turns, or as `rollout.gpus` says; None if there is a choice.

    Raises ConfigError where the GPUs do not suffice."""
    gpus, size, least = job.settings.cluster.gpus, job.costs.tensor_parallel, job.costs.trainers_least
    if gpus < least:
        raise ConfigError(
            f"cluster.gpus = {gpus} are too few: the trainer's state takes {least}; raise cluster.gpus, or take a "
            "smaller model"
        )
    if policy.pipeline is Pipeline.TURNS:
        return Split(gpus // size, gpus, gpus)
    fixed = job.settings.rollout.gpus
    if fixed % size:
        raise ConfigError(f"rollout.gpus = {fixed} is no multiple of {size}, which one rollout takes")
    if fixed and gpus - fixed < least:
        raise ConfigError(
            f"rollout.gpus = {fixed} leaves {gpus - fixed} of {gpus} GPUs to the trainer, whose state takes {least}; "
            "lower rollout.gpus"
        )
    if (gpus - least) // size < 1:
        raise ConfigError(
            f"cluster.gpus = {gpus} are too few: the trainer's state takes {least}, one rollout {size}; raise it"
        )
    return Split(fixed // size, fixed, gpus - fixed) if fixed else None


def best_split(job: Job, policy: Policy, tokens_per_s: Callable[[Split], float]) -> Split:
    """`tokens_per_s` tries a split under the policy; it is not asked where there is no choice."""
    found = fixed_split(job, policy)
    if found is not None:
        return found
    choices = _choices(job)
    middle = len(choices) // 2
    rates = {middle: tokens_per_s(choices[middle])}
    for direction in (1, -1):
        at = middle + direction
        while 0 <= at < len(choices):
            rates[at] = tokens_per_s(choices[at])
            if rates[at] <= rates[at - direction]:
                break
            at += direction
        if max(rates, key=lambda i: rates[i]) != middle:
            break
    return choices[max(rates, key=lambda i: (rates[i], -i))]


def _choices(job: Job) -> list[Split]:
    gpus, size = job.settings.cluster.gpus, job.costs.tensor_parallel
    most = (gpus - job.costs.trainers_least) // size
    rollouts = sorted({min(most, max(1, round(part * gpus / PARTS / size))) for part in range(1, PARTS)})
    return [Split(n, n * size, gpus - n * size) for n in rollouts]
