"""What a rebuilt etcd holds: a pure plan from what is left in the store, and from what an old etcd still says.

    Remains, Known ──plan──▶ Recovery ──records──▶ the keys of a new generation

    cursor      1 + the highest group seen anywhere: in tables, segments, logs, decisions
    incoming    durable segments, less the rows that are committed or stand in another segment too
    claims      each drawn trajectory that is neither committed nor in such a segment; its source is the log that has
                most of it, its term is above any that was written
    trainer     from the copies of the decisions; a step is recorded if all of its rows are durable
    weights     the newest version that anything names, so that published versions only grow

`validate` holds what the audit will hold. Nothing here reads or writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from laminar.buffer.claims import TrajectoryId, reissued
from laminar.buffer.coordination import KeyValue, Operation, Put
from laminar.buffer.experience import incoming_path
from laminar.buffer.incoming import COPIED, copy_path
from laminar.buffer.keys import Keys, parse_trajectory, trajectory_name
from laminar.buffer.records import (
    BatchDecision,
    Claim,
    Cursor,
    EvaluationRequest,
    Incoming,
    TableHead,
    TrainerHead,
    WeightsHead,
)
from laminar.buffer.remains import IncomingFile, Remains
from laminar.errors import StoreError

WRITER = "recovery"


@dataclass(frozen=True)
class Known:
    """What an etcd that still answers says, however old; empty where it is lost."""

    cursor: int = 0
    claims: Mapping[TrajectoryId, Claim] = field(default_factory=dict)
    weights: WeightsHead | None = None
    offers: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Digests by version."""

    @classmethod
    def of(cls, items: Iterable[KeyValue], keys: Keys) -> Known:
        by_key = {kv.key: kv.value for kv in items}
        offers: dict[int, set[str]] = {}
        for key in (k for k in by_key if k.startswith(keys.offers)):
            version, _, digest = key[len(keys.offers) :].partition("/")
            offers.setdefault(int(version), set()).add(digest)
        return cls(
            cursor=Cursor.parse(by_key[keys.cursor]).next if keys.cursor in by_key else 0,
            claims={parse_trajectory(k): Claim.parse(v) for k, v in by_key.items() if k.startswith(keys.claims)},
            weights=WeightsHead.parse(by_key[keys.weights]) if keys.weights in by_key else None,
            offers={version: frozenset(digests) for version, digests in offers.items()},
        )


@dataclass(frozen=True)
class Segment:
    """A segment to register. `rewritten` are the rows to write to its files first, where only some of a file's
    count."""

    table: str
    id: str
    path: str
    rows: int
    trajectories: list[str]
    rewritten: pa.Table | None = None
    copied_to: str = ""

    def incoming(self) -> Incoming:
        return Incoming(
            table=self.table, path=self.path, rows=self.rows, worker=WRITER, trajectories=self.trajectories,
            copied_to=self.copied_to,
        )  # fmt: skip


@dataclass(frozen=True)
class Recovery:
    """The state of the new generation, and what was found on the way to it."""

    cursor: int
    claims: dict[TrajectoryId, Claim]
    kept_tokens: dict[TrajectoryId, int]
    """Durable tokens of each claimed trajectory: 0 where it begins anew."""
    segments: list[Segment]
    heads: dict[str, TableHead]
    trainer: TrainerHead
    decisions: list[BatchDecision]
    """Those that etcd holds: not the archived ones."""
    closings: dict[str, BatchDecision]
    weights: WeightsHead | None
    offers: list[WeightsHead]
    evaluations: list[EvaluationRequest]
    left_out: dict[str, int]
    """Rows of segments that do not count, by reason."""
    damage: list[str]

    def validate(self, remains: Remains, samples_per_prompt: int) -> None:
        """Raise StoreError if a trajectory would be in no place, or in two (invariant 1)."""
        places: Counter[tuple[object, ...]] = Counter(remains.committed["experience"])
        places.update(self.claims.keys())
        places.update(parse_trajectory(n) for s in self.segments for n in s.trajectories)
        drawn = {(g, s) for g in range(self.cursor) for s in range(samples_per_prompt)}
        twice = [i for i, n in places.items() if n > 1]
        if twice or places.keys() != drawn:
            raise StoreError(
                f"the plan of a recovery is wrong: {len(drawn - places.keys())} trajectories in no place, {len(twice)} "
                f"in two, {len(places.keys() - drawn)} that were never drawn; report this as a bug"
            )


