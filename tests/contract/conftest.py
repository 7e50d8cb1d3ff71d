"""The implementations of `Coordination` under one interface for the suite: client, cut, restart, compact."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from secure_etcd import SecureEtcd, ask_for_users, make_certificates

from laminar.buffer.coordination import Coordination
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.workers.supervisor.etcd_process import EtcdProcess, _free_port


class Backend(Protocol):
    """`root`: a prefix of this test's own. `client`: an ordinary client; `cut_client`: one whose network can fail."""

    name: str
    root: str
    client: Coordination
    cut_client: Coordination

    async def cut(self) -> None: ...
    async def mend(self) -> None: ...
    async def restart(self) -> None: ...
    async def kill_leader(self) -> None: ...
    async def compact(self, revision: int) -> None: ...
    async def close(self) -> None: ...


class MemoryBackend:
    name = "memory"

    def __init__(self) -> None:
        self.root = "/test/"
        self.server = MemoryEtcd()
        self.faults = Faults(random.Random(1))
        self.client: Coordination = MemoryCoordination(self.server)
        self.cut_client: Coordination = MemoryCoordination(self.server, self.faults, timeout_s=0.3, retry_s=3)

    async def cut(self) -> None:
        self.faults.partition()

    async def mend(self) -> None:
        self.faults.heal()

    async def restart(self) -> None:
        self.server.stop()
        await asyncio.sleep(0.2)
        self.server.start()

    async def kill_leader(self) -> None:
        await self.restart()

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

    name = "etcd"

    def __init__(self, processes: list[EtcdProcess]) -> None:
        self.root = f"/test-{uuid.uuid4().hex[:12]}/"
        self.processes = processes
        self.wires: list[Wire] = []

    async def open(self) -> None:
        access = access_to(self.processes)
        self.client: Coordination = access.connect()
        self.wires = [Wire(p.client_port) for p in self.processes]
        await self.mend()
        through = [f"127.0.0.1:{w.port}" for w in self.wires]
        self.cut_client: Coordination = access.at(through).connect(timeout_s=0.5, retry_s=3)

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

    async def kill_leader(self) -> None:
        """SIGKILL to the leader (the only member is its own), which is started again after a second."""
        leader = await leader_of(self.processes)
        os.kill(leader.pid, signal.SIGKILL)
        await asyncio.sleep(1)
        await leader.start()

    async def compact(self, revision: int) -> None:
        assert isinstance(self.client, EtcdCoordination)
        await self.client.compact(revision)

    async def close(self) -> None:
        await self.client.close()
        await self.cut_client.close()
        await self.cut()


def access_to(processes: list[EtcdProcess], user: str = "laminar") -> EtcdAccess:
    """How tests reach a cluster: with its certificates and as `user` if it asks for them."""
    endpoints = tuple(p.endpoint for p in processes)
    first = processes[0]
    return first.access(user).at(endpoints) if isinstance(first, SecureEtcd) else EtcdAccess(endpoints)


async def leader_of(processes: list[EtcdProcess]) -> EtcdProcess:
    for process in processes:
        client = access_to([process], "root").connect()
        status = await client.status()
        await client.close()
        if status["member"] == status["leader"]:
            return process
    raise AssertionError("no member says that it leads")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, which has signed `server.pem` for 127.0.0.1 and localhost and `elsewhere.pem` for another name, with
    their `.key` files; and `stranger.pem`, an authority that has signed none of them."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def one_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdProcess]]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd") / "data")
    asyncio.run(process.start())
    yield [process]
    asyncio.run(process.stop())


def cluster_of_three(folder: Path, certificates: Path | None = None) -> list[EtcdProcess]:
    """In the clear, or with TLS to clients."""
    ports = [_free_port() for _ in range(3)]
    members = ",".join(f"member{i}=http://127.0.0.1:{port}" for i, port in enumerate(ports))
    made: list[EtcdProcess] = []
    for i, port in enumerate(ports):
        # The last of two equal flags counts: these replace those of a single node.
        flags = ("--name", f"member{i}", "--initial-cluster", members)
        if certificates is None:
            made.append(EtcdProcess(folder / f"member{i}", peer_port=port, flags=flags))
        else:
            made.append(SecureEtcd(folder / f"member{i}", certificates, peer_port=port, flags=flags))
    return made


@contextlib.contextmanager
def running(processes: list[EtcdProcess]) -> Iterator[list[EtcdProcess]]:
    async def start() -> None:
        await asyncio.gather(*(p.start() for p in processes))
        if isinstance(first := processes[0], SecureEtcd):
            await ask_for_users(first)

    async def stop() -> None:
        await asyncio.gather(*(p.stop() for p in processes))

    asyncio.run(start())
    try:
        yield processes
    finally:
        asyncio.run(stop())


@pytest.fixture(scope="session")
def secure_etcd(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[SecureEtcd]:
    member = SecureEtcd(tmp_path_factory.mktemp("secure") / "data", certificates)
    with running([member]):
        yield member


@pytest.fixture(scope="session")
def three_etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdProcess]]:
    with running(cluster_of_three(tmp_path_factory.mktemp("cluster"))) as processes:
        yield processes


@pytest.fixture(scope="session")
def secure_cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[list[EtcdProcess]]:
    with running(cluster_of_three(tmp_path_factory.mktemp("secure-cluster"), certificates)) as processes:
        yield processes


BACKENDS = {"memory": None, "etcd": "one_etcd", "cluster": "three_etcds", "secure cluster": "secure_cluster"}


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow) if "cluster" in n else n for n in BACKENDS])
def processes(request: pytest.FixtureRequest) -> list[EtcdProcess]:
    """The members that the backend runs on: none is the twin."""
    fixture = BACKENDS[request.param]
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
