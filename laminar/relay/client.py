"""How a process on the relay's host reaches its versions. The core blocks; `AsyncRelayClient` wraps it.

    with RelayConnection(path).open(None) as mapped:    the newest version, mapped read-only
        tensors = views(mapped.buffer, mapped.layout)

    arena = RelayConnection(path).reserve(layout)       None: the relay is busy, skip this version
    copy_into(arena.buffer, layout, tensors)            the only copy, and all that a trainer waits for
    info = arena.seal(version)

Each call makes its own connection, so that a restarted relay (which holds nothing) needs no care. A reservation and
a mapped version keep theirs: it tells the relay that they are alive. Raises RelayUnavailable if no relay answers in
time, WeightsError for what the relay refuses.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from laminar.errors import WeightsError
from laminar.relay.layout import Layout, verify
from laminar.relay.mapping import SharedMapping
from laminar.relay.protocol import (
    HEADER,
    MAX_VERSION,
    MAX_WAIT,
    PROTOCOL,
    Message,
    ProtocolError,
    RelayUnavailable,
    VersionInfo,
    checked_reply,
    checked_socket_path,
    decode,
    encode,
    frame_length,
    integer,
    text,
)
from laminar.relay.writing import SLOWEST_BYTES, Invitation, JoinedArena, WritableArena, close_mapping


@dataclass(frozen=True)
class HeldVersion:
    """`holds`: connections that opened it; `mapped`: some process still has its memory."""

    info: VersionInfo
    holds: int
    mapped: bool


@dataclass(frozen=True)
class RelayStatus:
    """`boot` is new at each start of the relay; `arenas` counts them by state; `errors` are the last ones. `refusals`:
    connections that were refused, and why the last one was."""

    run: str
    boot: str
    newest: int | None
    versions: tuple[HeldVersion, ...]
    arenas: dict[str, int]
    retained: tuple[int, ...]
    errors: tuple[str, ...]
    refusals: int
    last_refusal: str


class RelayConnection:
    """`run`, if given, must be the relay's. `timeout`: seconds for a call, beside what its bytes need."""

    def __init__(self, socket_path: str | Path, *, run: str = "", timeout: float = 10.0) -> None:
        self.socket_path = checked_socket_path(socket_path)
        self.run = run
        self.timeout = timeout

    def status(self) -> RelayStatus:
        reply, _ = self._once({"command": "status"}, self.timeout)
        held = [HeldVersion(_version(row), row["holds"], row["mapped"]) for row in reply["versions"]]
        return RelayStatus(
            run=reply["run"],
            boot=reply["boot"],
            newest=reply["newest"],
            versions=tuple(held),
            arenas=reply["arenas"],
            retained=tuple(reply["retained"]),
            errors=tuple(reply["errors"]),
            refusals=reply["refusals"],
            last_refusal=reply["last_refusal"],
        )

    def versions(self) -> list[VersionInfo]:
        """What the relay holds, oldest first."""
        return [held.info for held in self.status().versions]

    def reserve(self, layout: Layout, *, writers: int = 1) -> WritableArena | None:
        """Memory for a version of this layout; None if the relay has no free arena. May be called ahead of need.
        `writers`: processes of this host that fill it together, with this one; the others `join`."""
        wire = _Wire(self.socket_path, self.run, self.timeout)
        try:
            request = {"command": "reserve", "layout": layout.to_json(), "writers": writers}
            reply, fd = wire.call(request, self.timeout + layout.total_bytes / SLOWEST_BYTES)
            if fd is None:
                wire.close()
                return None
            mapping = _map(fd, layout.total_bytes, writable=True)
            invitation = Invitation(str(self.socket_path), self.run, text(reply, "ticket", 64))
            return WritableArena(layout, mapping, wire, self.timeout, invitation)
        except BaseException:
            wire.close()
            raise

    def join(self, ticket: str, layout: Layout) -> JoinedArena:
        """The memory that another process has reserved for several, which gave this `ticket`. Raises WeightsError if it
        was sealed or given up, or is of another layout."""
        wire = _Wire(self.socket_path, self.run, self.timeout)
        try:
            reply, fd = wire.call({"command": "join", "ticket": ticket}, self.timeout)
            if fd is None:
                raise ProtocolError("the relay let this process join an arena without a descriptor")
            mapping = _map(fd, layout.total_bytes, writable=True)
            if (found := text(reply, "layout_digest", 128)) != layout.digest:
                raise WeightsError(
                    f"the arena is of layout {found[:12]}, this writer's is {layout.digest[:12]}: all that write a "
                    "version need the same model and dtype"
                )
            return JoinedArena(layout, mapping, wire, self.timeout)
        except BaseException:
            wire.close()
            raise

    def open(self, version: int | None = None) -> MappedVersion:
        """Map `version` (None: the newest) read-only. Raises WeightsError if the relay does not hold it."""
        wire = _Wire(self.socket_path, self.run, self.timeout)
        try:
            reply, fd = wire.call({"command": "open", "version": version}, self.timeout)
            if fd is None:
                raise ProtocolError("the relay opened a version without a descriptor")
            info, layout = _version(reply["version"]), Layout.from_json(reply["layout"])
            chunk_bytes = integer(reply, "chunk_bytes", 1, MAX_VERSION)
            return MappedVersion(info, layout, chunk_bytes, _map(fd, layout.total_bytes, writable=False), wire)
        except BaseException:
            wire.close()
            raise

    def wait(self, newer_than: int, timeout_s: float) -> VersionInfo | None:
        """The newest version once it is newer than `newer_than` (-1: any); None after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(MAX_WAIT, deadline - time.monotonic()))
            request = {"command": "wait", "newer_than": newer_than, "timeout": left}
            reply, _ = self._once(request, left + self.timeout)
            if reply["version"] is not None:
                return _version(reply["version"])
            if time.monotonic() >= deadline:
                return None

    def retain(self, versions: Collection[int]) -> None:
        """Replace the set of versions that the relay keeps beside its newest ones."""
        self._once({"command": "retain", "versions": sorted(versions)}, self.timeout)

    def fetch(self, version: int, digest: str, timeout_s: float) -> None:
        """Have the relay get a version from another one, if it does not hold it. Raises WeightsError if it cannot."""
        request = {"command": "fetch", "version": version, "digest": digest, "timeout": timeout_s}
        self._once(request, timeout_s + self.timeout)

    def _once(self, request: Message, timeout: float) -> tuple[Message, int | None]:
        wire = _Wire(self.socket_path, self.run, self.timeout)
        try:
            return wire.call(request, timeout)
        finally:
            wire.close()


class MappedVersion:
    """A version mapped read-only; its memory stays as it is until `close`, whatever the relay does or suffers."""

    def __init__(
        self, info: VersionInfo, layout: Layout, chunk_bytes: int, mapping: SharedMapping, wire: _Wire
    ) -> None:
        self.info = info
        self.version = info.version
        self.digest = info.digest
        self.layout = layout
        self.chunk_bytes = chunk_bytes
        self.buffer = mapping.buffer
        self._mapping = mapping
        self._wire = wire

    def verify(self, *, threads: int = 1) -> None:
        """Check every byte against the digest. The relay did so once; raises WeightsError if they differ now."""
        verify(self.buffer, self.layout, self.chunk_bytes, self.digest, threads=threads)

    def close(self) -> None:
        """Raises WeightsError if tensors over `buffer` are still alive."""
        close_mapping(self._mapping, f"version {self.version}")
        self._wire.close()

    def __enter__(self) -> MappedVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._wire.close()


class AsyncRelayClient:
    """The same calls for asyncio; all but `wait` run in a thread."""

    def __init__(self, socket_path: str | Path, *, run: str = "", timeout: float = 10.0) -> None:
        self.connection = RelayConnection(socket_path, run=run, timeout=timeout)

    async def status(self) -> RelayStatus:
        return await asyncio.to_thread(self.connection.status)

    async def versions(self) -> list[VersionInfo]:
        return await asyncio.to_thread(self.connection.versions)

    async def reserve(self, layout: Layout, *, writers: int = 1) -> WritableArena | None:
        return await asyncio.to_thread(self.connection.reserve, layout, writers=writers)

    async def seal(
        self, arena: WritableArena, version: int, *, wrote: int = 0, replaces: str = ""
    ) -> VersionInfo:
        return await asyncio.to_thread(arena.seal, version, wrote=wrote, replaces=replaces)

    async def open(self, version: int | None = None) -> MappedVersion:
        return await asyncio.to_thread(self.connection.open, version)

    async def retain(self, versions: Collection[int]) -> None:
        await asyncio.to_thread(self.connection.retain, versions)

    async def fetch(self, version: int, digest: str, timeout_s: float) -> None:
        await asyncio.to_thread(self.connection.fetch, version, digest, timeout_s)

    async def wait(self, newer_than: int, timeout_s: float) -> VersionInfo | None:
        """As `RelayConnection.wait`; holds no thread while it waits, and can be cancelled at any time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left = max(0.0, min(MAX_WAIT, deadline - loop.time()))
            request = {"command": "wait", "newer_than": newer_than, "timeout": left}
            reply = await self._exchange(request, left + self.connection.timeout)
            if reply["version"] is not None:
                return _version(reply["version"])
            if loop.time() >= deadline:
                return None

    async def _exchange(self, request: Message, timeout: float) -> Message:
        path = self.connection.socket_path
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_unix_connection(str(path))
                try:
                    for message in (_hello(self.connection.run), request):
                        writer.write(encode(message))
                        await writer.drain()
                        length = frame_length(await reader.readexactly(HEADER.size))
                        reply = checked_reply(decode(await reader.readexactly(length)))
                    return reply
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError) as e:
            raise _unavailable(path, request, timeout, e) from e


