"""How a run stands: live from etcd while it works, from the store's tables after its end.

etcd   ──read_live──▶  LiveStatus ──to_snapshot──▶ display
tables ──step_rows──▶  StepRow, one a trained step
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from laminar.buffer.coordination import Coordination, KeyValue
from laminar.buffer.etcd_access import EtcdAccess, parse_endpoint
from laminar.buffer.keys import Keys, parse_trajectory
from laminar.buffer.records import (
    Claim,
    CommitterTrouble,
    Cursor,
    Incoming,
    LeaderRecord,
    Load,
    RelayLoad,
    RunManifest,
    TrainerHead,
    TrainerProgress,
    WeightsHead,
    WorkerRecord,
)
from laminar.config_places import CoordinationConfig
from laminar.errors import CoordinationError, StoreError
from laminar.workers.supervisor.ending import Ending, read_ending
from laminar.workers.viewing.display import Event, Snapshot, WorkerView
from laminar.workers.viewing.inspect import RUNS, StoreView

T = TypeVar("T")

LIVE_DEADLINE_S = 8.0
PROBE_S = 1.0


@dataclass(frozen=True)
class StepRow:
    """One trained step. Figures are None where the step had nothing to average; `at_s` is UTC seconds of its record."""

    step: int
    version: int
    at_s: float
    metrics: dict[str, float | None]
    reward: float | None
    response_length: float | None
    staleness_mean: float | None
    staleness_max: float | None


@dataclass(frozen=True)
class LiveStatus:
    """A run as etcd has it. `claims` counts trajectories by state, `in_flight` groups with a claim, `incoming` rows
    by table that are durable and not committed yet, `leaders` the worker of each role."""

    run: str
    generation: int
    head: TrainerHead | None
    weights: WeightsHead | None
    drawn: int
    claims: dict[str, int]
    in_flight: int
    incoming: dict[str, int]
    leaders: dict[str, str]
    workers: tuple[WorkerView, ...]
    progress: TrainerProgress | None
    processes: frozenset[tuple[str, int]] = frozenset()
    """Host and pid of each worker."""
    committers: dict[str, CommitterTrouble | None] = field(default_factory=dict)
    """Of each living relay: what it says of the committer beside it, None as long as that commits."""


@dataclass(frozen=True)
class RunStatus:
    """`live` is None when no etcd of this run answers: the run has ended, or runs where its etcd cannot be reached."""

    run: str
    store: str
    max_steps: int
    live: LiveStatus | None
    why_not_live: str
    last: StepRow | None
    statuses: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    ending: Ending | None = None
    """How the last `laminar run` ended; None if it works, or was killed."""


def mean(values: Sequence[float]) -> float:
    return fmean(values)


def run_status(store: StoreView, endpoints: list[str]) -> RunStatus:
    """`endpoints` empty: those of the run's config, else of the etcd that `laminar run` started here. Blocks."""
    live, why = None, "no etcd of it runs here (it has ended, was stopped, or runs elsewhere: --etcd HOST:PORT)"
    for access in ways_to_etcd(store, endpoints):
        live, why = asyncio.run(_try_live(store, access))
        if live is not None:
            break
    rows = step_rows(store)
    counted = store.query(
        "select status, finish_reason, count(*) as n from experience group by all order by n desc"
    ).to_pylist()
    statuses: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for row in counted:
        statuses[row["status"]] += row["n"]
        reasons[row["finish_reason"]] += row["n"]
    return RunStatus(
        run=store.run.run,
        store=store.root,
        max_steps=int(store.run.config.get("run", {}).get("max_steps", 0)),
        live=live,
        why_not_live=why if live is None else "",
        last=rows[-1] if rows else None,
        statuses=dict(statuses),
        finish_reasons=dict(reasons),
        ending=asyncio.run(read_ending(store.storage)),
    )


def ways_to_etcd(store: StoreView, endpoints: list[str]) -> list[EtcdAccess]:
    """How this run's etcd may be reached, best first: at `endpoints` if any are given."""
    configured = CoordinationConfig.model_validate(store.run.config.get("coordination", {})).access()
    if endpoints:
        return [configured.at(endpoints)]
    known = [configured] if configured.endpoints else []
    # An embedded etcd keeps its data on a local disk: beside a remote store, not in it.
    path = (Path(store.root) if store.local else RUNS / store.run.run) / "etcd" / "endpoint"
    if path.is_file():
        known.append(EtcdAccess((path.read_text(encoding="utf-8").strip(),)))
    return known


