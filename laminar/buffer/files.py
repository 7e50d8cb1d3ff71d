"""What a store's files can do (`Storage`), and how they fail. `storage.py` is where callers import this from."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Protocol

from laminar.errors import StoreError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of files that are being written, or whose writer died; nobody ever reads them."""

SECTOR_BYTES = 512
"""What a disk writes or loses whole: a file whose last sectors are all zeros had its length, but not its data, written
before a power cut."""


class NotFound(StoreError, FileNotFoundError):
    """The file is not there."""


class AlreadyExists(StoreError, FileExistsError):
    """The file is there, and it was asked not to replace it."""


class StorageFull(StoreError):
    """No space or quota is left. The file is as it was before the call."""


@dataclass(frozen=True)
class FileInfo:
    """`path` is relative to the root, `size` in bytes, `modified_us` UTC microseconds."""

    path: str
    size: int
    modified_us: int


class Storage(Protocol):
    """Paths are relative to the root, with '/'. Every method raises StoreError naming the path."""

    @property
    def url(self) -> str: ...

    @property
    def local(self) -> bool:
        """Whether `absolute` gives paths of this machine's file system."""
        ...

    @property
    def supports_append(self) -> bool: ...

    @property
    def table_options(self) -> dict[str, str]:
        """What Lance needs, beside the URL that `absolute` gives, to open a table in this store. Never a secret."""
        ...

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        """Publish a file whole and durably. Raises AlreadyExists, with the file untouched, unless `overwrite`."""
        ...

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        """Add to the end of a file, creating it. After an error go on in another file: this one's end is unsure."""
        ...

    async def read(self, path: str) -> bytes:
        """Raises NotFound."""
        ...

    async def exists(self, path: str) -> bool: ...

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        """All files in the folder `prefix` and below ('' is the root), by path; none if there is no such folder.
        Files that are being written are left out, or alone listed with `temporary`."""
        ...

    async def delete(self, path: str) -> None:
        """Deleting what is not there is no error."""
        ...

    async def delete_tree(self, path: str) -> None: ...

    async def free_bytes(self) -> int | None:
        """None where the storage has no known limit."""
        ...

    def absolute(self, path: str) -> str:
        """A path or URL that Lance, or a file API, opens."""
        ...

    async def probe(self) -> None:
        """Write, refuse to overwrite, read and delete a small file. Raises StoreError if this storage cannot serve."""
        ...


def clean_path(path: str) -> str:
    """The path without outer slashes. Raises StoreError if it would leave the root."""
    parts = path.strip("/").split("/") if path.strip("/") else []
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise StoreError(f"{path!r} is no path below the store's root")
    return "/".join(parts)


async def probe(storage: Storage) -> None:
    """Check by a small file that `storage` publishes once, reads back what was written, and deletes."""
    path = f"probe-{secrets.token_hex(8)}"
    try:
        await storage.write(path, b"first")
        try:
            await storage.write(path, b"second")
        except AlreadyExists:
            pass
        else:
            raise StoreError(
                f"{storage.url} replaced a file that it was asked to keep: it has no conditional put, without which "
                "two owners could both publish; use a store that honours If-None-Match"
            )
        if (data := await storage.read(path)) != b"first":
            raise StoreError(f"{storage.url} gave back {data!r} for a file that was written as b'first'")
    finally:
        await storage.delete(path)
