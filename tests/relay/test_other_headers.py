"""Headers by which further connections send a version: each decides where bytes go, so all must say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from laminar.errors import WeightsError
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout
from laminar.relay.receiving import Source
from laminar.relay.transport.base import ChunkSource, PeerRefused, PullRequest, VersionHeader, VersionName

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
Node = Any
CHUNK, CHUNKS = 4096, 48


def smaller_chunks(header: VersionHeader) -> VersionHeader:
    count = -(-header.layout.total_bytes // (CHUNK // 2))
    return replace(header, chunk_bytes=CHUNK // 2, checksums=(bytes(32),) * count)


def larger_chunks(header: VersionHeader) -> VersionHeader:
    return replace(header, chunk_bytes=2 * CHUNK, checksums=header.checksums[: CHUNKS // 2])


def fewer_bytes(header: VersionHeader) -> VersionHeader:
    layout = Layout.from_tensors({"w": ("uint8", (CHUNK * (CHUNKS - 1),))})
    return replace(header, layout=layout, checksums=header.checksums[:-1])


def another_version(header: VersionHeader) -> VersionHeader:
    return replace(header, name=VersionName(header.name.version + 1, header.name.digest))


def other_checksums(header: VersionHeader) -> VersionHeader:
    return replace(header, checksums=header.checksums[::-1])


CHANGES = [smaller_chunks, larger_chunks, fewer_bytes, another_version, other_checksums]
Change = Callable[[VersionHeader], VersionHeader]


class Otherwise:
    """A source that tells another header, and gives the pieces that are missing in the second half, as this one counts
    them."""

    def __init__(self, source: Source, change: Change) -> None:
        self.source, self.header, self.arena, self.base = source, change(source.header), source.arena, None
        self.close = source.close
        self.upcoming = iter(range(CHUNKS // 2, CHUNKS))

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        return Piece(next(self.upcoming) % wanted.size, 1)


class Ending:
    """A source that gives `pieces`, then gives the version up."""

    def __init__(self, source: Source, pieces: int) -> None:
        self.source, self.pieces = source, pieces
        self.header, self.arena, self.base, self.close = source.header, source.arena, source.base, source.close

    async def ready(self, wanted: ChunkSet, grain: int) -> Piece:
        if self.pieces == 0:
            raise WeightsError("its memory was needed")
        self.pieces -= 1
        return await self.source.ready(wanted, grain)


def answers(node: Node, *sources: Callable[[Source], ChunkSource]) -> list[int]:
    """From now on `node` answers with these in turn, then as ever; what is returned counts the answers."""
    find, count = node.holdings.find, [0]

    async def other(request: PullRequest) -> ChunkSource:
        source = await find(request)
        count[0] += 1
        return sources[count[0] - 1](source) if count[0] <= len(sources) else source

    node.holdings.find = other
    return count


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_header_that_differs_in_anything_is_refused(change: Change) -> None:
    layout = Layout.from_tensors({"w": ("uint8", (CHUNK * CHUNKS,))})
    header = VersionHeader(VersionName(1, "d" * 64), layout, CHUNK, tuple(bytes([i]) * 32 for i in range(CHUNKS)))
    header.check_same(replace(header))
    with pytest.raises(PeerRefused):
        change(header).check_same(header)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_whoever_would_send_the_rest_by_another_header_is_refused_and_told(chain: Chain, change: Change) -> None:
    """Its pieces would lie over chunks that were checked, and passed on, before."""
    first, odd, honest, relay = [await chain.add(f"r{i}") for i in range(4)]
    chain.plan(first)
    name = await first.publish(1)
    chain.nodes.remove(relay)
    chain.announce(name)
    await chain.until_all_hold(name)
    source = first.bytes_of(name)
    with odd.holdings.get(1).arena.buffer(len(source)) as buffer:
        buffer[:] = bytes(len(source))
    answers(honest, lambda source: Ending(source, CHUNKS // 2))
    asked = answers(odd, *[lambda source: Otherwise(source, change)] * 1000)
    await chain.kill(first)
    chain.nodes.append(relay)
    chain.plan(odd)
    chain.announce(name)
    await chain.until(lambda: relay.holdings.has(name), "the version")
    assert relay.bytes_of(name) == source
    assert asked[0] > 0 and "r1" not in relay.follower.hops[-1].peers


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_a_second_stream_that_begins_by_another_header_is_refused_and_told(chain: Chain, change: Change) -> None:
    first, relay = [await chain.add(f"r{i}") for i in range(2)]
    relay.follower.tuning.streams = 2
    chain.plan(first)
    name = await first.publish(1)
    asked = answers(first, lambda source: source, lambda source: Otherwise(source, change))
    chain.announce(name)
    await chain.until_all_hold(name)
    assert asked[0] >= 4 and relay.bytes_of(name) == first.bytes_of(name)
    expected = "other checksums" if change is other_checksums else "the version that comes already is"
    assert any(expected in error for error in relay.holdings.errors), "told"


async def test_what_lies_in_the_arena_stays_until_the_right_header_comes(chain: Chain) -> None:
    """Chunks that came before a refused header are kept, and nobody who read along got other bytes."""
    first, middle, last = [await chain.add(f"r{i}") for i in range(3)]
    middle.follower.tuning.streams = 2
    chain.plan(first)
    name = await first.publish(1)
    answers(
        first,
        lambda source: Ending(source, 10), lambda source: Ending(source, 10),
        *[lambda source: Otherwise(source, smaller_chunks)] * 2,
    )  # fmt: skip
    chain.announce(name)
    await chain.until_all_hold(name)
    assert middle.bytes_of(name) == last.bytes_of(name) == first.bytes_of(name)