async def _try_live(store: StoreView, access: EtcdAccess) -> tuple[LiveStatus | None, str]:
    """The live status, or why there is none."""
    return await ask_etcd(store, access, read_state)


async def ask_etcd(
    store: StoreView, access: EtcdAccess, read: Callable[[Coordination, Keys], Awaitable[T]]
) -> tuple[T | None, str]:
    """What `read` finds of the store's run, or why nothing can be read. An endpoint file outlives its etcd, so a cheap
    probe comes first."""
    where = str(access)
    if not await _any_listens(access):
        return None, f"nothing listens at {where}"
    coordination = access.connect()
    try:
        async with asyncio.timeout(LIVE_DEADLINE_S):
            return await read(coordination, await _keys_of(coordination, store.run.run, store.run.store_id)), ""
    except TimeoutError:
        return None, f"etcd at {where} did not answer within {LIVE_DEADLINE_S:.0f} s"
    except (CoordinationError, StoreError) as e:
        return None, str(e)
    finally:
        await coordination.close()


async def _any_listens(access: EtcdAccess) -> bool:
    for endpoint in access.endpoints:
        host, port = parse_endpoint(endpoint, tls=access.tls() is not None)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
        except (OSError, TimeoutError):
            continue
        writer.close()
        return True
    return False


async def read_live(coordination: Coordination, run: str, store_id: str = "") -> LiveStatus:
    """Read a run's state from etcd. Raises StoreError if etcd knows no such run, or knows it for another store."""
    return await read_state(coordination, await _keys_of(coordination, run, store_id))


async def _keys_of(coordination: Coordination, run: str, store_id: str) -> Keys:
    kv = await coordination.get(Keys(run).manifest)
    if kv is None:
        raise StoreError(f"etcd knows no run {run!r}")
    manifest = RunManifest.parse(kv.value)
    if store_id and manifest.store_id != store_id:
        raise StoreError(
            f"etcd knows run {run!r} with the store {manifest.store} (id {manifest.store_id}), not with this one (id "
            f"{store_id}): another run took the name or the port"
        )
    return Keys(run, manifest.generation)


async def read_state(coordination: Coordination, keys: Keys) -> LiveStatus:
    """One snapshot of everything under the run's prefix but the batches; small for a run of a few workers."""
    listed = [
        (await coordination.range(prefix)).items
        for prefix in (keys.claims, keys.workers_root, keys.loads_root, keys.incoming_root, f"{keys.prefix}leaders/")
    ]
    claims, workers, loads, incoming, leaders = listed
    single = {key: await coordination.get(key) for key in (keys.cursor, keys.trainer, keys.weights)}
    cursor, trainer, weights = (single[key] for key in (keys.cursor, keys.trainer, keys.weights))
    relays = {_name_of(kv.key): RelayLoad.parse(kv.value).committer for kv in loads if _kind_of(kv.key) == "relay"}
    progress = [TrainerProgress.parse(kv.value) for kv in loads if _kind_of(kv.key) == "trainer"]
    rows: Counter[str] = Counter()
    for kv in incoming:
        segment = Incoming.parse(kv.value)
        rows[segment.table] += segment.rows
    return LiveStatus(
        run=keys.run,
        generation=keys.generation,
        head=TrainerHead.parse(trainer.value) if trainer else None,
        weights=WeightsHead.parse(weights.value) if weights else None,
        drawn=Cursor.parse(cursor.value).next if cursor else 0,
        claims=dict(Counter(Claim.parse(kv.value).state for kv in claims)),
        in_flight=len({parse_trajectory(kv.key)[0] for kv in claims}),
        incoming=dict(rows),
        leaders={kv.key.rsplit("/", 1)[-1]: LeaderRecord.parse(kv.value).worker for kv in leaders},
        workers=_worker_views(workers, loads),
        progress=progress[0] if progress else None,
        committers={_name_of(kv.key): relays.get(_name_of(kv.key)) for kv in workers if _kind_of(kv.key) == "relay"},
        processes=frozenset((w.host, w.pid) for w in map(WorkerRecord.parse, (kv.value for kv in workers))),
    )


def _kind_of(key: str) -> str:
    return key.rsplit("/", 2)[-2]


def _name_of(key: str) -> str:
    return key.rsplit("/", 1)[-1]


