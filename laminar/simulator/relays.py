"""The relay's real holdings without its socket: other processes on the host call them directly.

A reservation goes with the process that made it, as it goes with its connection in `relay.server`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from laminar.relay.arena import Arena
from laminar.relay.client import HeldVersion, RelayStatus
from laminar.relay.holdings import Holdings
from laminar.relay.layout import Layout
from laminar.relay.protocol import RelayUnavailable, VersionInfo
from laminar.relay.transport.base import VersionName
from laminar.relay.writing import Invitation
from laminar.simulator.process import SimProcess

T = TypeVar("T")
CHUNK_BYTES = 4096
CALL_S = 10.0
DELAY_S = 0.001


class SimWeights:
    """What a simulated relay serves; in `switchboard` while it lives."""

    def __init__(self, process: SimProcess, run: str, retain: int, switchboard: dict[str, SimWeights]) -> None:
        self.process = process
        self.run = run
        self.endpoint = f"unix:/sim/{process.name}"
        self.holdings = Holdings(chunk_bytes=CHUNK_BYTES, retain=retain)
        self._switchboard = switchboard

    async def __aenter__(self) -> Self:
        await self.holdings.start()
        self._switchboard[self.endpoint.removeprefix("unix:")] = self
        self.process.on_death.append(self.gone)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._switchboard.pop(self.endpoint.removeprefix("unix:"), None)
        await self.holdings.stop()

    def gone(self) -> None:
        """The process died: its memory goes with it."""
        self._switchboard.pop(self.endpoint.removeprefix("unix:"), None)
        arenas, self.holdings.pool.arenas = self.holdings.pool.arenas, []
        for arena in arenas:
            try:
                arena.close()
            except BufferError:
                # Its own unfinished calls still look at it; they go at the end of the simulation.
                os.close(arena.fd)


class SimArena:
    """A reservation of one process. It fills memory of its own, which the seal copies: a mapping that goes with it."""

    def __init__(self, arena: Arena, layout: Layout, release: Callable[[], None]) -> None:
        self.arena = arena
        self.layout = layout
        self.release = release
        self.buffer = memoryview(bytearray(layout.total_bytes))
        self.invitation: Invitation | None = None

    def drop(self) -> None:
        self.release()


@dataclass(frozen=True)
class SimKept:
    """A version's bytes as its mapping keeps them: the relay's death does not touch them."""

    info: VersionInfo
    layout: Layout
    buffer: memoryview

    def close(self) -> None:
        self.buffer.release()


class SimRelayAccess:
    """One process's way to the relay at `path`."""

    def __init__(self, process: SimProcess, path: str, switchboard: dict[str, SimWeights]) -> None:
        self.process = process
        self.path = path
        self.switchboard = switchboard

    async def status(self) -> RelayStatus:
        async def status(relay: SimWeights) -> RelayStatus:
            held = tuple(HeldVersion(h.info, h.holds, False) for h in relay.holdings.versions())
            newest = relay.holdings.newest
            return RelayStatus(
                run=relay.run, boot=relay.process.name, newest=newest.version if newest else None, versions=held,
                arenas={}, retained=tuple(sorted(relay.holdings.retained)), errors=tuple(relay.holdings.errors),
                refusals=relay.holdings.refusals, last_refusal=relay.holdings.last_refusal,
            )  # fmt: skip

        return await self._call(status)

    async def reserve(self, layout: Layout, *, writers: int = 1) -> SimArena | None:
        assert writers == 1, "a simulated learner is one process"

        async def reserve(relay: SimWeights) -> SimArena | None:
            arena = await relay.holdings.reserve(layout)
            if arena is None:
                return None

            def release() -> None:
                if not relay.process.dead:
                    relay.holdings.release(arena)

            if self.process.dead:
                release()
                return None
            self.process.on_death.append(release)
            return SimArena(arena, layout, release)

        return await self._call(reserve)

    async def seal(self, arena: SimArena, version: int, *, wrote: int = 0, replaces: str = "") -> VersionInfo:
        async def seal(relay: SimWeights) -> VersionInfo:
            if arena.release in self.process.on_death:
                self.process.on_death.remove(arena.release)
            arena.arena.buffer(arena.layout.total_bytes)[:] = arena.buffer
            return await relay.holdings.seal(arena.arena, arena.layout, version, replaces=replaces)

        return await self._call(seal)

    async def open(self, version: int) -> SimKept:
        info, layout, content = await self.read(version)
        return SimKept(info, layout, memoryview(content))

    async def fetch(self, version: int, digest: str, timeout_s: float) -> None:
        async def fetch(relay: SimWeights) -> None:
            await relay.holdings.fetch(VersionName(version, digest), timeout_s)

        return await self._call(fetch)

    async def read(self, version: int) -> tuple[VersionInfo, Layout, bytes]:
        """All bytes of a version, as a mapping of it would show them."""

        async def read(relay: SimWeights) -> tuple[VersionInfo, Layout, bytes]:
            held = relay.holdings.get(version)
            return held.info, held.layout, bytes(held.arena.buffer(held.layout.total_bytes))

        return await self._call(read)

    async def _call(self, call: Callable[[SimWeights], Coroutine[Any, Any, T]]) -> T:
        async def made() -> T:
            await asyncio.sleep(DELAY_S)
            relay = self.switchboard.get(self.path)
            if relay is None:
                raise RelayUnavailable(f"relay at {self.path}: nobody answers; is it running?")
            try:
                async with asyncio.timeout(CALL_S):
                    return await relay.process.ask(lambda: call(relay))
            except (OSError, TimeoutError) as e:
                raise RelayUnavailable(f"relay at {self.path}: {e!r} (limit {CALL_S} s)") from e

        return await self.process.gate(made)
