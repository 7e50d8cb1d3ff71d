"""Relays of one process in a chain over loopback TCP, with faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.follower import ChainView, Follower, Peer
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Tuning
from laminar.relay.layout import Layout
from laminar.relay.receiving import Source
from laminar.relay.transport.base import ChunkSource, PullRequest, Transport, VersionName
from laminar.relay.transport.tcp import TcpTransport

CHUNK, CHUNKS = 4096, 48
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * CHUNKS - 999,))})
STALL_S = 1.2


class Slow:
    """A source that gives one piece each `seconds`."""

    def __init__(self, source: Source, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self.header, self.base, self.allocated, self.close = source.header, source.base, source.allocated, source.close

    @property
    def arena(self) -> Arena:
        return self.source.arena

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        await asyncio.sleep(self.seconds)
        return await self.source.ready(wanted, grain)


class Valve:
    """A TCP proxy in front of a relay; `shut` makes it silent without ending a connection, as a frozen host is."""

    def __init__(self, endpoint: str) -> None:
        self.target = endpoint.rpartition(":")
        self.open = asyncio.Event()
        self.open.set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._pipe, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def shut(self) -> None:
        self.open.clear()

    def stop(self) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.target[0], int(self.target[2]))
        for source, sink in ((reader, back), (there, writer)):
            self.tasks.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


@dataclass
class Node:
    """One relay: what it holds, how it is reached, and what follows the chain for it."""

    name: str
    holdings: Holdings
    transport: TcpTransport
    follower: Follower
    endpoint: str = ""
    slow_s: float = 0.0
    task: asyncio.Task[None] | None = None

    async def find(self, request: PullRequest) -> ChunkSource:
        source = await self.holdings.find(request)
        return Slow(source, self.slow_s) if self.slow_s else source

    async def start(self) -> None:
        await self.holdings.start()
        self.endpoint = await self.transport.listen(self.find)
        self.task = asyncio.create_task(self.follower.run())

    async def die(self) -> None:
        """As a kill does: connections are reset, memory is gone."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.transport.close()

    async def stop(self) -> None:
        await self.die()
        self.holdings.validate()
        assert all(arena.pins == 0 for arena in self.holdings.pool.arenas)
        await self.holdings.stop()

    async def publish(self, version: int, *, seed: int | None = None, data: bytes | None = None) -> VersionName:
        """As the trainer on this relay's host does: `data`, or what `seed` (else the version) gives."""
        arena = await self.holdings.reserve(LAYOUT)
        assert arena is not None
        with arena.buffer(LAYOUT.total_bytes) as buffer:
            buffer[:] = content(version if seed is None else seed) if data is None else data
        info = await self.holdings.seal(arena, LAYOUT, version)
        return VersionName(version, info.digest)

    def bytes_of(self, name: VersionName) -> bytes:
        held = self.holdings.get(name.version)
        assert held.name == name
        with held.arena.buffer(LAYOUT.total_bytes) as buffer:
            return bytes(buffer)


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(LAYOUT.total_bytes)


class Chain:
    """`nodes` in the order of the chain."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.epoch = 0
        self.all: list[Node] = []
        self.endpoints: dict[str, str] = {}
        self.master = ""
        self.valves: list[Valve] = []
        self.fabric: Transport | None = None
        """A better transport than tcp, which all relays offer."""

    async def add(self, name: str, *, retain: int = 2) -> Node:
        holdings = Holdings(chunk_bytes=CHUNK, retain=retain, spare=1)
        transport = TcpTransport(secret=b"s" * 32, run="demo", relay=name, stall_s=STALL_S)
        better = {self.fabric.name: self.fabric} if self.fabric else {}
        follower = Follower(holdings, {**better, "tcp": transport}, name, "here", tuning=Tuning(grain=1))
        node = Node(name, holdings, transport, follower)
        await node.start()
        self.endpoints[name] = node.endpoint
        self.nodes.append(node)
        self.all.append(node)
        return node

    async def valve(self, node: Node) -> Valve:
        """From the next plan on, `node` is reached through this."""
        valve = Valve(node.endpoint)
        self.endpoints[node.name] = await valve.start()
        self.valves.append(valve)
        return valve

    def plan(self, master: Node | None = None) -> None:
        """A new epoch, as the manager writes it; `master`: where the newest version was published."""
        self.epoch += 1
        self.master = master.name if master else self.master
        names = [*([self.fabric.name] if self.fabric else []), "tcp"]
        peers = {n.name: Peer("here", dict.fromkeys(names, self.endpoints[n.name])) for n in self.nodes}
        view = ChainView(self.epoch, tuple(node.name for node in self.nodes), peers, self.master)
        for node in self.nodes:
            node.follower.see(view)

    def announce(self, *names: VersionName) -> None:
        for node in self.nodes:
            node.follower.published(names)

    async def kill(self, *nodes: Node) -> None:
        await asyncio.gather(*(node.die() for node in nodes))
        self.nodes = [node for node in self.nodes if node not in nodes]

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():  # noqa: ASYNC110  the conditions are of many kinds
                    await asyncio.sleep(0.005)
        except TimeoutError:
            state = {n.name: (n.holdings.newest, list(n.holdings.errors)) for n in self.nodes}
            raise AssertionError(f"{what} did not happen within {timeout_s} s: {state}") from None

    async def until_all_hold(self, name: VersionName, timeout_s: float = 10.0) -> None:
        await self.until(lambda: all(n.holdings.has(name) for n in self.nodes), f"version {name} everywhere", timeout_s)


@pytest.fixture
async def chain() -> AsyncIterator[Chain]:
    chain = Chain()
    yield chain
    for valve in chain.valves:
        valve.stop()
    for node in chain.all:
        await node.stop()