class _Wire:
    """One blocking connection that has said hello; all its waits have deadlines."""

    def __init__(self, path: Path, run: str, timeout: float) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._sock.settimeout(timeout)
            self._sock.connect(str(path))
        except OSError as e:
            self._sock.close()
            raise _unavailable(path, {"command": "connect"}, timeout, e) from e
        try:
            self.call(_hello(run), timeout)
        except BaseException:
            self.close()
            raise

    def call(self, request: Message, timeout: float) -> tuple[Message, int | None]:
        """The checked reply, and the descriptor that came with it: the caller closes it."""
        deadline = time.monotonic() + timeout
        fds: list[int] = []
        try:
            self._sock.settimeout(timeout)
            self._sock.sendall(encode(request))
            header = self._exactly(HEADER.size, deadline, fds)
            reply = checked_reply(decode(self._exactly(frame_length(header), deadline, fds)))
            if len(fds) > 1:
                raise ProtocolError(f"the relay sent {len(fds)} descriptors with one reply")
            return reply, fds.pop() if fds else None
        except (OSError, EOFError) as e:
            raise _unavailable(self._path, request, timeout, e) from e
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self._sock.close()

    def _exactly(self, count: int, deadline: float, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._sock.settimeout(left)
            part, control, _, _ = self._sock.recvmsg(
                min(count - len(data), 1 << 20), socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += memoryview(payload[: len(payload) // 4 * 4]).cast("i").tolist()
            if not part:
                raise EOFError(f"the relay closed the connection after {len(data)} of {count} bytes")
            data += part
        return bytes(data)


def _hello(run: str) -> Message:
    return {"command": "hello", "protocol": PROTOCOL, "run": run}


def _version(data: object) -> VersionInfo:
    return VersionInfo.from_json(data)


def _unavailable(path: Path, request: Message, timeout: float, error: Exception) -> RelayUnavailable:
    what = "did not answer in time" if isinstance(error, TimeoutError) else f"failed: {error}"
    return RelayUnavailable(f"relay at {path}: {request['command']!r} {what} (limit {timeout:.1f} s); is it running?")


def _map(fd: int, nbytes: int, *, writable: bool) -> SharedMapping:
    """Map all of `fd` and close it: the mapping alone keeps the memory."""
    try:
        mapping = SharedMapping(fd, nbytes, writable=writable)
    except OSError as e:
        raise WeightsError(f"cannot map {nbytes} bytes of the relay's memory: {e}") from e
    finally:
        os.close(fd)
    if writable:
        mapping.populate()
    return mapping
