"""The weights of a checkpointed version as a local folder: where the store is one, else a copy in this host's cache.

A copy appears whole or not at all, and serves every process of the host. The newest few of a store are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laminar.buffer.storage import FsspecStorage, Storage
from laminar.errors import StoreError
from laminar.workers.checkpoints import EXPORT, checkpoint_path, read_info
from laminar.workers.models import default_cache
from laminar.workers.scratch import scratch, scratch_folder

log = logging.getLogger(__name__)

KEEP = 3
"""Copies of one store: a rollout that loads one is given time, while the newest two come."""


@dataclass(frozen=True)
class Export:
    folder: str
    digest: str


async def exported_version(storage: Storage, version: int, cache: Path | None = None) -> Export | None:
    """The Hugging Face folder of a checkpointed version, if this process can open it as a local folder; one in an
    object store is fetched first. `cache` replaces `$XDG_CACHE_HOME/laminar/exports`. Raises StoreError if it cannot
    be fetched."""
    path = checkpoint_path(version)
    info = await read_info(storage, path)
    if info is None:
        return None
    if storage.local:
        return Export(storage.absolute(f"{path}/{EXPORT}"), info.digest)
    if not isinstance(storage, FsspecStorage):
        return None
    store = hashlib.sha256(storage.url.encode()).hexdigest()[:16]
    cache = cache if cache is not None else default_cache().parent / "exports"
    copy = cache / f"{store}-{version:09d}-{info.digest[:16]}"
    if not copy.is_dir():
        await _fetch(storage, path, copy, f".{store}-")
        await asyncio.to_thread(_forget_old, cache, store)
    return Export(str(copy), info.digest)


async def _fetch(storage: FsspecStorage, path: str, copy: Path, kind: str) -> None:
    try:
        async with scratch_folder(copy.parent, f".{copy.name}-", kind=kind) as work:
            export = f"{path}/{EXPORT}"
            for file in await storage.list(export):
                await storage.download(file.path, work / file.path.removeprefix(f"{export}/"))
            # The mark of a checkpoint is deleted before its files: while it is there, all of them were listed.
            if await read_info(storage, path) is None:
                raise StoreError(f"the checkpoint {storage.absolute(path)} was deleted while it was fetched")
            os.rename(work, copy)
    except StoreError:
        raise
    except OSError as e:
        if not copy.is_dir():  # else another process of this host was first
            raise StoreError(f"{storage.absolute(path)} cannot be copied to {copy}: {e}") from e
    log.info("fetched %s to %s", storage.absolute(path), copy)


def _forget_old(cache: Path, store: str) -> None:
    copies = []
    for copy in cache.glob(f"{store}-*"):
        with suppress(FileNotFoundError):  # another process of this host was first
            copies.append((copy.stat().st_mtime_ns, copy))
    for _, old in sorted(copies, reverse=True)[KEEP:]:
        try:
            # Out of the way first: removing its files makes it look new to another process, which then keeps it.
            with scratch(cache, f".{old.name}-", kind=f".{store}-") as away, suppress(FileNotFoundError):
                os.rename(old, away)
        except OSError as e:
            log.warning("the old copy %s cannot be removed: %s", old, e)
