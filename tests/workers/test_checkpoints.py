"""A checkpoint is there whole or not at all, and the newest one that opens is used."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laminar.buffer.storage import LocalStorage, MemoryStorage, Storage
from laminar.errors import Fenced, StoreError
from laminar.workers.checkpoints import (
    CheckpointInfo,
    checkpoint_path,
    list_checkpoints,
    load_newest,
    prune_checkpoints,
    read_info,
    save_checkpoint,
)
from laminar.workers.learning import checkpoint
from laminar.workers.learning.checkpoint import MASTER, LearnerState


class SmallLearner:
    """A learner of three numbers that keeps its state in the real files. `interrupt(what)` is called at each part."""

    def __init__(self, version: int = 0, interrupt: Callable[[str], None] = lambda what: None) -> None:
        self.version = version
        self.interrupt = interrupt

    def save(self, folder: Path) -> None:
        self.interrupt("before save")
        state = LearnerState(self.version, self.version, "layout", "float32")
        checkpoint.write(folder, state, {"w": torch.full((3,), float(self.version))}, {})
        self.interrupt("after save")

    def export(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        self.interrupt("in export")
        (folder / "model.safetensors").write_text(str(self.version))

    def load(self, folder: Path) -> None:
        state = checkpoint.verify(folder)
        with checkpoint.opened(folder) as (master, _):
            weights = master["w"][:]
        assert weights.tolist() == [state.version] * 3
        self.version = state.version

    def verify(self, folder: Path) -> None:
        checkpoint.verify(folder)


class Killed(BaseException):
    """The process ended here: no handler runs."""


@pytest.fixture(params=["local", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A folder, whose checkpoints appear by a rename; objects, whose mark is written last."""
    return LocalStorage(tmp_path / "store") if request.param == "local" else MemoryStorage(supports_append=False)


async def save(storage: Storage, version: int, boot: str = "t1", **changes: Any) -> str:
    learner: Any = SmallLearner(version, **changes)
    return await save_checkpoint(storage, learner, f"digest-{version}", boot)


async def save_fenced(storage: Storage, version: int, fence: Callable[[], Awaitable[None]], **changes: Any) -> None:
    learner: Any = SmallLearner(version, **changes)
    await save_checkpoint(storage, learner, "of the zombie", "zombie", fence=fence)


async def prune(storage: Storage, keep: int) -> None:
    learner: Any = SmallLearner()
    await prune_checkpoints(storage, learner, keep)


async def loaded(storage: Storage, at_most: int = 100) -> int:
    """The version that a restarted trainer begins with; 0 is the initial model."""
    learner: Any = SmallLearner(0)
    info = await load_newest(storage, learner, at_most)
    assert (info.version if info else 0) == learner.version
    return int(learner.version)


async def versions(storage: Storage) -> list[int]:
    return [info.version for info in await list_checkpoints(storage)]


async def test_a_checkpoint_holds_the_state_an_export_and_what_they_are(storage: Storage) -> None:
    assert await save(storage, 5) == "checkpoints/step-000000005"
    assert await list_checkpoints(storage) == [CheckpointInfo(version=5, digest="digest-5")]
    names = {f.path.removeprefix("checkpoints/step-000000005/") for f in await storage.list("checkpoints")}
    assert names == {
        "checkpoint.json", "export/config.json", "export/model.safetensors", "trainer/learner.json",
        "trainer/master.safetensors", "trainer/optimizer.safetensors",
    }  # fmt: skip
    assert await loaded(storage) == 5


async def test_the_newest_that_is_not_too_new_is_loaded(storage: Storage) -> None:
    for version in (5, 20, 10):
        await save(storage, version)
    assert await versions(storage) == [20, 10, 5]
    assert [await loaded(storage, at_most) for at_most in (100, 19, 10, 9, 4)] == [20, 10, 10, 5, 0]


async def test_without_checkpoints_the_initial_model_is_used(storage: Storage) -> None:
    assert await loaded(storage) == 0


async def test_a_version_is_saved_once(storage: Storage) -> None:
    await save(storage, 5)

    def never(what: str) -> None:
        raise AssertionError(what)

    assert await save(storage, 5, interrupt=never) == checkpoint_path(5)
    assert await versions(storage) == [5]


# -- killed half-way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before save", "after save", "in export"])
async def test_the_previous_one_is_used_after_a_kill_in_the_middle(storage: Storage, where: str) -> None:
    """Case 36: kill during the checkpoint's save: the previous one is used."""

    def kill(what: str) -> None:
        if what == where:
            raise Killed

    await save(storage, 5)
    with pytest.raises(Killed):
        await save(storage, 10, interrupt=kill)
    assert await versions(storage) == [5] and await loaded(storage) == 5
    await save(storage, 10, boot="t2")
    assert await loaded(storage) == 10


