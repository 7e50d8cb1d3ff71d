"""Chunks that the receiving thread checked at once, and those that are checked afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece
from laminar.relay.layout import Layout, checksums, version_digest
from laminar.relay.receiving import Arriving, Checks
from laminar.relay.transport.base import ChunkSource, PullRequest, VersionHeader, VersionName
from laminar.relay.transport.bulk import BULK_BYTES
from laminar.relay.transport.tcp import TcpTransport

CHUNK, CHUNKS = 2 * BULK_BYTES, 5
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * CHUNKS - 1000,))})
DATA = os.urandom(LAYOUT.total_bytes)
SUMS = tuple(checksums(memoryview(DATA), CHUNK))
HEADER = VersionHeader(VersionName(1, version_digest(LAYOUT, SUMS)), LAYOUT, CHUNK, SUMS)
ALL = Piece(0, CHUNKS)


@pytest.fixture
def arrived() -> Iterator[Arriving]:
    """All bytes lie there; those of chunk 3 are damaged."""
    arena = Arena.create(LAYOUT.total_bytes)
    with arena.buffer(LAYOUT.total_bytes) as buffer:
        buffer[:] = DATA
        buffer[3 * CHUNK] ^= 1
    yield Arriving(HEADER, arena, complete=True)
    arena.close()


def test_only_sound_chunks_are_spared_a_second_look(arrived: Arriving) -> None:
    checks = Checks(arrived)
    for index in (0, 3, 4):
        checks.landed(index)
    assert checks.left(ALL) == [1, 2, 3]
    checks.check([1, 2])
    with pytest.raises(WeightsError, match=r"chunk 3 of version 1 .* other bytes than promised"):
        checks.check([1, 2, 3])


def test_what_comes_once_more_is_checked_once_more(arrived: Arriving) -> None:
    checks = Checks(arrived)
    checks.landed(1)
    assert checks.left(Piece(1, 1)) == []
    assert checks.left(Piece(1, 1)) == [1]
    assert Checks(arrived).left(ALL) == [0, 1, 2, 3, 4], "another stream knows nothing of it"


@pytest.mark.parametrize("grain", [1, 2, CHUNKS])
async def test_a_damaged_chunk_is_found_whoever_received_it(arrived: Arriving, grain: int) -> None:
    async def find(request: PullRequest) -> ChunkSource:
        return arrived.open()

    transports = [TcpTransport(secret=b"a secret of this test only", run="run", relay=name) for name in ("a", "b")]
    arena = Arena.create(LAYOUT.total_bytes)
    checks = Checks(Arriving(HEADER, arena))
    left: list[int] = []
    try:
        link = await transports[0].connect("b", await transports[1].listen(find), deadline_s=20)
        await link.find(PullRequest((HEADER.name,)))
        wanted = ChunkSet(CHUNKS, full=True)
        async with aclosing(link.receive(arena, wanted, grain, landed=checks.landed)) as pieces:
            async for piece in pieces:
                left += checks.left(piece)
        await link.close()
        assert 3 in left
        checks.check([index for index in left if index != 3])
        with pytest.raises(WeightsError, match="chunk 3"):
            checks.check(left)
        with arena.buffer(LAYOUT.total_bytes) as buffer:
            assert all(buffer[i * CHUNK : (i + 1) * CHUNK] == DATA[i * CHUNK : (i + 1) * CHUNK] for i in (0, 1, 2, 4))
    finally:
        for transport in transports:
            await transport.close()
        arena.close()
