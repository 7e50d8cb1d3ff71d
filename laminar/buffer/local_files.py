"""Storage in a folder: direct system calls, so that what is said to be durable is."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from laminar.buffer.files import TEMPORARY, AlreadyExists, FileInfo, NotFound, StorageFull, clean_path, probe
from laminar.buffer.space import free_bytes, says_full
from laminar.errors import StoreError

T = TypeVar("T")


class LocalStorage:
    """A folder. All calls that touch the disk run in threads."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(os.path.abspath(os.path.expanduser(root)))

    url = property(lambda self: str(self._root))
    local = True
    supports_append = True

    @property
    def table_options(self) -> dict[str, str]:
        return {}

    def absolute(self, path: str) -> str:
        return str(self._root / clean_path(path))

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        await self._run("write", path, len(data), lambda target: _publish(target, data, overwrite))

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        await self._run("append to", path, len(data), lambda target: _append(target, data, sync))

    async def read(self, path: str) -> bytes:
        return await self._run("read", path, 0, Path.read_bytes)

    async def exists(self, path: str) -> bool:
        return await self._run("look for", path, 0, Path.is_file)

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        return await self._run("list", prefix, 0, lambda folder: _walk(self._root, folder, temporary))

    async def delete(self, path: str) -> None:
        await self._run("delete", path, 0, lambda target: target.unlink(missing_ok=True))

    async def delete_tree(self, path: str) -> None:
        if not clean_path(path):
            raise StoreError(f"the root of the store {self.url} is not deleted as a tree; remove the folder by hand")
        await self._run("delete", path, 0, _delete_tree)

    async def free_bytes(self) -> int | None:
        return await self._run("measure", "", 0, free_bytes)

    async def probe(self) -> None:
        await probe(self)

    async def _run(self, verb: str, path: str, size: int, call: Callable[[Path], T]) -> T:
        target = self._root / clean_path(path)

        def translated() -> T:
            try:
                return call(target)
            except OSError as e:
                if isinstance(e, StoreError):
                    raise
                raise _explained(verb, target, size, e) from e

        return await asyncio.to_thread(translated)


def _explained(verb: str, target: Path, size: int, e: OSError) -> StoreError:
    if says_full(e):
        return StorageFull(
            f"disk is full at {target.parent}: no space for {size} bytes, {free_bytes(target.parent)} bytes are free "
            f"(cannot {verb} {target.name}: {e.strerror}); free space, what waits is then written"
        )
    if isinstance(e, FileNotFoundError):
        return NotFound(f"cannot {verb} {target}: it is not there")
    if isinstance(e, FileExistsError):
        return AlreadyExists(f"cannot {verb} {target}: it exists already, and is not to be replaced")
    return StoreError(f"cannot {verb} {target}: {e.strerror or e}")


def _publish(target: Path, data: bytes, overwrite: bool) -> None:
    if not overwrite and target.exists():
        raise FileExistsError(errno.EEXIST, "exists", str(target))
    _make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        if overwrite:
            os.replace(temporary, target)
        else:
            _link(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def _link(temporary: Path, target: Path) -> None:
    """A rename that never replaces: the file appears under its name whole, or the name was taken."""
    try:
        os.link(temporary, target)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        raise StoreError(
            f"the file system of {target.parent} has no hard links ({e.strerror}), without which a file cannot be "
            "published only once; put the store on a POSIX file system or an object store"
        ) from e


def _append(target: Path, data: bytes, sync: bool) -> None:
    _make_folder(target.parent)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_APPEND)
        created = False
    except FileNotFoundError:
        handle = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        created = True
    try:
        before = os.fstat(handle).st_size
        try:
            _write_all(handle, data)
        except OSError:
            # Only this writer appends here: taking the torn end back leaves the file readable to its end.
            with suppress(OSError):
                os.ftruncate(handle, before)
                if created:
                    target.unlink()
            raise
        if sync:
            os.fdatasync(handle)
    finally:
        os.close(handle)
    if created and sync:
        sync_folder(target.parent)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _make_folder(folder: Path) -> None:
    """Create the folder and its parents durably."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable (a file system that cannot sync folders keeps them so itself)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def _walk(root: Path, folder: Path, temporary: bool) -> list[FileInfo]:
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if bool(TEMPORARY.fullmatch(name)) is not temporary:
                continue
            path = Path(parent, name)
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # deleted since the folder was read
            if stat.S_ISREG(status.st_mode):
                found.append(FileInfo(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns // 1000))
    return sorted(found, key=lambda f: f.path)


def _delete_tree(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
