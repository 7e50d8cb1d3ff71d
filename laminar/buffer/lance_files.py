"""The files of a Lance table in a local folder: which manifests there are, and what makes them durable.

Of a table elsewhere nothing is known here, nor needed: an object store shows an object whole or not at all, and what
it has acknowledged stays. So all methods do nothing there.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from laminar.buffer.local_files import sync_folder

log = logging.getLogger(__name__)

SET_ASIDE = ".unreadable"
VERSIONS_UP = (1 << 64) - 1
"""Manifests are named by this minus their version, so that the newest is listed first."""


class TableFiles:
    """`uri`: a folder, or a URL that is left to Lance. `fsync` off: nothing is synced."""

    def __init__(self, uri: str, *, fsync: bool) -> None:
        self.local = "://" not in uri
        self.fsync = fsync and self.local
        self._folder = Path(uri)

    def manifests(self) -> list[Path]:
        """Newest first."""
        folder = self._folder / "_versions"
        if not self.local or not folder.is_dir():
            return []
        names = [n for n in os.listdir(folder) if re.fullmatch(r"\d+\.manifest", n)]
        return sorted((folder / n for n in names), key=version_of, reverse=True)

    def newest_manifest(self) -> Path | None:
        return next(iter(self.manifests()), None)

    def set_aside(self, manifest: Path) -> None:
        """Rename a manifest so that Lance does not see it; another process may do the same."""
        with suppress(FileNotFoundError):
            os.rename(manifest, manifest.with_name(manifest.name + SET_ASIDE))
            sync_folder(manifest.parent)

    def sync_data(self, fragments: Sequence[Any]) -> None:
        if self.fsync:
            for path in self._data_files(fragments):
                _sync_file(path)
            data = self._folder / "data"
            for folder in (data, data.parent, data.parent.parent):
                if folder.is_dir():
                    sync_folder(folder)

    def sync_manifests(self, since: int) -> None:
        """Make the version `since` durable, with the one before it and all newer ones."""
        if not self.fsync:
            return
        for path in self.manifests():
            if version_of(path) >= since - 1:
                _sync_file(path)
        for name in ("_versions", "_transactions"):
            folder = self._folder / name
            if folder.is_dir():
                sync_folder(folder)
        sync_folder(self._folder)

    def delete_data(self, fragments: Sequence[Any]) -> None:
        """Files that were surely never committed: cleanup would keep them for a week, as it does in an object store."""
        if self.local:
            for path in self._data_files(fragments):
                path.unlink(missing_ok=True)

    def _data_files(self, fragments: Sequence[Any]) -> list[Path]:
        return [self._folder / "data" / file.path for fragment in fragments for file in fragment.files]


def makes_sense(manifest: Path, version: int) -> bool:
    """Whether a manifest's content is that of this version. It is judged in a folder of its own, so that no other error
    of the table's file system is taken for one of content. Raises OSError if it cannot be read."""
    import lance

    content = manifest.read_bytes()
    with tempfile.TemporaryDirectory(prefix="laminar-manifest-") as folder:
        versions = Path(folder) / "table" / "_versions"
        versions.mkdir(parents=True)
        (versions / manifest.name).write_bytes(content)
        try:
            return bool(lance.dataset(str(versions.parent)).version == version)
        except (OSError, ValueError) as e:
            log.debug("the content of %s: %s", manifest, e)
            return False


def version_of(manifest: Path) -> int:
    number = int(manifest.name.partition(".")[0])
    return VERSIONS_UP - number if number > 1 << 63 else number


def fragments_of(dataset: Any) -> list[Any]:
    return [f.metadata for f in dataset.get_fragments()]


def numbered(base: Any, fragments: Sequence[Any]) -> list[Any]:
    """New fragments under the ids that follow those of `base`. They never repeat: a compaction's are higher yet."""
    first = 1 + max((f.id for f in fragments_of(base)), default=-1)
    return [replace(f, id=first + i) for i, f in enumerate(fragments)]


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
