"""Transfers over several connections at once, in pieces of several chunks, of which the last is shorter."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

import pytest

from laminar.relay.chunks import MAX_PIECE, ChunkSet, Piece
from laminar.relay.hops import FAST_RATE, FAST_STREAMS, Tuning
from laminar.relay.layout import Layout
from laminar.relay.receiving import Arriving, Source
from laminar.relay.transport.base import ChunkSource, PullRequest, VersionHeader, VersionName

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
Node = Any
CHUNK, CHUNKS = 4096, 48
ALL = ChunkSet(CHUNKS, full=True)


class Gate:
    """Lets a relay give `allowed` pieces, to all who ask together, and more once it is `opened`."""

    def __init__(self, node: Node, allowed: int) -> None:
        self.allowed = allowed
        self.opened = asyncio.Event()
        find = node.holdings.find

        async def gated(request: PullRequest) -> ChunkSource:
            return Gated(await find(request), self)

        node.holdings.find = gated


class Gated:
    def __init__(self, source: Source, gate: Gate) -> None:
        self.source, self.gate = source, gate
        self.header, self.arena, self.base, self.close = source.header, source.arena, source.base, source.close

    async def allocated(self) -> None:
        await self.source.allocated()

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        if self.gate.allowed <= 0:
            await self.gate.opened.wait()
        self.gate.allowed -= 1
        return await self.source.ready(wanted, grain)


async def of(chain: Chain, count: int, *, streams: int, grain: int) -> list[Node]:
    nodes = [await chain.add(f"r{i}") for i in range(count)]
    for node in nodes:
        node.follower.tuning.streams, node.follower.tuning.grain = streams, grain
    chain.plan(nodes[0])
    return nodes


def recorded(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """The pieces that come to `node`, once they were checked."""
    pieces: list[Piece] = []
    add = Arriving.add

    def noted(arriving: Arriving, piece: Piece) -> None:
        if any(arriving is known for known in node.holdings._arriving.values()):
            pieces.append(piece)
        add(arriving, piece)

    monkeypatch.setattr(Arriving, "add", noted)
    return pieces


def asked(node: Node) -> list[str]:
    """What is found at `node`, a line each time."""
    find, found = node.holdings.find, []

    async def counted(request: Any) -> Any:
        found.append(str(request.acceptable))
        return await find(request)

    node.holdings.find = counted
    return found


def missing_at(node: Node) -> int:
    transfer = node.follower.receiving
    missing = transfer.pull.missing if transfer else None
    return CHUNKS if missing is None else len(missing)


async def came(chain: Chain, chunks: int, *nodes: Node) -> None:
    await chain.until(lambda: all(CHUNKS - missing_at(n) >= chunks for n in nodes), f"{chunks} chunks")


def sound(chain: Chain, name: VersionName, source: bytes) -> None:
    assert all(node.bytes_of(name) == source for node in chain.nodes)


def test_a_fast_link_gets_several_connections_unless_their_number_is_fixed() -> None:
    assert Tuning().streams_for(100) == 1, "nothing is measured yet"
    assert Tuning(rate=FAST_RATE).streams_for(100) == FAST_STREAMS > 1
    assert Tuning(rate=FAST_RATE).streams_for(2) == 2 and Tuning(rate=FAST_RATE).streams_for(0) == 1, "a piece each"
    assert Tuning(streams=1, rate=FAST_RATE).streams_for(100) == 1
    assert Tuning(streams=4, rate=1e6).streams_for(100) == 4


@dataclass
class Way:
    """As much of a link as pieces are cut for."""

    tells_landed: bool
    round_trip_s: float = 1e-4


def test_pieces_leave_room_for_a_check_as_a_stage_of_its_own_unless_threads_check_what_they_receive() -> None:
    layout = Layout.from_tensors({"w": ("uint8", (1 << 30,))})
    header = VersionHeader(VersionName(1, "d"), layout, 1 << 20, ())

    def grain(rate: float, *, tells_landed: bool) -> int:
        link: Any = Way(tells_landed)
        return Tuning(rate=rate).grain_for(header, relays=2, link=link)

    assert grain(FAST_RATE, tells_landed=True) == MAX_PIECE >> 20, "nothing is forwarded"
    assert grain(FAST_RATE, tells_landed=False) < MAX_PIECE >> 20
    assert grain(FAST_RATE / 2, tells_landed=True) == grain(FAST_RATE / 2, tells_landed=False) < MAX_PIECE >> 20


@pytest.mark.parametrize("streams", [1, 2, 3, 100])
@pytest.mark.parametrize("grain", [1, 5, 47, 100])
async def test_a_version_comes_whole_in_pieces_of_so_many_chunks_over_so_many_connections(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, streams: int, grain: int
) -> None:
    master, relay = await of(chain, 2, streams=streams, grain=grain)
    pieces, connections = recorded(relay, monkeypatch), asked(master)
    name = await master.publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    assert relay.bytes_of(name) == master.bytes_of(name)
    assert sorted(pieces, key=lambda piece: piece.first) == list(ALL.runs(grain)), "each piece once"
    assert len(connections) == max(1, min(streams, CHUNKS // grain))
    hop = relay.follower.hops[-1]
    assert hop.received == hop.nbytes and hop.peers == ("r0",) and hop.piece_bytes == grain * CHUNK


@pytest.mark.parametrize("grain", [1, 5, 7])
async def test_relays_pass_on_what_comes_to_them_over_two_connections(chain: Chain, grain: int) -> None:
    nodes = await of(chain, 4, streams=2, grain=grain)
    gate = Gate(nodes[0], 4)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await came(chain, 3 * grain, *nodes[1:])
    assert not any(node.holdings.has(name) for node in nodes[1:]), "each passes on what it has"
    gate.opened.set()
    await chain.until_all_hold(name)
    sound(chain, name, nodes[0].bytes_of(name))
    assert [node.follower.hops[-1].peers for node in nodes[1:]] == [("r0",), ("r1",), ("r2",)]


@pytest.mark.parametrize(("grain", "pieces"), [(1, 1), (1, 47), (5, 1), (5, 4), (5, 9)])
async def test_a_peer_that_dies_midway_is_gone_round_and_what_came_over_both_connections_is_kept(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, grain: int, pieces: int
) -> None:
    nodes = await of(chain, 3, streams=2, grain=grain)
    gate = Gate(nodes[0], pieces)
    name = await nodes[0].publish(1)
    source = nodes[0].bytes_of(name)
    recorded_pieces = recorded(nodes[2], monkeypatch)
    chain.announce(name)
    await came(chain, max(1, grain * pieces - 2), *nodes[1:])
    await chain.kill(nodes[1])
    gate.opened.set()
    await chain.until_all_hold(name)
    sound(chain, name, source)
    hop = nodes[2].follower.hops[-1]
    assert hop.peers == ("r1", "r0") and [(r.lost, r.found) for r in hop.repairs] == [("r1", "r0")]
    chunks = [index for piece in recorded_pieces for index in range(piece.first, piece.end)]
    assert sorted(chunks) == list(range(CHUNKS)), "no chunk that was checked came again"


@pytest.mark.parametrize("pieces", [1, 4, 9])
async def test_the_masters_death_midway_leaves_what_came_and_the_next_master_sends_the_rest(
    chain: Chain, pieces: int
) -> None:
    nodes = await of(chain, 3, streams=2, grain=5)
    Gate(nodes[0], pieces)
    name = await nodes[0].publish(1)
    source = nodes[0].bytes_of(name)
    chain.announce(name)
    await came(chain, 5 * pieces - 2, *nodes[1:])
    await chain.kill(nodes[0])
    again = await chain.add("again")
    assert await again.publish(1) == name
    chain.plan(again)
    chain.announce(name)
    await chain.until_all_hold(name)
    sound(chain, name, source)
    assert nodes[1].follower.hops[-1].received <= len(source) + 2 * 5 * CHUNK, "but what was under way"


async def test_the_end_of_one_connection_of_two_ends_both_and_the_rest_comes_over_two_new_ones(chain: Chain) -> None:
    master, relay = await of(chain, 2, streams=2, grain=5)
    gate, connections = Gate(master, 4), asked(master)
    name = await master.publish(1)
    chain.announce(name)
    await came(chain, 5 * 4 - 2, relay)
    first, second = relay.follower.receiving._peers["r0"].links
    second._channel._sock.shutdown(socket.SHUT_RDWR)
    gate.opened.set()
    await chain.until_all_hold(name)
    assert relay.bytes_of(name) == master.bytes_of(name)
    assert len(connections) == 4 and relay.follower.hops[-1].peers == ("r0", "r0")
    assert first._channel._sock.fileno() == second._channel._sock.fileno() == -1, "both are closed"


async def test_damage_within_a_piece_of_several_chunks_is_noticed_on_any_connection(chain: Chain) -> None:
    nodes = await of(chain, 2, streams=2, grain=5)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    last = nodes[1].holdings.get(1).layout.total_bytes - 1
    with nodes[1].holdings.get(1).arena.buffer(last + 1) as buffer:
        buffer[last] ^= 1
    late = await chain.add("late")
    late.follower.tuning.streams, late.follower.tuning.grain = 2, 5
    chain.plan()
    chain.announce(name)
    await chain.until_all_hold(name)
    assert late.bytes_of(name) == nodes[0].bytes_of(name)
    assert any(f"chunk {CHUNKS - 1} of version 1" in error for error in late.holdings.errors)
