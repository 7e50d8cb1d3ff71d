"""Whether an etcd is behind its store: restored from a copy that is older than what was committed since.

Such an etcd is consistent in itself. A run that went on from it would draw, decide and commit a second time what the
store has already; so `laminar run` and `laminar audit` look for it, and `laminar recover` is the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from laminar.buffer.archive import archived_before, archived_paths
from laminar.buffer.coordination import KeyValue
from laminar.buffer.keys import Keys
from laminar.buffer.records import Cursor, Incoming, TableHead, TrainerHead
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table

DECISION = re.compile(r"batches/(\d+)\.json")
REMEDY = "etcd is older than its store: stop the run and rebuild etcd with `laminar recover`"


@dataclass(frozen=True)
class Extent:
    """How far a store has come: committed rows of each table (by their numbers), groups with a committed row, decided
    steps, recorded steps. Read before etcd it never exceeds what a sound etcd says, however busy the run is: each
    of these is written to etcd before, or in one go with, what makes it visible here."""

    rows: Mapping[str, int]
    groups: int
    decided: int
    recorded: int


async def read_extent(storage: Storage, tables: Mapping[str, Table]) -> Extent:
    columns = {"experience": "group", "step_metrics": "step"}
    highest: dict[str, int] = {}
    rows: dict[str, int] = {}
    for name, table in tables.items():
        found = await table.read(columns=["commit_seq", *([columns[name]] if name in columns else [])])
        rows[name] = 1 + max(found["commit_seq"].to_pylist(), default=-1)
        if name in columns:
            highest[name] = max(found[columns[name]].to_pylist(), default=-1)
    steps = [int(m[1]) for f in await storage.list("batches") if (m := DECISION.fullmatch(f.path))]
    decided = max(archived_before(await archived_paths(storage)), 1 + max(steps, default=-1))
    return Extent(rows, 1 + highest.get("experience", -1), decided, 1 + highest.get("step_metrics", -1))


def behind(extent: Extent, items: Iterable[KeyValue], keys: Keys) -> list[str]:
    """What the store has and etcd, in this listing of its generation, does not know. None: it is not behind."""
    by_key = {kv.key: kv.value for kv in items}
    found = []
    for name, there in extent.rows.items():
        if there > (known := _rows_known(by_key, keys, name)):
            found.append(f"the table {name} holds {there} committed rows, etcd knows of {known}")
    cursor = Cursor.parse(by_key[keys.cursor]).next if keys.cursor in by_key else 0
    head = TrainerHead.parse(by_key[keys.trainer]) if keys.trainer in by_key else None
    for what, there, known in (
        ("groups of committed rows", extent.groups, cursor),
        ("decided steps", extent.decided, head.decided if head else 0),
        ("recorded steps", extent.recorded, head.step if head else 0),
    ):
        if there > known:
            found.append(f"the store has {there} {what}, etcd knows of {known}")
    return [f"{text}: {REMEDY}" for text in found]


def _rows_known(by_key: Mapping[str, str], keys: Keys, table: str) -> int:
    """Committed rows of a table as etcd has them; those that are announced may have been committed too."""
    value = by_key.get(keys.head(table))
    if value is None:
        return 0
    head = TableHead.parse(value)
    announced = [keys.incoming(table, s) for s in head.committing.segments] if head.committing else []
    return head.rows + sum(Incoming.parse(by_key[k]).rows for k in announced if k in by_key)
