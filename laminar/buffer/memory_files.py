"""Storage in memory: the twin of `LocalStorage` for tests and the simulator, with the faults of real disks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laminar.buffer.files import SECTOR_BYTES, AlreadyExists, FileInfo, NotFound, StorageFull, clean_path, probe
from laminar.clock import Clock, SystemClock
from laminar.errors import StoreError


@dataclass
class _File:
    data: bytearray
    synced: int
    """Bytes that a power cut does not take."""
    modified_us: int


class MemoryStorage:
    """Faults are set as attributes, at any time:

    `capacity` bytes in all, beyond which writes raise StorageFull; `delay_s` before each call takes effect;
    `fault(verb, path)` is called first and may raise; `written(path)` is called when a file was published and may
    damage it; `crash()` is a power cut.
    """

    local = False

    def __init__(self, clock: Clock | None = None, *, supports_append: bool = True, name: str = "twin") -> None:
        self.clock: Clock = clock or SystemClock()
        self.supports_append = supports_append
        self.url = f"memory://{name}"
        self.capacity: int | None = None
        self.delay_s = 0.0
        self.fault: Callable[[str, str], None] | None = None
        self.written: Callable[[str], None] | None = None
        self._files: dict[str, _File] = {}

    @property
    def table_options(self) -> dict[str, str]:
        return {}

    def absolute(self, path: str) -> str:
        return f"{self.url}/{clean_path(path)}"

    async def write(self, path: str, data: bytes, *, overwrite: bool = False) -> None:
        path = await self._begin("write", path)
        old = self._files.get(path)
        if old is not None and not overwrite:
            raise AlreadyExists(f"cannot write {self.absolute(path)}: it exists already, and is not to be replaced")
        self._reserve(path, len(data), len(old.data) if old else 0)
        self._files[path] = _File(bytearray(data), len(data), self.clock.now_us())
        if self.written:
            self.written(path)

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        path = await self._begin("append", path)
        if not self.supports_append:
            raise StoreError(f"{self.absolute(path)} cannot be appended to: object stores hold whole objects only")
        self._reserve(path, len(data), 0)
        file = self._files.setdefault(path, _File(bytearray(), 0, 0))
        file.data += data
        file.modified_us = self.clock.now_us()
        if sync:
            file.synced = len(file.data)

    async def read(self, path: str) -> bytes:
        path = await self._begin("read", path)
        if path not in self._files:
            raise NotFound(f"cannot read {self.absolute(path)}: it is not there")
        return bytes(self._files[path].data)

    async def exists(self, path: str) -> bool:
        return await self._begin("exists", path) in self._files

    async def list(self, prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        prefix = await self._begin("list", prefix)
        if temporary:
            return []
        inside = (p for p in sorted(self._files) if not prefix or p == prefix or p.startswith(f"{prefix}/"))
        return [FileInfo(p, len(self._files[p].data), self._files[p].modified_us) for p in inside]

    async def delete(self, path: str) -> None:
        self._files.pop(await self._begin("delete", path), None)

    async def delete_tree(self, path: str) -> None:
        path = await self._begin("delete", path)
        if not path:
            raise StoreError(f"the root of the store {self.url} is not deleted as a tree")
        for name in [p for p in self._files if p.startswith(f"{path}/")]:
            del self._files[name]

    async def free_bytes(self) -> int | None:
        return None if self.capacity is None else max(0, self.capacity - self.used_bytes)

    async def probe(self) -> None:
        await probe(self)

    @property
    def used_bytes(self) -> int:
        return sum(len(f.data) for f in self._files.values())

    def crash(self, *, keep_unsynced: float = 0.0, zeroed: bool = False) -> None:
        """A power cut: of each file's un-synced tail the share `keep_unsynced` stays; `zeroed` keeps its length too."""
        for path, file in list(self._files.items()):
            keep = file.synced + int((len(file.data) - file.synced) * keep_unsynced)
            if zeroed and keep < len(file.data):  # a disk loses whole sectors
                keep = min(keep, max(file.synced, len(file.data) - SECTOR_BYTES))
            lost = len(file.data) - keep
            del file.data[keep:]
            if zeroed:
                file.data += bytes(lost)
            if not file.data and lost:
                del self._files[path]

    def damage(self, path: str, offset: int, data: bytes) -> None:
        """Overwrite bytes in place, as a bad disk would."""
        self._files[path].data[offset : offset + len(data)] = data

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each file under `prefix`."""
        return {p: len(f.data) for p, f in self._files.items() if p.startswith(f"{prefix}/")}

    async def spoil(self, how: str, *paths: str) -> None:
        """Damage files as `how` says: `missing`, `truncated` to a half, or `flipped`, one bit in the middle."""
        for path in paths:
            data = await self.read(path)
            if how == "missing":
                await self.delete(path)
            elif how == "truncated":
                await self.write(path, data[: len(data) // 2], overwrite=True)
            elif how == "flipped":
                self.flip(path, len(data) // 2, 3)
            else:
                raise ValueError(f"{how!r} is not missing, truncated or flipped")

    def flip(self, path: str, offset: int, bit: int) -> None:
        self._files[path].data[offset] ^= 1 << bit

    async def _begin(self, verb: str, path: str) -> str:
        path = clean_path(path)
        if self.delay_s:
            await self.clock.sleep(self.delay_s)
        if self.fault:
            self.fault(verb, path)
        return path

    def _reserve(self, path: str, size: int, replaced: int) -> None:
        if self.capacity is not None and self.used_bytes - replaced + size > self.capacity:
            raise StorageFull(
                f"cannot write {self.absolute(path)}: no space for {size} bytes, "
                f"{self.capacity - self.used_bytes} bytes are free; free space or move the store, writers try again"
            )
