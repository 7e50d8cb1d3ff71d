"""Arenas for what comes in: allocated and touched ahead, as many as memory has room for, given back when it has not.

    take ──▶ a free arena, else a new one ──▶ top_up: two stay free or incoming ──▶ allocated in a thread
    look (every `LOOK_S`) ──▶ places ──▶ fewer: versions go, free arenas are given back

The minimum (`retain` + incoming + spare) is what a relay needs; memory for it was checked at start. What lies beyond
comes one by one, when claims want it, and goes again. No allocation relies on an earlier look: see `Arena.create`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from laminar.errors import WeightsError
from laminar.relay import memory
from laminar.relay.arena import Arena, ArenaPool, ArenaState, arena_bytes
from laminar.relay.hindrance import kind
from laminar.relay.memory import INCOMING, Scope
from laminar.relay.places import RESERVE, Places, places

log = logging.getLogger(__name__)
LOOK_S = 2.0
"""Seconds between two looks at memory: other processes may want what versions fill."""

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Supply:
    """`fewer`: called when versions must go, as there are fewer places; `failed`: told what went wrong."""

    def __init__(
        self,
        *,
        minimum: int,
        share: float,
        weights_bytes: int,
        spawn: Spawn,
        fewer: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self.minimum = minimum
        self.share = share
        self.weights_bytes = weights_bytes
        self.pool = ArenaPool(minimum)
        self.places = places(0, minimum=minimum, mapped=0, scopes=(), share=share)
        self._spawn = spawn
        self._fewer = fewer
        self._failed = failed
        self.problem = ""
        """Why the arena that was wanted last could not be allocated."""
        self._told: set[str] = set()
        """Kinds of problems told since an arena was allocated: what comes in tries again and again."""
        self._growing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.weights_bytes:
            self.refill()
        if self.share > 0:
            self._looking = self._spawn(self._look())

    async def stop(self) -> None:
        """No more looks; the owner waits for what it spawned, then closes the pool."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def validate(self) -> None:
        """Raises AssertionError if the pool disagrees with its places."""
        assert self.pool.limit >= self.minimum
        assert self.pool.count(ArenaState.SERVING) + INCOMING <= self.pool.limit
        assert self.pool.count(ArenaState.INCOMING) <= INCOMING

    async def take(self, nbytes: int) -> Arena | None:
        """An arena that fits `nbytes`, now incoming; None if both are in use, or with a `problem` if there is one."""
        self.problem = ""
        if nbytes > self.weights_bytes:
            self.weights_bytes = nbytes
            if self.share > 0:
                await self._fit_now()
        usual = self.weights_bytes
        while self.pool.count(ArenaState.INCOMING) < INCOMING:
            arena = self.pool.take(nbytes)
            if arena is not None:
                self.refill()
                return arena
            if self._growing is None and not self._may_create(usual):
                break
            if not await self._grow(usual):
                # What went for want of memory has left its place to this one.
                return self.pool.take(nbytes)
        return None

    def refill(self) -> None:
        """Keep two arenas free or incoming, so that a publish finds touched memory."""
        self._spawn(self._top_up())

    def fit(self, scopes: Sequence[Scope]) -> None:
        """Follow what memory has room for. Not while an arena is being allocated: part of it is counted nowhere."""
        if self.pool.creating == 0:
            size, mapped = arena_bytes(self.weights_bytes), sum(arena.capacity for arena in self.pool.arenas)
            self._limit(places(size, minimum=self.minimum, mapped=mapped, scopes=scopes, share=self.share))

    def _limit(self, found: Places) -> None:
        before, self.places, self.pool.limit = self.pool.limit, found, found.count
        if found.count != before:
            log.debug("places=%d before=%d: %s", found.count, before, found.why)
        if found.count < before:
            self._fewer()
        self._free(self.pool.surplus(self.minimum))

    def _free(self, arenas: list[Arena]) -> None:
        # Gibibytes take their time to free: not in the loop, whose silence other relays take for death.
        if arenas:
            self._spawn(asyncio.to_thread(_close, arenas))

    def _may_create(self, nbytes: int) -> bool:
        """Whether one more arena is allowed, in place of free ones that are too small; else those go all the same."""
        if self.pool.may_create(nbytes):
            return True
        self._free(self.pool.outgrown(nbytes))
        return False

    async def _look(self) -> None:
        while True:
            if self.weights_bytes:
                await self._fit_now()
            await asyncio.sleep(LOOK_S)

    async def _fit_now(self) -> None:
        try:
            found = await asyncio.to_thread(memory.scopes)
        except (OSError, RuntimeError) as e:  # no descriptor, or no thread
            self._tell(f"memory cannot be looked at, {self.pool.limit} versions stay the most: {e}")
        else:
            self.fit(found)

    async def _top_up(self) -> None:
        while True:
            self.pool.reclaim()
            size = self.weights_bytes
            ready = sum(a.state is ArenaState.FREE and a.capacity >= size for a in self.pool.arenas)
            if ready + self.pool.count(ArenaState.INCOMING) >= INCOMING:
                return
            if self._growing is None and not self._may_create(size):
                return
            if not await self._grow(size):
                return

    async def _grow(self, size: int) -> bool:
        """Allocate one arena, or wait for the one being allocated. False if that failed (told)."""
        if self._growing is None:
            self._growing = self._spawn(self._create(size, self.pool.outgrown(size)))
        growing = self._growing
        try:
            await asyncio.shield(growing)
        except WeightsError:
            return False
        return True

    async def _create(self, size: int, outgrown: list[Arena]) -> None:
        beyond = len(self.pool.arenas) >= self.minimum
        self.pool.creating += 1
        try:
            self.pool.arenas.append(await self._allocated(size, RESERVE if beyond else 0.0, outgrown))
            self._told.clear()
        except WeightsError as e:
            self.problem = str(e)
            self._tell(self.problem)
            if beyond:
                # Memory went meanwhile. What comes in goes before what claims refer to.
                self._limit(Places(len(self.pool.arenas), f"no arena can be added: {e}"))
            raise
        finally:
            self.pool.creating -= 1
            self._growing = None

    async def _allocated(self, size: int, reserve: float, outgrown: list[Arena]) -> Arena:
        try:
            return await asyncio.to_thread(_replace, outgrown, size, reserve)
        except RuntimeError as e:
            _close(outgrown)
            raise WeightsError(f"cannot allocate an arena of {size} bytes: {e}; let this user have more threads") from e

    def _tell(self, problem: str) -> None:
        if kind(problem) not in self._told:
            self._told.add(kind(problem))
            self._failed(problem)


def _replace(outgrown: list[Arena], size: int, reserve: float) -> Arena:
    """Close some, then allocate one: their memory may be needed for it. Raises WeightsError."""
    _close(outgrown)
    return Arena.create(size, reserve=reserve)


def _close(arenas: list[Arena]) -> None:
    """None is left in the list, nor closed twice should another thread have begun with it."""
    while arenas:
        arenas.pop().close()
