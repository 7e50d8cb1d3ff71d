"""`laminar replay`: trains recorded steps again, from a checkpoint or the initial model, without etcd or rollouts.

    checkpoints/ ──▶ learner ◀── batches/<step> + its decision ── steps up to `first`: as they were recorded
                        │                                         from there on: with the changes asked for
                        └──▶ metrics and digest of each step, beside the recorded ones

The steps go through `stepping.train_decided`, as a restarted trainer's do: without changes the same bits come out.
Nothing is written into the store.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from laminar.buffer.archive import archived_before, archived_paths
from laminar.buffer.manifest import RunFile
from laminar.buffer.steps import DecidedBatch, read_batch, read_decision
from laminar.buffer.storage import NotFound, Storage
from laminar.config import Config, config_from, with_overrides
from laminar.errors import ConfigError, StoreError
from laminar.relay.layout import checksums, version_digest
from laminar.workers.checkpoints import list_checkpoints, load_checkpoint
from laminar.workers.learning import create_learner
from laminar.workers.learning.base import Learner
from laminar.workers.learning.settings import SETTINGS, settings_of
from laminar.workers.models import fingerprint
from laminar.workers.tables import open_table
from laminar.workers.training.step_metrics import step_metrics
from laminar.workers.training.stepping import train_decided
from laminar.workers.viewing.inspect import StoreView

DECISION = re.compile(r"batches/(\d+)\.json")
DEVICES = "trainer.devices"


@dataclass(frozen=True)
class Question:
    """What to replay. `first`: the first step to show and to change; `checkpoint`: the version to begin with (0 is the
    initial model; None: the newest one that is not after `first`); `count`: how many steps (None: all). `changes`:
    values of the config by their keys, instead of the recorded ones. `devices`: `trainer.devices`, for all steps,
    instead of the run's newest; it is not recorded with a step."""

    first: int | None = None
    checkpoint: int | None = None
    count: int | None = None
    changes: Mapping[str, Any] | None = None
    devices: int | None = None
    model: Path | None = None


@dataclass(frozen=True)
class Plan:
    """`base`: the version that is loaded; steps from it to `first` are trained as recorded, to get there."""

    base: int
    first: int
    end: int


@dataclass(frozen=True)
class Recorded:
    """What `step_metrics` has of a step: an empty digest means that its version was not published."""

    digest: str
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class ReplayedStep:
    """`recorded` is None if no row of the step is committed; `settings`: whether those of the step were recorded."""

    step: int
    digest: str
    metrics: dict[str, float | None]
    recorded: Recorded | None
    settings: bool

    @property
    def equal(self) -> bool | None:
        """None: there is no digest to compare with."""
        return self.digest == self.recorded.digest if self.recorded and self.recorded.digest else None


