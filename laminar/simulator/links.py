"""Twins of the relays' transports: connections between simulated processes, with delay, loss and silence.

    asker's process ── connect, FIND, FETCH ──▶ SimWire ──▶ server's process: real `ChunkSource`
    asker's process ◀── HEADER, pieces, signs of life ───── SimWire

A process that dies ends its connections at once, a host that dies falls silent, and so does a process that is stopped.
Nothing is lost within a connection that goes on: what a cut holds back comes when it is mended. With `writes_itself`,
as RDMA does, a piece's bytes lie in the asker's arena without its doing, also while it is stopped; closing the link is
what keeps a late one out.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.receiving import Source
from laminar.relay.transport.base import (
    HEARTBEAT_S,
    ChunkSource,
    FabricFailed,
    FindSource,
    Landed,
    LinkBroken,
    PeerRefused,
    PullRequest,
    VersionHeader,
)
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.process import SimProcess

Message = tuple[str, Any]
T = TypeVar("T")
WORDS_BYTES = 200
"""What a message takes on a link beside the bytes of a piece."""


class SimNetwork:
    """All hosts reach each other. `delay_s`: range of a message's delay; `rate`: bytes a second of each connection.

    `silent`: hosts that nothing comes from or reaches; while `fabric_broken` no device reaches another."""

    def __init__(
        self, loop: SimulationLoop, source: random.Random, *, delay_s: tuple[float, float], rate: float
    ) -> None:
        self.loop = loop
        self.source = source
        self.delay_s = delay_s
        self.rate = rate
        self.silent: set[str] = set()
        self.fabric_broken = False
        self.listening: dict[str, SimTransport] = {}
        self.wires: list[SimWire] = []

    def silence(self, name: str) -> None:
        self.silent.add(name)

    def mend(self, name: str) -> None:
        """What was under way comes now."""
        self.silent.discard(name)
        for wire in list(self.wires):
            wire.deliver()

    def reset(self, name: str) -> None:
        """All connections of a host end, as when something on the way forgets them."""
        for wire in [w for w in self.wires if name in w.ends]:
            wire.end(f"the connection of {wire.ends[0]} and {wire.ends[1]} was reset")


class SimWire:
    """One connection. Each end reads in order; the delay of a message holds back those behind it."""

    def __init__(self, network: SimNetwork, asker: SimProcess, server: SimProcess) -> None:
        self.network = network
        self.ends = (asker.name, server.name)
        self.problem = ""
        self._coming: dict[str, deque[tuple[float, Message]]] = {asker.name: deque(), server.name: deque()}
        self._came: dict[str, deque[Message]] = {asker.name: deque(), server.name: deque()}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._free_at: dict[str, float] = {asker.name: 0.0, server.name: 0.0}
        self.landing: Callable[[Any], None] | None = None
        """Takes a piece's bytes as they arrive, without the asker's doing."""
        self._deaths = [(process, self._died(process)) for process in (asker, server)]
        for process, callback in self._deaths:
            process.on_death.append(callback)
        network.wires.append(self)

    def _died(self, process: SimProcess) -> Callable[[], None]:
        def died() -> None:
            # The dead one's kernel ends its connections; of a host that went with it nobody hears.
            if process.name not in self.network.silent:
                self.network.loop.call_later(self._delay(), self.end, f"{process.name} died")

        return died

    def send(self, to: str, message: Message, nbytes: int = 0) -> float:
        """When `message` will be there; it takes its turn behind what was sent before."""
        now = self.network.loop.now
        begins = max(now, self._free_at[to])
        self._free_at[to] = ends = begins + (nbytes + WORDS_BYTES) / self.network.rate
        due = ends + self._delay()
        self._coming[to].append((due, message))
        self.network.loop.outside(lambda: self.network.loop.call_later(due - now, self.deliver))
        return ends

    def deliver(self) -> None:
        """Hand over what is due, unless one of the hosts is silent."""
        if self.problem or not self.network.silent.isdisjoint(self.ends):
            return
        for end, coming in self._coming.items():
            while coming and coming[0][0] <= self.network.loop.now + 1e-9:
                _, message = coming.popleft()
                if message[0] == "piece" and self.landing is not None:
                    if self.network.fabric_broken:
                        message = ("failed", None)
                    else:
                        self.landing(message[1])
                self._came[end].append(message)
                self._wake(end)

    def end(self, problem: str) -> None:
        """Both ends learn it, once they have read what came before."""
        if not self.problem:
            self.problem = problem
            self.landing = None
            for process, callback in self._deaths:
                if callback in process.on_death:
                    process.on_death.remove(callback)
            self.network.wires.remove(self)
            for end in self.ends:
                self._wake(end)

    async def receive(self, end: str, silence_s: float) -> Message:
        """The next message for `end`. Raises LinkBroken after `silence_s` without any."""
        while not self._came[end]:
            if self.problem:
                raise LinkBroken(self.problem)
            self._waiting[end] = waiting = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(silence_s):
                    await waiting
            except TimeoutError:
                raise LinkBroken(f"{_other(self.ends, end)} said nothing for {silence_s:g} s") from None
        return self._came[end].popleft()

    def _wake(self, end: str) -> None:
        waiting = self._waiting.pop(end, None)
        if waiting is not None and not waiting.done():
            self.network.loop.outside(lambda: waiting.set_result(None))

    def _delay(self) -> float:
        return self.network.source.uniform(*self.network.delay_s)


def _other(ends: tuple[str, str], end: str) -> str:
    return ends[1] if end == ends[0] else ends[0]


class SimTransport:
    """As `transport.base.Transport`, for one simulated process."""

    def __init__(
        self, process: SimProcess, network: SimNetwork, *, name: str, stall_s: float, writes_itself: bool = False
    ) -> None:
        self.name = name
        self.process = process
        self.network = network
        self.stall_s = stall_s
        self.writes_itself = writes_itself
        self._find: FindSource | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, find: FindSource) -> str:
        self._find = find
        endpoint = f"{self.process.name}:{1 + self.writes_itself}"
        self.network.listening[endpoint] = self

        def died() -> None:
            self.network.listening.pop(endpoint, None)

        self.process.on_death.append(died)
        return endpoint

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> SimLink:
        began = asyncio.get_running_loop().time()
        if self.writes_itself and self.network.fabric_broken:
            raise FabricFailed(f"{relay} is not reached by {self.name}")
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.sleep(2 * self.network.source.uniform(*self.network.delay_s))
                while not self.network.silent.isdisjoint((relay, self.process.name)):  # noqa: ASYNC110  virtual time
                    await asyncio.sleep(HEARTBEAT_S)
                server = self.network.listening.get(endpoint)
                if server is None:
                    raise LinkBroken(f"{relay} at {endpoint} refuses connections")
                wire = SimWire(self.network, self.process, server.process)
                server.accept(wire)
                try:
                    await wire.receive(self.process.name, deadline_s)
                except BaseException:
                    wire.end("the asker left")
                    raise
        except TimeoutError:
            raise LinkBroken(f"{relay} was not reached within {deadline_s:g} s") from None
        return SimLink(self, wire, relay, asyncio.get_running_loop().time() - began)

    def passed_over(self, relay: str, problem: FabricFailed) -> None:
        """Nothing: whether the device gets through is asked anew each time."""

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    # -- serving ------------------------------------------------------------------------------------------------

    def accept(self, wire: SimWire) -> None:
        """Serve it in this transport's own process."""
        self.process.ask(lambda: self._accepted(wire)).add_done_callback(_seen, context=contextvars.Context())

    async def _accepted(self, wire: SimWire) -> None:
        task = asyncio.create_task(self._serve(wire))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, wire: SimWire) -> None:
        me, asker = self.process.name, wire.ends[0]
        beating = asyncio.create_task(self._beat(wire, asker))
        try:
            wire.send(asker, ("welcome", None))
            while True:
                _, request = await wire.receive(me, 30.0)
                await self._answer(wire, me, asker, request)
        except LinkBroken:
            return
        finally:
            beating.cancel()
            wire.end(f"{me} closed the connection")

    async def _beat(self, wire: SimWire, asker: str) -> None:
        while not wire.problem:
            await asyncio.sleep(HEARTBEAT_S)
            wire.send(asker, ("alive", None))

    async def _answer(self, wire: SimWire, me: str, asker: str, request: PullRequest) -> None:
        assert self._find is not None
        finding: asyncio.Future[ChunkSource] = asyncio.ensure_future(self._find(request))
        try:
            source = await _while_connected(wire, finding)
        except LinkBroken:
            raise
        except WeightsError as e:
            wire.send(asker, ("refused", str(e)))
            return
        try:
            wire.send(asker, ("header", source.header))
            _, (wanted, grain) = await wire.receive(me, 30.0)
            await self._send(wire, asker, source, wanted, grain)
        finally:
            source.close()

    async def _send(self, wire: SimWire, asker: str, source: ChunkSource, wanted: ChunkSet, grain: int) -> None:
        header = source.header
        total = header.layout.total_bytes
        while len(wanted) > 0:
            ready = asyncio.ensure_future(source.ready(wanted, grain))
            try:
                piece = await _while_connected(wire, ready)
            except LinkBroken:
                raise
            except WeightsError as e:
                wire.send(asker, ("refused", str(e)))
                return
            wanted.discard(piece)
            start, end = span(piece, header.chunk_bytes, total)
            with source.arena.buffer(total) as buffer:
                data = bytes(buffer[start:end])
            until = wire.send(asker, ("piece", (piece, start, data)), len(data))
            # As a full socket buffer does: nothing runs ahead of what the link carries.
            await asyncio.sleep(max(0.0, until - self.network.loop.now))
            if wire.problem:
                raise LinkBroken(wire.problem)


