"""The implementations of `Coordination` under one interface for the suite: client, cut, restart, compact."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from laminar.buffer.coordination import Coordination
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.workers.etcd_process import EtcdProcess, _free_port


class Backend(Protocol):
    """`root`: a prefix of this test's own. `client`: an ordinary client; `cut_client`: one whose network can fail."""

    name: str
    root: str
    client: Coordination
    cut_client: Coordination

    async def cut(self) -> None: ...
    async def mend(self) -> None: ...
    async def restart(self) -> None: ...
    async def compact(self, revision: int) -> None: ...
    async def close(self) -> None: ...


class MemoryBackend:
    name = "memory"

    def __init__(self) -> None:
        self.root = "/test/"
        self.server = MemoryEtcd()
        self.faults = Faults(random.Random(1))
        self.client: Coordination = MemoryCoordination(self.server)
        self.cut_client: Coordination = MemoryCoordination(self.server, self.faults, timeout_s=0.3, retry_s=1.5)

    async def cut(self) -> None:
        self.faults.partition()

    async def mend(self) -> None:
        self.faults.heal()

    async def restart(self) -> None:
        self.server.stop()
        await asyncio.sleep(0.2)
        self.server.start()

    async def compact(self, revision: int) -> None:
        self.server.compact(revision)

    async def close(self) -> None:
        await self.client.close()
        await self.cut_client.close()


class Wire:
    """A TCP relay in front of etcd that can be cut: established connections die, new ones are refused."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        mine = {writer, back}
        self._writers |= mine
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= mine
            for each in mine:
                each.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


class EtcdBackend:
    """On `processes`, which all tests share: hence a root of its own for each test."""

    def __init__(self, processes: list[EtcdProcess]) -> None:
        self.name = "etcd" if len(processes) == 1 else "cluster"
        self.root = f"/test-{uuid.uuid4().hex[:12]}/"
        self.processes = processes
        self.wires: list[Wire] = []

    async def open(self) -> None:
        endpoints = [p.endpoint for p in self.processes]
        self.client: Coordination = EtcdCoordination(endpoints)
        self.wires = [Wire(p.client_port) for p in self.processes]
        await self.mend()
        through = [f"127.0.0.1:{w.port}" for w in self.wires]
        self.cut_client: Coordination = EtcdCoordination(through, timeout_s=0.5, retry_s=1.5)

    async def cut(self) -> None:
        for wire in self.wires:
            await wire.cut()

    async def mend(self) -> None:
        for wire in self.wires:
            await wire.mend()

    async def restart(self) -> None:
        """All members, one after the other."""
        for process in self.processes:
            await process.restart()

    async def compact(self, revision: int) -> None:
        assert isinstance(self.client, EtcdCoordination)
        await self.client.compact(revision)

    async def close(self) -> None:
        await self.client.close()
        await self.cut_client.close()
        await self.cut()


@pytest.fixture(scope="session")
def one_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdProcess]]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd") / "data")
    asyncio.run(process.start())
    yield [process]
    asyncio.run(process.stop())


def cluster_of_three(folder: Path) -> list[EtcdProcess]:
    ports = [_free_port() for _ in range(3)]
    members = ",".join(f"member{i}=http://127.0.0.1:{port}" for i, port in enumerate(ports))
    return [
        EtcdProcess(
            folder / f"member{i}",
            peer_port=port,
            # The last of two equal flags counts: these replace those of a single node.
            flags=("--name", f"member{i}", "--initial-cluster", members),
        )
        for i, port in enumerate(ports)
    ]


@pytest.fixture(scope="session")
def three_etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdProcess]]:
    processes = cluster_of_three(tmp_path_factory.mktemp("cluster"))

    async def start() -> None:
        await asyncio.gather(*(p.start() for p in processes))

    async def stop() -> None:
        await asyncio.gather(*(p.stop() for p in processes))

    asyncio.run(start())
    yield processes
    asyncio.run(stop())


@pytest.fixture(params=["memory", "etcd", pytest.param("cluster", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest) -> list[EtcdProcess]:
    """The members that the backend runs on: none is the twin."""
    fixture = {"memory": None, "etcd": "one_etcd", "cluster": "three_etcds"}[request.param]
    return request.getfixturevalue(fixture) if fixture else []


@pytest.fixture
async def backend(processes: list[EtcdProcess]) -> AsyncIterator[Backend]:
    if not processes:
        memory = MemoryBackend()
        yield memory
        await memory.close()
        return
    etcd = EtcdBackend(processes)
    await etcd.open()
    yield etcd
    await etcd.close()
