"""The committed tables of a store as Lance data sets."""

from __future__ import annotations

from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table


def open_table(storage: Storage, name: str) -> Table:
    return LanceTable(storage.absolute(f"{name}.lance"), TABLES[name], fsync=storage.local)
