"""Writing a table of the store to one file of the user's: parquet, JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from laminar.errors import ConfigError, StoreError
from laminar.workers.viewing.inspect import QUERYABLE, StoreView, explained

ROWS_PER_BATCH = 1024
"""Trajectories are long lists: a batch of this many rows of 8,192 tokens is about 130 MB."""

Writer = Callable[[Path, pa.RecordBatchReader], int]


def export_table(
    store: StoreView,
    path: Path,
    *,
    table: str = "experience",
    file_format: str = "",
    where: str = "",
    force: bool = False,
) -> int:
    """Write `table` (rows that fulfil `where`, DuckDB's SQL) to `path`; the number of rows.

    The file appears whole or not at all. Lists are JSON text in CSV. An existing file is replaced only with `force`.
    `file_format` is parquet, jsonl or csv; empty: by the ending of `path`. Raises ConfigError or StoreError.
    """
    if table not in QUERYABLE:
        raise ConfigError(f"there is no table {table!r}; tables: {', '.join(QUERYABLE)}")
    write = checked_writer(path, file_format, force=force)
    store.require(table)
    sql = f"select * from {table}" + (f" where {where}" if where else "")
    with store.connect() as connection, explained(sql):
        reader = connection.sql(sql).to_arrow_reader(ROWS_PER_BATCH)
        with _published(path, force) as temporary:
            return write(temporary, reader)


def checked_writer(path: Path, file_format: str = "", *, force: bool = False) -> Writer:
    """Raises ConfigError if nothing could be written to `path`: ask before the work that makes the rows."""
    write = _writer(file_format or path.suffix.removeprefix("."), path)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another path, or replace it with --force")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; make it first")
    return write


def write_table(rows: pa.Table, path: Path, *, force: bool = False) -> int:
    """Write `rows` to `path`, in the format of its ending, whole or not at all; their number."""
    write = checked_writer(path, force=force)
    with _published(path, force) as temporary:
        return write(temporary, rows.to_reader())


def _writer(file_format: str, path: Path) -> Writer:
    writers: dict[str, Writer] = {"parquet": _parquet, "jsonl": _jsonl, "csv": _csv}
    if file_format not in writers:
        raise ConfigError(
            f"cannot tell the format of {path} ({file_format or 'no ending'!r}): give --format {'|'.join(writers)}"
        )
    return writers[file_format]


@contextmanager
def _published(path: Path, force: bool) -> Iterator[Path]:
    """A temporary file in the same folder that takes the name `path` once the body has ended without an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        if force:
            temporary.replace(path)
        else:
            _link_new(temporary, path)
    except OSError as e:
        raise StoreError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        temporary.unlink(missing_ok=True)


def _link_new(temporary: Path, path: Path) -> None:
    # A link refuses a name that was taken meanwhile; a rename would silently replace the file.
    try:
        path.hardlink_to(temporary)
    except FileExistsError as e:
        raise ConfigError(f"{path} was made by somebody else meanwhile; choose another path, or use --force") from e
    except OSError:  # file systems without hard links
        temporary.replace(path)


def _parquet(path: Path, reader: pa.RecordBatchReader) -> int:
    rows = 0
    with pyarrow.parquet.ParquetWriter(path, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _jsonl(path: Path, reader: pa.RecordBatchReader) -> int:
    rows = 0
    with path.open("w", encoding="utf-8") as file:
        for batch in reader:
            for row in batch.to_pylist():
                try:
                    file.write(json.dumps(row, default=_plain, ensure_ascii=False, allow_nan=False) + "\n")
                except ValueError as e:
                    raise StoreError(
                        f"row {rows} has a number that JSON cannot hold (NaN or infinite); export as parquet instead"
                    ) from e
                rows += 1
    return rows


def _csv(path: Path, reader: pa.RecordBatchReader) -> int:
    rows = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(reader.schema.names)
        for batch in reader:
            for row in batch.to_pylist():
                writer.writerow([_cell(value) for value in row.values()])
                rows += 1
    return rows


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value, default=_plain)
    return value.isoformat() if isinstance(value, datetime) else value


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} has no JSON form")
