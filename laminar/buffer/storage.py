"""The store's files: whole files published atomically, and logs that grow by appends.

    write ──▶ .<name>.<random>.tmp ──fsync──▶ link (never replaces) or rename (replaces) ──▶ fsync of the folder
    append ─▶ one write at the end of the file ──fsync (if asked)──▶ fsync of the folder (first time)

A reader sees a published file whole or not at all. An append may be torn by a crash; `segments.py` finds that.
No file locks anywhere: some network file systems have none, and the protocol needs none. `LocalStorage` serves
folders, `FsspecStorage` object stores, `MemoryStorage` tests and the simulator; one contract
(`tests/contract/test_storage.py`) holds for all three.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.buffer.files import AlreadyExists, FileInfo, NotFound, Storage, StorageFull
from laminar.buffer.local_files import LocalStorage
from laminar.buffer.memory_files import MemoryStorage
from laminar.buffer.object_files import FsspecStorage
from laminar.errors import ConfigError

__all__ = [
    "AlreadyExists",
    "FileInfo",
    "FsspecStorage",
    "LocalStorage",
    "MemoryStorage",
    "NotFound",
    "Storage",
    "StorageFull",
    "open_storage",
]


def open_storage(url: str, options: Mapping[str, str] | None = None) -> Storage:
    """Storage for a folder, `file://` URL or any fsspec URL; `options` are those of the config's section `storage`.

    Raises ConfigError for a scheme that cannot be opened, and for options that do not fit it.
    """
    if url.startswith("memory://"):
        raise ConfigError(f"store {url!r} would vanish with its process; give a folder or an object store's URL")
    if url.startswith("file://"):
        return LocalStorage(url.removeprefix("file://"))
    return FsspecStorage(url, options) if "://" in url else LocalStorage(url)
