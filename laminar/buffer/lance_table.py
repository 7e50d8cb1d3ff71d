"""A committed table as a Lance data set: exclusive, recognisable, durable commits; bounded files and memory.

    commit:   data files ──fsync──▶ manifest (only as version `target`) ──fsync──▶ acknowledged
    compact:  merged files ──fsync──▶ manifest ──fsync──▶ old versions and what only they refer to are deleted

Lance alone promises less, as measured: it rebases a late `Append`, which doubles rows, and a `commit_lock` that would
forbid this replaces the atomic creation of a manifest by look-then-write (one acknowledged commit of 150 races was
lost). So rows are committed as a `Merge` that lists all fragments, and a compaction as a `Rewrite` under fragment
ids of our own: Lance holds either incompatible with whatever came since the version it was made for, and creates
the manifest atomically. Lance never syncs local files either: a power cut takes acknowledged commits and can leave
a newest manifest that does not open, or that opens as an empty table of version 0. So every step is synced here,
and `_newest` checks what it opens. A newest manifest whose content makes no sense was not acknowledged: readers pass
it over, the committer sets it aside. One that merely could not be read, as a network file system may say for a while,
is never taken for such.

In an object store the same holds without syncs: a manifest is made by a conditional put, which the store's probe has
tried before anything relies on it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from laminar.buffer.files import StorageFull
from laminar.buffer.lance_files import SET_ASIDE, TableFiles, fragments_of, makes_sense, numbered, version_of
from laminar.buffer.memory_table import check_columns, with_commit_seq
from laminar.buffer.table_errors import TableUnreadable, TargetTaken
from laminar.errors import StoreError

log = logging.getLogger(__name__)
T = TypeVar("T")

DATA_STORAGE_VERSION = "2.0"
"""Writes large batches two to three times as fast as 2.2, for a fifth more space."""
MESSAGE = "__lance_commit_message"
CACHE_BYTES = 64 << 20
"""Each of Lance's two caches; unbounded, they grew by 900 MB in 3,000 commits."""
ROWS_PER_FRAGMENT = 10_000
"""Fragments below this are merged by a compaction; 10,000 trajectories of 4,096 tokens are about half a gigabyte."""
COMPACTION = "compaction"
CLEANED_UP = "\0cleaned up"


