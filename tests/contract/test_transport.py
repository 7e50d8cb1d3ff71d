"""What every transport does: moves checked pieces between arenas, notices the dead, refuses strangers.

A transport joins the suite with a `Network` of its own in `NETWORKS`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol

import pytest

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.receiving import Arriving
from laminar.relay.transport.base import (
    ChunkSource,
    Link,
    LinkBroken,
    PeerRefused,
    PullRequest,
    Transport,
    VersionHeader,
    VersionName,
)
from laminar.relay.transport.tcp import TcpTransport
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import active_ports, select

CHUNK, CHUNKS = 4096, 9
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * CHUNKS - 1000,))})
SECRET = b"the secret of this run, 32 bytes"
SLOWNESS = float(os.environ.get("LAMINAR_TEST_SLOWNESS", "1"))
"""How much longer all takes here than on a real machine: more than 1 where one is emulated."""
STALL_S, DEADLINE_S = 1.0 * SLOWNESS, 5.0 * SLOWNESS


class Network(Protocol):
    """Makes transports that reach each other. `refusals` is told to; `cut` ends all connections as a death does."""

    def transport(
        self, relay: str, *, secret: bytes = SECRET, run: str = "demo", refusals: Callable[[str], None] | None = None
    ) -> Transport: ...


class TcpNetwork:
    def transport(
        self, relay: str, *, secret: bytes = SECRET, run: str = "demo", refusals: Callable[[str], None] | None = None
    ) -> Transport:
        return TcpTransport(
            secret=secret, run=run, relay=relay, stall_s=STALL_S, on_refusal=refusals or (lambda reason: None)
        )


class VerbsNetwork:
    """Askers at one device, servers at another."""

    def __init__(self) -> None:
        ports = [port for port in active_ports() if port.device in RDMA_DEVICES]
        self.ports = {port.device: select([port]) for port in ports}

    def transport(
        self, relay: str, *, secret: bytes = SECRET, run: str = "demo", refusals: Callable[[str], None] | None = None
    ) -> Transport:
        port, gid = self.ports[RDMA_DEVICES[relay == "asker"]]
        return VerbsTransport(
            port,
            gid,
            secret=secret,
            run=run,
            relay=relay,
            stall_s=STALL_S,
            on_refusal=refusals or (lambda reason: None),
        )


RDMA_DEVICES = [name for name in os.environ.get("LAMINAR_TEST_RDMA_DEVICES", "").split(",") if name]
NETWORKS: dict[str, Callable[[], Network]] = {"tcp": TcpNetwork}
if RDMA_DEVICES:
    NETWORKS["verbs"] = VerbsNetwork  # in the guest of scripts/rdma


class Holder:
    """A relay's side that is asked: one version, complete or arriving, under the test's control."""

    def __init__(self, version: int = 1, *, complete: bool = True) -> None:
        self.data = os.urandom(LAYOUT.total_bytes)
        sums = checksums(memoryview(self.data), CHUNK)
        self.name = VersionName(version, version_digest(LAYOUT, sums))
        self.header = VersionHeader(self.name, LAYOUT, CHUNK, tuple(sums))
        self.arena = Arena.create(LAYOUT.total_bytes)
        with self.arena.buffer(LAYOUT.total_bytes) as buffer:
            buffer[:] = self.data
        self.arriving = Arriving(self.header, self.arena, complete=complete)
        self.found = asyncio.Event()
        self.requests: list[PullRequest] = []
        if complete:
            self.found.set()

    async def find(self, request: PullRequest) -> ChunkSource:
        self.requests.append(request)
        if self.name not in request.acceptable:
            raise WeightsError("this relay does not hold it")
        await self.found.wait()
        return self.arriving.open()


@pytest.fixture(params=sorted(NETWORKS))
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]()


class Pair:
    """An asker and a server over one network, and an arena to receive into."""

    def __init__(self, network: Network, holder: Holder) -> None:
        self.network, self.holder = network, holder
        self.refusals: list[str] = []
        self.server = network.transport("server", refusals=self.refusals.append)
        self.asker = network.transport("asker")
        self.endpoint = ""
        self.arena = Arena.create(LAYOUT.total_bytes)

    async def open(self) -> Link:
        if not self.endpoint:
            self.endpoint = await self.server.listen(self.holder.find)
        return await self.asker.connect("server", self.endpoint, deadline_s=DEADLINE_S)

    async def found(self) -> Link:
        link = await self.open()
        await link.find(PullRequest((self.holder.name,)))
        return link

    async def receive(self, link: Link, wanted: ChunkSet, grain: int) -> list[Piece]:
        async with aclosing(link.receive(self.arena, wanted, grain)) as pieces:
            return [piece async for piece in pieces]

    def received(self, pieces: list[Piece]) -> bool:
        """Whether the bytes of `pieces` are the holder's."""
        with self.arena.buffer(LAYOUT.total_bytes) as buffer:
            return all(
                buffer[p.first * CHUNK : p.end * CHUNK] == self.holder.data[p.first * CHUNK : p.end * CHUNK]
                for p in pieces
            )

    async def close(self) -> None:
        await self.asker.close()
        await self.server.close()
        assert (self.arena.pins, self.holder.arena.pins) == (0, 0), "nobody uses the arenas any more"
        self.arena.close()
        self.holder.arena.close()


