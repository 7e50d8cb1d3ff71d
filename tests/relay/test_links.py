"""Which transport a link takes, and that another one takes over where the better one does not get through."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from laminar.errors import ConfigError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.follower import ChainView, Peer
from laminar.relay.transport.base import FabricFailed, FindSource, Landed, Link, LinkBroken, VersionName
from laminar.relay.transport.recovery import UNREACHED
from laminar.relay.transport.tcp import SocketLink, TcpTransport
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import ETHERNET, Gid, Port

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""


class Fabric(TcpTransport):
    """Stands in for a device that breaks after `pieces`, as often as told; then it is avoided, as verbs is."""

    name = "fabric"

    def __init__(self, pieces: int) -> None:
        super().__init__(secret=b"s" * 32, run="demo", relay="asker")
        self.pieces = pieces
        self.broken = False
        self.connected = 0

    async def listen(self, find: FindSource) -> str:
        raise AssertionError("the nodes listen by tcp")

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> SocketLink:
        if self.broken:
            raise FabricFailed("not reached for now")
        self.connected += 1
        return await super().connect(relay, endpoint, deadline_s=deadline_s)

    def _link(self, relay: str, channel: Any, round_trip_s: float) -> SocketLink:
        return Breaking(self, super()._link(relay, channel, round_trip_s), channel, round_trip_s)


class Breaking(SocketLink):
    def __init__(self, fabric: Fabric, link: Link, channel: Any, round_trip_s: float) -> None:
        super().__init__(channel, round_trip_s=round_trip_s)
        self.fabric, self.link = fabric, link
        self.find = link.find  # type: ignore[method-assign]

    async def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        async with aclosing(self.link.receive(arena, wanted, grain, base, landed)) as pieces:
            async for piece in pieces:
                if self.fabric.pieces == 0:
                    self.fabric.broken = True
                    raise FabricFailed("the peer's device does not acknowledge")
                self.fabric.pieces -= 1
                yield piece


@pytest.mark.parametrize("pieces", [0, 5, 1000])
async def test_a_better_transport_is_taken_until_it_fails(chain: Chain, pieces: int) -> None:
    """What came by it is kept; the rest comes by tcp, from the same relay."""
    chain.fabric = fabric = Fabric(pieces)
    nodes = [await chain.add(f"r{i}") for i in range(2)]
    chain.plan(nodes[0])
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    assert nodes[1].bytes_of(name) == nodes[0].bytes_of(name)
    hop = nodes[1].follower.hops[-1]
    assert set(hop.peers) == {"r0"} and fabric.connected == 1
    assert len(hop.repairs) == (0 if pieces == 1000 else 1)


class Device(VerbsTransport):
    """Counts what is asked of the control ports."""

    def __init__(self) -> None:
        gid = Gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", 2)
        port = Port("rx0", 1, ETHERNET, 5, 1 << 30, 0, (gid,))
        super().__init__(port, gid, secret=b"s" * 32, run="demo", relay="asker")
        self.tried = 0

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> SocketLink:
        self.tried += not self._avoided(relay)
        return await super().connect(relay, endpoint, deadline_s=deadline_s)


@asynccontextmanager
async def filtered(chain: Chain, *, silent: bool, tcp_too: bool = False) -> AsyncIterator[tuple[Any, Any, Device]]:
    """Two relays, the first of which is not reached at its control port of verbs."""
    chain.fabric = device = Device()
    master, relay = [await chain.add(f"r{i}") for i in range(2)]
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if silent:
            port.listen()
        endpoint = f"127.0.0.1:{port.getsockname()[1]}"
        links = {"verbs": endpoint, "tcp": endpoint if tcp_too else chain.endpoints["r0"]}
        relay.follower.see(ChainView(1, ("r0", "r1"), {"r0": Peer("here", links)}, "r0"))
        yield master, relay, device


def without_rdma(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is reached without RDMA" in r.getMessage()]


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "refused"])
async def test_a_control_port_that_is_filtered_is_gone_round_and_told_once(
    chain: Chain, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Often a firewall lets one port through: that of tcp."""
    monkeypatch.setattr("laminar.relay.transfer.CONNECT_S", 0.2)
    async with filtered(chain, silent=silent) as (master, relay, device):
        for version, tried in ((1, UNREACHED), (2, UNREACHED)):
            name = await master.publish(version)
            relay.follower.published([name])
            await chain.until(lambda name=name: relay.holdings.has(name), "the version")
            assert device.tried == tried, "not again for a while"
        (told,) = without_rdma(caplog)
        assert told.startswith("relay r0 is reached without RDMA for 60 s") and "failed 3 times in a row" in told
        monkeypatch.setattr("laminar.relay.transport.recovery.AVOID_S", 0.0)
        device._avoidance.failed("r0", asyncio.get_running_loop().time())
        name = await master.publish(3)
        relay.follower.published([name])
        await chain.until(lambda: relay.holdings.has(name), "the version")
        assert device.tried == UNREACHED + 1, "then it is tried, and tcp at once after it"
        assert relay.follower.hops[-1].repairs == () and len(without_rdma(caplog)) == 1