async def test_a_kill_before_the_rename_leaves_what_the_next_save_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 36, at the last instant."""
    storage = LocalStorage(tmp_path)
    await save(storage, 5)

    def kill(*names: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("laminar.workers.checkpoints.os.rename", kill)
        await save(storage, 10)
    assert (tmp_path / "checkpoints" / ".writing-t1" / "checkpoint.json").exists()
    assert await versions(storage) == [5] and await loaded(storage) == 5
    await save(storage, 10, boot="t2")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000000005", "step-000000010"]


async def test_objects_are_no_checkpoint_before_the_last_of_them(tmp_path: Path) -> None:
    """Case 36 on storage without rename: killed before each of its writes."""
    for survived in range(6):
        storage = MemoryStorage(supports_append=False)
        await save(storage, 5)
        left = survived

        def kill(verb: str, path: str) -> None:
            nonlocal left
            if verb == "write":
                if left == 0:
                    raise Killed
                left -= 1

        storage.fault = kill
        with pytest.raises(Killed):
            await save(storage, 10)
        storage.fault = None
        assert await versions(storage) == [5] and await loaded(storage) == 5
        await save(storage, 10, boot="t2")
        assert await loaded(storage) == 10


async def test_a_full_disk_is_said_and_may_be_tried_again(storage: Storage) -> None:
    def full(what: str) -> None:
        if what == "in export":
            raise OSError(28, "No space left on device")

    await save(storage, 5)
    with pytest.raises(StoreError, match=r"checkpoint of version 10 could not be written .*No space left"):
        await save(storage, 10, interrupt=full)
    assert await loaded(storage) == 5
    await save(storage, 10)
    assert await loaded(storage) == 10


# -- two trainers -----------------------------------------------------------------------------------------------


async def test_a_trainer_that_was_replaced_removes_and_replaces_nothing(storage: Storage) -> None:
    """It stood still between the record of its step and the checkpoint; its successor is writing that version."""
    unfinished = "checkpoints/.writing-t2/trainer/master.safetensors"
    await storage.write(unfinished, b"of the leader")
    before = await storage.list("checkpoints")

    async def fence() -> None:
        raise Fenced("replaced")

    with pytest.raises(Fenced):
        await save_fenced(storage, 5, fence)
    assert await storage.read(unfinished) == b"of the leader" and await storage.list("checkpoints") == before


async def test_a_trainer_that_is_replaced_while_it_writes_leaves_the_leaders_checkpoint(storage: Storage) -> None:
    calls = 0

    async def fence() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await save(storage, 5, boot="t2")
            raise Fenced("replaced")

    with pytest.raises(Fenced):
        await save_fenced(storage, 5, fence)
    assert [info.digest for info in await list_checkpoints(storage)] == ["digest-5"] and await loaded(storage) == 5


async def test_a_checkpoint_that_appeared_at_the_last_instant_stays(tmp_path: Path) -> None:
    """The trainer stood still after it had looked whether it leads."""
    storage, elsewhere = LocalStorage(tmp_path / "store"), LocalStorage(tmp_path / "elsewhere")
    await save(elsewhere, 5, boot="t2")
    calls = 0

    async def fence() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            (tmp_path / "elsewhere" / checkpoint_path(5)).rename(tmp_path / "store" / checkpoint_path(5))

    await save_fenced(storage, 5, fence)
    assert [info.digest for info in await list_checkpoints(storage)] == ["digest-5"]
    assert [p.name for p in (tmp_path / "store" / "checkpoints").iterdir()] == ["step-000000005"]


# -- damage -----------------------------------------------------------------------------------------------------


async def flip(storage: Storage, path: str) -> None:
    data = bytearray(await storage.read(path))
    data[-2] ^= 0x40
    await storage.write(path, bytes(data), overwrite=True)


@pytest.mark.parametrize("how", ["flipped bit", "missing file", "no state", "unreadable mark", "no mark"])
async def test_one_that_does_not_open_is_passed_over(storage: Storage, how: str) -> None:
    for version in (5, 10):
        await save(storage, version)
    folder = checkpoint_path(10)
    if how == "flipped bit":
        await flip(storage, f"{folder}/trainer/{MASTER}")
    elif how == "missing file":
        await storage.delete(f"{folder}/trainer/{MASTER}")
    elif how == "no state":
        await storage.write(f"{folder}/trainer/learner.json", b"{", overwrite=True)
    elif how == "unreadable mark":
        await storage.write(f"{folder}/checkpoint.json", b'{"version": 10', overwrite=True)
    else:
        await storage.delete(f"{folder}/checkpoint.json")
    assert await loaded(storage) == 5


@pytest.mark.parametrize("lack", [errno.ENOSPC, errno.EMFILE])
async def test_what_the_host_lacks_is_no_damage(storage: Storage, lack: int) -> None:
    """A full folder for temporary files, say: the newest one would lose its mark once an older one is opened."""
    for version in (5, 10):
        await save(storage, version)
    learner: Any = SmallLearner(0)

    def load(folder: Path) -> None:
        raise OSError(lack, os.strerror(lack))

    learner.load = load
    with pytest.raises(StoreError, match=os.strerror(lack)):
        await load_newest(storage, learner, 100)
    assert await versions(storage) == [10, 5] and await loaded(storage) == 10


async def test_what_a_prune_had_no_time_to_delete_goes_with_the_next(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after it took the mark: no list of whole checkpoints has that one any more."""
    for version in (5, 10):
        await save(storage, version)

    async def killed(path: str) -> None:
        raise StoreError(f"killed before it deleted {path}")

    with monkeypatch.context() as dying, pytest.raises(StoreError, match="step-000000005"):
        dying.setattr(storage, "delete_tree", killed)
        await prune(storage, keep=1)
    assert await versions(storage) == [10] and await storage.list(checkpoint_path(5))
    await save(storage, 15)
    await prune(storage, keep=1)
    assert await versions(storage) == [15]
    assert {f.path.split("/")[1] for f in await storage.list("checkpoints")} == {"step-000000015"}


