"""How hosts' addresses are found: literal ones at once, names in threads that nobody else needs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from laminar.relay.follower import ChainView, Peer
from laminar.relay.transport.base import LinkBroken, PeerRefused
from laminar.relay.transport.names import Names, join_endpoint, literal_address, split_endpoint
from laminar.relay.transport.tcp import TcpTransport

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
HERE = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]


class NameServer:
    """Answers what `answers` says of a name, 127.0.0.1 else; while `silent`, nothing, as one behind a filter."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Exception] = {}
        self.speaks = threading.Event()
        self.speaks.set()
        self._real = socket.getaddrinfo

    def silent(self) -> None:
        self.speaks.clear()

    def getaddrinfo(self, host: str, port: int | None, *args: Any, **options: Any) -> list[Any]:
        if options.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, port, *args, **options)
        self.asked.append(host)
        self.speaks.wait()
        if host in self.answers:
            raise self.answers[host]
        return HERE


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.speaks.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110  threads change it
            await asyncio.sleep(0.005)


async def given_up(asking: Awaitable[Any]) -> None:
    """As a peer's deadline does, once the name server was asked."""
    task = asyncio.ensure_future(asking)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", (socket.AF_INET, ("127.0.0.1", 80))),
        ("::1", (socket.AF_INET6, ("::1", 80, 0, 0))),
        ("fe80::1%lo", (socket.AF_INET6, ("fe80::1", 80, 0, socket.if_nametoindex("lo")))),
        ("node07", None),
        ("10.0.0.300", None),
    ],
)
async def test_a_literal_address_needs_no_thread_and_no_resolver(
    monkeypatch: pytest.MonkeyPatch, host: str, expected: object
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert literal_address(host, 80) == expected
    if expected is not None:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert await Names().addresses(host, 80) == [expected]


async def test_one_name_is_looked_up_once_for_all_who_ask_meanwhile(server: NameServer) -> None:
    names = Names()
    server.silent()
    asking = [asyncio.ensure_future(names.addresses("node07", port)) for port in (1, 2)]
    await until(lambda: server.asked == ["node07"])
    assert names.looks_up("node07") and not names.looks_up("node08")
    server.speaks.set()
    assert await asyncio.gather(*asking) == [[(socket.AF_INET, ("127.0.0.1", port))] for port in (1, 2)]
    assert not names.looks_up("node07")
    await names.addresses("node07", 1)
    assert server.asked == ["node07", "node07"], "a host that moves is found"


async def test_an_answer_that_comes_late_is_for_whoever_asks_next(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that takes longer than anybody waits would else never be heard."""
    names = Names()
    server.answers["gone"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    server.silent()
    for host in ("node07", "gone", "node07"):
        await given_up(names.addresses(host, 1))
    server.speaks.set()
    await until(lambda: not names.looks_up("node07") and not names.looks_up("gone"))
    assert await names.addresses("node07", 9) == [(socket.AF_INET, ("127.0.0.1", 9))]
    with pytest.raises(OSError, match="Temporary failure"):
        await names.addresses("gone", 9)
    assert server.asked == ["node07", "gone"]
    server.silent()
    await given_up(names.addresses("node07", 1))
    server.speaks.set()
    await until(lambda: not names.looks_up("node07"))
    monkeypatch.setattr("laminar.relay.transport.names.KEPT_S", 0.0)
    await names.addresses("node07", 1)
    assert server.asked == ["node07", "gone", "node07", "node07"], "but not for ever"


async def test_so_many_names_at_once_and_the_others_after_them(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.relay.transport.names.LOOKUPS", 2)
    names = Names()
    server.silent()
    asking = [asyncio.ensure_future(names.addresses(f"node{i}", 1)) for i in range(5)]
    await until(lambda: len(server.asked) == 2)
    await asyncio.sleep(0.05)
    assert len(server.asked) == 2
    server.speaks.set()
    await asyncio.gather(*asking)
    assert len(server.asked) == 5


async def test_what_is_no_name_or_finds_no_thread_is_an_error_like_any_other(
    server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["odd"] = UnicodeError("label too long")
    names = Names()
    with pytest.raises(OSError, match="'odd' is no name: label too long"):
        await names.addresses("odd", 1)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="no thread to look up 'node07'"):
        await names.addresses("node07", 1)


async def test_a_peer_whose_name_is_not_told_in_time_is_said_to_be_that(server: NameServer) -> None:
    transport = TcpTransport(secret=b"s" * 32, run="demo", relay="r0")
    server.silent()
    with pytest.raises(LinkBroken, match=r"r1 at node07:7000 was not reached within 0\.1 s: no name server has told"):
        await transport.connect("r1", "node07:7000", deadline_s=0.1)
    await transport.close()


@pytest.mark.parametrize("dead", [3, 20])
async def test_a_silent_name_server_keeps_nothing_from_a_neighbour_that_is_known_by_its_number(
    chain: Chain, server: NameServer, dead: int
) -> None:
    """Nor from the checks of what comes: all its look-ups still hang at the end."""
    master, relay = [await chain.add(f"r{i}") for i in range(2)]
    server.silent()
    name = await master.publish(1)
    order = ("r0", *(f"d{i}" for i in range(dead)), "r1")
    peers = {"r0": Peer("here", {"tcp": chain.endpoints["r0"]})}
    peers.update({f"d{i}": Peer("elsewhere", {"tcp": f"node{i}:7000"}) for i in range(dead)})
    relay.follower.see(ChainView(1, order, peers, "r0"))
    relay.follower.published([name])
    await chain.until(lambda: relay.holdings.has(name), "the version", 60.0)
    assert server.asked and not server.speaks.is_set()
    assert relay.bytes_of(name) == master.bytes_of(name)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:80", "[fe80::1%eth0]:80", "node07:65535"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    assert join_endpoint(*split_endpoint(endpoint)) == endpoint


@pytest.mark.parametrize("endpoint", ["node07", ":80", "node07:0", "node07:65536", "node07:x", "node07:²"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(PeerRefused, match="not an address of the form HOST:PORT"):
        split_endpoint(endpoint)
