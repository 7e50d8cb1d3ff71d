"""Connections that have not proved the secret keep out nobody who does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.relay.transport import admission, tcp
from laminar.relay.transport.base import ChunkSource, LinkBroken, PullRequest
from laminar.relay.transport.strangers import PATIENCE_S, Strangers, network_of
from laminar.relay.transport.tcp import TcpTransport

SECRET = b"s" * 32

arrivals = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.01, 0.3, 1.0]), st.booleans()), max_size=80)


def addresses(network: int) -> str:
    return f"10.0.0.{network}"


@given(st.integers(1, 8), arrivals)
def test_places_are_shared(places: int, steps: list[tuple[int, float, bool]]) -> None:
    """Never more than the places; only who had its time, or is of a network that holds more, loses its own."""
    strangers: Strangers[int] = Strangers(places)
    held: dict[int, tuple[int, float]] = {}
    now = 0.0
    for key, (network, later, leaves) in enumerate(steps):
        now += later
        if leaves and held:
            left = next(iter(held))
            strangers.leave(left)
            del held[left]
        counts = Counter(n for n, _ in held.values())
        verdict = strangers.admit(key, addresses(network), now)
        if verdict.closed is not None:
            loser, since = held.pop(verdict.closed)
            assert counts[loser] == max(counts.values())
            assert now - since >= PATIENCE_S or counts[loser] > counts[network] + 1
            assert verdict.network == addresses(loser)
            assert verdict.held == counts[loser]
        if verdict.taken:
            held[key] = (network, now)
        else:
            assert len(held) == places
            assert counts[network] + 1 >= max(counts.values()), "a network that holds few was refused"
        assert len(strangers) == len(held) <= places


@given(st.integers(2, 8), st.integers(0, 200))
def test_one_network_keeps_out_no_other(places: int, flood: int) -> None:
    strangers: Strangers[str] = Strangers(places)
    for i in range(places + flood):
        strangers.admit(f"mute {i}", "10.0.0.66", 0.0)
    assert strangers.admit("honest", "10.0.0.1", 0.0).taken
    for i in range(flood):
        assert strangers.admit(f"again {i}", "10.0.0.66", 10.0 + i).closed != "honest"


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_networks(address: str, network: str) -> None:
    assert network_of(address) == network


async def _nothing(request: PullRequest) -> ChunkSource:
    raise AssertionError("nobody asks for a version here")


async def _stay_mute(endpoint: str, many: int) -> None:
    """Hold `many` half-open connections, and open another at once for each that is closed."""
    host, port = tcp.split_endpoint(endpoint)

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(many)))


async def test_who_proves_the_secret_comes_in_past_a_full_house_of_its_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attackers at the very address of the honest relay, more than there are places, that come back at once; and no
    deadline of theirs makes place."""
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 1000.0)
    full = asyncio.Event()

    def on_refusal(message: str) -> None:
        if f"{admission.MAX_STRANGERS} of them from 127.0.0.1" in message:
            full.set()

    server = TcpTransport(secret=SECRET, run="demo", relay="me", on_refusal=on_refusal)
    endpoint = await server.listen(_nothing)
    attack = asyncio.create_task(_stay_mute(endpoint, 2 * admission.MAX_STRANGERS))
    asker = TcpTransport(secret=SECRET, run="demo", relay="asker")
    try:
        async with asyncio.timeout(60):
            await full.wait()
            for _ in range(3):
                while True:
                    with contextlib.suppress(LinkBroken):
                        link = await asker.connect("me", endpoint, deadline_s=2)
                        break
                    await asyncio.sleep(0.05)
                await link.close()
    finally:
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        await server.close()


async def test_a_connection_that_loses_its_place_is_closed_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_STRANGERS", 2)
    told: list[str] = []
    server = TcpTransport(secret=SECRET, run="demo", relay="me", on_refusal=told.append)
    host, port = tcp.split_endpoint(await server.listen(_nothing))
    loop = asyncio.get_running_loop()
    mutes: list[socket.socket] = []
    try:
        async with asyncio.timeout(20):
            for _ in range(2):
                mute = socket.socket()
                mute.setblocking(False)
                await loop.sock_connect(mute, (host, port))
                assert len(await loop.sock_recv(mute, 1 << 10)) == tcp.GREETING.size
                mutes.append(mute)
            await asyncio.sleep(PATIENCE_S + 0.1)
            link = await TcpTransport(secret=SECRET, run="demo", relay="asker").connect(
                "me", f"{host}:{port}", deadline_s=10
            )
            assert await loop.sock_recv(mutes[0], 1) == b""
            one = "2 connections have not proved the secret, 2 of them from 127.0.0.1: one of those is closed"
            assert told == [one]
            await link.close()
    finally:
        for mute in mutes:
            mute.close()
        await server.close()
