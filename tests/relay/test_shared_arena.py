"""Several processes fill one arena: the seal waits for all of them, and no version comes of a part."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laminar.errors import WeightsError
from laminar.relay import reservation
from laminar.relay.client import RelayConnection
from laminar.relay.layout import Layout
from laminar.relay.server import RelayServer
from laminar.relay.writing import JoinedArena, WritableArena

LAYOUT = Layout.from_tensors({"a": ("uint8", (3000,)), "b": ("uint8", (5001,))})
TENSOR_BYTES = 8001
HALF = 4000


async def let_go(server: RelayServer) -> None:
    """Until the relay has seen the end of each connection that had reserved something."""
    async with asyncio.timeout(5):
        while server.reservations:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.01)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RelayServer]:
    async with RelayServer(tmp_path / "relay.sock", run="demo", chunk_bytes=1024) as server:
        yield server
        server.holdings.validate()
        await let_go(server)


@pytest.fixture
def connection(server: RelayServer) -> RelayConnection:
    return RelayConnection(server.socket_path, run="demo")


def fill(arena: WritableArena | JoinedArena, start: int, end: int) -> int:
    """Bytes `start` to `end` of the tensors' own, without the gap between them."""
    gap = LAYOUT.tensors[1].offset - 3000
    for index in range(start, end):
        arena.buffer[index + (gap if index >= 3000 else 0)] = index % 251
    return end - start


async def reserved(connection: RelayConnection, writers: int) -> WritableArena:
    arena = await asyncio.to_thread(lambda: connection.reserve(LAYOUT, writers=writers))
    assert arena is not None
    return arena


async def joined(connection: RelayConnection, arena: WritableArena) -> JoinedArena:
    return await asyncio.to_thread(connection.join, arena.ticket, LAYOUT)


async def digest_of_one_writer(connection: RelayConnection, version: int) -> str:
    arena = await reserved(connection, 1)
    fill(arena, 0, TENSOR_BYTES)
    return (await asyncio.to_thread(arena.seal, version)).digest


async def test_the_seal_waits_for_all_and_the_bytes_are_those_of_a_single_writer(connection: RelayConnection) -> None:
    arena = await reserved(connection, 3)
    others = [await joined(connection, arena) for _ in range(2)]
    own = fill(arena, 0, 1000)
    sealing = asyncio.create_task(asyncio.to_thread(lambda: arena.seal(1, wrote=own)))
    await asyncio.to_thread(others[0].wrote, fill(others[0], 1000, 3500))
    await asyncio.sleep(0.1)
    assert not sealing.done() and await asyncio.to_thread(connection.versions) == []
    await asyncio.to_thread(others[1].wrote, fill(others[1], 3500, TENSOR_BYTES))
    info = await sealing
    assert info.digest == await digest_of_one_writer(connection, 1)


async def test_a_writer_may_come_after_the_seal_was_asked_for(connection: RelayConnection) -> None:
    arena = await reserved(connection, 2)
    own = fill(arena, 0, HALF)
    sealing = asyncio.create_task(asyncio.to_thread(lambda: arena.seal(1, wrote=own)))
    await asyncio.sleep(0.05)
    late = await joined(connection, arena)
    await asyncio.to_thread(late.wrote, fill(late, HALF, TENSOR_BYTES))
    assert (await sealing).version == 1


DIES = """
import os, sys
from laminar.relay.client import RelayConnection
from laminar.relay.layout import Layout
layout = Layout.from_tensors({"a": ("uint8", (3000,)), "b": ("uint8", (5001,))})
joined = RelayConnection(sys.argv[1], run="demo").join(sys.argv[2], layout)
joined.buffer[4000:5000] = b"x" * 1000
os.kill(os.getpid(), 9)
"""


async def test_a_writer_that_dies_leaves_no_version_and_its_arena_is_used_again(
    server: RelayServer, connection: RelayConnection
) -> None:
    arena = await reserved(connection, 2)
    command = [sys.executable, "-c", DIES, str(server.socket_path), arena.ticket]
    assert await asyncio.to_thread(subprocess.call, command) == -9
    own = fill(arena, 0, HALF)
    with pytest.raises(WeightsError, match="one of its writers ended before it was done; publish it again"):
        await asyncio.to_thread(lambda: arena.seal(1, wrote=own))
    assert "version 1: a version cannot be sealed" in server.holdings.errors[-1]
    await digest_of_one_writer(connection, 1)
    assert await asyncio.to_thread(connection.versions) != []


@pytest.mark.parametrize("written", [TENSOR_BYTES, TENSOR_BYTES - HALF - 1], ids=["twice", "too little"])
async def test_bytes_that_were_written_twice_or_not_at_all_are_counted(
    connection: RelayConnection, written: int
) -> None:
    arena = await reserved(connection, 2)
    other = await joined(connection, arena)
    await asyncio.to_thread(other.wrote, written)
    with pytest.raises(WeightsError, match=f"wrote {written + HALF} bytes, its tensors have {TENSOR_BYTES}"):
        await asyncio.to_thread(lambda: arena.seal(1, wrote=HALF))


async def test_a_writer_that_never_comes_is_waited_for_only_so_long(
    connection: RelayConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservation, "WRITERS_S", 0.2)
    arena = await reserved(connection, 3)
    other = await joined(connection, arena)
    await asyncio.to_thread(other.wrote, HALF)
    with pytest.raises(WeightsError, match=r"1 of its 3 writers were not done 0.2 s after .*; 2 have come at all"):
        await asyncio.to_thread(lambda: arena.seal(1, wrote=HALF))


async def test_a_mapping_that_was_not_closed_is_no_end(connection: RelayConnection) -> None:
    arena = await reserved(connection, 2)
    other = await joined(connection, arena)
    view = other.buffer[:10]
    with pytest.raises(WeightsError, match="the arena is still in use"):
        other.wrote(1)
    view.release()
    other.abandon()
    with pytest.raises(WeightsError, match="ended before it was done"):
        await asyncio.to_thread(lambda: arena.seal(1, wrote=HALF))


async def test_strangers_to_an_arena_are_told_why(server: RelayServer, connection: RelayConnection) -> None:
    arena = await reserved(connection, 2)
    other = await joined(connection, arena)
    with pytest.raises(WeightsError, match="all 2 writers of this arena have come"):
        await joined(connection, arena)
    with pytest.raises(WeightsError, match="no arena is reserved under this ticket"):
        await asyncio.to_thread(connection.join, "0" * 32, LAYOUT)
    other.abandon()
    arena.abandon()
    await let_go(server)
    with pytest.raises(WeightsError, match="no arena is reserved under this ticket"):
        await joined(connection, arena)


async def test_another_layout_is_refused(connection: RelayConnection) -> None:
    arena = await reserved(connection, 2)
    small = Layout.from_tensors({"a": ("uint8", (3000,))})
    with pytest.raises(WeightsError, match="all that write a version need the same model and dtype"):
        await asyncio.to_thread(connection.join, arena.ticket, small)
    arena.abandon()


async def test_the_state_agrees_with_itself_at_each_event(server: RelayServer) -> None:
    arena = await server.holdings.reserve(LAYOUT)
    assert arena is not None
    held = reservation.Reservation(arena, LAYOUT, 3, "ticket")
    for event in (held.join, held.join, lambda: held.wrote(4000), lambda: held.wrote(1)):
        event()
        held.validate()
    await held.complete(TENSOR_BYTES - 4001)
    with pytest.raises(WeightsError, match="all 3 writers"):
        held.join()
    server.holdings.release(arena)
