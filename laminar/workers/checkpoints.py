"""Checkpoints in the store: `checkpoints/step-<version>/` with the trainer's state and a Hugging Face export.

A checkpoint appears whole or not at all: it is written beside its place, synced, and renamed; its
`checkpoint.json` is the last file written and names the version and digest. What has no `checkpoint.json` is not
a checkpoint. On storage without rename the files are uploaded first and `checkpoint.json` last.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from laminar.buffer.space import FULL, says_full
from laminar.buffer.storage import FsspecStorage, Storage, StorageFull
from laminar.errors import StoreError, WeightsError
from laminar.workers.learning.base import Learner
from laminar.workers.scratch import scratch_folder

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
STATE = "trainer"
EXPORT = "export"
INFO = "checkpoint.json"


class CheckpointInfo(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int
    digest: str
    """Digest of the published weights of this version; empty if it was not published."""


def checkpoint_path(version: int) -> str:
    return f"{FOLDER}/step-{version:09d}"


async def _nobody_else() -> None:
    """The fence of a learner that no other process could stand in for."""


async def save_checkpoint(
    storage: Storage, learner: Learner, digest: str, boot: str, *, fence: Callable[[], Awaitable[None]] = _nobody_else
) -> str:
    """Write the learner's state and export of its version; the path under the store root. One that is there already
    is kept, if it opens. Raises StoreError if it cannot be written (no space, say): no checkpoint of this version
    exists then, and it may be tried again. `fence` raises once another trainer leads: its checkpoints, which this one
    does not know of, are neither removed nor replaced then."""
    target = checkpoint_path(learner.version)
    info = CheckpointInfo(version=learner.version, digest=digest)
    existing = await read_info(storage, target)
    if existing is not None:
        damage = await why_not(storage, learner, existing)
        if not damage:
            return target
        log.error("checkpoint %s does not open (%s); it is written again", target, damage)
    try:
        if storage.local:
            await _save_local(storage, learner, info, target, boot, fence, replaces=existing is not None)
        else:
            await _save_objects(storage, learner, info, target, fence)
    except (OSError, SafetensorError) as e:
        kind = StorageFull if says_full(e) else StoreError
        raise kind(
            f"the checkpoint of version {learner.version} could not be written to {storage.absolute(target)}: {e}"
        ) from e
    return target


async def _save_objects(
    storage: Storage, learner: Learner, info: CheckpointInfo, target: str, fence: Callable[[], Awaitable[None]]
) -> None:
    async with scratch_folder(Path(tempfile.gettempdir()), "laminar-checkpoint-") as temporary:
        await asyncio.to_thread(_fill, temporary, learner)
        for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
            await fence()
            await _upload(storage, f"{target}/{path.relative_to(temporary).as_posix()}", path)
        await fence()
        await storage.write(f"{target}/{INFO}", info.model_dump_json().encode(), overwrite=True)


async def _upload(storage: Storage, path: str, file: Path) -> None:
    if isinstance(storage, FsspecStorage):
        await storage.upload(path, file)  # part by part: a trainer's state may not fit into memory a second time
    else:
        await storage.write(path, await asyncio.to_thread(file.read_bytes), overwrite=True)


async def _download(storage: Storage, path: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(storage, FsspecStorage):
        await storage.download(path, file)
    else:
        await asyncio.to_thread(file.write_bytes, await storage.read(path))


def _fill(folder: Path, learner: Learner) -> None:
    for name in (STATE, EXPORT):
        (folder / name).mkdir()
    learner.save(folder / STATE)
    learner.export(folder / EXPORT)


async def _save_local(
    storage: Storage, learner: Learner, info: CheckpointInfo, target: str, boot: str,
    fence: Callable[[], Awaitable[None]], *, replaces: bool,
) -> None:  # fmt: skip
    place = Path(storage.absolute(target))
    temporary = place.with_name(f".writing-{boot}")
    await fence()
    await asyncio.to_thread(_write_beside, temporary, learner, info)
    await fence()
    await asyncio.to_thread(_put_in_place, temporary, place, replaces)


def _write_beside(temporary: Path, learner: Learner, info: CheckpointInfo) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for left_over in temporary.parent.glob(".writing-*"):
        shutil.rmtree(left_over)
    temporary.mkdir()
    _fill(temporary, learner)
    (temporary / INFO).write_text(info.model_dump_json(), encoding="utf-8")
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)


def _put_in_place(temporary: Path, target: Path, replaces: bool) -> None:
    if (target / INFO).exists() and not replaces:
        log.warning("another trainer has written %s meanwhile: its checkpoint stays", target)
        shutil.rmtree(temporary)
        return
    if target.exists():
        shutil.rmtree(target)  # incomplete or damaged, else save_checkpoint had returned
    os.rename(temporary, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def read_info(storage: Storage, path: str) -> CheckpointInfo | None:
    """None if the folder is no (complete) checkpoint."""
    try:
        return CheckpointInfo.model_validate_json(await storage.read(f"{path}/{INFO}"))
    except FileNotFoundError:
        return None
    except ValidationError as e:
        log.warning("%s/%s is unreadable, this checkpoint is passed over: %s", path, INFO, e)
        return None


async def list_checkpoints(storage: Storage) -> list[CheckpointInfo]:
    """Complete checkpoints, newest first."""
    paths = {f.path.rsplit("/", 1)[0] for f in await storage.list(FOLDER) if f.path.endswith(f"/{INFO}")}
    paths = {p for p in paths if not p.split("/")[-1].startswith(".")}
    found = [info for p in paths if (info := await read_info(storage, p)) is not None]
    return sorted(found, key=lambda i: i.version, reverse=True)


UNUSABLE = (OSError, ValueError, KeyError, WeightsError, SafetensorError)
"""What opening a checkpoint raises that is damaged, incomplete, or of another model."""
SHORT_OF = (*FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What this host lacks: it says nothing of the checkpoint."""


