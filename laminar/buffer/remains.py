"""What a store holds of a run, read once: that from which `recovery.py` rebuilds a lost etcd.

    tables ──────▶ committed rows, how far each table is numbered
    incoming/ ───▶ durable segments, with what they hold; what is damaged of them is read from its copy
    partials/ ───▶ the best that is left of each unfinished trajectory
    batches/ ────▶ what each step means
    checkpoints ─▶ versions (read by the caller)

Nothing is written. Damage is reported, never raised: what cannot be read counts as not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import pyarrow as pa

from laminar.buffer.archive import read_archive
from laminar.buffer.claims import TrajectoryId
from laminar.buffer.files import NotFound
from laminar.buffer.incoming import copy_path, first_path
from laminar.buffer.partials import PartialRow, assemble, read_partials
from laminar.buffer.records import BatchDecision, Source, TableHead
from laminar.buffer.schema import TABLES
from laminar.buffer.segments import read_segment
from laminar.buffer.steps import CLOSING, decision_path
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table
from laminar.errors import CoordinationError, CorruptSegment, StoreError

IDENTITY: dict[str, tuple[str, ...]] = {
    "experience": ("group", "sample"),
    "steps": ("step", "group", "sample"),
    "step_metrics": ("step",),
    "evaluation": ("version", "mode", "prompt_index", "sample"),
}
"""Columns of which a table holds each combination once."""
SPANS = ("span_version", "span_digest")


@dataclass(frozen=True)
class Unfinished:
    """The most that is durable of one trajectory: in whose log, under which version it went on, how many tokens after
    the prompt there are (`tokens`), and how many of them the policy wrote (`progress`)."""

    source: Source
    version: int
    tokens: int
    progress: int


@dataclass(frozen=True)
class IncomingFile:
    """A durable segment of finished rows, registered or not. `rows` are of the table's schema. `path`: the file that
    they were read from; `copied_to`: the other one, if there is one that may be sound."""

    table: str
    path: str
    rows: pa.Table
    copied_to: str = ""

    @property
    def id(self) -> str:
        return self.path.rsplit("/", 1)[-1].removesuffix(".arrow")

    def identities(self) -> list[tuple[object, ...]]:
        """Of each row, in order."""
        return identities(self.table, self.rows)


@dataclass
class Remains:
    """`committed`: identities of the rows of each table. `versions` are those that `step_metrics` has a digest of, and
    `written_under` those that trajectories name. `terms`: the highest term of a trajectory in any log."""

    committed: dict[str, set[tuple[object, ...]]] = field(default_factory=lambda: {name: set() for name in TABLES})
    heads: dict[str, TableHead] = field(default_factory=dict)
    incoming: list[IncomingFile] = field(default_factory=list)
    unfinished: dict[TrajectoryId, Unfinished] = field(default_factory=dict)
    terms: dict[TrajectoryId, int] = field(default_factory=dict)
    decisions: list[BatchDecision] = field(default_factory=list)
    """By step, from 0 on without a gap."""
    archived: int = 0
    """Steps whose decisions are in the archive, and no longer in etcd."""
    closings: dict[str, BatchDecision] = field(default_factory=dict)
    """By the name of their key: what endings of the run retired."""
    versions: dict[int, str] = field(default_factory=dict)
    written_under: dict[int, set[str]] = field(default_factory=dict)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    """(version, digest), newest first; the digest is empty if the version was not published."""
    damage: list[str] = field(default_factory=list)

    def wrote(self, version: int, digest: str) -> None:
        if digest:
            self.written_under.setdefault(version, set()).add(digest)


def identities(table: str, rows: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in IDENTITY[table]), strict=True))


async def read_remains(
    storage: Storage, tables: Mapping[str, Table], checkpoints: Sequence[tuple[int, str]] = ()
) -> Remains:
    """Read everything. Raises StoreError where what is left is no state that a run can have been in: a step without its
    decision while later ones are decided."""
    remains = Remains(checkpoints=sorted(checkpoints, reverse=True))
    for name, table in tables.items():
        await _read_table(remains, name, table)
    incoming = {file.path for file in await storage.list("incoming")}
    for path in sorted({first_path(p) for p in incoming}):
        await _read_incoming(remains, storage, path, incoming)
    for worker in sorted({f.path.split("/")[1] for f in await storage.list("partials")}):
        await _read_log(remains, storage, worker)
    await _read_decisions(remains, storage)
    return remains


async def _read_table(remains: Remains, name: str, table: Table) -> None:
    more = {"experience": SPANS, "step_metrics": ("version", "digest")}.get(name, ())
    rows = await table.read(columns=[*IDENTITY[name], "commit_seq", *more])
    remains.committed[name] = set(identities(name, rows))
    numbered = rows["commit_seq"].to_pylist()
    remains.heads[name] = TableHead(lance_version=await table.version(), rows=1 + max(numbered, default=-1))
    if doubled := rows.num_rows - len(remains.committed[name]):
        remains.damage.append(f"the table {name} holds {doubled} rows twice")
    _note_versions(remains, name, rows)


def _note_versions(remains: Remains, table: str, rows: pa.Table) -> None:
    if table == "step_metrics":
        recorded = zip(rows["version"].to_pylist(), rows["digest"].to_pylist(), strict=True)
        remains.versions |= {version: digest for version, digest in recorded if digest}
    elif table == "experience":
        for versions, digests in zip(rows["span_version"].to_pylist(), rows["span_digest"].to_pylist(), strict=True):
            for version, digest in zip(versions, digests, strict=True):
                remains.wrote(version, digest)


async def _read_incoming(remains: Remains, storage: Storage, path: str, there: Set[str]) -> None:
    """`path` is a segment's first file; `there` are all files under incoming/. Raises StoreError if neither it nor its
    copy can be read for now: it may be sound, and what is not found here would be given up for good."""
    table = path.split("/")[1]
    if table not in TABLES or not path.endswith(".arrow"):
        return
    copy = copy_path(path)
    files = [path, copy] if copy in there else [path]
    damage: list[str] = []
    refused: StoreError | None = None
    for file in files:
        try:
            contents = read_segment(await storage.read(file), TABLES[table], complete=True, name=file)
        except (CorruptSegment, NotFound) as e:
            damage.append(f"{file}: {e}")
            continue
        except StoreError as e:
            refused = e
            continue
        rows = pa.Table.from_batches(contents.batches, schema=TABLES[table])
        remains.incoming.append(IncomingFile(table, file, rows, copied_to=copy if file != files[-1] else ""))
        if table == "experience":
            _note_versions(remains, table, rows)
        remains.damage += [f"{text}; its copy is used" for text in damage]
        return
    if refused is not None:
        raise StoreError(
            f"{path} cannot be read for now: {refused}; nothing was changed, try again once the store serves it"
        ) from refused
    remains.damage += damage


async def _read_log(remains: Remains, storage: Storage, worker: str) -> None:
    log = await read_partials(storage, worker)
    remains.damage += log.damage
    for (group, sample, term), rows in sorted(log.rows.items()):
        try:
            _note_rows(remains, worker, (group, sample), term, rows)
        except StoreError as e:
            remains.damage.append(f"partials/{worker}: {e}")


def _note_rows(remains: Remains, worker: str, id: TrajectoryId, term: int, rows: Sequence[PartialRow]) -> None:
    remains.terms[id] = max(term, remains.terms.get(id, 0))
    partial = assemble(rows)
    for span in partial.spans:
        remains.wrote(span.version, span.digest)
    if not partial.prompt_ids:
        return
    source = Source(worker=worker, term=term)
    found = Unfinished(source, rows[-1].version, len(partial.token_ids), sum(partial.policy_mask))
    best = remains.unfinished.get(id)
    if best is None or (found.tokens, term) > (best.tokens, best.source.term):
        remains.unfinished[id] = found


async def _read_decisions(remains: Remains, storage: Storage) -> None:
    archived = [step.decision for step in await read_archive(storage)]
    remains.archived = len(archived)
    found = {d.step: d for d in archived}
    for file in await storage.list("batches"):
        if not file.path.endswith(".json"):
            continue
        try:
            decision = BatchDecision.parse((await storage.read(file.path)).decode())
        except (CoordinationError, UnicodeDecodeError) as e:
            raise StoreError(f"the copy of a decision at {file.path} is unreadable: {e}; restore the file") from e
        if CLOSING.fullmatch(file.path):
            remains.closings[file.path.rsplit("/", 1)[-1].removeprefix("closing-").removesuffix(".json")] = decision
        else:
            found[decision.step] = decision
    missing = sorted(set(range(max(found, default=-1))) - found.keys())
    if missing:
        raise StoreError(
            f"{storage.url} has decisions up to step {max(found)}, and none of step {missing[0]} "
            f"({len(missing)} are missing): restore {decision_path(missing[0])}"
        )
    remains.decisions = [found[step] for step in sorted(found)]