async def _while_connected(wire: SimWire, task: asyncio.Future[T]) -> T:
    """Its result; LinkBroken if the connection ends meanwhile."""
    try:
        while not (await asyncio.wait([task], timeout=HEARTBEAT_S))[0]:
            if wire.problem:
                raise LinkBroken(wire.problem)
        return task.result()
    except BaseException:
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Source):
            result.close()
        raise


def _seen(answer: asyncio.Future[None]) -> None:
    """A process that died before it could serve: the asker hears of it by its wire."""
    if not answer.cancelled():
        answer.exception()


class SimLink:
    """As `transport.base.Link`."""

    def __init__(self, transport: SimTransport, wire: SimWire, relay: str, round_trip_s: float) -> None:
        self.tells_landed = not transport.writes_itself
        self.round_trip_s = round_trip_s
        self.received = 0
        self.differences = 0
        self._transport = transport
        self._wire = wire
        self._relay = relay
        self._me = transport.process.name
        self._found: VersionHeader | None = None

    async def find(self, request: PullRequest) -> VersionHeader:
        self._wire.send(self._relay, ("find", request))
        header: VersionHeader = (await self._next("header"))[1]
        self._found = header
        return header

    async def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        assert self._found is not None
        total = self._found.layout.total_bytes
        missing = wanted.copy()
        arena.pins += 1
        process = self._transport.process

        def land(piece: tuple[Piece, int, bytes]) -> None:
            _, start, data = piece
            if not process.dead:
                with arena.buffer(total) as buffer:
                    buffer[start : start + len(data)] = data

        try:
            if self._transport.writes_itself:
                self._wire.landing = land
            self._wire.send(self._relay, ("fetch", (wanted.copy(), grain)))
            while len(missing) > 0:
                _, content = await self._next("piece")
                if not self._transport.writes_itself:
                    land(content)
                piece, _, data = content
                if self.tells_landed and landed is not None:
                    for index in range(piece.first, piece.end):
                        if index % 3:  # the others are received by the loop, or by several turns of threads
                            landed(index)
                self.received += len(data)
                missing.discard(piece)
                yield piece
        finally:
            self._wire.landing = None
            arena.pins -= 1

    async def close(self) -> None:
        self._wire.end(f"{self._me} closed the connection")

    async def _next(self, kind: str) -> Message:
        """The next message that is not only a sign of life."""
        while True:
            message = await self._wire.receive(self._me, self._transport.stall_s)
            if message[0] == "failed":
                raise FabricFailed(f"{self._relay}: its device does not acknowledge")
            if message[0] == "refused":
                raise PeerRefused(f"{self._relay}: {message[1]}")
            if message[0] == kind:
                return message
            if message[0] not in ("alive", "welcome"):
                raise LinkBroken(f"{self._relay} sent a {message[0]} in place of a {kind}")