async def load_newest(storage: Storage, learner: Learner, at_most: int) -> CheckpointInfo | None:
    """Load the newest checkpoint of a version <= `at_most` that opens; older ones if it does not, None if none does.

    Those that did not open lose their mark once an older one did: they are written again when their version is reached,
    and count no more among those that pruning keeps. If none opens they stay as they are, since the cause may be one
    that passes; what was tried is said."""
    failed: dict[int, str] = {}
    for info in await list_checkpoints(storage):
        if info.version > at_most:
            continue
        try:
            await load_checkpoint(storage, learner, info.version)
        except WeightsError as e:
            log.error("%s; trying the one before it", e)
            failed[info.version] = str(e)
            continue
        for version in failed:
            await storage.delete(f"{checkpoint_path(version)}/{INFO}")
        return info
    if failed:
        log.error(
            "none of the %d checkpoints opens: all %d steps are trained again from the initial model. Tried: %s",
            len(failed), at_most, "; ".join(failed.values()),
        )  # fmt: skip
    return None


async def load_checkpoint(storage: Storage, learner: Learner, version: int) -> None:
    """Raises WeightsError, with the learner as it was, if it does not open, StoreError if this host lacks the space or
    the files to try. Changes nothing in the store."""
    path = f"{checkpoint_path(version)}/{STATE}"
    try:
        async with _local_copy(storage, path) as folder:
            await asyncio.to_thread(learner.load, folder)
    except UNUSABLE as e:
        if isinstance(e, OSError) and e.errno in SHORT_OF:
            raise StoreError(f"this host cannot open checkpoint {path} now: {e}") from e
        raise WeightsError(f"checkpoint {path} does not open: {e}") from e


async def why_not(storage: Storage, learner: Learner, info: CheckpointInfo) -> str:
    """Why a checkpoint would not open; empty if it would. Reads all of the trainer's state."""
    try:
        async with _local_copy(storage, f"{checkpoint_path(info.version)}/{STATE}") as folder:
            await asyncio.to_thread(learner.verify, folder)
    except UNUSABLE as e:
        return str(e)
    return ""


@asynccontextmanager
async def _local_copy(storage: Storage, path: str) -> AsyncIterator[Path]:
    if storage.local:
        yield Path(storage.absolute(path))
        return
    async with scratch_folder(Path(tempfile.gettempdir()), "laminar-checkpoint-") as temporary:
        for file in await storage.list(path):
            await _download(storage, file.path, temporary / file.path.removeprefix(f"{path}/"))
        yield temporary


async def prune_checkpoints(storage: Storage, learner: Learner, keep: int) -> None:
    """Delete all but the newest `keep`, unless none of these would open: then nothing is deleted, and it is said. What
    older prunes had no time to delete goes too."""
    infos = await list_checkpoints(storage)
    if len(infos) <= keep:
        return
    damage: list[str] = []
    for info in infos[:keep]:
        if not (reason := await why_not(storage, learner, info)):
            break
        damage.append(f"{checkpoint_path(info.version)}: {reason}")
    else:
        log.error("no older checkpoint is deleted, since the newest %d do not open: %s", keep, "; ".join(damage))
        return
    oldest = checkpoint_path(infos[keep - 1].version)
    folders = {"/".join(f.path.split("/")[:2]) for f in await storage.list(FOLDER)}
    for folder in sorted(f for f in folders if f.startswith(f"{FOLDER}/step-") and f < oldest):
        # The mark goes first: a prune that dies half-way leaves no checkpoint that looks whole.
        await storage.delete(f"{folder}/{INFO}")
        await storage.delete_tree(folder)
