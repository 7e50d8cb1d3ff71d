"""`laminar recover`: finds the run's etcd, refuses where nothing is lost, and rebuilds it from the store.

`buffer/recovery.py` says what is rebuilt, `buffer/rebuilding.py` in which order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from laminar.buffer.coordination import Coordination
from laminar.buffer.extent import behind, read_extent
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import RunFile, read_run
from laminar.buffer.rebuilding import Rebuilder, next_generation
from laminar.buffer.records import RunManifest, SupervisorRecord, WorkerRecord
from laminar.buffer.recovery import Known, Recovery, plan
from laminar.buffer.remains import read_remains
from laminar.buffer.sampler import lengths_by_reason
from laminar.buffer.schema import FORMAT_VERSION, TABLES
from laminar.buffer.storage import Storage, open_storage
from laminar.buffer.table import Table
from laminar.config import Config, config_from
from laminar.errors import ConfigError
from laminar.workers.checkpoints import list_checkpoints
from laminar.workers.supervisor.run_etcd import etcd_of
from laminar.workers.tables import open_table

SHOWN = 5
GOES_ON = "go on from their logs"
ANEW = "begin anew, nothing of them was durable"


def run_recover(
    store: str, options: Mapping[str, str], endpoints: Sequence[str], *, force: bool, dry_run: bool
) -> str:
    """Blocking: what was done, or would be with `dry_run`. Raises ConfigError where there is nothing to recover."""
    return asyncio.run(_run_recover(open_storage(store, options), endpoints, force, dry_run))


async def _run_recover(storage: Storage, endpoints: Sequence[str], force: bool, dry_run: bool) -> str:
    file = await read_run(storage)
    tables = {name: open_table(storage, name) for name in TABLES}
    async with etcd_of(storage, file, endpoints, create=not dry_run) as access:
        if access is None:
            return await _dry_run(storage, tables, file, Known(), file.generation + 1, ("its data are not there",))
        coordination = access.connect()
        try:
            return await recover(coordination, storage, tables, file, force=force, dry_run=dry_run)
        finally:
            await coordination.close()


async def recover(
    coordination: Coordination, storage: Storage, tables: Mapping[str, Table], file: RunFile, *, force: bool = False,
    dry_run: bool = False,
) -> str:  # fmt: skip
    """See `run_recover`. Raises Fenced if this attempt lost its lease: it counts for nothing then."""
    state = await why(coordination, storage, tables, file)
    if not force:
        state.refuse()
    if dry_run:
        return await _dry_run(storage, tables, file, state.known, state.generation, state.reasons)
    config = config_from(file.config, origin="run.json")
    record = RunManifest(
        run=file.run, store=storage.url, storage=config.storage.model_dump(), store_id=file.store_id,
        generation=state.generation, format_version=FORMAT_VERSION, config=file.config_digest,
    )  # fmt: skip
    rebuilder = await Rebuilder.begin(coordination, storage, tables, file, record)
    try:

        async def make_plan(known: Known, generation: int) -> Recovery:
            return await _plan(storage, tables, config, known, generation)

        recovery, keys = await rebuilder.rebuild(make_plan)
    finally:
        await rebuilder.close()
    lines = describe(recovery, file, keys.generation, state.reasons)
    return "\n".join([*lines, "", "next", "  laminar run CONFIG", f"  laminar audit {storage.url}"])


async def _dry_run(
    storage: Storage, tables: Mapping[str, Table], file: RunFile, known: Known, generation: int, reasons: Sequence[str]
) -> str:
    config = config_from(file.config, origin="run.json")
    recovery = await _plan(storage, tables, config, known, generation)
    return "\n".join([*describe(recovery, file, generation, reasons), "dry run: nothing was written"])


async def _plan(
    storage: Storage, tables: Mapping[str, Table], config: Config, known: Known, generation: int
) -> Recovery:
    checkpoints = [(info.version, info.digest) for info in await list_checkpoints(storage)]
    remains = await read_remains(storage, tables, checkpoints)
    samples = config.sampling.samples_per_prompt
    recovery = plan(
        remains, known, samples_per_prompt=samples, generation=generation, max_steps=config.run.max_steps,
        evaluate_every=config.evaluation.every if config.evaluation.size else 0,
    )  # fmt: skip
    recovery.validate(remains, samples)
    return recovery


# -- what etcd says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EtcdState:
    """What is there of the run in etcd. `reasons` say why a recovery is due; none if it is not. `generation` is the
    one that a recovery would begin."""

    run: str
    reasons: tuple[str, ...]
    alive: tuple[str, ...]
    known: Known
    generation: int

    def refuse(self) -> None:
        """Raise ConfigError if the run is at work, or its etcd is sound."""
        if self.alive:
            shown = ", ".join(self.alive[:SHOWN]) + (", …" if len(self.alive) > SHOWN else "")
            raise ConfigError(
                f"run {self.run!r} is at work: {shown} (alive in etcd: {len(self.alive)}). Stop it, or fence it out "
                "with --force"
            )
        if not self.reasons:
            raise ConfigError(
                f"nothing is to be recovered: etcd knows run {self.run!r} and is not behind its store. `laminar run "
                "CONFIG` resumes it; --force rebuilds etcd all the same"
            )


async def why(coordination: Coordination, storage: Storage, tables: Mapping[str, Table], file: RunFile) -> EtcdState:
    """Raises ConfigError if etcd has another run under this name."""
    extent = await read_extent(storage, tables)  # before etcd: see `Extent`
    root = Keys(file.run)
    items = (await coordination.range(root.root)).items
    kv = next((kv for kv in items if kv.key == root.manifest), None)
    manifest = RunManifest.parse(kv.value) if kv else None
    generation = next_generation(file, manifest, items)
    if manifest is None:
        return EtcdState(file.run, ("it knows nothing of the run",), (), Known(), generation)
    if manifest.store_id != file.store_id:
        raise ConfigError(
            f"etcd knows a run {file.run!r} with its store at {manifest.store} (id {manifest.store_id}), which is not "
            f"{storage.url} (id {file.store_id}): name the etcd of this store with --etcd"
        )
    keys = Keys(file.run, manifest.generation)
    mine = [kv for kv in items if kv.key.startswith(keys.prefix)]
    supervisors = [SupervisorRecord.parse(kv.value) for kv in items if kv.key == keys.supervisor]
    alive = [f"laminar run, pid {s.pid} on {s.host}" for s in supervisors]
    alive += [WorkerRecord.parse(kv.value).id for kv in mine if kv.key.startswith(keys.workers_root)]
    reasons = behind(extent, mine, keys)
    if manifest.generation < file.generation:
        reasons.insert(0, f"it is of generation {manifest.generation}, the store of generation {file.generation}")
    return EtcdState(file.run, tuple(reasons), tuple(alive), Known.of(mine, keys), generation)


# -- what is said -----------------------------------------------------------------------------------------------


def describe(recovery: Recovery, file: RunFile, generation: int, reasons: Sequence[str]) -> list[str]:
    """One line a subject: what the new etcd holds, and what is lost."""
    why_due = reasons or ("sound, and rebuilt all the same",)
    head, weights = recovery.trainer, recovery.weights
    registered: Counter[str] = Counter()
    for segment in recovery.segments:
        registered[segment.table] += segment.rows
    committed = ", ".join(f"{h.rows} of {name}" for name, h in sorted(recovery.heads.items()))
    lines = [
        f"run        {file.run}, generation {generation}",
        *(f"{'etcd' if n == 0 else '':<10} {reason}" for n, reason in enumerate(why_due)),
        f"drawn      {recovery.cursor} groups, {head.consumed_groups} of them consumed",
        f"committed  rows: {committed}",
        "durable    rows registered again: " + (_listed(registered) or "none"),
        *_claim_lines(recovery),
        f"trainer    {head.decided} steps decided, {head.step} recorded, checkpoint "
        f"{head.checkpoint if head.checkpoint >= 0 else 'none'}",
        f"weights    {f'version {weights.version} ({weights.digest[:12]})' if weights else 'none was published'}",
    ]
    if recovery.offers:
        lines.append(f"           {len(recovery.offers)} versions were available under another digest too")
    if recovery.evaluations:
        asked = ", ".join(str(r.version) for r in recovery.evaluations)
        lines.append(f"evaluate   again: version {asked}")
    lines += [f"left out   {n} durable rows: {reason}" for reason, n in sorted(recovery.left_out.items())]
    return lines + [f"damaged    {text}" for text in recovery.damage]


def _claim_lines(recovery: Recovery) -> list[str]:
    by_length = lengths_by_reason([(GOES_ON if n else ANEW, n) for n in recovery.kept_tokens.values()])
    lines = [f"in flight  {len(recovery.claims)} trajectories"]
    if (kept := by_length.get(GOES_ON)) is not None:
        tokens = f"mean {kept['mean_length']:.1f} tokens, longest {kept['longest']:.0f}"
        lines.append(f"           {kept['count']:.0f} {GOES_ON} ({tokens})")
    if (anew := by_length.get(ANEW)) is not None:
        lines.append(f"lost       {anew['count']:.0f} {ANEW}")
    return lines


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} of {name}" for name, n in sorted(counts.items()))
