"""Runs one policy of a job, with the GPUs split as suits it."""

from __future__ import annotations

from dataclasses import replace

from laminar.simulator.scale.barriers import Barriers
from laminar.simulator.scale.flowing import Flowing
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Outcome
from laminar.simulator.scale.policies import POLICIES, Pipeline
from laminar.simulator.scale.split import Split, best_split

TRIED_STEPS, TRIED_WARMUP = 2, 3
"""Of the simulation by which a split is judged; where all wait for each other, a step is like the next."""


def split_of(name: str, job: Job) -> Split:
    """Raises ConfigError where the GPUs do not suffice."""
    warmup = TRIED_WARMUP if POLICIES[name].pipeline is Pipeline.FLOWING else 1
    tried = job.settings.job.model_copy(update={"steps": TRIED_STEPS, "warmup_steps": warmup})
    short = replace(job, settings=job.settings.model_copy(update={"job": tried}))
    return best_split(job, POLICIES[name], lambda split: run_split(name, short, split).tokens_per_s)


def run_split(name: str, job: Job, split: Split) -> Outcome:
    if POLICIES[name].pipeline is Pipeline.FLOWING:
        return Flowing(name, job, split).run()
    return Barriers(name, job, split).run()


def run_policy(name: str, job: Job) -> Outcome:
    """Equal settings give equal outcomes. Raises ConfigError where the GPUs do not suffice."""
    return run_split(name, job, split_of(name, job))
