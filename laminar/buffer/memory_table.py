"""A table in memory: the twin of `LanceTable` for tests and the simulator, with the hazards that Lance showed."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from laminar.buffer.table_errors import TableUnreadable, TargetTaken
from laminar.clock import Clock, SystemClock
from laminar.errors import StoreError


@dataclass(frozen=True)
class _Version:
    number: int
    key: str | None
    rows: pa.Table


class MemoryTable:
    """Hazards are set as attributes, at any time:

    `lose_reply`: the next commit succeeds and raises StoreError; `fail_commit`: the next commit raises and adds
    nothing; `unreadable`: the newest version does not open until `repair()` sets it aside, as after a power cut;
    `unfenced`: a late commit is rebased on the newest version, as Lance does without a commit lock; `late_s`: the next
    commit is made so many seconds later, whatever has become of who asked for it: a thread goes on after its owner gave
    up, and so does a request to an object store.
    """

    def __init__(self, schema: pa.Schema, clock: Clock | None = None) -> None:
        self.schema = schema
        self.clock: Clock = clock or SystemClock()
        self.delay_s = 0.0
        self.lose_reply = False
        self.fail_commit = False
        self.unreadable = False
        self.unfenced = False
        self.late_s = 0.0
        self._late: asyncio.TimerHandle | None = None
        self._versions: list[_Version] = []

    async def version(self) -> int:
        await self._begin()
        return self._version

    async def commit(self, rows: pa.Table, *, target: int, key: str) -> int:
        check_columns(rows, self.schema)
        await self._begin()
        if self.fail_commit:
            self.fail_commit = False
            raise StoreError(f"commit {key!r} failed before it was made")
        if self.late_s:
            wait_s, self.late_s = self.late_s, 0.0
            await self._make_late(wait_s, rows, target, key)
        else:
            # Nothing is awaited from here on: what others commit meanwhile is seen.
            self._make(rows, target, key)
        if self.lose_reply:
            self.lose_reply = False
            raise StoreError(f"the reply to commit {key!r} was lost")
        return self._version

    async def _make_late(self, wait_s: float, rows: pa.Table, target: int, key: str) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[TargetTaken | None] = loop.create_future()

        def make() -> None:
            refusal = None
            try:
                self._make(rows, target, key)
            except TargetTaken as e:
                refusal = e
            if not answer.done():
                answer.set_result(refusal)

        # In nobody's context: the death of who asked does not stop it.
        self._late = loop.call_later(wait_s, make, context=Context())
        if (refusal := await answer) is not None:
            raise refusal

    def forget_late(self) -> None:
        """A commit that is on its way still never arrives."""
        if self._late is not None:
            self._late.cancel()

    def _make(self, rows: pa.Table, target: int, key: str) -> None:
        if target != self._version + 1 and not self.unfenced:
            raise TargetTaken(
                f"commit {key!r} was to become version {target}, the next one is {self._version + 1}; look for its key"
            )
        before = self._versions[-1].rows if self._versions else self.schema.empty_table()
        self._versions.append(_Version(self._version + 1, key, pa.concat_tables([before, rows])))

    async def find(self, key: str, *, within: int = 100) -> int | None:
        await self._begin()
        return next((v.number for v in reversed(self._versions[-within:]) if v.key == key), None)

    async def count(self) -> int:
        return int((await self._newest()).num_rows)

    async def read(
        self, columns: Sequence[str] | None = None, filter: str | None = None, limit: int | None = None
    ) -> pa.Table:
        rows = await self._newest()
        if filter is not None:
            rows = rows.take(_matching(rows, filter))
        return rows.slice(0, limit).select(list(columns) if columns is not None else self.schema.names)

    async def scan_since(self, commit_seq: int, columns: Sequence[str] | None = None) -> pa.Table:
        rows = await self._newest()
        rows = rows.filter(pc.greater(rows["commit_seq"], commit_seq)).sort_by("commit_seq")
        return rows.select(with_commit_seq(columns) or self.schema.names)

    async def compact(self, *, keep: int) -> int:
        await self._begin()
        if self._versions:
            self._versions.append(_Version(self._version + 1, None, self._versions[-1].rows.combine_chunks()))
            del self._versions[:-keep]
        return self._version

    def repair(self) -> None:
        """Set the unreadable newest version aside."""
        if self.unreadable:
            self.unreadable = False
            self._versions.pop()

    @property
    def _version(self) -> int:
        return self._versions[-1].number if self._versions else 0

    async def _newest(self) -> pa.Table:
        await self._begin()
        return self._versions[-1].rows if self._versions else self.schema.empty_table()

    async def _begin(self) -> None:
        if self.delay_s:
            await self.clock.sleep(self.delay_s)
        if self.unreadable:
            raise TableUnreadable(f"version {self._version} of the table does not open")


_SIMPLE = re.compile(
    r"`?(?P<column>\w+)`? "
    r"(?:(?P<sign><|>|=) (?:(?P<number>-?\d+)|'(?P<text>[^']*)')|IN \((?P<list>-?\d+(?:, -?\d+)*)\))"
)
"""What the protocol itself asks for. A simulation asks thousands of times, and DuckDB takes 10 ms to start."""


def _holds(column: pa.ChunkedArray, simple: re.Match[str]) -> Any:
    if simple["list"]:
        wanted = [int(n) for n in simple["list"].split(",")]
        return pc.is_in(column, value_set=pa.array(wanted, column.type))
    compare = {"<": pc.less, ">": pc.greater, "=": pc.equal}[simple["sign"]]
    value = simple["text"] if simple["number"] is None else int(simple["number"])
    return pc.fill_null(compare(column, value), False)


def with_commit_seq(columns: Sequence[str] | None) -> list[str] | None:
    if columns is None:
        return None
    return [*columns] if "commit_seq" in columns else [*columns, "commit_seq"]


def check_columns(rows: pa.Table, schema: pa.Schema) -> None:
    """Raises StoreError unless the rows have exactly the table's columns."""
    if not rows.schema.equals(schema, check_metadata=False):
        raise StoreError(f"rows with the columns {rows.schema.names} do not fit {schema.names}, or their types")


def _matching(rows: pa.Table, expression: str) -> pa.Array:
    """Positions of the rows for which the SQL expression holds."""
    parts = [_SIMPLE.fullmatch(part.strip()) for part in expression.split(" AND ")]
    simple = [p for p in parts if p is not None and p["column"] in rows.schema.names]
    if len(simple) == len(parts):
        return pc.indices_nonzero(functools.reduce(pc.and_, (_holds(rows[p["column"]], p) for p in simple)))
    import duckdb

    names = [n for n in rows.schema.names if re.search(rf"\b{re.escape(n)}\b", expression)]
    source: Any = rows.select(names).append_column("__position", pa.array(range(rows.num_rows), pa.int64()))
    with duckdb.connect() as connection:
        relation = connection.from_arrow(source).filter(_quoted(expression, names)).project("__position")
        return relation.order("__position").to_arrow_table()["__position"].combine_chunks()


def _quoted(expression: str, names: Sequence[str]) -> str:
    """Column names in DuckDB's quotes ("group" is a keyword), as Lance takes them bare or in backticks."""
    parts = re.split(r"('(?:[^']|'')*')", expression.replace("`", ""))
    pattern = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
    if pattern:
        parts[::2] = [re.sub(rf"\b({pattern})\b", r'"\1"', part) for part in parts[::2]]
    return "".join(parts)