async def test_a_damaged_one_is_written_again_and_does_not_outlive_good_ones(storage: Storage) -> None:
    """It would be kept as the newest while pruning deletes the one that the trainer has just begun with."""
    for version in (5, 10):
        await save(storage, version)
    await flip(storage, f"{checkpoint_path(10)}/trainer/{MASTER}")
    assert await loaded(storage) == 5
    await prune(storage, keep=1)
    assert await versions(storage) == [5]
    await save(storage, 10, boot="t2")
    await prune(storage, keep=1)
    assert await versions(storage) == [10] and await loaded(storage) == 10


async def test_if_none_opens_nothing_is_given_up(storage: Storage) -> None:
    await save(storage, 5)
    await flip(storage, f"{checkpoint_path(5)}/trainer/{MASTER}")
    assert await loaded(storage) == 0 and await versions(storage) == [5]


async def test_if_none_opens_all_that_was_tried_is_said(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    for version in (5, 10):
        await save(storage, version)
    await flip(storage, f"{checkpoint_path(5)}/trainer/{MASTER}")
    await storage.delete(f"{checkpoint_path(10)}/trainer/learner.json")
    assert await loaded(storage, at_most=12) == 0
    said = caplog.messages[-1]
    assert said.startswith("none of the 2 checkpoints opens: all 12 steps are trained again from the initial model.")
    assert "step-000000010/trainer does not open: the learner state" in said
    assert "step-000000005/trainer does not open: the checkpoint file" in said and "is damaged" in said


async def test_one_that_stayed_damaged_is_written_again_when_its_version_is_reached(storage: Storage) -> None:
    """Its mark would otherwise pass for a checkpoint for ever."""
    await save(storage, 5)
    await flip(storage, f"{checkpoint_path(5)}/trainer/{MASTER}")
    assert await loaded(storage) == 0
    await save(storage, 5, boot="t2")
    assert await loaded(storage) == 5


async def test_the_last_one_that_opens_is_never_pruned(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    for version in (5, 10, 15):
        await save(storage, version)
    for version in (10, 15):
        await flip(storage, f"{checkpoint_path(version)}/trainer/{MASTER}")
    await prune(storage, keep=2)
    assert await versions(storage) == [15, 10, 5]
    assert "no older checkpoint is deleted, since the newest 2 do not open" in caplog.text
    await save(storage, 20)
    await prune(storage, keep=2)
    assert await versions(storage) == [20, 15] and await loaded(storage) == 20


async def test_if_none_opens_the_initial_model_is_used(storage: Storage) -> None:
    for version in (5, 10):
        await save(storage, version)
        await flip(storage, f"{checkpoint_path(version)}/trainer/{MASTER}")
    assert await loaded(storage) == 0


# -- pruning and exports ----------------------------------------------------------------------------------------


async def test_the_newest_are_kept(storage: Storage) -> None:
    for version in (5, 10, 15, 20):
        await save(storage, version)
    await prune(storage, keep=2)
    assert await versions(storage) == [20, 15]
    assert {f.path.split("/")[1] for f in await storage.list("checkpoints")} == {"step-000000015", "step-000000020"}
    await prune(storage, keep=2)
    assert await loaded(storage) == 20


async def test_a_prune_that_dies_half_way_leaves_no_checkpoint_that_looks_whole() -> None:
    storage = MemoryStorage()
    for version in (5, 10):
        await save(storage, version)
    deletions = 0

    def kill(verb: str, path: str) -> None:
        nonlocal deletions
        deletions += verb == "delete"
        if deletions == 2:
            raise Killed

    storage.fault = kill
    with pytest.raises(Killed):
        await prune(storage, keep=1)
    storage.fault = None
    assert await storage.list(checkpoint_path(5)) != [] and await read_info(storage, checkpoint_path(5)) is None
    assert await versions(storage) == [10]
