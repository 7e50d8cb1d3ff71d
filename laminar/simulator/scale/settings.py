"""cluster.toml: one tree of frozen models, as the run's config is one. An unknown key is an error naming the near one.

Every field has a default; what is 0 or empty follows from the others, by the rules that the docstrings name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from laminar.config_places import Section
from laminar.config_values import explain_all, overridden
from laminar.errors import ConfigError
from laminar.simulator.scale.policies import POLICIES
from laminar.simulator.scale.published import GPUS, MODELS

MEASURED = "measured"
AHEAD_STEPS = 4
MOST_GPUS = 100_000
MOST_STEPS, MOST_TRAJECTORIES, MOST_TOKENS = 100_000, 1_000_000, 100_000_000
"""Of a job; trajectories a step."""
LEAST_S, MOST_S, LEAST_RATE = 1e-9, 1e5, 1e-6
"""Of a step of decoding, of what one event takes, and a second."""


class ClusterSection(Section):
    gpus: int = Field(64, ge=1, le=MOST_GPUS)
    """GPUs of all machines together."""
    gpus_per_machine: int = Field(8, ge=1)
    """One relay each machine of rollouts; the trainer's machine has the master. In training, the GPUs of a machine
    share a sequence."""
    gpu: str = "h800"
    """`h800`, `h100`, `h200` or `a100`."""

    @field_validator("gpu")
    @classmethod
    def _known(cls, gpu: str) -> str:
        if gpu not in GPUS:
            raise ValueError(f"cluster.gpu = {gpu!r} is not known; one of {', '.join(GPUS)}, and section [costs]")
        return gpu


class ModelSection(Section):
    name: str = "qwen2.5-7b"
    """`qwen2.5-7b`, `qwen2.5-32b`, `qwen2.5-72b`; or `measured`: all costs are in section [costs]."""
    tensor_parallel: int = Field(0, ge=0)
    """GPUs of one rollout; 0: the smallest power of two at which weights take a quarter of the memory at most. All of
    one machine: it divides cluster.gpus_per_machine, and the model's heads."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in MODELS and name != MEASURED:
            raise ValueError(f"model.name = {name!r} is not known; one of {', '.join(MODELS)}, {MEASURED}")
        return name


class JobSection(Section):
    steps: int = Field(10, ge=1, le=MOST_STEPS)
    """Optimizer steps that are measured."""
    warmup_steps: int = Field(5, ge=0, le=MOST_STEPS)
    """Steps before those: a pipeline of several steps takes some to fill."""
    groups_per_step: int = Field(512, ge=1)
    """Groups that a step trains on."""
    samples_per_prompt: int = Field(16, ge=1, le=120)
    """Trajectories of a group; 1: as a run without a group baseline (`trainer.advantage = "reinforce++"`)."""
    mini_batches: int = Field(16, ge=1)
    """Updates of the weights within a step."""
    prompt_tokens: int = Field(300, ge=1, le=MOST_TOKENS)
    """Of each prompt; computed once a group."""
    max_tokens: int = Field(16_384, ge=1, le=MOST_TOKENS)
    """Policy tokens of a trajectory at most."""
    max_ahead_groups: int = Field(0, ge=0)
    """Groups drawn but not consumed at most, where generation does not stop for training; 0: four steps' groups."""
    max_ready_groups: int = Field(0, ge=0)
    """While so many complete groups wait for the trainer, Laminar draws no more; those under way come beside. 0: one
    step's groups."""
    max_staleness: int | None = Field(None, ge=0)
    """As `trainer.max_staleness` of a run; absent: no bound but max_ahead_groups."""
    seed: int = Field(0, ge=0)
    """Of lengths and of who draws first: equal seeds give equal results."""


class LengthsSection(Section):
    median: float = Field(1638.0, gt=0)
    """Of the log-normal distribution of policy tokens; a tenth of the longest."""
    sigma: float = Field(0.99, ge=0, le=5)
    """Of its logarithm; 0.99: the 99th percentile is ten times the median."""
    trace: str = ""
    """A .parquet or .jsonl file whose lengths are drawn instead, relative to the TOML file."""
    column: str = "tokens"
    """Its column of lengths."""


class EnvironmentSection(Section):
    turns: int = Field(1, ge=1)
    """Policy turns of a trajectory; its tokens are spread evenly over them."""
    median_s: float = Field(0.0, ge=0, le=MOST_S)
    """Seconds of the environment's reply to each turn, the last one too, where there are several: the median of a
    log-normal distribution."""
    sigma: float = Field(0.0, ge=0, le=5)
    """Of its logarithm."""
    reward_s: float = Field(0.0, ge=0, le=MOST_S)
    """Seconds of the reward at the end."""


class RolloutSection(Section):
    gpus: int = Field(0, ge=0)
    """GPUs that generate, where others train; 0: for each policy, the fastest of the splits by eighths that are tried
    on some steps of the job, or of a quarter or a half of it."""
    max_running: int = Field(256, ge=1)
    """Trajectories that one engine generates at once; 256 is vLLM's default."""
    repack_interval: float = Field(5.0, ge=0.1, le=3600)
    """Seconds between two plans."""


