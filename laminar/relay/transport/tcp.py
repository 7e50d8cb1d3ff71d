"""Chunks over plain sockets, straight from one mapped arena into the other.

asker ──▶ connect, handshake ──▶ FIND ──▶ HEADER ──▶ FETCH ──▶ PIECE, PIECE, … DONE ──▶ FIND or the end

The asker reads all the time and the server sends all the time, a sign of life if nothing else: so silence, an end or a
reset at either side is noticed by the other without any lease. Nothing is encrypted: use it on networks whose listeners
you trust, as most clusters' are.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

from laminar.errors import ConfigError, WeightsError
from laminar.relay.accepting import BACKLOG, accept_all
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.protocol import ProtocolError
from laminar.relay.transport.admission import Admission
from laminar.relay.transport.base import (
    IDLE_S,
    ChunkSource,
    FabricFailed,
    FindSource,
    Landed,
    LinkBroken,
    PeerRefused,
    PullRequest,
    VersionHeader,
)
from laminar.relay.transport.bulk import Blocks, Bulk, keep_in_cache
from laminar.relay.transport.frames import (
    FrameChannel,
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
    reason_of,
)
from laminar.relay.transport.handshake import ACCEPT, GREETING, PROOF, Asker, Identity, Server
from laminar.relay.transport.names import Address, Names, join_endpoint, split_endpoint
from laminar.relay.transport.pieces import alive, receive_delta, send_pieces, told

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds that a stranger may take to prove the secret."""


async def listen_at(address: str, port: int) -> socket.socket:
    """A listening socket; `port` 0: any free one. Raises ConfigError, naming the setting to correct."""
    try:
        family, place = (await Names().addresses(address, port))[0]
        listener = _stream_socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as e:
        remedy = "correct relay.bind"
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = "stop what listens there, or correct relay.port"
        raise ConfigError(f"a relay cannot listen at {address}:{port}: {e.strerror or e}; {remedy}") from e
    return listener


