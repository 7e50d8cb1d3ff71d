"""Storage in an object store, through fsspec: whole objects, and a conditional put to publish one only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from laminar.buffer.files import AlreadyExists, FileInfo, NotFound, clean_path, probe
from laminar.errors import ConfigError, StoreError

T = TypeVar("T")
TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Under which names fsspec's file systems give the time of the last change."""


class FsspecStorage:
    """An object store through fsspec. No appends; a file is published once by the store's conditional put."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        """Raises ConfigError if fsspec, or the package that serves the scheme, cannot open `url`."""
        import fsspec

        settings = {"use_listings_cache": False, **(options or {})}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **settings)
        except (ImportError, ValueError) as e:
            raise ConfigError(f"the store {url!r} cannot be opened: {e}") from e
        self._url = url.rstrip("/")

    url = property(lambda self: self._url)
    local = False
    supports_append = False

    def absolute(self, path: str) -> str:
        path = clean_path(path)
        return f"{self._url}/{path}" if path else self._url

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        def put(key: str) -> None:
            self._fs.pipe_file(key, data, mode="overwrite" if overwrite else "create")

        await self._run("write", path, put)

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        raise StoreError(f"{self.absolute(path)} cannot be appended to: object stores hold whole objects only")

    async def read(self, path: str) -> bytes:
        data: bytes = await self._run("read", path, lambda key: self._fs.cat_file(key))
        return data

    async def exists(self, path: str) -> bool:
        return await self._run("look for", path, lambda key: bool(self._fs.isfile(key)))

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        def find(key: str) -> list[FileInfo]:
            self._fs.invalidate_cache()
            return sorted((self._info(d) for d in self._fs.find(key, detail=True).values()), key=lambda f: f.path)

        return [] if temporary else await self._run("list", prefix, find)

    def _info(self, detail: dict[str, Any]) -> FileInfo:
        name = str(detail["name"])
        modified = next((detail[k] for k in TIMES if k in detail), 0)
        seconds = modified.timestamp() if hasattr(modified, "timestamp") else float(modified or 0)
        return FileInfo(name.removeprefix(self._root).lstrip("/"), int(detail["size"]), int(seconds * 1e6))

    async def delete(self, path: str) -> None:
        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(key)

        await self._run("delete", path, remove)

    async def delete_tree(self, path: str) -> None:
        if not clean_path(path):
            raise StoreError(f"the root of the store {self.url} is not deleted as a tree; remove it by hand")

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm(key, recursive=True)

        await self._run("delete", path, remove)

    async def free_bytes(self) -> int | None:
        return None

    async def probe(self) -> None:
        await probe(self)

    async def _run(self, verb: str, path: str, call: Callable[[str], T]) -> T:
        path = clean_path(path)
        key = f"{self._root.rstrip('/')}/{path}" if path else self._root
        try:
            return await asyncio.to_thread(call, key)
        except FileNotFoundError as e:
            raise NotFound(f"cannot {verb} {self.absolute(path)}: it is not there") from e
        except FileExistsError as e:
            raise AlreadyExists(f"cannot {verb} {self.absolute(path)}: it exists already") from e
        except OSError as e:
            raise StoreError(f"cannot {verb} {self.absolute(path)}: {e}") from e
