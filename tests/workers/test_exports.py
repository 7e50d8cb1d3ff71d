"""A checkpointed version as a local folder, wherever the store is."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from laminar.buffer.storage import FsspecStorage, LocalStorage, MemoryStorage, Storage
from laminar.errors import StoreError
from laminar.workers.checkpoints import load_newest, save_checkpoint
from laminar.workers.exports import KEEP, _forget_old, exported_version
from laminar.workers.scratch import scratch


class FolderLearner:
    """Its state and export are files that name the version; the state is larger than a part of an upload."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def save(self, folder: Path) -> None:
        (folder / "state").write_bytes(bytes([self.version]) * (6 << 20))

    def load(self, folder: Path) -> None:
        self.version = (folder / "state").read_bytes()[-1]

    def verify(self, folder: Path) -> None:
        assert (folder / "state").stat().st_size == 6 << 20

    def export(self, folder: Path) -> None:
        (folder / "nested").mkdir()
        (folder / "nested" / "vocabulary").write_text("words")
        (folder / "model.safetensors").write_text(str(self.version))


async def save(storage: Storage, version: int) -> None:
    learner: Any = FolderLearner(version)
    await save_checkpoint(storage, learner, f"digest-{version}", "trainer-1")


async def test_an_export_in_a_folder_is_taken_where_it_lies(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    await save(storage, 5)
    export = await exported_version(storage, 5)
    assert export is not None and export.digest == "digest-5"
    assert Path(export.folder).is_relative_to(tmp_path)
    assert (Path(export.folder) / "model.safetensors").read_text() == "5"
    assert await exported_version(storage, 6) is None


async def test_an_export_in_an_object_store_is_copied_once_and_old_copies_go(s3_service: Any, tmp_path: Path) -> None:
    storage = FsspecStorage(s3_service.bucket(), s3_service.options)
    for version in range(1, 6):
        await save(storage, version)
        both = await asyncio.gather(*(exported_version(storage, version, tmp_path / "cache") for _ in range(2)))
        export = both[0]
        assert export is not None and export == both[1] and export.digest == f"digest-{version}"
        assert (Path(export.folder) / "model.safetensors").read_text() == str(version)
        assert (Path(export.folder) / "nested" / "vocabulary").read_text() == "words"
    assert len(list((tmp_path / "cache").iterdir())) == 3
    learner: Any = FolderLearner()
    loaded = await load_newest(storage, learner, at_most=4)
    assert loaded is not None and learner.version == 4


async def test_a_cache_that_cannot_be_written_is_named(s3_service: Any, tmp_path: Path) -> None:
    storage = FsspecStorage(s3_service.bucket(), s3_service.options)
    await save(storage, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be copied to .*file"):
        await exported_version(storage, 1, tmp_path / "file")


async def test_the_twins_objects_are_no_folder() -> None:
    storage = MemoryStorage()
    await save(storage, 5)
    assert await exported_version(storage, 5) is None


def left_over(folder: Path) -> Path:
    """What a process leaves that was killed while it wrote."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("half")
    return folder


async def test_what_killed_processes_left_half_fetched_or_half_saved_goes(
    s3_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next save or fetch on the same host; what a living process is at stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage, cache = FsspecStorage(s3_service.bucket(), s3_service.options), tmp_path / "cache"
    unsaved = left_over(tmp_path / "laminar-checkpoint-killed")
    with scratch(tmp_path, "laminar-checkpoint-") as being_saved:
        await save(storage, 1)
        assert being_saved.is_dir() and not unsaved.exists()
    export = await exported_version(storage, 1, cache)
    assert export is not None
    store = Path(export.folder).name.partition("-")[0]
    unfetched, foreign = left_over(cache / f".{store}-000000001-xyz"), left_over(cache / ".other-000000001-xyz")
    await save(storage, 2)
    with scratch(cache, f".{store}-000000002-") as being_fetched:
        assert await exported_version(storage, 2, cache) is not None
        assert being_fetched.is_dir() and foreign.is_dir() and not unfetched.exists()
    assert not being_fetched.exists() and sorted(p.name for p in tmp_path.iterdir() if "laminar" in p.name) == []


def test_two_processes_may_forget_the_same_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other removes it between the listing and the look at its age."""
    copies = [left_over(tmp_path / f"store-{i}") for i in range(KEEP + 2)]
    real = Path.stat

    def gone(self: Path, **options: Any) -> Any:
        if self == copies[0]:
            raise FileNotFoundError(str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", gone)
    _forget_old(tmp_path, "store")
    monkeypatch.undo()
    assert len([copy for copy in copies[1:] if copy.exists()]) == KEEP


def test_a_copy_half_removed_by_another_process_is_not_taken_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file removed from a folder makes it look new."""
    copies = [left_over(tmp_path / f"store-{i}") for i in range(KEEP + 1)]
    for age, copy in enumerate(copies):
        os.utime(copy, (age, age))
    remove = shutil.rmtree

    def stopped_half_way(folder: Path, **options: Any) -> None:
        monkeypatch.undo()
        (folder / "model.safetensors").unlink()
        _forget_old(tmp_path, "store")
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", stopped_half_way)
    _forget_old(tmp_path, "store")
    assert sorted(tmp_path.iterdir()) == copies[1:]