async def test_a_dead_relay_that_no_transport_reaches_is_not_taken_for_one_without_rdma(
    chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    async with filtered(chain, silent=False, tcp_too=True) as (_, relay, device):
        relay.follower.published([VersionName(1, "d" * 64)])
        await chain.until(lambda: device.tried > UNREACHED, "more tries than it takes")
        assert not device._avoided("r0") and not without_rdma(caplog)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that every host name has, in the resolver's order."""
    addresses: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int | None, **options: Any) -> list[Any]:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return real(host, port, **options)
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return addresses


async def test_each_address_of_a_host_name_is_tried(names: list[str]) -> None:
    """On networks with both families the resolver names IPv6 first, and a relay at 0.0.0.0 does not listen there."""
    transport = TcpTransport(secret=b"s" * 32, run="demo", relay="r0", advertise="both.example")

    async def find(request: Any) -> Any:
        raise AssertionError("nobody asks")

    endpoint = await transport.listen(find)
    try:
        names[:] = ["::1", "127.0.0.2", "127.0.0.1"]
        link = await transport.connect("r0", endpoint, deadline_s=5.0)
        await link.close()
        names[:] = ["::1", "127.0.0.2"]
        with pytest.raises(LinkBroken, match=r"r0 at both.example:.*::1: .*; 127.0.0.2: Connection refused"):
            await transport.connect("r0", endpoint, deadline_s=5.0)
    finally:
        await transport.close()


async def test_an_address_that_does_not_answer_leaves_time_for_the_next(names: list[str]) -> None:
    transport = TcpTransport(secret=b"s" * 32, run="demo", relay="r0", advertise="both.example")

    async def find(request: Any) -> Any:
        raise AssertionError("nobody asks")

    endpoint = await transport.listen(find)
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def swallowed(sock: socket.socket, address: Any) -> None:
        await (asyncio.sleep(60.0) if address[0] == "192.0.2.1" else connect(sock, address))

    loop.sock_connect = swallowed  # type: ignore[method-assign, assignment]
    try:
        names[:] = ["192.0.2.1", "127.0.0.1"]
        link = await transport.connect("r0", endpoint, deadline_s=1.0)
        await link.close()
    finally:
        await transport.close()


async def test_a_place_where_no_relay_can_listen_is_named_with_its_setting() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = TcpTransport(secret=b"s" * 32, run="demo", relay="r0", bind="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .*in use; .* or correct relay\.port"):
            await taken.listen(lambda name: None)
    foreign = TcpTransport(secret=b"s" * 32, run="demo", relay="r0", bind="203.0.113.7")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7:0: .*; correct relay\.bind"):
        await foreign.listen(lambda name: None)
