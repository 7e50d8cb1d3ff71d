"""Makes a run's store ready: model, prompts, manifest; or checks that an existing one may be resumed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from laminar.buffer.manifest import PATH, Fingerprints, RunFile, compare_for_resume, read_run, write_run
from laminar.buffer.prompts import PromptPool
from laminar.buffer.prompts import fingerprint as prompts_fingerprint
from laminar.buffer.schema import PROMPTS
from laminar.buffer.storage import Storage, open_storage
from laminar.clock import Clock
from laminar.config import FROZEN, Config
from laminar.errors import ConfigError
from laminar.relay.layout import Layout
from laminar.relay.memory import SPARE, check_memory
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.environments.sources import PromptSet, load_prompts
from laminar.workers.models import fingerprint, resolve_model, tensor_shapes
from laminar.workers.pools import prompt_of
from laminar.workers.rollouts.conversation import Conversation, load_tokenizer

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What a run consists of, before anything is written. `existing` is the run's file if it is resumed."""

    config: Config
    storage: Storage
    model_folder: Path
    train: pa.Table
    held_out: pa.Table
    report: str
    fingerprints: Fingerprints
    existing: RunFile | None

    def describe(self) -> str:
        c = self.config
        lines = [
            f"run        {c.run.name} ({'resumed' if self.existing else 'new'}), {c.run.max_steps} steps of "
            f"{c.trainer.groups_per_step} groups x {c.sampling.samples_per_prompt} samples",
            f"store      {self.storage.url}",
            f"model      {c.model.path} at {self.model_folder} ({c.model.dtype})",
            f"prompts    {self.train.num_rows} for training, {self.held_out.num_rows} held out; {self.report}",
            f"workers    1 trainer, 1 relay, {c.rollout.workers} rollout(s) on {c.rollout.engine}",
            f"etcd       {', '.join(c.coordination.endpoints) or 'embedded (a child process)'}",
            f"admission  at most {c.max_ahead_groups} groups ahead of the trainer",
        ]
        if c.trainer.warmup_steps >= c.run.max_steps:
            lines.append(
                f"note       trainer.warmup_steps = {c.trainer.warmup_steps} is not below run.max_steps = "
                f"{c.run.max_steps}: the learning rate does not get to its peak"
            )
        return "\n".join(lines)


async def plan_run(config: Config) -> Plan:
    """Check everything that can be checked without starting or writing. Raises ConfigError."""
    storage = open_storage(config.store_root, config.storage.model_dump())
    await _check_space(storage)
    existing = await read_run(storage) if await storage.exists(PATH) else None
    folder = await asyncio.to_thread(resolve_model, config.model.path)
    await asyncio.to_thread(_check_memory, config, folder)
    prompts = await asyncio.to_thread(
        load_prompts, config.prompts, config.evaluation, reward=_scoring_reward(config),
        environment=config.environment.name != "single-turn",
    )  # fmt: skip
    train, held_out, note = await _fitting(config, folder, prompts)
    model = await asyncio.to_thread(fingerprint, folder)
    fingerprints = Fingerprints(
        model=model.model,
        tokenizer=model.tokenizer,
        template=model.template,
        prompts=prompts_fingerprint(train),
        held_out=prompts_fingerprint(held_out),
    )
    report = f"{prompts.report}{note}"
    plan = Plan(config, storage, folder, train, held_out, report, fingerprints, existing)
    if existing is not None:
        compare_for_resume(existing, config.model_dump(mode="json"), fingerprints, FROZEN, step=0)
    return plan


def _check_memory(config: Config, folder: Path) -> None:
    """Raises ConfigError if this host cannot hold the versions that its relay keeps."""
    shapes = tensor_shapes(folder)
    layout = Layout.from_tensors({name: (config.model.dtype, shape) for name, shape in shapes.items()})
    check_memory(layout.total_bytes, retain=config.relay.retain, spare=SPARE)


def _scoring_reward(config: Config) -> str:
    """The reward that scores the prompts; empty if an environment of the user's own may do it in another way."""
    return "" if ":" in config.environment.name else config.reward.name


async def _check_space(storage: Storage) -> None:
    free = await storage.free_bytes()
    if free is not None and free < MIN_FREE_BYTES:
        raise ConfigError(
            f"the store {storage.url} has {free >> 20} MiB free, a run needs at least {MIN_FREE_BYTES >> 20} MiB: free "
            "some space, or choose another run.store"
        )


async def _fitting(config: Config, folder: Path, prompts: PromptSet) -> tuple[pa.Table, pa.Table, str]:
    """Rows of schema PROMPTS whose first prompt is at most `prompts.max_prompt_tokens` long."""
    tokenizer = await asyncio.to_thread(load_tokenizer, folder)
    conversation = Conversation(tokenizer, config.sampling.chat_template_options)
    limit = min(config.prompts.max_prompt_tokens, config.rollout.max_model_len - 1)
    host = EnvironmentHost(config.environment, config.reward, workers=1)
    await host.start()
    try:

        async def length(row: dict) -> int:  # type: ignore[type-arg]
            turn = await host.reset(prompt_of(row))
            return len(conversation.prompt_ids(turn.messages))

        tables, left_out = [], []
        for rows in (prompts.train, prompts.held_out):
            lengths = [await length({**r, "prompt_index": i}) for i, r in enumerate(rows)]
            left_out += [r["prompt"] for r, n in zip(rows, lengths, strict=True) if n > limit]
            kept = [r for r, n in zip(rows, lengths, strict=True) if n <= limit]
            kept = [{**r, "prompt_index": i} for i, r in enumerate(kept)]
            tables.append(pa.Table.from_pylist(kept, schema=PROMPTS))
    finally:
        await host.close()
    own = limit == config.prompts.max_prompt_tokens
    why = "prompts.max_prompt_tokens" if own else "rollout.max_model_len, less one"
    example = f"such as {left_out[0][:60]!r}" if left_out else ""
    note = f"; {len(left_out)} longer than {limit} tokens ({why}) left out, {example}" if left_out else ""
    if tables[0].num_rows == 0:
        raise ConfigError(
            f"no prompt of {config.prompts.source} {config.prompts.dataset!r} is left to train on "
            f"({prompts.report}{note})"
        )
    return tables[0], tables[1], note


async def write_plan(plan: Plan, clock: Clock, step: int = 0) -> RunFile:
    """Create the run's store, or note in it what a resume changes."""
    config = plan.config.model_dump(mode="json")
    if plan.existing is not None:
        changes = compare_for_resume(plan.existing, config, plan.fingerprints, FROZEN, step)
        for change in changes:
            log.warning("resuming with %s = %r (was %r)", change.key, change.after, change.before)
        file = plan.existing.model_copy(
            update={
                "config": config,
                "changes": [*plan.existing.changes, *changes],
                "model_folder": str(plan.model_folder),
            }
        )
        await write_run(plan.storage, file, overwrite=True)
        return file
    for name, rows in (("prompts", plan.train), ("held_out", plan.held_out)):
        if rows.num_rows:
            uri, options = plan.storage.absolute(f"{name}.lance"), plan.storage.table_options
            await PromptPool.create(uri, rows, storage_options=options)
    file = RunFile(
        run=plan.config.run.name,
        created_at_us=clock.now_us(),
        config=config,
        model_folder=str(plan.model_folder),
        prompts=plan.train.num_rows,
        held_out=plan.held_out.num_rows,
        fingerprints=plan.fingerprints,
    )
    await write_run(plan.storage, file)
    return file
