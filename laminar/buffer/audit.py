"""Checks the invariants of a run from etcd at one revision and the store: pure checks over a gathered picture.

`gather` reads; `check` decides. Rows with commit_seq below the head's count are what was committed at that revision,
whatever has been committed since: a living run can be audited.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from laminar.buffer.archive import read_archive
from laminar.buffer.claims import Held, stranded
from laminar.buffer.coordination import Coordination
from laminar.buffer.extent import behind, read_extent
from laminar.buffer.incoming import read_incoming
from laminar.buffer.keys import Keys, parse_trajectory
from laminar.buffer.records import BatchDecision, Cursor, Incoming, TableHead, TrainerHead, WeightsHead
from laminar.buffer.schema import EXPERIENCE, TABLES
from laminar.buffer.segments import read_segment
from laminar.buffer.steps import BATCH, oldest_checkpoint, read_closings
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table
from laminar.errors import StoreError

log = logging.getLogger(__name__)

Id = tuple[int, int]
SHOWN = 5


@dataclass
class Picture:
    """A run at one etcd revision. `registered` holds segments that are durable and not committed yet."""

    samples_per_prompt: int
    on_version_lost: Literal["continue", "restart"]
    update: Literal["drain", "interrupt"] = "drain"
    revision: int = 0
    cursor: int = 0
    claims: list[Held] = field(default_factory=list)
    registered: list[Id] = field(default_factory=list)
    experience: Sequence[Mapping[str, Any]] = ()
    head: TrainerHead | None = None
    weights: WeightsHead | None = None
    decisions: list[BatchDecision] = field(default_factory=list)
    batch_files: dict[str, str] = field(default_factory=dict)
    """sha256 of each decided batch file that is there."""
    batch_groups: dict[str, dict[int, Counter[str]]] = field(default_factory=dict)
    """Per batch file: group -> how many rows of each use."""
    removed: set[str] = field(default_factory=set)
    """Batch files that no restart needs and that are not there any more."""
    metrics: Sequence[Mapping[str, Any]] = ()
    steps: Sequence[Mapping[str, Any]] = ()
    registered_metrics: set[int] = field(default_factory=set)
    """Steps whose row of `step_metrics` is durable and not committed yet."""
    registered_steps: set[tuple[int, int, int]] = field(default_factory=set)
    """(step, group, sample) whose row of `steps` is durable and not committed yet."""
    unreadable: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Files and keys of the dead that nothing refers to."""
    stranded: list[Id] = field(default_factory=list)
    """Trajectories that wait for a living worker whose inbox does not have them."""
    offered: dict[int, set[str]] = field(default_factory=dict)
    """Digests under which each version was made available again after its publication."""
    behind: list[str] = field(default_factory=list)
    """What the store has and etcd does not know."""


@dataclass(frozen=True)
class AuditReport:
    problems: list[str]
    checked: dict[str, int]

    @property
    def ok(self) -> bool:
        return not self.problems


