"""Strangers and nonsense at a relay's port: refused before anything is allocated, counted, and without effect."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing

import psutil
import pytest

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet
from laminar.relay.holdings import Holdings
from laminar.relay.layout import Layout
from laminar.relay.transport import tcp
from laminar.relay.transport.base import PeerRefused, PullRequest, VersionHeader, VersionName
from laminar.relay.transport.frames import (
    LONGEST,
    PREFIX,
    Kind,
    decode_delta,
    decode_fetch,
    decode_header,
    decode_piece,
    decode_reason,
    decode_request,
    encode_fetch,
    encode_header,
    encode_json,
    encode_request,
)
from laminar.relay.transport.handshake import ACCEPT, GREETING, PROOF, Asker, Identity, Sealer, Server
from laminar.relay.transport.tcp import TcpTransport

CHUNK = 1024
LAYOUT = Layout.from_tensors({"w": ("uint8", (CHUNK * 3,))})
SECRET = b"s" * 32
IDENTITY = Identity(SECRET, "demo", "me")


class Target:
    """A relay that holds a version, and its refusals."""

    def __init__(self) -> None:
        self.holdings = Holdings(chunk_bytes=CHUNK, retain=2)
        self.transport = TcpTransport(
            secret=SECRET, run="demo", relay="me", stall_s=1.0,
            on_refusal=self.holdings.record_refusal, on_error=self.holdings.record_error,
        )

    async def start(self) -> None:
        await self.holdings.start()
        arena = await self.holdings.reserve(LAYOUT)
        assert arena is not None
        info = await self.holdings.seal(arena, LAYOUT, 1)
        self.name = VersionName(1, info.digest)

    async def converse(self, fuzzer: Fuzzer) -> None:
        """One connection over a socket pair: what accept does, without a port for each of many thousands."""
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(self.transport.serve(theirs, "a fuzzer", self.holdings.find))
        ours.setblocking(False)
        try:
            async with asyncio.timeout(20):
                await fuzzer.attack(ours)
                ours.shutdown(socket.SHUT_WR)
                while await asyncio.get_running_loop().sock_recv(ours, 1 << 16):
                    pass
        except ConnectionError:
            pass
        finally:
            ours.close()
            await serving


class Fuzzer:
    """Random malformed conversations; half of them by somebody who knows the secret."""

    def __init__(self, seed: int, name: VersionName) -> None:
        self.rng = random.Random(seed)
        self.name = name

    async def attack(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            await loop.sock_sendall(sock, rng.randbytes(rng.randrange(1, 200)))
            return
        greeting = await exactly(sock, GREETING.size)
        if kind == 1:
            proof = bytearray(Asker(IDENTITY).prove(greeting))
            proof[rng.randrange(len(proof))] ^= 1 << rng.randrange(8)
            await loop.sock_sendall(sock, bytes(proof[: rng.choice([len(proof), rng.randrange(1, len(proof))])]))
            return
        asker = Asker(IDENTITY)
        await loop.sock_sendall(sock, asker.prove(greeting))
        seal, _ = asker.finish(await exactly(sock, ACCEPT.size))
        if rng.random() < 0.5:
            request = encode_request(PullRequest((self.name,)))
            await loop.sock_sendall(sock, frame(seal, Kind.FIND, request))
        await loop.sock_sendall(sock, self.malformed(seal))

    def malformed(self, seal: Sealer) -> bytes:
        rng = self.rng
        payload = self.payload()
        kind = rng.choice(list(Kind)) if rng.random() < 0.8 else rng.randrange(256)
        good = frame(seal, kind, payload)
        match rng.randrange(4):
            case 0:
                return good
            case 1:
                return PREFIX.pack(kind, rng.choice([1 << 31, 0xFFFFFFFF, len(payload) + 1])) + payload
            case 2:
                return good[: rng.randrange(1, len(good))]
            case _:
                bad = bytearray(good)
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
                return bytes(bad)

    def payload(self) -> bytes:
        rng = self.rng
        values = [None, True, -1, 1 << 80, 1.5, "x" * 90, "zz", [], [[]], [[1, 2]], [[1, "d", 3]], {}, "f" * 5000]
        message: dict[str, object] = rng.choice(
            [
                {"acceptable": [[1, self.name.digest]], "held_only": False, "layout": "", "base": [1, "d"]},
                {"grain": 1, "wanted": "7"},
                {"version": 1, "digest": "d", "layout_digest": "l", "chunk_bytes": 1024, "layout": None},
                {"reason": "because"},
            ]
        )
        message = dict(message)
        message[rng.choice(sorted(message))] = rng.choice(values)
        if rng.random() < 0.3:
            del message[rng.choice(sorted(message))]
        body = json.dumps(message).encode()
        return rng.choice(
            [
                body,
                struct.pack(">I", len(body)) + body,
                struct.pack(">I", rng.randrange(1 << 32)) + body,
                struct.pack(">II", rng.randrange(1 << 32), rng.randrange(1 << 32)),
                rng.randbytes(rng.randrange(40)),
                b"[" * 5000,
                b'{"grain":NaN}',
                b"",
            ]
        )


def frame(seal: Sealer, kind: int, payload: bytes) -> bytes:
    plain = PREFIX.pack(kind, len(payload)) + payload
    return plain + seal.tag(plain)


async def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    await target.start()
    yield target
    await target.transport.close()
    assert all(arena.pins == 0 for arena in target.holdings.pool.arenas)
    target.holdings.validate()
    await target.holdings.stop()


SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=SLOW), pytest.param(100_000, marks=[SLOW, NIGHTLY])]
)
async def test_malformed_conversations_end_in_counted_refusals(target: Target, count: int) -> None:
    fuzzer = Fuzzer(11, target.name)
    for _ in range(200):
        await target.converse(fuzzer)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(count):
        await target.converse(fuzzer)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 16 << 20, "no growth"
    assert not [error for error in target.holdings.errors if "internal" in error]
    assert target.holdings.refusals > count / 4
    assert target.holdings.has(target.name)


class Liar:
    """A relay's port behind which somebody answers nonsense: a stranger, or one that knows the secret."""

    def __init__(self, seed: int, header: VersionHeader) -> None:
        self.fuzzer = Fuzzer(seed, header.name)
        self.header = header

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(20):
                await self._lie(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the asker has had enough
        finally:
            writer.close()

    async def _lie(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rng = self.fuzzer.rng
        kind = rng.randrange(5)
        if kind == 0:
            return writer.write(rng.randbytes(rng.randrange(200)))
        server = Server(IDENTITY)
        writer.write(server.greeting())
        accept, seal, _ = server.accept(await reader.readexactly(PROOF.size))
        if kind == 1:
            return writer.write(rng.randbytes(ACCEPT.size) if rng.random() < 0.5 else accept[: rng.randrange(32)])
        writer.write(accept)
        await self._frame(reader)
        if kind > 2:
            layout = encode_json(LAYOUT.to_json())
            writer.write(frame(seal, Kind.HEADER, encode_header(self.header, layout)))
            await self._frame(reader)
            if kind > 3:
                writer.write(frame(seal, Kind.PIECE, struct.pack(">II", 0, 1)) + rng.randbytes(CHUNK))
        writer.write(self.fuzzer.malformed(seal))

    async def _frame(self, reader: asyncio.StreamReader) -> None:
        _, length = PREFIX.unpack(await reader.readexactly(PREFIX.size))
        await reader.readexactly(length + 16)


@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_whatever_a_peer_answers_the_asker_refuses_it_and_writes_nowhere_else(target: Target, count: int) -> None:
    header = VersionHeader(target.name, LAYOUT, CHUNK, tuple(target.holdings.get(1).checksums))
    liar = Liar(23, header)
    endpoint = await liar.start()
    arena = Arena.create(LAYOUT.total_bytes)
    asker = TcpTransport(secret=SECRET, run="demo", relay="asker", stall_s=1.0)
    wanted = ChunkSet.from_hex("3", 3)
    refused, before = 0, 0
    for i in range(100 + count):
        if i == 100:
            gc.collect()
            before = psutil.Process().memory_info().rss
        try:
            link = await asker.connect("me", endpoint, deadline_s=5.0)
            try:
                await link.find(PullRequest((target.name,)))
                async with aclosing(link.receive(arena, wanted.copy(), 1)) as pieces:
                    assert [piece.first async for piece in pieces] == [0, 1]
            finally:
                await link.close()
        except WeightsError:
            refused += 1
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 16 << 20, "no growth"
    assert refused > 0.95 * count and arena.pins == 0
    with arena.buffer(LAYOUT.total_bytes) as buffer:
        assert bytes(buffer[2 * CHUNK :]) == bytes(CHUNK), "the chunk that was not asked for"
    arena.close()
    liar.server.close()


async def test_a_false_length_costs_no_memory(target: Target) -> None:
    """An asker that knows the secret says 4 GiB; one that says what is allowed gets only what it sends."""
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(target.transport.serve(theirs, "a liar", target.holdings.find))
    ours.setblocking(False)
    asker = Asker(IDENTITY)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ours, asker.prove(await exactly(ours, GREETING.size)))
    asker.finish(await exactly(ours, ACCEPT.size))
    await loop.sock_sendall(ours, PREFIX.pack(Kind.FIND, 0xFFFFFFFF))
    await asyncio.wait_for(serving, 5)
    assert f"over its limit of {LONGEST[Kind.FIND]}" in target.holdings.last_refusal
    ours.close()


async def test_a_stranger_who_says_nothing_is_let_go(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.1)
    ours, theirs = socket.socketpair()
    await asyncio.wait_for(target.transport.serve(theirs, "a mute", target.holdings.find), 5)
    assert "did not prove the secret within 0.1 s" in target.holdings.last_refusal
    ours.close()


def test_what_is_decoded_is_what_was_encoded() -> None:
    sums = tuple(bytes([i]) * 32 for i in range(3))
    header = VersionHeader(VersionName(7, "d" * 64), LAYOUT, CHUNK, sums)
    layout = encode_json(LAYOUT.to_json())
    assert decode_header(encode_header(header, layout), None) == header
    assert decode_header(encode_header(header, b""), LAYOUT) == header
    with pytest.raises(PeerRefused, match="not known here"):
        decode_header(encode_header(header, b""), None)
    request = PullRequest((VersionName(1, "a"), VersionName(2, "b")), held_only=True, known_layout=LAYOUT)
    based = dataclasses.replace(request, base=VersionName(0, "c"))
    assert decode_request(encode_request(based))[0].base == VersionName(0, "c")
    decoded, known = decode_request(encode_request(request))
    assert decoded.base is None
    assert (decoded.acceptable, decoded.held_only, known) == (request.acceptable, True, LAYOUT.digest)
    wanted = ChunkSet.from_hex("5", 3)
    assert decode_fetch(encode_fetch(wanted, 2), 3) == (wanted, 2)


@pytest.mark.slow
def test_a_hundred_thousand_malformed_payloads_are_refused_or_right() -> None:
    fuzzer = Fuzzer(5, VersionName(1, "d"))
    sums = tuple(bytes(32) for _ in range(3))
    good = encode_header(VersionHeader(VersionName(1, "d"), LAYOUT, CHUNK, sums), encode_json(LAYOUT.to_json()))
    wanted = ChunkSet(3, full=True)
    refused = 0
    for i in range(20_000):
        payload = fuzzer.payload()
        torn = bytearray(good[: fuzzer.rng.randrange(len(good))] if i % 2 else good)
        for _ in range(min(3, len(torn))):
            torn[fuzzer.rng.randrange(len(torn))] = fuzzer.rng.randrange(256)
        for decode in (
            lambda p=payload: decode_request(p),
            lambda p=payload: decode_fetch(p, 3),
            lambda p=payload: decode_piece(p, wanted, 2),
            lambda p=payload: decode_delta(p, wanted, 2),
            lambda p=payload: decode_reason(p),
            lambda p=bytes(torn): decode_header(p, LAYOUT),
        ):
            try:
                decode()
            except WeightsError:
                refused += 1
    assert refused > 60_000


def test_a_recorded_conversation_cannot_be_played_again() -> None:
    first, second = Server(IDENTITY), Server(IDENTITY)
    proof = Asker(IDENTITY).prove(first.greeting())
    first.accept(proof)
    with pytest.raises(PeerRefused):
        second.accept(proof)
    asker = Asker(IDENTITY)
    accept, seal, check = second.accept(asker.prove(second.greeting()))
    ours, theirs = asker.finish(accept)
    tag = ours.tag(b"frame")
    check.check(b"frame", tag)
    with pytest.raises(PeerRefused, match="tag is wrong"):
        check.check(b"frame", tag)
    theirs.check(b"answer", seal.tag(b"answer"))
    with pytest.raises(PeerRefused):
        Server(IDENTITY).accept(PROOF.pack(b"HTTP", 1, bytes(32), bytes(32)))