class LanceTable:
    """See `table.Table`. One instance may be used by several tasks; commits are for one process at a time.

    `fsync` has an effect on local storage only. `storage_options` go to Lance's object store.
    """

    def __init__(
        self, uri: str, schema: pa.Schema, *, fsync: bool, storage_options: dict[str, str] | None = None
    ) -> None:
        self.uri = uri.removeprefix("file://")
        self.schema = schema
        self.files = TableFiles(self.uri, fsync=fsync)
        self.storage_options = storage_options
        self._lock = threading.RLock()
        self._dataset: Any = None
        self._seen = False
        self._session: Any = None
        self._keys: dict[int, str | None] = {}
        self._passed_over: Path | None = None
        self._doubtful: list[tuple[int, str, list[Any]]] = []
        """Of compactions that failed: the version that was due, its key, the fragments written for it."""

    async def version(self) -> int:
        return await self._run(lambda: self._version())

    async def commit(self, rows: pa.Table, *, target: int, key: str) -> int:
        check_columns(rows, self.schema)
        return await self._run(lambda: self._commit(rows, target, key))

    async def find(self, key: str, *, within: int = 100) -> int | None:
        return await self._run(lambda: self._find(key, within))

    async def count(self) -> int:
        return await self._run(lambda: 0 if (newest := self._newest()) is None else int(newest.count_rows()))

    async def read(
        self, columns: Sequence[str] | None = None, filter: str | None = None, limit: int | None = None
    ) -> pa.Table:
        return await self._run(lambda: self._read(columns, filter, limit))

    async def scan_since(self, commit_seq: int, columns: Sequence[str] | None = None) -> pa.Table:
        rows = await self.read(with_commit_seq(columns), filter=f"commit_seq > {commit_seq:d}")
        return rows.sort_by("commit_seq")

    async def compact(self, *, keep: int) -> int:
        return await self._run(lambda: self._compact(keep))

    async def _run(self, call: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return call()
            except StoreError:
                raise
            except (OSError, ValueError, RuntimeError) as e:
                raise self._explained(e) from e

        return await asyncio.to_thread(translated)

    def _explained(self, e: Exception) -> StoreError:
        reason = _first_line(e)
        if "No space left" in reason or "os error 28" in reason:
            return StorageFull(f"no space is left for the table {self.uri}: {reason}; free some, it is tried again")
        return StoreError(f"the table {self.uri} could not be read or written: {reason}")

    # -- opening ------------------------------------------------------------------------------------------------

    def _version(self) -> int:
        newest = self._newest()
        return 0 if newest is None else int(newest.version)

    def _newest(self, *, repairing: bool = False) -> Any:
        """The data set at its newest version, or None. Raises TableUnreadable if it does not open. A newest manifest
        without sense is passed over: it was not acknowledged. Only who is `repairing`, the committer, renames it."""
        with self._lock:
            failed: Path | None = None
            while True:
                manifest = self.files.newest_manifest()
                if self.files.local and manifest is None:
                    self._dataset = None
                    return None
                try:
                    self._dataset = self._refreshed(manifest)
                    self._seen = True
                    return self._dataset
                except (OSError, ValueError) as e:
                    self._dataset = None
                    if not self.files.local:
                        # A table that was there cannot be absent: it would be begun anew over its remains.
                        if "was not found" in str(e) and not self._seen:
                            return None
                        raise
                    if manifest is not None and manifest != self.files.newest_manifest():
                        continue  # a newer one came, or this one was set aside by another process
                    if failed != manifest:
                        failed, self._session = manifest, None
                        continue  # the error may have been a passing one
                    older = self._before(manifest, e)
                    if not repairing:
                        self._say_passed_over(manifest, e)
                        return older
                    self._set_aside(manifest, e)

    def _refreshed(self, manifest: Path | None) -> Any:
        if self._dataset is not None:
            self._dataset.checkout_latest()
            dataset = self._dataset
        else:
            dataset = self._open()
        named = version_of(manifest) if manifest is not None else dataset.version
        # Another commit may have come since the listing, but never an older version, and never version 0.
        if dataset.version < max(named, 1):
            raise OSError(f"it opens as version {dataset.version}, and its newest manifest is named {named}")
        if dataset.schema.names != self.schema.names:
            raise StoreError(
                f"the table {self.uri} has the columns {dataset.schema.names}, this version of Laminar expects "
                f"{self.schema.names}"
            )
        return dataset

    def _open(self, version: int | None = None) -> Any:
        import lance

        if self._session is None:
            # Lance's type stubs leave out this public name.
            self._session = lance.Session(  # type: ignore[attr-defined]
                metadata_cache_size_bytes=CACHE_BYTES, index_cache_size_bytes=CACHE_BYTES
            )
        return lance.dataset(
            self.uri,
            version=version,
            storage_options=self.storage_options,
            session=self._session,
        )

    def _before(self, manifest: Path | None, cause: Exception) -> Any:
        """The data set without its newest manifest, if the content of that makes no sense: the version before it, or
        None if there is none. Raises TableUnreadable otherwise."""
        if manifest is None:
            raise TableUnreadable(f"the table {self.uri} does not open: {_first_line(cause)}") from cause
        version = version_of(manifest)
        if makes_sense(manifest, version):
            raise TableUnreadable(
                f"the table {self.uri} does not open at version {version}, whose manifest {manifest} is whole: "
                f"{_first_line(cause)}; it is tried again when it is next asked for"
            ) from cause
        try:
            older = next((m for m in self.files.manifests() if version_of(m) < version), None)
            if older is None:
                return None
            dataset = self._open(version=version_of(older))
            if dataset.version != version_of(older):
                raise OSError(f"version {version_of(older)} does not open as itself")
            return dataset
        except (OSError, ValueError) as e:
            raise TableUnreadable(
                f"the table {self.uri} does not open at version {version} ({_first_line(cause)}), nor is the version "
                f"before it usable ({_first_line(e)}); restore {manifest} from a backup, or rebuild the table"
            ) from e

    def _say_passed_over(self, manifest: Path | None, cause: Exception) -> None:
        if manifest != self._passed_over:
            self._passed_over = manifest
            log.warning(
                "%s makes no sense (%s) and is passed over, as a power cut leaves one; the next commit sets it aside",
                manifest, _first_line(cause),
            )  # fmt: skip

    def _set_aside(self, manifest: Path | None, cause: Exception) -> None:
        """Rename a newest manifest whose content makes no sense: see `_before`."""
        assert manifest is not None
        self.files.set_aside(manifest)
        self._keys.clear()
        self._session = None
        log.warning(
            "the newest manifest of %s (version %d) makes no sense and is set aside as %s%s: %s; "
            "a power cut left it, and nothing acknowledged is in it alone",
            self.uri, version_of(manifest), manifest.name, SET_ASIDE, _first_line(cause),
        )  # fmt: skip

    # -- committing ---------------------------------------------------------------------------------------------

    def _commit(self, rows: pa.Table, target: int, key: str) -> int:
        from lance import LanceOperation
        from lance.fragment import write_fragments

        with self._lock:
            newest = self._newest(repairing=True)
            if target != (next_version := 1 if newest is None else newest.version + 1):
                raise self._taken(target, key, f"the next one is {next_version}")
            fragments = write_fragments(
                rows,
                self.uri if newest is None else newest,
                schema=self.schema,
                mode="create" if newest is None else "append",
                data_storage_version=DATA_STORAGE_VERSION,
                storage_options=self.storage_options,
            )
            self.files.sync_data(fragments)
            if newest is None:
                operation: Any = LanceOperation.Overwrite(self.schema, fragments)
            else:
                operation = LanceOperation.Merge([*fragments_of(newest), *numbered(newest, fragments)], newest.schema)
            try:
                self._publish(newest, operation, key)
            except (OSError, ValueError, RuntimeError) as e:
                there = self._version()
                if there < target:
                    raise  # not made, and the target is free: the same call may be made again
                holder = self._key_at(target)
                if holder == key:
                    self.files.sync_manifests(target)  # made, and its reply was lost, or its sync failed
                    return target
                if holder is not CLEANED_UP:
                    self.files.delete_data(fragments)
                raise self._taken(target, key, f"the next one is {there + 1}") from e
            self._settle()
            return target

    def _publish(self, base: Any, operation: Any, key: str) -> None:
        """Make the version after `base` of this operation, durably. Raises if any other was made of `base` before."""
        from lance import LanceDataset

        version = 0 if base is None else int(base.version)
        made = LanceDataset.commit(
            self.uri if base is None else base,
            operation,
            read_version=version,
            storage_options=self.storage_options,
            enable_v2_manifest_paths=True,
            max_retries=0,
            commit_message=key,
        )
        self.files.sync_manifests(version + 1)
        # A handle to a new table does not share the bounded caches: open it anew.
        self._dataset = None if base is None else made
        if made.version != version + 1:
            raise StoreError(
                f"commit {key!r} of the table {self.uri} was made as version {made.version}, {version + 1} was due: "
                "something other than Laminar's committer writes to this table; stop it"
            )

    def _taken(self, target: int, key: str, why: str) -> TargetTaken:
        return TargetTaken(
            f"commit {key!r} of the table {self.uri} was to become version {target}, {why}; "
            "look for its key before announcing it anew"
        )

    def _key_at(self, version: int) -> str | None:
        """The key that a version was made with; CLEANED_UP if the version is not kept."""
        if version not in self._keys:
            try:
                transaction = self._newest().read_transaction(version)
            except (OSError, ValueError) as e:
                if "not found" in str(e).lower():
                    return CLEANED_UP
                raise
            self._keys[version] = None if transaction is None else transaction.transaction_properties.get(MESSAGE)
        return self._keys[version]

    def _find(self, key: str, within: int) -> int | None:
        newest = self._newest()
        if newest is None:
            return None
        for version in range(int(newest.version), max(0, int(newest.version) - within), -1):
            holder = self._key_at(version)
            if holder == key:
                self.files.sync_manifests(version)  # whoever made it may have died before this
                return version
            if holder is CLEANED_UP:
                return None  # and so are all older ones
        return None

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, columns: Sequence[str] | None, filter: str | None, limit: int | None) -> pa.Table:
        newest = self._newest()
        if newest is None:
            empty = self.schema.empty_table()
            return empty if columns is None else empty.select(list(columns))
        return newest.to_table(columns=None if columns is None else list(columns), filter=filter, limit=limit)

    # -- compaction ---------------------------------------------------------------------------------------------

    def _compact(self, keep: int) -> int:
        with self._lock:
            newest = self._newest(repairing=True)
            if newest is None:
                return 0
            if groups := self._rewritten(newest):
                self._replace(newest, groups)
            newest = self._newest()
            assert newest is not None
            # Nothing older may go before this one is durable, whoever made it.
            self.files.sync_manifests(int(newest.version))
            newest.cleanup_old_versions(retain_versions=keep)
            for version in [v for v in self._keys if v <= newest.version - keep]:
                del self._keys[version]
            return int(newest.version)

    def _rewritten(self, base: Any) -> list[tuple[list[Any], list[Any]]]:
        """Small neighbouring fragments with what replaces them, written and durable."""
        from lance.optimize import Compaction, CompactionOptions

        options = CompactionOptions(target_rows_per_fragment=ROWS_PER_FRAGMENT, num_threads=1)
        results: list[Any] = []
        try:
            for task in Compaction.plan(base, options).tasks:
                results.append(task.execute(base))
            for result in results:
                self.files.sync_data(result.new_fragments)
        except (OSError, ValueError, RuntimeError):
            self.files.delete_data([f for r in results for f in r.new_fragments])
            raise
        return [(list(r.original_fragments), list(r.new_fragments)) for r in results]

    def _replace(self, base: Any, groups: list[tuple[list[Any], list[Any]]]) -> None:
        """Publish a compaction, unless another commit came. What it wrote is deleted only when it is certain that no
        version refers to it: an error of the call does not say so."""
        target, key = int(base.version) + 1, f"{COMPACTION}/{secrets.token_hex(8)}"
        written = [f for _, new in groups for f in new]
        try:
            self._rewrite(base, groups, key)
        except (OSError, ValueError, RuntimeError) as e:
            if self._version() < target:
                # A network file system may make it after it has said no; the next commit settles that.
                self._doubtful.append((target, key, written))
                raise
            holder = self._key_at(target)
            if holder == key:
                log.warning("compaction of %s was made as version %d, despite: %s", self.uri, target, _first_line(e))
                return
            log.info("compaction of %s gave way to another commit: %s", self.uri, _first_line(e))
            if holder is not CLEANED_UP:
                self.files.delete_data(written)

    def _settle(self) -> None:
        """Delete what compactions wrote that failed, and whose version has become something else."""
        there = self._version() if self._doubtful else 0
        settled = [d for d in self._doubtful if d[0] <= there]
        for doubtful in settled:
            target, key, written = doubtful
            if self._key_at(target) not in (key, CLEANED_UP):
                self.files.delete_data(written)
            self._doubtful.remove(doubtful)

    def _rewrite(self, base: Any, groups: list[tuple[list[Any], list[Any]]], key: str) -> None:
        from lance import LanceOperation

        ids = iter(numbered(base, [f for _, new in groups for f in new]))
        rewritten = [LanceOperation.RewriteGroup(old, [next(ids) for _ in new]) for old, new in groups]
        self._publish(base, LanceOperation.Rewrite(rewritten, []), key)


def _first_line(e: Exception) -> str:
    return str(e).partition("\n")[0][:300]