async def gather(
    coordination: Coordination, keys: Keys, storage: Storage, tables: Mapping[str, Table], *, samples_per_prompt: int,
    on_version_lost: Literal["continue", "restart"], update: Literal["drain", "interrupt"] = "drain",
) -> Picture:  # fmt: skip
    """Read everything that the checks need. Blocks nobody."""
    extent = await read_extent(storage, tables)  # before etcd: see `Extent`
    snapshot = await coordination.range(keys.prefix)
    by_key = {kv.key: kv for kv in snapshot.items}
    picture = Picture(samples_per_prompt, on_version_lost, update, revision=snapshot.revision)
    picture.behind = behind(extent, snapshot.items, keys)

    def one(key: str) -> str | None:
        return by_key[key].value if key in by_key else None

    def under(prefix: str) -> list[str]:
        return [k for k in by_key if k.startswith(prefix)]

    cursor, head, weights = one(keys.cursor), one(keys.trainer), one(keys.weights)
    picture.cursor = Cursor.parse(cursor).next if cursor else 0
    picture.head = TrainerHead.parse(head) if head else None
    picture.weights = WeightsHead.parse(weights) if weights else None
    for key in under(keys.offers):
        version, _, digest = key.removeprefix(keys.offers).partition("/")
        picture.offered.setdefault(int(version), set()).add(digest)
    picture.claims = [Held.of(by_key[k]) for k in under(keys.claims)]
    living = {k.rsplit("/", 1)[-1] for k in under(keys.workers_root)}
    picture.stranded = [h.id for h in stranded(picture.claims, living, by_key, keys)]
    table_head = one(keys.head("experience"))
    experience = TableHead.parse(table_head) if table_head else TableHead(lance_version=0, rows=0)
    done_segments: set[str] = set()
    if experience.committing and await tables["experience"].find(experience.committing.key) is not None:
        done_segments = set(experience.committing.segments)
    rows_committed = experience.rows
    for key in under(keys.incoming_table("experience")):
        incoming = Incoming.parse(by_key[key].value)
        if key.rsplit("/", 1)[-1] in done_segments:
            rows_committed += incoming.rows
            continue
        await _gather_incoming(coordination, key, storage, incoming, picture)
    for name, schema in TABLES.items():
        for key in under(keys.incoming_table(name)) if name != "experience" else ():
            await _gather_other(coordination, key, storage, schema, Incoming.parse(by_key[key].value), picture)
    table = await tables["experience"].read(filter=f"commit_seq < {rows_committed}")
    picture.experience = table.to_pylist()
    picture.metrics = (await tables["step_metrics"].read()).to_pylist()
    picture.steps = (await tables["steps"].read(columns=["step", "group", "sample"])).to_pylist()
    in_etcd = [BatchDecision.parse(by_key[k].value) for k in under(keys.batches)]
    closings = await read_closings(storage, {k: by_key[k].value for k in under(keys.closings)})
    archived = await read_archive(storage)
    for step in archived:
        picture.offered.setdefault(step.decision.step, set()).update(step.offered)
    in_etcd_too = {d.step for d in in_etcd}
    old = [s.decision for s in archived if s.decision.step not in in_etcd_too]
    await _gather_batches(storage, [*old, *in_etcd, *closings], picture)
    registered = {path for k in under(keys.incoming_root) for path in Incoming.parse(by_key[k].value).files}
    await _gather_left_over(storage, picture, living, registered)
    for root in (keys.inbox_root, keys.moves_root, keys.rests_root):
        picture.left_over += [k for k in under(root) if k[len(root) :].split("/")[0] not in living]
    return picture


async def _gather_incoming(
    coordination: Coordination, key: str, storage: Storage, incoming: Incoming, picture: Picture
) -> None:
    try:
        contents = read_segment(await storage.read(incoming.path), EXPERIENCE, complete=True)
        found = [(r["group"], r["sample"]) for b in contents.batches for r in b.select(["group", "sample"]).to_pylist()]
    except (StoreError, FileNotFoundError) as e:
        # A segment that is no longer registered was committed since, and its file deleted.
        if await coordination.get(key) is not None:
            picture.unreadable.append(f"{incoming.path}: {e}")
        found = [parse_trajectory(name) for name in incoming.trajectories]
    picture.registered += found


async def _gather_other(
    coordination: Coordination, key: str, storage: Storage, schema: pa.Schema, incoming: Incoming, picture: Picture
) -> None:
    try:
        found = await read_incoming(storage, incoming, schema)
    except (StoreError, FileNotFoundError) as e:
        if await coordination.get(key) is not None:
            picture.unreadable.append(f"{e}; its {incoming.rows} rows of table {incoming.table} would be lost")
        return
    if found.instead:
        log.warning("%s", found.instead)
    if incoming.table == "step_metrics":
        picture.registered_metrics.update(step for batch in found.batches for step in batch.column("step").to_pylist())
    elif incoming.table == "steps":
        columns = [[batch.column(name).to_pylist() for name in ("step", "group", "sample")] for batch in found.batches]
        picture.registered_steps.update(row for batch in columns for row in zip(*batch, strict=True))


async def _gather_batches(storage: Storage, decisions: Sequence[BatchDecision], picture: Picture) -> None:
    """Files of steps before the oldest checkpoint may have been removed: the experience has their rows."""
    oldest = 0
    for decision in decisions:
        picture.decisions.append(decision)
        try:
            data = await storage.read(decision.file)
            picture.batch_files[decision.file] = hashlib.sha256(data).hexdigest()
            counts: dict[int, Counter[str]] = {}
            for batch in read_segment(data, BATCH, complete=True).batches:
                for row in batch.select(["group", "use"]).to_pylist():
                    counts.setdefault(row["group"], Counter())[row["use"]] += 1
            picture.batch_groups[decision.file] = counts
        except (StoreError, FileNotFoundError) as e:
            if isinstance(e, FileNotFoundError) and decision.step >= oldest:
                oldest = oldest_checkpoint(f.path for f in await storage.list("checkpoints"))
            if isinstance(e, FileNotFoundError) and decision.step < oldest:
                picture.removed.add(decision.file)
            else:
                picture.unreadable.append(f"{decision.file}: {e}")


