"""The versions that a relay holds in this host's memory, and the arenas for those that come in. No sockets here.

    reserve ──▶ incoming arena ──(a local process writes)──▶ seal: check, digest ──▶ held ──retention──▶ released
    begin   ──▶ incoming arena ──(checked pieces arrive)───▶ complete ────────────────▲
      └─ source: relays after this one make room at once, then read along

`retain` newest versions are kept, then those that claims refer to, newest first, as far as memory allows while two
arenas stay free for what comes in. The local server and the chain both fill arenas through these calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from laminar.errors import WeightsError
from laminar.relay.arena import Arena, ArenaState, check_leases
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.memory import INCOMING, SPARE, check_memory, gib
from laminar.relay.places import kept
from laminar.relay.protocol import VersionInfo
from laminar.relay.receiving import Arriving, Source
from laminar.relay.supply import Supply
from laminar.relay.transport.base import PullRequest, VersionHeader, VersionName

log = logging.getLogger(__name__)
SEAL_GRACE = 1.0
"""Seconds that a seal waits for the writer's mapping to be gone; the kernel gives no event for it."""
SEAL_POLL = 0.005
T = TypeVar("T")


@dataclass
class Held:
    """A sealed version. `holds` counts connections that opened it; the kernel, not this count, guards its memory."""

    info: VersionInfo
    layout: Layout
    checksums: tuple[bytes, ...]
    arena: Arena
    holds: int = 0

    @property
    def name(self) -> VersionName:
        return VersionName(self.info.version, self.info.digest)


