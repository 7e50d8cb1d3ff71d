"""Checkpoints in the store: `checkpoints/step-<version>/` with the trainer's state and a Hugging Face export.

A checkpoint appears whole or not at all: it is written beside its place, synced, and renamed; its
`checkpoint.json` is the last file written and names the version and digest. What has no `checkpoint.json` is not
a checkpoint. On storage without rename the files are uploaded first and `checkpoint.json` last.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from laminar.buffer.storage import Storage
from laminar.errors import StoreError, WeightsError
from laminar.workers.learning.base import Learner

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


@dataclass(frozen=True)
class Export:
    folder: str
    digest: str


def checkpoint_path(version: int) -> str:
    return f"{FOLDER}/step-{version:09d}"


async def save_checkpoint(storage: Storage, learner: Learner, digest: str, boot: str) -> str:
    """Write the learner's state and export of its version; the path under the store root. Raises StoreError if it
    cannot be written (no space, say): no checkpoint of this version exists then, and it may be tried again."""
    target = checkpoint_path(learner.version)
    info = CheckpointInfo(version=learner.version, digest=digest)
    if await read_info(storage, target) is not None:
        return target
    try:
        await _write(storage, learner, info, target, boot)
    except (OSError, SafetensorError) as e:
        raise StoreError(
            f"the checkpoint of version {learner.version} could not be written to {storage.absolute(target)}: {e}"
        ) from e
    return target


async def _write(storage: Storage, learner: Learner, info: CheckpointInfo, target: str, boot: str) -> None:
    if storage.local:
        folder, place = Path(storage.absolute(FOLDER)), Path(storage.absolute(target))
        await asyncio.to_thread(_save_local, folder, place, learner, info, boot)
        return
    with tempfile.TemporaryDirectory(prefix="laminar-checkpoint-") as temporary:
        await asyncio.to_thread(_fill, Path(temporary), learner)
        for path in sorted(p for p in Path(temporary).rglob("*") if p.is_file()):
            data = await asyncio.to_thread(path.read_bytes)
            await storage.write(f"{target}/{path.relative_to(temporary).as_posix()}", data, overwrite=True)
        await storage.write(f"{target}/{INFO}", info.model_dump_json().encode(), overwrite=True)


def _fill(folder: Path, learner: Learner) -> None:
    for name in (STATE, EXPORT):
        (folder / name).mkdir()
    learner.save(folder / STATE)
    learner.export(folder / EXPORT)


def _save_local(root: Path, target: Path, learner: Learner, info: CheckpointInfo, boot: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for left_over in root.glob(".writing-*"):
        shutil.rmtree(left_over)
    if target.exists():
        shutil.rmtree(target)  # without checkpoint.json, else save_checkpoint had returned
    temporary = root / f".writing-{boot}"
    temporary.mkdir()
    _fill(temporary, learner)
    (temporary / INFO).write_text(info.model_dump_json(), encoding="utf-8")
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    os.rename(temporary, target)
    _sync(root)


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


async def load_newest(storage: Storage, learner: Learner, at_most: int) -> CheckpointInfo | None:
    """Load the newest checkpoint of a version <= `at_most` that opens; older ones if it does not.

    Those that did not open lose their mark once an older one did: they are written again when their version is reached,
    and count no more among those that pruning keeps."""
    damaged: list[CheckpointInfo] = []
    for info in await list_checkpoints(storage):
        if info.version > at_most:
            continue
        path = f"{checkpoint_path(info.version)}/{STATE}"
        with tempfile.TemporaryDirectory(prefix="laminar-checkpoint-") as folder:
            local = Path(storage.absolute(path)) if storage.local else await _download(storage, path, Path(folder))
            try:
                await asyncio.to_thread(learner.load, local)
            except (OSError, ValueError, KeyError, WeightsError, SafetensorError) as e:
                log.error("checkpoint %s does not open (%s); trying the one before it", path, e)
                damaged.append(info)
                continue
        for other in damaged:
            await storage.delete(f"{checkpoint_path(other.version)}/{INFO}")
        return info
    return None


async def _download(storage: Storage, path: str, folder: Path) -> Path:
    for file in await storage.list(path):
        local = folder / file.path.removeprefix(f"{path}/")
        local.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(local.write_bytes, await storage.read(file.path))
    return folder


async def prune_checkpoints(storage: Storage, keep: int) -> None:
    for info in (await list_checkpoints(storage))[keep:]:
        # The mark goes first: a prune that dies half-way leaves no checkpoint that looks whole.
        await storage.delete(f"{checkpoint_path(info.version)}/{INFO}")
        await storage.delete_tree(checkpoint_path(info.version))


async def exported_version(storage: Storage, version: int) -> Export | None:
    """The Hugging Face folder of a checkpointed version, if this process can open it as a local folder."""
    info = await read_info(storage, checkpoint_path(version))
    if info is None or not storage.local:
        return None
    return Export(storage.absolute(f"{checkpoint_path(version)}/{EXPORT}"), info.digest)