@pytest.fixture
async def make_pair(network: Network) -> AsyncIterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: bool) -> Pair:
        pairs.append(Pair(network, Holder(**options)))
        return pairs[-1]

    yield make
    for pair in pairs:
        await pair.close()


ALL = ChunkSet(CHUNKS, full=True)


def some(*indices: int) -> ChunkSet:
    result = ChunkSet(CHUNKS)
    for index in indices:
        result.add(Piece(index, 1))
    return result


@pytest.mark.parametrize("grain", [1, 4, 100])
async def test_all_chunks_come_in_pieces_of_the_asked_size(make_pair: Callable[..., Pair], grain: int) -> None:
    pair = make_pair()
    link = await pair.open()
    header = await link.find(PullRequest((pair.holder.name,)))
    assert header == pair.holder.header and link.round_trip_s > 0
    pieces = await pair.receive(link, ALL, grain)
    assert pieces == list(ALL.runs(grain)) and pair.received(pieces)
    await link.close()


async def test_only_what_is_missing_is_sent_and_a_link_serves_again(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    link = await pair.found()
    pieces = await pair.receive(link, some(1, 2, 5, 8), 2)
    assert pieces == [Piece(1, 1), Piece(2, 1), Piece(5, 1), Piece(8, 1)] and pair.received(pieces)
    with pair.arena.buffer(LAYOUT.total_bytes) as buffer:
        assert bytes(buffer[:CHUNK]) == bytes(CHUNK), "other chunks were not touched"
    await link.find(PullRequest((pair.holder.name,)))
    assert await pair.receive(link, some(0), 1) == [Piece(0, 1)]
    await link.close()


async def test_only_chunks_that_lie_there_are_told_of(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    link = await pair.found()
    told: dict[int, bool] = {}

    def landed(index: int) -> None:
        told[index] = pair.received([Piece(index, 1)])

    early: list[int] = []
    async with aclosing(link.receive(pair.arena, ALL, 4, landed=landed)) as pieces:
        async for piece in pieces:
            early += [index for index in told if index >= piece.end]
    assert all(told.values()) and pair.received(list(ALL.runs(4)))
    assert early == [], "nothing of a piece that has not come"
    await link.close()


@pytest.mark.parametrize("grain", [1, 2, 4])
async def test_two_links_fill_one_arena_with_a_share_each(make_pair: Callable[..., Pair], grain: int) -> None:
    pair = make_pair()
    shares = [ALL.every(2, i, grain) for i in range(2)]
    links = [await pair.found() for _ in shares]
    came = await asyncio.gather(*map(pair.receive, links, shares, [grain] * 2))
    assert [list(share.runs(grain)) for share in shares] == came and all(came)
    pieces = sorted(came[0] + came[1], key=lambda piece: piece.first)
    assert pieces == list(ALL.runs(grain)) and pair.received(pieces)
    for link in links:
        await link.close()


async def test_a_peer_that_dies_while_two_links_bring_a_share_each_leaves_what_came(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(complete=False)
    pair.holder.found.set()
    grain, last = 2, Piece(CHUNKS - 1, 1)
    links = [await pair.found() for _ in range(2)]
    receiving = [link.receive(pair.arena, ALL.every(2, i, grain), grain) for i, link in enumerate(links)]
    async with aclosing(receiving[0]) as first, aclosing(receiving[1]) as second:
        for piece in (last, Piece(2, 2)):
            pair.holder.arriving.add(piece)
        assert [await anext(first), await anext(second)] == [last, Piece(2, 2)], "the last piece is shorter"
        await pair.server.close()
        for pieces in (first, second):
            with pytest.raises(LinkBroken):
                await anext(pieces)
    assert pair.received([last, Piece(2, 2)])
    for link in links:
        await link.close()


async def test_a_known_layout_is_not_sent_again(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    link = await pair.open()
    header = await link.find(PullRequest((pair.holder.name,), known_layout=LAYOUT))
    assert header.layout is LAYOUT
    await link.close()


async def test_a_piece_is_passed_on_as_soon_as_it_is_there(make_pair: Callable[..., Pair]) -> None:
    """Cut-through: the server itself is still receiving."""
    pair = make_pair(complete=False)
    pair.holder.found.set()
    link = await pair.found()
    async with aclosing(link.receive(pair.arena, ALL.copy(), 2)) as pieces:
        for piece in (Piece(4, 2), Piece(0, 2), Piece(2, 2), Piece(6, 2), Piece(8, 1)):
            pair.holder.arriving.add(piece)
            assert await asyncio.wait_for(anext(pieces), DEADLINE_S) == piece
        assert await anext(pieces, None) is None
    assert pair.received(list(ALL.runs()))
    await link.close()


async def test_a_peer_that_waits_itself_counts_as_alive(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(complete=False)
    link = await pair.open()
    finding = asyncio.create_task(link.find(PullRequest((pair.holder.name,))))
    await asyncio.sleep(2 * STALL_S)
    pair.holder.found.set()
    await finding
    receiving = asyncio.create_task(pair.receive(link, ALL.copy(), 100))
    await asyncio.sleep(2 * STALL_S)
    pair.holder.arriving.add(Piece(0, CHUNKS))
    assert await receiving == [Piece(0, CHUNKS)]
    await link.close()


async def test_a_peer_that_makes_room_itself_tells_what_comes_and_counts_as_alive(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair()
    pair.holder.arriving = arriving = Arriving(pair.holder.header)
    link = await pair.open()
    assert await link.find(PullRequest((pair.holder.name,))) == pair.holder.header
    receiving = asyncio.create_task(pair.receive(link, ALL.copy(), 100))
    await asyncio.sleep(2 * STALL_S)
    arriving.lies_in(pair.holder.arena)
    assert pair.holder.arena.pins == 1, "who reads along keeps it"
    arriving.add(Piece(0, CHUNKS))
    assert await receiving == [Piece(0, CHUNKS)] and pair.received([Piece(0, CHUNKS)])
    await link.close()


async def test_a_peer_that_finds_no_room_says_so(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.holder.arriving = arriving = Arriving(pair.holder.header)
    link = await pair.found()
    receiving = asyncio.create_task(pair.receive(link, ALL.copy(), 100))
    await asyncio.sleep(0.1)
    arriving.give_up("no arena is free for it")
    with pytest.raises(PeerRefused, match="no arena is free for it"):
        await receiving
    await link.close()


async def test_what_the_peer_does_not_have_is_refused_in_its_words(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    link = await pair.open()
    other = VersionName(7, "0" * 64)
    with pytest.raises(PeerRefused, match="this relay does not hold it"):
        await link.find(PullRequest((other,), held_only=True))
    assert pair.holder.requests[-1].acceptable == (other,) and pair.holder.requests[-1].held_only
    await link.find(PullRequest((other, pair.holder.name)))
    await link.close()


async def test_a_version_that_is_given_up_half_way_is_told(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(complete=False)
    pair.holder.found.set()
    link = await pair.found()
    async with aclosing(link.receive(pair.arena, ALL.copy(), 1)) as pieces:
        pair.holder.arriving.add(Piece(0, 1))
        assert await anext(pieces) == Piece(0, 1)
        pair.holder.arriving.give_up("its memory was needed")
        with pytest.raises(PeerRefused, match="its memory was needed"):
            await anext(pieces)
    await link.close()


async def test_the_death_of_the_peer_is_noticed_at_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(complete=False)
    pair.holder.found.set()
    link = await pair.found()
    async with aclosing(link.receive(pair.arena, ALL.copy(), 1)) as pieces:
        pair.holder.arriving.add(Piece(0, 1))
        assert await anext(pieces) == Piece(0, 1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await pair.server.close()
        with pytest.raises(LinkBroken):
            await anext(pieces)
        assert loop.time() - began < STALL_S / 2, "no waiting for silence where the wire knows"
    await link.close()


async def test_an_asker_that_goes_lets_go_of_the_arena(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(complete=False)
    pair.holder.found.set()
    link = await pair.found()
    receiving = asyncio.create_task(pair.receive(link, ALL.copy(), 1))
    await asyncio.sleep(0.1)
    assert (pair.arena.pins, pair.holder.arena.pins) == (1, 1)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    await link.close()
    assert pair.arena.pins == 0, "nothing is written any more"
    for _ in range(round(20 * DEADLINE_S)):
        if pair.holder.arena.pins == 0:
            break
        await asyncio.sleep(0.02)
    assert pair.holder.arena.pins == 0


async def test_a_relay_that_does_not_answer_is_unreachable_within_the_deadline(network: Network) -> None:
    asker, server = network.transport("asker"), network.transport("server")
    endpoint = await server.listen(Holder().find)
    await server.close()
    with pytest.raises(LinkBroken):
        await asker.connect("server", endpoint, deadline_s=1)


async def test_eight_relays_that_start_at_once_have_an_address_each(network: Network) -> None:
    """Case 61: no port is chosen beforehand: each takes a free one and says which."""
    relays = {f"relay-{n}": network.transport(f"relay-{n}") for n in range(8)}
    endpoints = await asyncio.gather(*(relay.listen(Holder().find) for relay in relays.values()))
    assert len(set(endpoints)) == 8
    asker = network.transport("asker")
    for name, endpoint in zip(relays, endpoints, strict=True):
        await (await asker.connect(name, endpoint, deadline_s=DEADLINE_S)).close()
    for relay in relays.values():
        await relay.close()


@pytest.mark.parametrize("wrong", [{"secret": b"x" * 32}, {"run": "other"}], ids=["secret", "run"])
async def test_a_stranger_gets_nothing(make_pair: Callable[..., Pair], wrong: dict[str, bytes]) -> None:
    """Neither side accepts the other, and nothing was asked of the holder."""
    pair = make_pair()
    await (await pair.open()).close()
    stranger = pair.network.transport("asker", **wrong)  # type: ignore[arg-type]
    with pytest.raises((LinkBroken, PeerRefused)):
        await stranger.connect("server", pair.endpoint, deadline_s=DEADLINE_S)
    assert pair.holder.requests == [] and any("secret" in reason for reason in pair.refusals)


async def test_a_relay_that_took_anothers_address_is_noticed(make_pair: Callable[..., Pair]) -> None:
    """Loopback addresses and ports are used again: whoever answers must be the one that was meant."""
    pair = make_pair()
    await (await pair.open()).close()
    with pytest.raises((LinkBroken, PeerRefused)):
        await pair.asker.connect("another", pair.endpoint, deadline_s=DEADLINE_S)


async def test_many_askers_are_served_at_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    arenas = [Arena.create(LAYOUT.total_bytes) for _ in range(4)]

    async def one(arena: Arena) -> None:
        link = await pair.found()
        async with aclosing(link.receive(arena, ALL.copy(), 1)) as pieces:
            assert len([piece async for piece in pieces]) == CHUNKS
        await link.close()

    await asyncio.gather(*(one(arena) for arena in arenas))
    for arena in arenas:
        with arena.buffer(LAYOUT.total_bytes) as buffer:
            assert bytes(buffer) == pair.holder.data
        arena.close()