def _worker_views(workers: Sequence[KeyValue], loads: Sequence[KeyValue]) -> tuple[WorkerView, ...]:
    load_of = {kv.key.rsplit("/", 1)[-1]: kv.value for kv in loads}
    return tuple(_worker_view(WorkerRecord.parse(kv.value), load_of.get(kv.key.rsplit("/", 1)[-1])) for kv in workers)


def _worker_view(record: WorkerRecord, load: str | None) -> WorkerView:
    if load is None:
        return WorkerView(record.id, record.kind, activity="starting" if record.kind in ("rollout", "trainer") else "")
    if record.kind == "trainer":
        progress = TrainerProgress.parse(load)
        return WorkerView(record.id, record.kind, version=progress.step, activity=progress.activity)
    if record.kind != "rollout":
        return WorkerView(record.id, record.kind)
    report = Load.parse(load)
    return WorkerView(
        record.id,
        record.kind,
        version=report.version,
        running=report.running,
        waiting=report.waiting,
        kv_share=report.kv_tokens / report.kv_capacity if report.kv_capacity else None,
        tokens_per_s=report.decode_tokens_per_s,
        draining=report.draining,
        activity="slow, rests" if report.resting else "",
        moved_out=report.moved_out,
        moved_in=report.moved_in,
        refilled_tokens=report.refilled_tokens,
    )


def to_snapshot(
    live: LiveStatus,
    *,
    max_steps: int,
    elapsed_s: float,
    rewards: Mapping[int, float | None] | None = None,
    events: Sequence[Event] = (),
) -> Snapshot:
    """The display's view of a live status. `rewards`: mean reward by step, as far as the caller has seen them; what the
    trainer reports is added. Shown is the last step whose figures are known: they come a moment after its number."""
    head, progress = live.head, live.progress
    metrics = progress.metrics if progress else {}
    known = {**(rewards or {}), **(progress.rewards if progress else {})}
    steps = head.step if head else 0
    if progress is not None and progress.rewards:
        steps = min(steps, max(progress.rewards) + 1)
    rates = [worker.tokens_per_s for worker in live.workers if worker.tokens_per_s is not None]
    last_ten = [r for step in range(max(0, steps - 10), steps) if (r := known.get(step)) is not None]
    consumed = head.consumed_groups if head else 0
    return Snapshot(
        run=live.run,
        step=steps,
        max_steps=max_steps,
        elapsed_s=elapsed_s,
        reward=known.get(steps - 1),
        reward_mean_10=mean(last_ten) if last_ten else None,
        staleness_mean=metrics.get("staleness_mean"),
        staleness_max=metrics.get("staleness_max"),
        tokens_per_s=sum(rates) if rates else None,
        drawn=live.drawn,
        consumed=consumed,
        complete=max(0, live.drawn - consumed - live.in_flight),
        in_flight=live.in_flight,
        workers=live.workers,
        events=tuple(events),
    )


def step_rows(store: StoreView) -> list[StepRow]:
    """One row a trained step, by step. What the metrics do not name is taken from the rows that the step trained on."""
    rows = store.query(
        """
        select m.step, m.version, epoch_us(m."at") / 1e6 as at_s, m.metrics,
               t.reward, t.length, t.staleness_mean, t.staleness_max
        from step_metrics m left join (
            select s.step, avg(e.reward) as reward, avg(len(e.token_ids)) as length,
                   avg(s.staleness) as staleness_mean, max(s.staleness) as staleness_max
            from steps s join experience e on s."group" = e."group" and s.sample = e.sample group by s.step
        ) t on m.step = t.step
        where m.step >= 0
        order by m.step
        """
    ).to_pylist()
    result = []
    for row in rows:
        metrics = _metrics(row["metrics"])
        pick = {
            name: metrics.get(metric) if metrics.get(metric) is not None else row[column]
            for name, metric, column in (
                ("reward", "reward_mean", "reward"),
                ("response_length", "response_length_mean", "length"),
                ("staleness_mean", "staleness_mean", "staleness_mean"),
                ("staleness_max", "staleness_max", "staleness_max"),
            )
        }
        result.append(StepRow(row["step"], row["version"], row["at_s"], metrics, **pick))
    return result


def _metrics(text: str) -> dict[str, float | None]:
    """Numbers by name; what is not finite counts as not measured."""
    values = json.loads(text)
    return {name: v if v is None or math.isfinite(v) else None for name, v in values.items()}
