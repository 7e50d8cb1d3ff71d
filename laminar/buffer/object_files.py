"""Storage in an object store, through fsspec: whole objects, and a conditional put to publish one only once.

    write ──▶ put, if there is no object of that name ──created──▶ done
                   └─refused: is the one that is there ours? (an earlier attempt whose answer was lost) ──▶ done
                                                              └─no ──▶ AlreadyExists
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from laminar.buffer import s3
from laminar.buffer.files import AlreadyExists, FileInfo, NotFound, clean_path, probe
from laminar.errors import ConfigError, StoreError

T = TypeVar("T")
TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Under which names fsspec's file systems give the time of the last change."""
WRITER = "laminar-writer"
"""The metadata of an S3 object by which its writer recognises it."""
THREADS = 8
CONFLICT_ATTEMPTS = 5
"""S3 answers 409, and nothing is written, when another conditional put of the same name is under way."""


class FsspecStorage:
    """An object store through fsspec. No appends; a file is published once by the store's conditional put."""

    local = False
    supports_append = False

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        """`options`: `endpoint_url` and `region` of an S3 service. Raises ConfigError if they do not fit the URL, or if
        fsspec, or the package that serves the scheme, cannot open it."""
        import fsspec

        scheme = url.partition("://")[0]
        self._s3 = s3.S3Settings.of(options or {}) if scheme in s3.SCHEMES else None
        if self._s3 is None and (given := [name for name, value in (options or {}).items() if value]):
            raise ConfigError(
                f"storage.{given[0]} is for s3:// stores, and run.store is {url!r}; the packages for other object "
                "stores take their settings from the environment"
            )
        settings = self._s3.for_fsspec() if self._s3 else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False, **settings)
        except (ImportError, ValueError) as e:
            raise ConfigError(f"the store {url!r} cannot be opened: {e}") from e
        if self._s3:
            # The client below repeats requests itself: both together would wait for many minutes.
            self._fs.retries = 1
        self._errors: tuple[type[Exception], ...] = (OSError, *(s3.client_errors() if self._s3 else ()))
        self._url = url.rstrip("/")
        # Not the loop's own threads: slow storage must not hold up whatever else runs in those.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="object-store")

    url = property(lambda self: self._url)

    @property
    def table_options(self) -> dict[str, str]:
        return self._s3.for_lance() if self._s3 else {}

    def absolute(self, path: str) -> str:
        path = clean_path(path)
        return f"{self._url}/{path}" if path else self._url

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        await self._run("write", path, lambda key: self._put(key, data, overwrite))

    def _put(self, key: str, data: bytes, overwrite: bool) -> None:
        if overwrite or self._s3 is None:
            self._fs.pipe_file(key, data, mode="overwrite" if overwrite else "create")
            return
        token = secrets.token_hex(16)
        for attempt in range(1, CONFLICT_ATTEMPTS + 1):
            try:
                self._fs.pipe_file(key, data, mode="create", Metadata={WRITER: token})
                return
            except self._errors as e:
                status = s3.status_of(e)
                if status == 412 or isinstance(e, FileExistsError):
                    if self._fs.metadata(key).get(WRITER) == token:
                        return
                    raise FileExistsError(key) from e
                if status != 409 or attempt == CONFLICT_ATTEMPTS:
                    raise
            time.sleep(0.05 * 2**attempt)

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        raise StoreError(f"{self.absolute(path)} cannot be appended to: object stores hold whole objects only")

    async def read(self, path: str) -> bytes:
        data: bytes = await self._run("read", path, lambda key: self._fs.cat_file(key))
        return data

    async def upload(self, path: str, file: Path) -> None:
        """Write an object from a local file, part by part, replacing one that is there."""
        await self._run("write", path, lambda key: self._fs.put_file(str(file), key))

    async def download(self, path: str, file: Path) -> None:
        """Write an object to a local file, piece by piece, making its folder. Raises NotFound."""

        def fetch(key: str) -> None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(key, str(file))

        await self._run("read", path, fetch)

    async def exists(self, path: str) -> bool:
        def look(key: str) -> bool:
            # Not `isfile`, which takes a service that does not answer for a file that is not there.
            try:
                return bool(self._fs.info(key)["type"] == "file")
            except FileNotFoundError:
                return False

        return await self._run("look for", path, look)

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        def find(key: str) -> list[FileInfo]:
            self._fs.invalidate_cache()
            found = self._fs.find(key, detail=True).values()
            # A "folder" made by other tools is an empty object whose name ends in a slash.
            files = (self._info(d) for d in found if not str(d["name"]).endswith("/"))
            return sorted(files, key=lambda f: f.path)

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
            return await asyncio.get_running_loop().run_in_executor(self._threads, call, key)
        except FileNotFoundError as e:
            if "bucket does not exist" in str(e):
                raise StoreError(f"cannot {verb} {self.absolute(path)}: its bucket does not exist; create it") from e
            raise NotFound(f"cannot {verb} {self.absolute(path)}: it is not there") from e
        except FileExistsError as e:
            raise AlreadyExists(f"cannot {verb} {self.absolute(path)}: it exists already") from e
        except self._errors as e:
            raise StoreError(f"cannot {verb} {self.absolute(path)}: {e or type(e).__name__}{self._hint(e)}") from e

    def _hint(self, e: Exception) -> str:
        kind = type(e).__name__
        if self._s3 is None:
            return ""
        if "Credentials" in kind:
            return "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for this process"
        if isinstance(e, PermissionError):
            return "; the keys of this process may not do that: check them, and the policy of the bucket"
        if "Connect" in kind or "Timeout" in kind:
            where = self._s3.endpoint_url or "AWS"
            return f"; {where} is not reached: check storage.endpoint_url (or AWS_ENDPOINT_URL) and the network"
        return ""
