"""However many connections come, the loop has its turns for everything else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.relay import accepting
from laminar.relay.accepting import BATCH, LONGEST_PAUSE_S, SHARE, accept_all, pause_after
from laminar.relay.server import RelayServer
from laminar.relay.transport.tcp import TcpTransport, split_endpoint

MANY = 3 * BATCH


async def _never(*_: object) -> Any:
    raise AssertionError("nobody asks for a version here")


async def _most_in_a_turn(begun: list[object]) -> int:
    """How many connections, of `MANY`, began in one turn of the loop at most."""
    most = before = 0
    async with asyncio.timeout(60):
        while len(begun) < MANY:
            await asyncio.sleep(0)
            most, before = max(most, len(begun) - before), len(begun)
    return most


@contextlib.asynccontextmanager
async def _stored(family: int, address: object) -> AsyncIterator[None]:
    """`MANY` connections in the kernel's backlog: they are made without a turn of the loop."""
    with contextlib.ExitStack() as opened:
        for _ in range(MANY):
            opened.enter_context(socket.socket(family, socket.SOCK_STREAM)).connect(address)
        yield


def _counted(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> list[object]:
    """Each call of `owner.method`, which goes on as ever."""
    calls: list[object] = []
    real = getattr(owner, method)

    def counting(self: Any, *args: Any) -> Any:
        calls.append(None)
        return real(self, *args)

    monkeypatch.setattr(owner, method, counting)
    return calls


async def test_others_have_their_turn_while_strangers_keep_coming_to_a_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = _counted(monkeypatch, TcpTransport, "serve")
    server = TcpTransport(secret=b"s" * 32, run="demo", relay="me")
    try:
        async with _stored(socket.AF_INET, split_endpoint(await server.listen(_never))):
            assert await _most_in_a_turn(begun) <= BATCH
    finally:
        await server.close()


async def test_what_fails_here_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told among the errors, which strangers do not push out."""

    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(TcpTransport, "serve", broken)
    errors: asyncio.Queue[str] = asyncio.Queue()
    refusals: list[str] = []
    server = TcpTransport(
        secret=b"s" * 32, run="demo", relay="me", on_refusal=refusals.append, on_error=errors.put_nowait
    )
    try:
        with socket.create_connection(split_endpoint(await server.listen(_never))):
            async with asyncio.timeout(30):
                assert "broken" in await errors.get()
        assert not refusals
    finally:
        await server.close()


async def test_others_have_their_turn_while_processes_keep_coming_to_the_local_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = _counted(monkeypatch, RelayServer, "_serve")
    async with (
        RelayServer(tmp_path / "of this user" / "relay.sock", chunk_bytes=4096) as server,
        _stored(socket.AF_UNIX, str(server.socket_path)),
    ):
        assert await _most_in_a_turn(begun) <= BATCH


@given(st.floats(0, 1000))
def test_accepting_leaves_most_of_the_loop_to_others(busy_s: float) -> None:
    pause = pause_after(busy_s)
    assert 0 <= pause <= LONGEST_PAUSE_S
    assert pause == LONGEST_PAUSE_S or busy_s == pytest.approx(SHARE * (busy_s + pause))


async def test_a_listener_that_fails_is_told_of_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of descriptors."""
    monkeypatch.setattr(accepting, "RETRY_S", 0.0)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, iter([OSError(24, "Too many open files")] * 5)

    async def first_failing(listener: socket.socket) -> Any:
        for failure in failures:
            raise failure
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", first_failing)
    told: list[str] = []
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        task = asyncio.create_task(accept_all(listener, lambda sock, _: accepted.put_nowait(sock), told.append))
        try:
            with socket.create_connection(listener.getsockname()):
                async with asyncio.timeout(30):
                    (await accepted.get()).close()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert told == ["cannot accept a connection: Too many open files"]
