"""The start of a run, or its resume: store and etcd are made to agree, under this process's hold on the run.

What is written to etcd (the manifest; the trainer's head, where a run that had ended goes on) is one transaction that
compares the hold and what was read. A start that was stopped in between for longer than its lease, or that meets a
trainer or a recovery at work, so overwrites nothing that it has not seen. A store compares nothing: `run.json` is
written right after a look at the hold.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from laminar.buffer.coordination import Compare, Coordination, KeyValue, Put, Transaction, absent, unchanged
from laminar.buffer.extent import REMEDY, behind, read_extent
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import PATH, RunFile, read_run
from laminar.buffer.records import RunManifest, TrainerHead
from laminar.buffer.schema import FORMAT_VERSION, TABLES
from laminar.buffer.session import transact_or_read_back
from laminar.clock import SystemClock
from laminar.errors import ConfigError, CoordinationError
from laminar.workers.supervisor.exclusion import Supervision
from laminar.workers.supervisor.preparation import Plan, write_plan
from laminar.workers.tables import open_table

TRIES = 8


async def enter(plan: Plan, coordination: Coordination, keys: Keys, hold: Supervision) -> tuple[RunFile, Keys]:
    """Make the store and the manifest in etcd agree; a run that was done may be given more steps. Raises ConfigError if
    they are of different runs, or etcd is behind its store, Fenced if the hold is lost."""
    for _ in range(TRIES):
        manifest = await coordination.get(keys.manifest)
        if manifest is not None:
            keys = Keys(keys.run, RunManifest.parse(manifest.value).generation)
        head = await coordination.get(keys.trainer)
        await _check(plan, coordination, keys, manifest)
        decided = TrainerHead.parse(head.value).decided if head else 0
        await hold.check()
        file = await write_plan(plan, SystemClock(), step=decided)
        if await _written(plan, file, coordination, keys, hold, manifest, head):
            return file, keys
        await hold.check()
        plan = replace(plan, existing=file)  # a trainer or a recovery wrote meanwhile: what it wrote counts
    raise CoordinationError(f"run {keys.run!r} changed {TRIES} times in etcd while it was entered; run this again")


async def _written(
    plan: Plan, file: RunFile, coordination: Coordination, keys: Keys, hold: Supervision, manifest_kv: KeyValue | None,
    head_kv: KeyValue | None,
) -> bool:  # fmt: skip
    """False if the hold, the manifest or the head is not what it was any more: then nothing is written."""
    manifest = RunManifest.parse(manifest_kv.value) if manifest_kv else None
    record = RunManifest(
        run=keys.run, store=plan.storage.url, storage=plan.config.storage.model_dump(), store_id=file.store_id,
        generation=manifest.generation if manifest else file.generation, format_version=FORMAT_VERSION,
        config=file.config_digest,
    )  # fmt: skip
    again = head_going_on(TrainerHead.parse(head_kv.value) if head_kv else None, plan.config.run.max_steps)
    puts = []
    if record != manifest:  # a new run, another config, or the same store at another place
        puts.append(Put(keys.manifest, record.dump()))
    if again is not None:
        puts.append(Put(keys.trainer, again.dump()))
    if not puts:
        return True

    async def committed() -> bool:
        found = [await coordination.get(put.key) for put in puts]
        return [kv.value if kv else "" for kv in found] == [put.value for put in puts]

    compares = (hold.guard(), _as_read(keys.manifest, manifest_kv), _as_read(keys.trainer, head_kv))
    return await transact_or_read_back(coordination, Transaction(compares, tuple(puts)), committed=committed)


def head_going_on(head: TrainerHead | None, max_steps: int) -> TrainerHead | None:
    """A finished run with more steps, or a failed one tried again, goes on where it was: its head then, else None."""
    if head is None or head.state == "running" or (head.state == "done" and head.decided >= max_steps):
        return None
    return head.model_copy(update={"state": "running", "reason": "", "by": f"laminar run/{secrets.token_hex(8)}"})


def _as_read(key: str, kv: KeyValue | None) -> Compare:
    return unchanged(kv) if kv else absent(key)


async def _check(plan: Plan, coordination: Coordination, keys: Keys, manifest_kv: KeyValue | None) -> None:
    """Raises ConfigError if this plan cannot be entered at this etcd."""
    manifest = RunManifest.parse(manifest_kv.value) if manifest_kv else None
    if manifest is not None and (plan.existing is None or plan.existing.store_id != manifest.store_id):
        raise ConfigError(
            f"etcd knows a run {keys.run!r} with its store at {manifest.store} (id {manifest.store_id}), which is not "
            f"{plan.storage.url}: choose another run.name, or restore that store"
        )
    if manifest is None and plan.existing is not None and await _has_begun(plan):
        raise ConfigError(
            f"{plan.storage.url} holds run {plan.existing.run!r}, but this etcd does not know it: point "
            "coordination.endpoints at its etcd, rebuild it from the store if it was lost (`laminar recover "
            f"{plan.storage.url}`), or start another run (run.name)"
        )
    there = await read_run(plan.storage) if await plan.storage.exists(PATH) else None
    if there != plan.existing:
        raise ConfigError(
            f"{plan.storage.url}/{PATH} is not what it was when this start began: another `laminar run` or `laminar "
            "recover` has changed it; run this again"
        )
    if manifest is not None and plan.existing is not None:
        await _check_age(plan, plan.existing, coordination, keys)


async def _check_age(plan: Plan, existing: RunFile, coordination: Coordination, keys: Keys) -> None:
    """Raises ConfigError if etcd was restored from a copy that is older than the store."""
    tables = {name: open_table(plan.storage, name) for name in TABLES}
    extent = await read_extent(plan.storage, tables)
    missing = behind(extent, (await coordination.range(keys.prefix)).items, keys)
    if existing.generation > keys.generation:
        missing.insert(0, f"the store is in generation {existing.generation}, etcd in {keys.generation}: {REMEDY}")
    if missing:
        raise ConfigError(f"run {keys.run!r} cannot go on:\n  " + "\n  ".join(missing))


async def _has_begun(plan: Plan) -> bool:
    """Whether anything was generated. A start that ended between its `run.json` and etcd's manifest is just resumed."""
    folders = ("partials", "incoming", "batches", "checkpoints", "experience.lance")
    return any([await plan.storage.list(folder) for folder in folders])