class CostsSection(Section):
    """What was measured, in place of what follows from model and GPU; 0 or empty: that."""

    decode: list[tuple[float, float, float]] = Field([])
    """Rows of batch, tokens in the KV cache, and seconds of a decode step."""
    kv_tokens: int = Field(0, ge=0)
    """Of one engine's KV cache."""
    prefill_tokens_per_s: float = Field(0.0, ge=0)
    """Of one engine."""
    train_tokens_per_s: float = Field(0.0, ge=0)
    """Of one training GPU, prompts counted."""
    version_bytes: float = Field(0.0, ge=0)
    """Of the published weights."""
    bytes_per_s: float = Field(0.0, ge=0)
    """Onto the master relay, and from relay to relay."""
    load_s: float = Field(0.0, ge=0, le=MOST_S)
    """From a relay into an engine."""

    @field_validator("prefill_tokens_per_s", "train_tokens_per_s", "bytes_per_s")
    @classmethod
    def _none_or_some(cls, rate: float) -> float:
        if 0 < rate < LEAST_RATE:
            raise ValueError(f"a rate of {rate:g} a second is below {LEAST_RATE:g}: nothing would end; 0: as derived")
        return rate

    @field_validator("decode")
    @classmethod
    def _positive(cls, rows: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
        for batch, kv, seconds in rows:
            if batch < 1 or kv < 0 or not LEAST_S <= seconds <= MOST_S:
                raise ValueError(
                    f"costs.decode has the row [{batch:g}, {kv:g}, {seconds:g}]: a batch of 1 or more, 0 or more "
                    f"tokens, {LEAST_S:g} to {MOST_S:g} seconds are needed"
                )
        return rows


class CompareSection(Section):
    policies: list[str] = Field(["synchronous", "one-step", "stream", "partial", "laminar"])
    """Which policies to run; the last one is what the others are compared with."""

    @field_validator("policies")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in POLICIES]
        if unknown or not names:
            raise ValueError(f"compare.policies = {names}: known are {', '.join(POLICIES)}")
        return list(dict.fromkeys(names))


class Settings(Section):
    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    job: JobSection = JobSection()
    lengths: LengthsSection = LengthsSection()
    environment: EnvironmentSection = EnvironmentSection()
    rollout: RolloutSection = RolloutSection()
    costs: CostsSection = CostsSection()
    compare: CompareSection = CompareSection()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        job, costs = self.job, self.costs
        if self.rollout.gpus >= self.cluster.gpus and self.rollout.gpus:
            raise ValueError(
                f"rollout.gpus = {self.rollout.gpus} leaves none of cluster.gpus = {self.cluster.gpus} to train on; "
                "lower it, or 0 to have the fastest of some splits"
            )
        if self.rollout.max_running < job.samples_per_prompt:
            raise ValueError(
                f"rollout.max_running = {self.rollout.max_running} is below job.samples_per_prompt = "
                f"{job.samples_per_prompt}: a rollout draws whole groups, so it could never draw one; raise max_running"
            )
        if (many := job.groups_per_step * job.samples_per_prompt) > MOST_TRAJECTORIES:
            raise ValueError(
                f"job.groups_per_step = {job.groups_per_step} with job.samples_per_prompt = {job.samples_per_prompt}: "
                f"{many} trajectories a step, of which at most {MOST_TRAJECTORIES} are simulated; lower one of them"
            )
        if job.max_ahead_groups and job.max_ahead_groups < job.groups_per_step:
            raise ValueError(
                f"job.max_ahead_groups = {job.max_ahead_groups} is below groups_per_step = {job.groups_per_step}: the "
                "trainer could never fill a batch; set it to at least two steps' groups, or 0"
            )
        if job.max_ready_groups and job.max_ready_groups < job.groups_per_step:
            raise ValueError(
                f"job.max_ready_groups = {job.max_ready_groups} is below groups_per_step = {job.groups_per_step}: the "
                "trainer could never fill a batch; set it to at least one step's groups, or 0"
            )
        if self.model.name == MEASURED:
            needed = ("decode", "kv_tokens", "prefill_tokens_per_s", "train_tokens_per_s")
            missing = [f"costs.{name}" for name in needed if not getattr(costs, name)]
            if missing:
                raise ValueError(f"model.name = 'measured' needs {', '.join(missing)}")
        return self

    @property
    def max_ahead_groups(self) -> int:
        return self.job.max_ahead_groups or AHEAD_STEPS * self.job.groups_per_step

    @property
    def max_ready_groups(self) -> int:
        return self.job.max_ready_groups or self.job.groups_per_step


def settings_from(
    data: dict[str, Any], *, origin: str = "cluster.toml", overrides: Sequence[str] = ()
) -> Settings:  # fmt: skip
    """Raises ConfigError naming each bad key, the near key for a misspelt one, and what was expected. `origin`: where
    it is from, but for the values that are of `overrides`."""
    try:
        return Settings.model_validate(data)
    except ValidationError as e:
        raise ConfigError(explain_all(e, Settings, origin=origin, overrides=overrides)) from e


def load_settings(path: Path, overrides: list[str]) -> Settings:
    """Of a file, with `section.key=value` applied to it. Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{path} is not valid TOML: {e}") from e
    settings = settings_from(overridden(data, overrides, Settings), origin=str(path), overrides=overrides)
    trace = settings.lengths.trace
    if not trace:
        return settings
    lengths = settings.lengths.model_copy(update={"trace": str(path.parent / trace)})
    return settings.model_copy(update={"lengths": lengths})