def plan(
    remains: Remains, known: Known, *, samples_per_prompt: int, generation: int, evaluate_every: int, max_steps: int
) -> Recovery:
    """Raises StoreError where steps are recorded whose decisions are missing. `evaluate_every` 0: never."""
    segments, left_out = _segments(remains, generation)
    recorded = _recorded(remains, segments)
    cursor = max(known.cursor, 1 + _highest_group(remains))
    weights, versions = _weights(remains, known, segments)
    settled = remains.committed["experience"] | {parse_trajectory(n) for s in segments for n in s.trajectories}
    claims, kept = _claims(remains, known, cursor, samples_per_prompt, settled, weights.version if weights else 0)
    archived = remains.archived
    return Recovery(
        cursor=cursor,
        claims=claims,
        kept_tokens=kept,
        segments=segments,
        heads=remains.heads,
        trainer=_trainer(remains, recorded),
        decisions=[d for d in remains.decisions if d.step >= archived],
        closings={name: d for name, d in _sound_closings(remains).items() if d.step >= archived},
        weights=weights,
        offers=_offers(remains, known, versions, weights),
        evaluations=_evaluations(remains, segments, versions, weights, evaluate_every, max_steps),
        left_out=left_out,
        damage=[*remains.damage, *_stale_closings(remains)],
    )


# -- segments ---------------------------------------------------------------------------------------------------


def _segments(remains: Remains, generation: int) -> tuple[list[Segment], dict[str, int]]:
    """What to register of the durable segments, each row once. Of a trajectory that two owners finished the later one
    counts; of a step, a pair of files by one trainer; of an evaluation, the file with most rows."""
    chosen: list[Segment] = []
    left_out: Counter[str] = Counter()
    by_table: dict[str, list[IncomingFile]] = {}
    for file in sorted(remains.incoming, key=lambda f: f.path):
        by_table.setdefault(file.table, []).append(file)
    usable = {table: _whole_steps(remains, by_table, table) for table in ("steps", "step_metrics")}
    taken: dict[str, set[tuple[object, ...]]] = {table: set(rows) for table, rows in remains.committed.items()}
    for table, files in by_table.items():
        for file in _preferred(table, files):
            if file.id not in usable.get(table, {file.id}):
                left_out["of a step that is not recorded"] += file.rows.num_rows
                continue
            keep: list[int] = []
            for row, id in enumerate(file.identities()):
                if id in taken[table]:
                    committed = id in remains.committed[table]
                    left_out["committed already" if committed else "in another segment too"] += 1
                else:
                    taken[table].add(id)
                    keep.append(row)
            if keep:
                chosen.append(_segment(file, keep, generation))
    return sorted(chosen, key=lambda s: s.path), dict(left_out)


def _segment(file: IncomingFile, keep: list[int], generation: int) -> Segment:
    rows = file.rows.take(keep)
    names: list[str] = []
    if file.table == "experience":
        pairs = zip(rows["group"].to_pylist(), rows["sample"].to_pylist(), strict=True)
        names = [trajectory_name(group, sample) for group, sample in pairs]
    if len(keep) == file.rows.num_rows:
        return Segment(file.table, file.id, file.path, len(keep), names, copied_to=file.copied_to)
    id = f"{WRITER}-{generation:03d}-{file.id}"
    path = incoming_path(file.table, id)
    return Segment(file.table, id, path, len(keep), names, rows, copy_path(path) if file.table in COPIED else "")


def _preferred(table: str, files: Sequence[IncomingFile]) -> list[IncomingFile]:
    """The order in which files may take a row."""
    if table == "experience":
        return sorted(files, key=_last_finished, reverse=True)
    if table == "evaluation":
        return sorted(files, key=lambda f: (-f.rows.num_rows, f.path))
    return list(files)


def _last_finished(file: IncomingFile) -> tuple[int, str]:
    """In UTC microseconds."""
    return max(file.rows["finished_at"].cast(pa.int64()).to_pylist(), default=0), file.path