async def _gather_left_over(storage: Storage, picture: Picture, living: set[str], registered: set[str]) -> None:
    """Files of the dead that nothing refers to: the manager removes them in bounded time, so one look cannot tell
    whether they are a problem."""
    named = {h.claim.source.worker for h in picture.claims}
    for worker in sorted({f.path.split("/")[1] for f in await storage.list("partials")} - living - named):
        picture.left_over.append(f"partials/{worker}")
    for file in await storage.list("incoming"):
        if file.path not in registered and not any(w in file.path for w in living):
            picture.left_over.append(file.path)
    decided = {d.file for d in picture.decisions}
    picture.left_over += [
        f.path for f in await storage.list("batches") if f.path.endswith(".arrow") and f.path not in decided
    ]


def check(p: Picture) -> AuditReport:
    """All invariants that can be seen from here; each problem names what breaks it."""
    problems = [*p.behind, *p.unreadable]
    problems += _exactly_once(p)
    problems += _trajectories(p)
    problems += _batches(p)
    problems += _recorded(p)
    problems += _versions(p)
    checked = {
        "groups drawn": p.cursor,
        "trajectories committed": len(p.experience),
        "registered": len(p.registered),
        "claimed": len(p.claims),
        "batches decided": len(p.decisions),
        "versions recorded": len(p.metrics),
        "leftovers of ended workers": len(p.left_over),
    }
    return AuditReport(problems, checked)


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(str(i) for i in items[:SHOWN])
    return f"{len(items)} ({shown}{', …' if len(items) > SHOWN else ''})"


def _exactly_once(p: Picture) -> list[str]:
    """Invariant 1: each drawn trajectory is exactly one of claimed, registered, committed."""
    places: Counter[Id] = Counter()
    places.update(h.id for h in p.claims)
    places.update(p.registered)
    places.update((r["group"], r["sample"]) for r in p.experience)
    drawn = {(g, s) for g in range(p.cursor) for s in range(p.samples_per_prompt)}
    problems = []
    if lost := sorted(drawn - places.keys()):
        problems.append(f"invariant 1: lost trajectories {_some(lost)}")
    if twice := sorted(i for i, n in places.items() if n > 1):
        problems.append(f"invariant 1: trajectories in two places {_some(twice)}")
    if unknown := sorted(places.keys() - drawn):
        problems.append(f"invariant 1: trajectories that were never drawn {_some(unknown)}")
    if p.stranded:
        problems.append(f"invariant 1: trajectories that wait for a worker that does not know it {_some(p.stranded)}")
    return problems


def _trajectories(p: Picture) -> list[str]:
    """Invariants 2 and 3: one contiguous sequence, every policy token with a version and a finite logprob."""
    problems: list[str] = []
    digests = _digests(p)
    for row in p.experience:
        name = f"({row['group']}, {row['sample']})"
        tokens, mask, logprobs = row["token_ids"], row["policy_mask"], row["logprobs"]
        if not len(tokens) == len(mask) == len(logprobs):
            problems.append(f"invariant 2: {name} has {len(tokens)} tokens, {len(mask)} mask, {len(logprobs)} logprobs")
            continue
        if not all(math.isfinite(x) for x in logprobs):
            problems.append(f"invariant 2: {name} has a logprob that is not finite")
        starts, versions = row["span_start"], row["span_version"]
        if any(mask) and (not starts or mask.index(True) < starts[0] or starts != sorted(starts)):
            problems.append(f"invariant 2: {name} has policy tokens outside its spans {starts}")
        if not len(starts) == len(versions) == len(row["span_worker"]) == len(row["span_digest"]):
            problems.append(f"invariant 2: {name} has span columns of different lengths")
        problems += _weights(row, name, digests, p.weights.version if p.weights else -1)
        if len(set(versions)) > 1 and p.on_version_lost != "continue" and p.update == "drain":
            problems.append(f"invariant 3: {name} has spans of versions {sorted(set(versions))}")
        if (row["reward"] is None) != (row["status"] != "ok"):
            problems.append(f"invariant 2: {name} has status {row['status']!r} and reward {row['reward']}")
    return problems


def _digests(p: Picture) -> dict[int, set[str]]:
    """The prefixes that spans of each version may carry."""
    digests: dict[int, set[str]] = {}
    named = [(m["version"], m["digest"]) for m in p.metrics if m["digest"]]
    named += [(version, digest) for version, offered in p.offered.items() for digest in offered]
    if p.weights:
        named.append((p.weights.version, p.weights.digest))
    for version, digest in named:
        digests.setdefault(version, set()).add(digest[:16])
    return digests


def _weights(row: Mapping[str, Any], name: str, digests: Mapping[int, set[str]], newest: int) -> list[str]:
    """Invariant 2: what spans say of the weights that wrote them. Versions after `newest` are another problem."""
    published = set[str]().union(*digests.values())
    for version, digest in zip(row["span_version"], row["span_digest"], strict=False):
        if digest[:16] not in published:
            return [f"invariant 2: {name} was written by weights that were never published: {digest[:16]}"]
        if version <= newest and digest[:16] not in digests.get(version, ()):
            of = sorted(v for v, known in digests.items() if digest[:16] in known)
            return [f"invariant 2: {name} has a span of version {version} with the digest of version {of[0]}"]
    return []