def changes_of(file: RunFile, overrides: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` strings as settings; `devices_of` has `trainer.devices`. Raises ConfigError for what is no
    value of the config, or shapes no step."""
    overrides = [item for item in overrides if _key(item) != DEVICES]
    if not overrides:
        return {}
    config = config_from(with_overrides(file.config, list(overrides)), origin="--set")
    keys = [_key(item) for item in overrides]
    other = [key for key in keys if key not in SETTINGS]
    if other:
        raise ConfigError(
            f"--set {other[0]}: this does not shape an optimizer step (the batches are those that were decided); what "
            f"can be set: {', '.join((*SETTINGS, DEVICES))}"
        )
    values = settings_of(config.trainer, config.sampling.temperature)
    return {key: values[key] for key in keys}


def devices_of(file: RunFile, overrides: Sequence[str]) -> int | None:
    """The `trainer.devices` among `section.key=value` strings. Raises ConfigError for what is no number of them."""
    chosen = [item for item in overrides if _key(item) == DEVICES]
    return config_from(with_overrides(file.config, chosen), origin="--set").trainer.devices if chosen else None


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def replay(store: StoreView, question: Question, tell: Callable[[ReplayedStep], None]) -> list[ReplayedStep]:
    """Blocks; `tell` gets each step as it is trained.

    Raises ConfigError for steps or a checkpoint that are not there, and for a model that is not the run's; StoreError
    or CorruptSegment for a batch that cannot be read, WeightsError for a checkpoint that does not open.
    """
    return asyncio.run(_replay(store, question, tell))


async def _replay(store: StoreView, question: Question, tell: Callable[[ReplayedStep], None]) -> list[ReplayedStep]:
    storage = store.storage
    plan = await plan_replay(storage, question)
    config = config_from(store.run.config, origin="run.json")
    if question.devices is not None:
        trainer = config.trainer.model_copy(update={"devices": question.devices})
        config = config.model_copy(update={"trainer": trainer})
    folder = await asyncio.to_thread(check_model, store.run, question.model)
    learner = await asyncio.to_thread(create_learner, config, folder)
    try:
        return await _train_again(store, question, plan, config, learner, tell)
    finally:
        await asyncio.to_thread(learner.close)


async def _train_again(
    store: StoreView, question: Question, plan: Plan, config: Config, learner: Learner,
    tell: Callable[[ReplayedStep], None],
) -> list[ReplayedStep]:  # fmt: skip
    storage = store.storage
    if plan.base:
        await load_checkpoint(storage, learner, plan.base)
    recorded = await asyncio.to_thread(recorded_steps, store, plan.first, plan.end)
    experience = open_table(storage, "experience")
    steps = []
    for step in range(plan.base, plan.end):
        try:
            batch = await read_batch(storage, await read_decision(storage, step), experience)
        except NotFound as e:
            raise StoreError(f"step {step} cannot be trained again, its batch is gone: {e}; restore it") from e
        if step < plan.first:
            await train_decided(learner, batch)
            continue
        replayed = await _again(learner, config, batch, question.changes or {}, recorded.get(step))
        tell(replayed)
        steps.append(replayed)
    return steps


async def plan_replay(storage: Storage, question: Question) -> Plan:
    """Raises ConfigError naming what there is."""
    decided = await _decided(storage)
    first = question.first if question.first is not None else question.checkpoint or 0
    if first >= decided:
        raise ConfigError(
            f"step {first} of {storage.url} cannot be replayed: {decided} steps are decided, counted from 0"
        )
    there = sorted(info.version for info in await list_checkpoints(storage))
    base = question.checkpoint
    if base is None:
        base = max((version for version in there if version <= first), default=0)
    if base and base not in there:
        kept = ", ".join(map(str, there)) or "none"
        raise ConfigError(
            f"there is no checkpoint of version {base} in {storage.url}; there are: {kept}, and 0, the initial model "
            "(trainer.keep_checkpoints says how many a run keeps)"
        )
    if base > first:
        raise ConfigError(f"step {first} comes before the checkpoint of version {base}; choose an earlier checkpoint")
    end = decided if question.count is None else min(decided, first + question.count)
    return Plan(base, first, end)


async def _decided(storage: Storage) -> int:
    """Steps that have a decision in the store."""
    copies = [int(m[1]) + 1 for f in await storage.list("batches") if (m := DECISION.fullmatch(f.path))]
    return max([archived_before(await archived_paths(storage)), *copies])


def check_model(file: RunFile, folder: Path | None) -> Path:
    """The folder of the initial model. Raises ConfigError unless it holds the very model of the run. Blocks."""
    chosen = folder or Path(file.model_folder)
    if not (chosen / "config.json").is_file():
        raise ConfigError(f"the initial model is not at {chosen}; restore it, or say where it is with --model")
    found = fingerprint(chosen).model
    if found != file.fingerprints.model:
        raise ConfigError(
            f"the model at {chosen} has changed: run {file.run!r} began with {file.fingerprints.model[:16]}…, this is "
            f"{found[:16]}…; restore it, or say with --model where the run's model is"
        )
    return chosen


def recorded_steps(store: StoreView, first: int, end: int) -> dict[int, Recorded]:
    rows = store.query("select step, digest, metrics from step_metrics where step >= ? and step < ?", [first, end])
    return {row["step"]: Recorded(row["digest"], json.loads(row["metrics"])) for row in rows.to_pylist()}


async def _again(
    learner: Learner, config: Config, batch: DecidedBatch, changes: Mapping[str, Any], recorded: Recorded | None
) -> ReplayedStep:
    step = batch.decision.step
    trained = await train_decided(learner, batch, changes=changes)
    metrics = step_metrics(batch, trained.rows, trained.result, version_before=step, started=0.0)
    digest = await asyncio.to_thread(_digest, learner, config.relay.chunk_mib << 20)
    shown = {name: value for name, value in metrics.items() if not name.endswith("_s")}
    return ReplayedStep(step, digest, shown, recorded, settings=bool(batch.decision.settings))


def _digest(learner: Learner, chunk_bytes: int) -> str:
    """What a relay would call these weights."""
    learner.stage()
    buffer = memoryview(bytearray(learner.layout.total_bytes))
    learner.write_weights(buffer)
    return version_digest(learner.layout, checksums(buffer, chunk_bytes))


def verdict(steps: Sequence[ReplayedStep], changes: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether all is as it should be, and what the digests say."""
    compared = [s for s in steps if s.equal is not None]
    equal = [s for s in compared if s.equal]
    text = f"{len(equal)} of {len(compared)} recorded digests came out equal"
    if len(compared) < len(steps):
        text += f" ({len(steps) - len(compared)} steps have none: not committed, or not published)"
    if changes:
        given = ", ".join(f"{key} = {value!r}" for key, value in changes.items())
        return True, f"{text}; trained with {given}"
    unknown = sum(not s.settings for s in steps)
    if unknown:
        text += f"; {unknown} steps have no recorded settings, those of run.json were used"
    if len(equal) == len(compared):
        return True, f"{text}: bitwise the same" if compared else text
    first = next(s.step for s in compared if not s.equal)
    return False, (
        f"{text}, step {first} is the first that did not; other hardware, another number of devices "
        f"(--set {DEVICES}=N; else the run's newest is used) or of threads (trainer.threads), kernels that are not "
        "deterministic (trainer.deterministic) or another release of torch give other bits"
    )


def as_table(steps: Sequence[ReplayedStep]) -> pa.Table:
    """One row a step: step, version, digest, recorded_digest, equal, and each metric beside `recorded_<metric>`."""
    names = sorted({name for s in steps for name in s.metrics})
    rows = [
        {
            "step": s.step,
            "version": s.step + 1,
            "digest": s.digest,
            "recorded_digest": s.recorded.digest if s.recorded else None,
            "equal": s.equal,
            **{name: s.metrics.get(name) for name in names},
            **{f"recorded_{name}": s.recorded.metrics.get(name) if s.recorded else None for name in names},
        }
        for s in steps
    ]
    numbers = [pa.field(prefix + name, pa.float64()) for name in names for prefix in ("", "recorded_")]
    texts = [pa.field("digest", pa.string()), pa.field("recorded_digest", pa.string())]
    whole = [pa.field("step", pa.int64()), pa.field("version", pa.int64())]
    return pa.Table.from_pylist(rows, schema=pa.schema([*whole, *texts, pa.field("equal", pa.bool_()), *numbers]))