def _whole_steps(remains: Remains, by_table: Mapping[str, Sequence[IncomingFile]], table: str) -> set[str]:
    """Ids of the segments of steps that may be registered: the step's rows and its metrics are durable both, committed
    or by the same trainer. One that has only half of them is trained and recorded again."""
    other = "step_metrics" if table == "steps" else "steps"
    done = {id[0] for id in remains.committed[other]}
    partners = {file.id for file in by_table.get(other, ())}
    steps_of = {file.id: {id[0] for id in file.identities()} for file in by_table.get(table, ())}
    pairs: dict[object, str] = {}
    for id, steps in sorted(steps_of.items()):
        for step in steps:
            if step in done or step == -1 or id in partners:
                pairs.setdefault(step, id)
    return set(pairs.values())


# -- the trainer ------------------------------------------------------------------------------------------------


def _recorded(remains: Remains, segments: Sequence[Segment]) -> set[int]:
    """Steps whose metrics are committed or to be registered; -1 made version 0."""
    paths = {s.path for s in segments if s.table == "step_metrics"}
    rows = {int(str(id[0])) for id in remains.committed["step_metrics"]}
    return rows | {int(str(id[0])) for f in remains.incoming if f.path in paths for id in f.identities()}


def _trainer(remains: Remains, recorded: set[int]) -> TrainerHead:
    decided = len(remains.decisions)
    step = next(n for n in range(decided + 1) if n not in recorded or n == decided)
    if beyond := [n for n in sorted(recorded) if n >= decided]:
        raise StoreError(
            f"step {beyond[-1]} is recorded, and only {decided} steps have a decision under batches/: restore the "
            "copies of the decisions"
        )
    checkpoint = next((version for version, _ in remains.checkpoints if version <= decided), -1)
    consumed = [*remains.decisions, *_sound_closings(remains).values()]
    return TrainerHead(
        # What a checkpoint has behind it is never trained again, whatever became of its rows.
        step=max(step, checkpoint),
        decided=decided,
        checkpoint=checkpoint,
        consumed_groups=sum(len(d.trained) + len(d.retired) for d in consumed),
        state="running",
        initial=-1 in recorded,
        by=WRITER,
    )


def _sound_closings(remains: Remains) -> dict[str, BatchDecision]:
    """Without those of an ending that did not come about: a step consumed their groups after all."""
    consumed = {group for d in remains.decisions for group in (*d.trained, *d.retired)}
    return {name: d for name, d in remains.closings.items() if consumed.isdisjoint(d.retired)}


def _stale_closings(remains: Remains) -> list[str]:
    sound = _sound_closings(remains)
    stale = sorted(remains.closings.keys() - sound.keys())
    return [f"batches/closing-{name}.json retires groups that a step has consumed" for name in stale]


def _highest_group(remains: Remains) -> int:
    groups: set[int] = {int(str(id[0])) for id in remains.committed["experience"]}
    groups |= {int(str(id[0])) for f in remains.incoming if f.table == "experience" for id in f.identities()}
    groups |= {group for group, _ in remains.terms}
    groups |= {g for d in (*remains.decisions, *remains.closings.values()) for g in (*d.trained, *d.retired)}
    return max(groups, default=-1)


# -- claims -----------------------------------------------------------------------------------------------------


def _claims(
    remains: Remains, known: Known, cursor: int, samples: int, settled: set[tuple[object, ...]], newest: int
) -> tuple[dict[TrajectoryId, Claim], dict[TrajectoryId, int]]:
    claims: dict[TrajectoryId, Claim] = {}
    kept: dict[TrajectoryId, int] = {}
    for id in ((g, s) for g in range(cursor) for s in range(samples)):
        if id in settled:
            continue
        before, found = known.claims.get(id), remains.unfinished.get(id)
        term = 1 + max(remains.terms.get(id, 0), before.term if before else 0)
        claim = reissued(term=term, version=found.version if found else newest)
        if found is not None:
            claim = claim.model_copy(update={"source": found.source, "progress": found.progress})
        if before is not None:
            kept_of_it = {"attempts": before.attempts, "deaths": before.deaths, "last_error": before.last_error}
            claim = claim.model_copy(update=kept_of_it)
        claims[id], kept[id] = claim, found.tokens if found else 0
    return claims, kept