def _batches(p: Picture) -> list[str]:
    """Invariant 4: each step has one batch of whole groups; every group is consumed at most once."""
    problems: list[str] = []
    consumed: Counter[int] = Counter()
    committed = Counter(r["group"] for r in p.experience) if p.removed else Counter[int]()
    for d in p.decisions:
        consumed.update(d.trained)
        consumed.update(d.retired.keys())
        if d.file in p.batch_files and p.batch_files[d.file] != d.sha256:
            problems.append(f"invariant 4: {d.file} is not the file that step {d.step} decided")
        rows = p.batch_groups.get(d.file, {})
        # An unreadable file is reported as such, not for each of its groups.
        groups = {*rows, *d.trained, *d.retired} if d.file in p.batch_groups else set[int]()
        for group in sorted(groups):
            uses = rows.get(group, Counter())
            wanted = "train" if group in d.trained else d.retired.get(group)
            if uses != Counter({wanted: p.samples_per_prompt}):
                problems.append(f"invariant 4: step {d.step}, group {group} has rows {dict(uses)}, not {wanted}")
        groups = {*d.trained, *d.retired} if d.file in p.removed else set[int]()
        if lost := sorted(g for g in groups if committed[g] != p.samples_per_prompt):
            problems.append(f"invariant 4: step {d.step} has no file, nor the experience its groups {_some(lost)}")
    if twice := sorted(g for g, n in consumed.items() if n > 1):
        problems.append(f"invariant 4: groups consumed twice {_some(twice)}")
    per_step = Counter(d.step for d in p.decisions if d.trained)
    steps = sorted(per_step)
    if p.head is not None:
        if steps != list(range(p.head.decided)):
            problems.append(f"invariant 4: {p.head.decided} batches are decided, there are records of {_some(steps)}")
        if len(consumed) != p.head.consumed_groups:
            problems.append(f"invariant 4: {len(consumed)} groups are decided, the head says {p.head.consumed_groups}")
        if p.head.state == "done" and len(consumed) != p.cursor:
            problems.append(f"the run is done, but {p.cursor - len(consumed)} groups are neither trained nor retired")
    trained = Counter((s["step"], s["group"], s["sample"]) for s in p.steps)
    if again := sorted(k for k, n in trained.items() if n > 1):
        problems.append(f"invariant 4: (step, group, sample) recorded twice {_some(again)}")
    return problems


def _recorded(p: Picture) -> list[str]:
    """Each recorded step has its row of metrics, and one row of `steps` for each ok trajectory of the groups that it
    trained; committed or registered. What is damaged in both of its files before its commit costs them."""
    problems: list[str] = []
    recorded = p.head.step if p.head is not None else 0
    if lost := sorted(set(range(recorded)).difference((m["version"] - 1 for m in p.metrics), p.registered_metrics)):
        problems.append(f"table step_metrics has no row of the recorded steps {_some(lost)}")
    step_of = {group: d.step for d in p.decisions if d.step < recorded for group in d.trained}
    ok = ((r["group"], r["sample"]) for r in p.experience if r["status"] == "ok" and r["group"] in step_of)
    trained = {(step_of[group], group, sample) for group, sample in ok}
    missing = trained.difference(((s["step"], s["group"], s["sample"]) for s in p.steps), p.registered_steps)
    if missing:
        steps = sorted({step for step, _, _ in missing})
        problems.append(
            f"table steps has no row of {len(missing)} trained trajectories of the recorded steps {_some(steps)}"
        )
    return problems


def _versions(p: Picture) -> list[str]:
    """Invariant 5: versions only grow, one digest each."""
    problems: list[str] = []
    rows = Counter(m["version"] for m in p.metrics)
    if twice := sorted(v for v, n in rows.items() if n > 1):
        problems.append(f"invariant 5: versions recorded twice {_some(twice)}")
    digests = {m["version"]: m["digest"] for m in p.metrics}
    if p.weights and (known := digests.get(p.weights.version)) and known != p.weights.digest:
        problems.append(
            f"invariant 5: version {p.weights.version} was published as {p.weights.digest[:16]}, "
            f"recorded as {known[:16]}"
        )
    newest = p.weights.version if p.weights else -1
    if ahead := sorted({v for r in p.experience for v in r["span_version"] if v > newest}):
        problems.append(f"invariant 5: trajectories of versions that were never published {_some(ahead)}")
    return problems