class Holdings:
    """`spare` more versions than `retain` fit at least; `memory_share` of the host's memory may be filled with more (0:
    none), while claims refer to them and enough stays free."""

    def __init__(
        self,
        *,
        chunk_bytes: int,
        retain: int,
        spare: int = SPARE,
        memory_share: float = 0.0,
        weights_bytes: int = 0,
        threads: int = 1,
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.retain = retain
        self.spare = spare
        self.threads = threads
        self.supply = Supply(
            minimum=retain + INCOMING + spare,
            share=memory_share,
            weights_bytes=weights_bytes,
            spawn=self._spawn,
            fewer=self._evict,
            failed=self.record_error,
        )
        self.pool = self.supply.pool
        self.retained: frozenset[int] = frozenset()
        self.recent: frozenset[int] = frozenset()
        self.errors: deque[str] = deque(maxlen=16)
        self.refusals = 0
        self.last_refusal = ""
        """Not among the errors: strangers can make as many as they like, and would push out what went wrong here."""
        self.skipped: deque[VersionName] = deque(maxlen=16)
        """Versions that this relay will not have, for want of an arena: nobody should wait for them here."""
        self.fetch_elsewhere: Callable[[VersionName, float], Awaitable[None]] | None = None
        """Brings a version from another relay within some seconds; None where there is no chain."""
        self._held: dict[int, Held] = {}
        self._arriving: dict[VersionName, Arriving] = {}
        self._refusal_logged_at = -1.0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Check the kernel and memory; begin to touch the arenas. Raises ConfigError."""
        await asyncio.to_thread(check_leases)
        if self.supply.weights_bytes:
            check_memory(self.supply.weights_bytes, retain=self.retain, spare=self.spare)
        self.supply.start()

    async def stop(self) -> None:
        """Finish what is being checked or allocated, then let go of all memory; readers keep theirs."""
        await self.supply.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for arriving in list(self._arriving.values()):
            self.abort(arriving, "this relay stops")
        self._held.clear()
        self.pool.close()

    @property
    def newest(self) -> VersionInfo | None:
        return self._held[max(self._held)].info if self._held else None

    def versions(self) -> list[Held]:
        return [self._held[version] for version in sorted(self._held)]

    def get(self, version: int | None) -> Held:
        """Raises WeightsError, naming what is held, if `version` (None: the newest) is not."""
        wanted = max(self._held, default=None) if version is None else version
        if wanted is None:
            raise WeightsError("this relay holds no version yet; wait for one")
        if wanted not in self._held:
            raise WeightsError(f"this relay does not hold version {wanted}; it holds {sorted(self._held)}")
        return self._held[wanted]

    async def reserve(self, layout: Layout) -> Arena | None:
        """An arena for a version that comes in; None if both are in use or memory is short: skip the version."""
        return await self.supply.take(layout.total_bytes)

    def release(self, arena: Arena) -> None:
        """Give back an arena that was reserved and will not be sealed."""
        self.pool.release(arena)

    async def seal(
        self, arena: Arena, layout: Layout, version: int, *, expected: str | None = None, replaces: str = ""
    ) -> VersionInfo:
        """Turn a filled arena into a version. Raises WeightsError, and gives the arena back, if it is still mapped by
        its writer, if its digest is not `expected`, or if the version is held with other bytes. The same bytes again
        are welcome, and bytes of digest `replaces`, which were never published, give way. Survives the cancellation of
        its caller."""
        return await asyncio.shield(self._spawn(self._seal(arena, layout, version, expected, replaces)))

    # -- from other relays --------------------------------------------------------------------------------------

    async def begin(self, header: VersionHeader) -> Arriving | None:
        """Room for a version that comes from another relay; others may read along, and learn of it while there is none
        yet. None if this relay is busy.

        The header must have been checked. Raises WeightsError if the version is here or coming already."""
        if header.name in self._arriving or self.has(header.name):
            raise WeightsError(f"version {header.name} is here or coming already")
        self._arriving[header.name] = arriving = Arriving(header)
        self._notify()
        try:
            arena = await self.reserve(header.layout)
        except BaseException as e:
            self.abort(arriving, f"no arena was made for it: {e!r}")
            raise
        if arena is None:
            self.abort(arriving, "no arena is free for it")
            return None
        if arriving.problem:
            self.release(arena)
            raise WeightsError(f"version {header.name} is not coming any more: {arriving.problem}")
        arriving.lies_in(arena)
        return arriving

    def complete(self, arriving: Arriving) -> VersionInfo:
        """All chunks are there and were checked one by one: the version is held from now on."""
        header = arriving.header
        if not arriving.have.full:
            raise WeightsError(f"version {header.name} is not complete: {arriving.have!r}")
        del self._arriving[header.name]
        layout = header.layout
        info = VersionInfo(header.name.version, header.name.digest, layout.digest, layout.total_bytes)
        known = self._held.get(info.version)
        if known is not None and known.info == info:
            # Offered by a local process while it came: the arena goes back, readers keep theirs.
            self.release(arriving.arena)
            return info
        if known is not None:
            self.discard(info.version)
        self._hold(Held(info, layout, header.checksums, arriving.arena))
        return info

    def abort(self, arriving: Arriving, reason: str, *, skip: bool = False) -> None:
        """The version will not be completed; with `skip`, relays that ask for it are sent elsewhere."""
        self._arriving.pop(arriving.header.name, None)
        arriving.give_up(reason)
        if skip:
            self.skip(arriving.header.name)
        if arriving.has_arena:
            self.release(arriving.arena)
        self._notify()

    async def fetch(self, name: VersionName, timeout_s: float) -> None:
        """Have a version here that another relay holds. Raises WeightsError if none does, or not in time."""
        if self.has(name):
            return
        if self.fetch_elsewhere is None:
            raise WeightsError(f"version {name} is not here, and this relay reaches no other")
        await self.fetch_elsewhere(name, timeout_s)

    def skip(self, name: VersionName) -> None:
        self.skipped.append(name)
        self._notify()

    def discard(self, version: int) -> None:
        """Let go of a version that was never published under the digest it has here."""
        held = self._held.pop(version)
        log.warning("released version=%s: it was never published with this digest", held.name)
        self.pool.release(held.arena)

    def has(self, name: VersionName) -> bool:
        held = self._held.get(name.version)
        return held is not None and held.name == name

    async def find(self, request: PullRequest) -> Source:
        """The newest acceptable version that is held or arriving; waits for one that is still to come.

        Raises WeightsError if none will: it was skipped, or is older than what this relay has."""
        while True:
            for name in sorted(request.acceptable, reverse=True):
                held = self._held.get(name.version)
                if held is not None and held.name == name:
                    return self._compared(self._read(held), request.base)
                if name in self._arriving and not request.held_only:
                    return self._compared(self._arriving[name].open(), request.base)
            to_come = [name for name in request.acceptable if self._may_come(name)]
            if request.held_only or not to_come:
                wanted = ", ".join(str(name) for name in request.acceptable)
                raise WeightsError(f"version {wanted} is not here; held are {sorted(self._held)}")
            await self._changed.wait()

    def read_newest(self) -> Source | None:
        """The newest version, kept until the source is closed."""
        return self._read(self._held[max(self._held)]) if self._held else None

    def _compared(self, source: Source, base: VersionName | None) -> Source:
        """With the base to which the asker takes differences, if it is here too."""
        held = self._held.get(base.version) if base else None
        if held is not None and held.name == base and held.layout.digest == source.header.layout.digest:
            source.compare_with(self._read(held))
        return source

    def _may_come(self, name: VersionName) -> bool:
        return name not in self.skipped and name.version > max(self._held, default=-1)

    def _read(self, held: Held) -> Source:
        def closed() -> None:
            held.holds -= 1

        held.holds += 1
        header = VersionHeader(held.name, held.layout, self.chunk_bytes, held.checksums)
        return Source(Arriving(header, held.arena, complete=True), closed=closed)

    # -- retention ----------------------------------------------------------------------------------------------

    def retain_versions(self, versions: Collection[int], recent: Collection[int] = ()) -> None:
        """Replace the set of versions that claims refer to, and that of those to which some may that nobody has told of
        yet: these stay while there is room for more than what is known to be needed."""
        self.retained, self.recent = frozenset(versions), frozenset(recent)
        self._evict()

    async def wait(self, newer_than: int, timeout: float) -> VersionInfo | None:
        """The newest version once it is newer than `newer_than`; None after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while (newest := self.newest) is None or newest.version <= newer_than:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return newest

    def record_error(self, message: str) -> None:
        log.warning("relay error: %s", message)
        self.errors.append(message)

    def record_refusal(self, message: str) -> None:
        """A stranger, or nonsense: counted always, logged at most once a second, since there may be many."""
        self.refusals += 1
        self.last_refusal = message
        now = asyncio.get_running_loop().time()
        if now - self._refusal_logged_at >= 1.0:
            self._refusal_logged_at = now
            log.warning("relay refusal number %d: %s", self.refusals, message)

    def validate(self) -> None:
        """Raises AssertionError if versions and arenas disagree."""
        serving = [arena for arena in self.pool.arenas if arena.state is ArenaState.SERVING]
        incoming = {id(arena) for arena in self.pool.arenas if arena.state is ArenaState.INCOMING}
        assert {id(arriving.arena) for arriving in self._arriving.values() if arriving.has_arena} <= incoming
        assert {id(a) for a in serving} == {id(h.arena) for h in self._held.values()}
        self.supply.validate()
        assert all(v == h.info.version and h.info.bytes <= h.arena.capacity for v, h in self._held.items())

    async def _seal(
        self, arena: Arena, layout: Layout, version: int, expected: str | None, replaces: str
    ) -> VersionInfo:
        try:
            await self._writer_gone(arena, version)
            sums = await asyncio.to_thread(self._finish, arena, layout)
            info = VersionInfo(version, version_digest(layout, sums), layout.digest, layout.total_bytes)
            if expected is not None and info.digest != expected:
                raise WeightsError(f"version {version} came in as {info.digest[:12]}, promised was {expected[:12]}")
            known = self._held.get(version)
            if known is not None and known.info != info and known.info.digest == replaces:
                self.discard(version)
                known = None
            if known is not None and known.info != info:
                raise WeightsError(
                    f"version {version} is held with digest {known.info.digest[:12]}; {info.digest[:12]} is refused: "
                    "a version has one digest for ever, publish other bytes under another number"
                )
        except Exception as e:
            # Whatever it is: an arena that stays incoming would be lost for ever, and there are few.
            self.release(arena)
            if isinstance(e, WeightsError):
                self.record_error(str(e))
            raise
        if known is not None:
            self.release(arena)
            return info
        self._hold(Held(info, layout, tuple(sums), arena))
        return info

    def _hold(self, held: Held) -> None:
        held.arena.move(ArenaState.SERVING)
        self._held[held.info.version] = held
        log.info("holds version=%d digest=%s bytes=%d", held.info.version, held.info.digest[:12], held.info.bytes)
        self._evict(just_sealed=held.info.version)
        self._notify()
        self.supply.refill()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _writer_gone(self, arena: Arena, version: int) -> None:
        for _ in range(round(SEAL_GRACE / SEAL_POLL)):
            if arena.is_exclusive():
                return
            await asyncio.sleep(SEAL_POLL)
        raise WeightsError(
            f"version {version} cannot be sealed: after {SEAL_GRACE} s a process still has its arena open or mapped; "
            "unmap it (in forked children too) before seal"
        )

    def _finish(self, arena: Arena, layout: Layout) -> list[bytes]:
        """Gaps may hold bytes of an earlier version in this arena; equal tensors must give equal digests."""
        with arena.buffer(layout.total_bytes) as buffer:
            for offset, nbytes in layout.gaps():
                buffer[offset : offset + nbytes] = bytes(nbytes)
            return checksums(buffer, self.chunk_bytes, threads=self.threads)

    def _evict(self, just_sealed: int | None = None) -> None:
        room = self.pool.limit - INCOMING
        keep = kept(
            self._held, newest=self.retain, wanted=self.retained, first=just_sealed, room=room, recent=self.recent
        )
        for version in sorted(self._held.keys() - keep):
            if version in self.retained:
                size = gib(self._held[version].arena.capacity)
                self.record_error(
                    f"version {version} is claimed but let go: this relay has memory for {room} versions of {size} and "
                    f"{INCOMING} incoming ones ({self.supply.places.why})"
                )
            log.info("released version=%d", version)
            self.pool.release(self._held.pop(version).arena)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, WeightsError):
            self.record_error(f"internal error: {failure!r}")
            log.error("a relay task failed", exc_info=failure)