class TcpTransport:
    """`bind`: address to listen at, `port` 0 takes a free one; `advertise`: the host name that others use, if another.

    `stall_s`: seconds of silence after which a peer counts as dead. `delta_share`: a piece goes as its difference to
    the asker's base if that takes at most this share of its bytes; 0: never. `on_refusal` is told why somebody was
    refused, as often as strangers like; `on_error` what went wrong here. `names`: where peers' names are looked up, if
    together with another transport.
    """

    name = "tcp"

    def __init__(
        self,
        *,
        secret: bytes,
        run: str,
        relay: str,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        stall_s: float = 2.0,
        delta_share: float = 0.5,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_error: Callable[[str], None] = lambda problem: None,
        names: Names | None = None,
    ) -> None:
        self._secret, self._run, self._relay = secret, run, relay
        self._bind, self._port, self._advertise = bind, port, advertise
        self._stall_s = stall_s
        self._delta_share = delta_share
        self._on_refusal, self._on_error = on_refusal, on_error
        self._names = names or Names()
        self._bulk = Bulk()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._admission = Admission(on_refusal)
        self._layouts: dict[str, bytes] = {}

    async def listen(self, find: FindSource) -> str:
        """Raises ConfigError if the address cannot be bound."""
        self._listener = await listen_at(self._bind, self._port)
        host, port = self._listener.getsockname()[:2]
        self._spawn(accept_all(self._listener, partial(self._begin, find), self._on_error))
        return join_endpoint(self._advertise or host, port)

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> SocketLink:
        host, port = split_endpoint(endpoint)
        loop = asyncio.get_running_loop()
        peer = f"{relay} at {endpoint}"
        try:
            async with asyncio.timeout(deadline_s):
                sock = await _reach(await self._names.addresses(host, port), loop.time() + deadline_s)
                try:
                    channel = FrameChannel(sock, peer=peer, stall_s=self._stall_s, bulk=self._bulk)
                    asker = Asker(Identity(self._secret, self._run, relay))
                    proof = asker.prove(await channel.exactly(GREETING.size))
                    await channel.send_bytes(memoryview(proof))
                    sent_at = loop.time()
                    channel.sealed_by(*asker.finish(await channel.exactly(ACCEPT.size)))
                    return self._link(relay, channel, loop.time() - sent_at)
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            why = ": no name server has told its address yet" if self._names.looks_up(host) else ""
            raise LinkBroken(f"{peer} was not reached within {deadline_s:g} s{why}") from None
        except OSError as e:
            raise LinkBroken(f"{peer} cannot be reached: {e.strerror or e}") from e

    def passed_over(self, relay: str, problem: FabricFailed) -> None:
        """Nothing: there is no other way than by sockets."""

    def _link(self, relay: str, channel: FrameChannel, round_trip_s: float) -> SocketLink:
        """The asking side of a connection on which both have proved the secret."""
        return TcpLink(channel, round_trip_s=round_trip_s)

    async def _serve_chunks(self, channel: FrameChannel, source: ChunkSource, wanted: ChunkSet, grain: int) -> None:
        """Send what was fetched."""
        await send_pieces(channel, source, wanted, grain, delta_share=self._delta_share)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._names.close()
        self._bulk.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- serving ------------------------------------------------------------------------------------------------

    def _begin(self, find: FindSource, sock: socket.socket, address: tuple[str, int]) -> None:
        # The task that accepts is one of those.
        if self._admission.admits(sock, address[0], len(self._tasks) - 1):
            self._spawn(self.serve(sock, f"{address[0]}:{address[1]}", find))

    async def serve(self, sock: socket.socket, address: str, find: FindSource) -> None:
        """Serve one connection until its end; whatever it sends, only it is ended."""
        _prepare(sock)
        channel = FrameChannel(sock, peer=address, stall_s=HANDSHAKE_S, bulk=self._bulk)
        try:
            try:
                await self._admit(channel)
            finally:
                self._admission.leave(sock)
            keep_in_cache(sock)
            while True:
                await self._answer(channel, find)
        except (PeerRefused, ProtocolError) as e:
            self._on_refusal(f"refused {address}: {e}")
        except LinkBroken as e:
            log.debug("a connection ended: %s", e)
        except WeightsError as e:
            self._on_refusal(f"refused {address}: {e}")
        finally:
            channel.close()

    async def _admit(self, channel: FrameChannel) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                server = Server(Identity(self._secret, self._run, self._relay))
                await channel.send_bytes(memoryview(server.greeting()))
                accept, seal, check = server.accept(await channel.exactly(PROOF.size))
                await channel.send_bytes(memoryview(accept))
                channel.sealed_by(seal, check)
        except TimeoutError:
            raise PeerRefused(f"it did not prove the secret within {HANDSHAKE_S:g} s") from None

    async def _answer(self, channel: FrameChannel, find: FindSource) -> None:
        """One request: find, then send what is fetched."""
        _, payload = await channel.receive(Kind.FIND, silence_s=IDLE_S)
        request, known_layout = decode_request(payload)
        sources: list[ChunkSource] = []

        async def look() -> None:
            # Kept here, not in the task's result: an asker that leaves at that moment must not keep an arena.
            sources.append(await find(request))

        try:
            try:
                await alive(channel, look())
            except LinkBroken:
                raise
            except WeightsError as e:
                await channel.send(Kind.REFUSED, reason_of(e))
                return
            source = sources[0]
            header = source.header
            # Threads may be busy: the asker must not take that for our death.
            await channel.send(Kind.HEADER, await alive(channel, self._encoded(header, known_layout)))
            _, payload = await channel.receive(Kind.FETCH, silence_s=IDLE_S)
            wanted, grain = decode_fetch(payload, header.chunks)
            await told(channel, source.allocated())
            await self._serve_chunks(channel, source, wanted, grain)
        finally:
            for source in sources:
                source.close()

    async def _encoded(self, header: VersionHeader, known_layout: str) -> bytes:
        layout = b"" if header.layout.digest == known_layout else await self._layout(header)
        return await asyncio.to_thread(encode_header, header, layout)

    async def _layout(self, header: VersionHeader) -> bytes:
        """The layout as JSON, encoded once for all askers."""
        digest = header.layout.digest
        if digest not in self._layouts:
            encoded = await asyncio.to_thread(lambda: encode_json(header.layout.to_json()))
            self._layouts = {digest: encoded}
        return self._layouts[digest]

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)  # type: ignore[arg-type]
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._on_error(f"internal error: {failure!r}")
            log.error("a connection to a relay failed", exc_info=failure)


