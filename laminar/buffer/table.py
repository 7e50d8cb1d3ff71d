"""Committed tables: rows that were finished, added by one committer at a time.

Versions count commits and compactions: 0 is no table, the first commit makes version 1. A commit names the version
that it must become (`target`) and a key by which it is recognised afterwards, since a call that failed may still
have committed. `lance_table.LanceTable` keeps this on disk; `memory_table.MemoryTable` is its twin, with Lance's
measured hazards; `tests/contract/test_table.py` holds for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from laminar.buffer.memory_table import MemoryTable
from laminar.buffer.table_errors import TableUnreadable, TargetTaken

__all__ = ["MemoryTable", "Table", "TableUnreadable", "TargetTaken"]


class Table(Protocol):
    """Readers see the newest version at each call. Filters are SQL expressions over the columns."""

    schema: pa.Schema

    async def version(self) -> int:
        """The newest version; 0 if the table does not exist yet."""
        ...

    async def commit(self, rows: pa.Table, *, target: int, key: str) -> int:
        """Add rows as version `target`, durably, and return it. Raises TargetTaken, with nothing added, unless the
        version written is exactly `target`; any other StoreError may still have committed: ask `find` first."""
        ...

    async def find(self, key: str, *, within: int = 100) -> int | None:
        """The version at which a commit with this key was made, among the newest `within` versions that are kept. It
        is durable on return, even if whoever committed it died before it was."""
        ...

    async def count(self) -> int: ...

    async def read(
        self, columns: Sequence[str] | None = None, filter: str | None = None, limit: int | None = None
    ) -> pa.Table: ...

    async def scan_since(self, commit_seq: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Rows with a commit_seq greater than this, by commit_seq (which is among the columns returned)."""
        ...

    async def compact(self, *, keep: int) -> int:
        """Merge small files, delete all but the newest `keep` versions, and return the newest. Rows stay as they are.

        Resolve an announced commit first: `find` knows only versions that are kept.
        """
        ...