# -- versions ---------------------------------------------------------------------------------------------------


def _weights(
    remains: Remains, known: Known, segments: Sequence[Segment]
) -> tuple[WeightsHead | None, dict[int, str]]:
    """The newest version, and the digest of each that is recorded. A trajectory names a version only after its writer
    has loaded and verified it, so it is a record of it too."""
    paths = {s.path for s in segments if s.table == "step_metrics"}
    recorded = dict(remains.versions)
    for rows in (f.rows for f in remains.incoming if f.path in paths):
        pairs = zip(rows["version"].to_pylist(), rows["digest"].to_pylist(), strict=True)
        recorded |= {version: digest for version, digest in pairs if digest}
    by_source = [{v: sorted(d)[0] for v, d in remains.written_under.items()}]
    by_source += [{v: d for v, d in remains.checkpoints if d}, recorded]
    if known.weights is not None:
        by_source.insert(2, {known.weights.version: known.weights.digest})
    digests = {v: d for source in by_source for v, d in source.items()}
    if not digests:
        return None, recorded
    newest = max(digests)
    old = known.weights
    same_layout = {"layout_digest": old.layout_digest, "bytes": old.bytes} if old else {"layout_digest": "", "bytes": 0}
    return WeightsHead(version=newest, digest=digests[newest], master="", **same_layout), recorded  # type: ignore[arg-type]


def _offers(
    remains: Remains, known: Known, recorded: Mapping[int, str], weights: WeightsHead | None
) -> list[WeightsHead]:
    """Digests under which versions were available beside the recorded one (a replay that gave other bits)."""
    if weights is None:
        return []
    named: dict[int, set[str]] = {}
    for version, digests in (*remains.written_under.items(), *known.offers.items()):
        named.setdefault(version, set()).update(digests)
    for version, digest in remains.checkpoints:
        if digest:
            named.setdefault(version, set()).add(digest)
    published = {**recorded, weights.version: weights.digest}
    return [
        weights.model_copy(update={"version": version, "digest": digest})
        for version, digests in sorted(named.items())
        for digest in sorted(digests - {published.get(version)})
    ]


def _evaluations(
    remains: Remains, segments: Sequence[Segment], recorded: Mapping[int, str], weights: WeightsHead | None,
    every: int, max_steps: int,
) -> list[EvaluationRequest]:  # fmt: skip
    """Those due that have no rows, of versions that can still be had: the newest, or a checkpoint's."""
    if every == 0 or weights is None:
        return []
    paths = {s.path for s in segments if s.table == "evaluation"}
    done = {id[0] for id in remains.committed["evaluation"]}
    done |= {id[0] for f in remains.incoming if f.path in paths for id in f.identities()}
    there = {weights.version, *(version for version, _ in remains.checkpoints)}
    due = [v for v in sorted(recorded) if v in there - done and (v % every == 0 or v == max_steps)]
    return [EvaluationRequest(version=v, digest=recorded[v]) for v in due]


# -- keys -------------------------------------------------------------------------------------------------------


def records(recovery: Recovery, keys: Keys) -> list[Operation]:
    """Everything that the new generation's keys hold."""
    puts: list[Operation] = [
        Put(keys.cursor, Cursor(next=recovery.cursor, by=WRITER).dump()),
        Put(keys.trainer, recovery.trainer.dump()),
    ]
    puts += [Put(keys.head(name), head.dump()) for name, head in sorted(recovery.heads.items())]
    puts += [Put(keys.claim(*id), claim.dump()) for id, claim in recovery.claims.items()]
    puts += [Put(keys.incoming(s.table, s.id), s.incoming().dump()) for s in recovery.segments]
    puts += [Put(keys.batch(d.step), d.dump()) for d in recovery.decisions]
    puts += [Put(f"{keys.closings}{name}", d.dump()) for name, d in sorted(recovery.closings.items())]
    if recovery.weights is not None:
        puts.append(Put(keys.weights, recovery.weights.dump()))
    puts += [Put(f"{keys.offers_of(w.version)}{w.digest}", w.dump()) for w in recovery.offers]
    puts += [Put(f"{keys.evaluations}{r.version:09d}", r.dump()) for r in recovery.evaluations]
    return puts
