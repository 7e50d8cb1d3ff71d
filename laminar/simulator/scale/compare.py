"""Runs one policy of a job, with the GPUs split as suits it."""

from __future__ import annotations

from dataclasses import replace

from laminar.simulator.scale.barriers import Barriers
from laminar.simulator.scale.flowing import Flowing
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Outcome
from laminar.simulator.scale.policies import POLICIES, Pipeline
from laminar.simulator.scale.split import PARTS, Split, best_split

TRIED_STEPS, TRIED_WARMUP = 2, 3
"""Of the simulation by which a split is judged; where all wait for each other, a step is like the next."""
SCALES = (4, 2, 1)
"""By how much smaller a job is on which splits are tried, as long as its GPUs can be split by eighths."""


def split_of(name: str, job: Job) -> Split:
    """Raises ConfigError where the GPUs do not suffice."""

    def tokens_per_s(split: Split) -> float:
        return run_split(name, short, Split(max(1, split.rollouts // scale), *_gpus(split, scale))).tokens_per_s

    scale = _scale(job)
    short = _short(job, scale, 1 if POLICIES[name].pipeline is not Pipeline.FLOWING else TRIED_WARMUP)
    return best_split(job, POLICIES[name], tokens_per_s)


def _scale(job: Job) -> int:
    gpus, groups = job.settings.cluster.gpus, job.settings.job.groups_per_step
    return next(s for s in SCALES if s == 1 or (gpus >= s * PARTS * job.costs.tensor_parallel and not groups % s))


def _gpus(split: Split, scale: int) -> tuple[int, int]:
    return max(1, split.rollout_gpus // scale), max(1, split.trainer_gpus // scale)


def _short(job: Job, scale: int, warmup: int) -> Job:
    """A few steps, of as many trajectories for each GPU."""
    settings = job.settings
    smaller = settings.job.model_copy(
        update={
            "steps": TRIED_STEPS,
            "warmup_steps": warmup,
            "groups_per_step": settings.job.groups_per_step // scale,
            "max_ahead_groups": settings.max_ahead_groups // scale,
            "max_ready_groups": settings.max_ready_groups // scale,
        }
    )
    return replace(job, settings=settings.model_copy(update={"job": smaller}))


def run_split(name: str, job: Job, split: Split) -> Outcome:
    if POLICIES[name].pipeline is Pipeline.FLOWING:
        return Flowing(name, job, split).run()
    return Barriers(name, job, split).run()


def run_policy(name: str, job: Job) -> Outcome:
    """Equal settings give equal outcomes. Raises ConfigError where the GPUs do not suffice."""
    return run_split(name, job, split_of(name, job))
