"""Versions that come as differences to the one before: fewer bytes, the same result, whole where there is no base."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.transport.base import ChunkSource, LinkBroken, PullRequest, VersionName
from laminar.relay.transport.frames import PREFIX, FrameChannel, Kind
from laminar.relay.transport.pieces import send_pieces

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
Node = Any
CHUNK = 4096


def a_little_changed(data: bytes, seed: int, *, words: int = 200) -> bytes:
    """As a step at a small learning rate does: some words move by one."""
    changed = bytearray(data)
    for index in random.Random(seed).sample(range(len(data) // 2), words):
        changed[2 * index] = (changed[2 * index] + 1) % 256
    return bytes(changed)


async def spread(chain: Chain, name: VersionName) -> None:
    chain.announce(name)
    await chain.until_all_hold(name)


async def of(chain: Chain, count: int) -> list[Node]:
    """Relays that hold version 1, over links on which whole versions are slow."""
    nodes = [await chain.add(f"r{i}") for i in range(count)]
    chain.plan(nodes[0])
    await spread(chain, await nodes[0].publish(1))
    for node in nodes:
        node.follower.tuning.way.whole_rate = 1.0
    return nodes


async def publish_changed(node: Node, version: int) -> tuple[VersionName, bytes]:
    held = node.holdings.get(version - 1)
    data = a_little_changed(node.bytes_of(held.name), version)
    return await node.publish(version, data=data), data


async def test_what_changed_passes_along_the_chain(chain: Chain) -> None:
    """A relay in the middle computes the difference anew from what it holds: none is kept."""
    nodes = await of(chain, 4)
    for version in (2, 3):
        name, data = await publish_changed(nodes[0], version)
        await spread(chain, name)
        assert all(node.bytes_of(name) == data for node in nodes)
        hops = [node.follower.hops[-1] for node in nodes[1:]]
        assert [hop.peers for hop in hops] == [("r0",), ("r1",), ("r2",)]
        assert all(hop.received < 0.2 * hop.nbytes for hop in hops), [hop.received for hop in hops]


async def test_the_first_version_and_that_of_a_newcomer_come_whole(chain: Chain) -> None:
    nodes = await of(chain, 2)
    newcomer = await chain.add("r2")
    name, data = await publish_changed(nodes[0], 2)
    chain.plan(nodes[0])
    await spread(chain, name)
    assert newcomer.bytes_of(name) == data
    for hop in (nodes[1].follower.hops[0], newcomer.follower.hops[0]):
        assert hop.received == hop.nbytes


async def test_versions_that_have_little_in_common_come_whole(chain: Chain) -> None:
    nodes = await of(chain, 2)
    name = await nodes[0].publish(2)
    await spread(chain, name)
    hop = nodes[1].follower.hops[-1]
    assert hop.received == hop.nbytes and nodes[1].bytes_of(name) == nodes[0].bytes_of(name)


async def test_a_base_that_is_not_what_it_should_be_is_noticed_and_left(chain: Chain) -> None:
    """Memory that was overwritten: each piece is checked against the digest, and then comes whole."""
    nodes = await of(chain, 2)
    base = nodes[1].holdings.get(1)
    with base.arena.buffer(64) as buffer:
        buffer[:] = bytes(64)
    name, data = await publish_changed(nodes[0], 2)
    await spread(chain, name)
    assert nodes[1].bytes_of(name) == data
    assert any("other bytes than promised" in error for error in nodes[1].holdings.errors)


async def test_a_death_within_a_broadcast_of_differences_is_gone_round(chain: Chain) -> None:
    nodes = await of(chain, 4)
    nodes[0].slow_s = 0.02
    name, data = await publish_changed(nodes[0], 2)
    chain.announce(name)
    last = nodes[3]
    await chain.until(lambda: last.follower.receiving and last.follower.receiving.pull.phase.value == "receiving", "it")
    await chain.kill(nodes[2])
    await chain.until_all_hold(name)
    hop = last.follower.hops[-1]
    assert last.bytes_of(name) == data and hop.peers == ("r2", "r1")
    assert hop.received < 0.3 * hop.nbytes, "the rest came as differences too"


class Sending:
    """Lets a relay give `pieces` pieces, and more once it is `going_on`."""

    def __init__(self, node: Node, pieces: int) -> None:
        self.pieces = pieces
        self.going_on = asyncio.Event()
        self._find, node.holdings.find = node.holdings.find, self.find

    async def find(self, request: PullRequest) -> ChunkSource:
        source = await self._find(request)
        ready = source.ready

        async def some(wanted: ChunkSet, grain: int) -> Piece:
            if self.pieces <= 0:
                await self.going_on.wait()
            self.pieces -= 1
            return await ready(wanted, grain)

        source.ready = some  # type: ignore[method-assign]
        return source


async def came(chain: Chain, node: Node, chunks: int) -> None:
    def so_many() -> bool:
        transfer = node.follower.receiving
        missing = transfer.pull.missing if transfer else None
        return missing is not None and missing.size - len(missing) >= chunks

    await chain.until(so_many, f"{chunks} chunks")


@pytest.mark.parametrize(("streams", "pieces"), [(1, 1), (2, 6), (1, 11)])
@pytest.mark.parametrize("survivor", ["has the base", "has none", "sends whole"])
async def test_the_sender_of_differences_dies_midway_and_another_sends_the_rest(
    chain: Chain, streams: int, pieces: int, survivor: str
) -> None:
    """As differences too where the other one holds the base, else whole; what came is kept."""
    grain = 4
    first, second, last = await of(chain, 3)
    last.follower.tuning.grain, last.follower.tuning.streams = grain, streams
    name, data = await publish_changed(first, 2)
    chain.nodes.remove(last)
    await spread(chain, name)
    chain.nodes.append(last)
    Sending(second, pieces)
    if survivor == "has none":
        first.holdings.discard(1)
    elif survivor == "sends whole":
        first.transport._delta_share = 0.0
    last.follower.published([name])
    await came(chain, last, grain * pieces)
    assert last.follower.receiving.pull.peer == "r1"
    await chain.kill(second)
    await chain.until_all_hold(name)
    hop = last.follower.hops[-1]
    assert last.bytes_of(name) == data
    assert hop.peers == ("r1", "r0") and [(r.lost, r.found) for r in hop.repairs] == [("r1", "r0")]
    if survivor == "has the base":
        assert hop.received < 0.3 * hop.nbytes
    else:
        rest = hop.nbytes - grain * pieces * CHUNK
        assert rest <= hop.received < rest + 0.3 * hop.nbytes, "what came is not sent again"


async def test_a_sender_that_dies_within_a_difference_leaves_the_arena_sound(chain: Chain) -> None:
    """Half of a difference is none: nothing of it lies in the arena, and the piece comes from another."""
    first, second, last = await of(chain, 3)
    name, data = await publish_changed(first, 2)
    chain.nodes.remove(last)
    await spread(chain, name)
    chain.nodes.append(last)
    second.transport._serve_chunks = cut_off_within_the_third
    last.follower.published([name])
    await chain.until_all_hold(name)
    hop = last.follower.hops[-1]
    assert last.bytes_of(name) == data and hop.peers == ("r1", "r0")
    assert any("closed the connection within a piece" in error for error in last.holdings.errors)


async def cut_off_within_the_third(channel: FrameChannel, source: ChunkSource, wanted: ChunkSet, grain: int) -> None:
    """As `TcpTransport._serve_chunks` until the connection ends in the middle of what was announced."""
    send_bytes, announced = channel.send_bytes, 0

    async def short(data: memoryview) -> None:
        nonlocal announced
        announced += data.nbytes > PREFIX.size and data[0] == Kind.DELTA
        # The encoded difference follows the frame that announces it, untagged.
        if announced == 3 and data[0] != Kind.DELTA:
            await send_bytes(data[: data.nbytes // 2])
            raise LinkBroken("the sender dies")
        await send_bytes(data)

    channel.send_bytes = short  # type: ignore[method-assign]
    await send_pieces(channel, source, wanted, grain, delta_share=0.5)


async def test_differences_can_be_turned_off(chain: Chain) -> None:
    nodes = await of(chain, 2)
    nodes[1].follower.tuning.deltas = False
    name, _ = await publish_changed(nodes[0], 2)
    await spread(chain, name)
    hop = nodes[1].follower.hops[-1]
    assert hop.received == hop.nbytes


@pytest.mark.parametrize("delta_rate", [1.0, 1e15])
async def test_the_way_by_which_versions_came_faster_is_taken(chain: Chain, delta_rate: float) -> None:
    nodes = await of(chain, 2)
    way = nodes[1].follower.tuning.way
    way.whole_rate, way.delta_rate = 1e9, delta_rate
    name, _ = await publish_changed(nodes[0], 2)
    await spread(chain, name)
    hop = nodes[1].follower.hops[-1]
    assert (hop.received < hop.nbytes) == (delta_rate > 1e9)
