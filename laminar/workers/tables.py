"""The committed tables of a store as Lance data sets."""

from __future__ import annotations

from laminar.buffer.lance_table import LanceTable
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import Storage
from laminar.buffer.table import Table


def open_table(storage: Storage, name: str) -> Table:
    uri, options = storage.absolute(f"{name}.lance"), storage.table_options
    return LanceTable(uri, TABLES[name], fsync=storage.local, storage_options=options)