class SocketLink(ABC):
    """The asking side of a connection: finding. How the chunks come, a subclass says."""

    tells_landed = False

    def __init__(self, channel: FrameChannel, *, round_trip_s: float) -> None:
        self.round_trip_s = round_trip_s
        self.received = 0
        self.differences = 0
        self._channel = channel
        self._found: VersionHeader | None = None

    @abstractmethod
    def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        """As `transport.base.Link.receive`."""

    async def find(self, request: PullRequest) -> VersionHeader:
        await self._channel.send(Kind.FIND, encode_request(request))
        _, payload = await self._receive(Kind.HEADER)
        self._found = await asyncio.to_thread(decode_header, payload, request.known_layout)
        return self._found

    async def close(self) -> None:
        self._channel.close()

    def _take_found(self) -> VersionHeader:
        header, self._found = self._found, None
        if header is None:
            raise AssertionError("find a version before its chunks are received")
        return header

    async def _receive(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """The next frame that is not only a sign of life."""
        while True:
            kind, payload = await self._channel.receive(*kinds, Kind.WAITING, Kind.REFUSED)
            if kind is Kind.REFUSED:
                raise PeerRefused(f"{self._channel.peer}: {decode_reason(payload)}")
            if kind is not Kind.WAITING:
                return kind, payload


class TcpLink(SocketLink):
    """Chunks come over the same connection."""

    tells_landed = True

    async def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        header = self._take_found()
        kinds = (Kind.PIECE,) if base is None else (Kind.PIECE, Kind.DELTA)
        await self._channel.send(Kind.FETCH, encode_fetch(wanted, grain))
        missing = wanted.copy()
        total = header.layout.total_bytes
        arena.pins += 1
        try:
            with arena.buffer(total) as buffer:
                while len(missing) > 0:
                    kind, payload = await self._receive(*kinds)
                    if kind is Kind.DELTA and base is not None:
                        piece, nbytes = decode_delta(payload, missing, grain)
                        bounds = span(piece, header.chunk_bytes, total)
                        await receive_delta(self._channel, base, arena, bounds, nbytes)
                        self.differences += 1
                    else:
                        piece = decode_piece(payload, missing, grain)
                        start, end = span(piece, header.chunk_bytes, total)
                        nbytes = end - start
                        with buffer[start:end] as target:
                            await self._channel.receive_into(target, _blocks(piece, header, nbytes, landed))
                    self.received += nbytes
                    missing.discard(piece)
                    yield piece
            await self._receive(Kind.DONE)
        finally:
            arena.pins -= 1


def _blocks(piece: Piece, header: VersionHeader, nbytes: int, landed: Landed | None) -> Blocks | None:
    """The chunks of a piece of `nbytes`."""
    return Blocks(nbytes, header.chunk_bytes, lambda i: landed(piece.first + i)) if landed else None


async def _reach(found: Sequence[Address], until: float) -> socket.socket:
    """A connection to the first of a host's addresses that takes one: it may have some of a family at which the relay
    does not listen. Each has an equal share of the time left until `until`. Raises OSError."""
    loop = asyncio.get_running_loop()
    problems: dict[str, OSError] = {}
    for i, (family, address) in enumerate(found):
        try:
            sock = _stream_socket(family)
            try:
                async with asyncio.timeout((until - loop.time()) / (len(found) - i)):
                    await loop.sock_connect(sock, address)
                return sock
            except BaseException:
                sock.close()
                raise
        except OSError as e:
            problems[str(address[0])] = e
    if len(problems) == 1:
        raise next(iter(problems.values()))
    told = {address: os.strerror(e.errno) if e.errno else "no answer" for address, e in problems.items()}
    raise OSError("; ".join(f"{address}: {problem}" for address, problem in told.items()))


def _stream_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    _prepare(sock)
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
