"""Chunks written by an RDMA device straight into the asker's arena; everything else over a TCP connection.

    asker                                            server
    FETCH, QUEUE: my end, my arena's keys ─────────▶ makes its end, goes to it
    goes to the server's end ◀────────────── QUEUE: my end
    CREDIT 32: receives are posted ────────────────▶ writes pieces, one credit each
    ◀════ RDMA write, immediate data = first chunk ══
    CREDIT 1, as pieces are used; or 0: alive ─────▶
    ◀───────────────────────────── WAITING: alive;   DONE once all is acknowledged by the asker's device
    DONE ──────────────────────────────────────────▶ FIND or the end

Handshake, tags, refusals and signs of life are those of `tcp`: a receiving device says nothing when its peer dies, so
the connection does. A queue pair lives for one `receive`: when that ends, nobody can write into the arena any more,
though its registration stays. Where the device fails while the connection works (FabricFailed), the peer is reached by
another transport for a while; that is logged once a relay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.protocol import Message, decode, integer, integers, text
from laminar.relay.transport.base import (
    HEARTBEAT_S,
    ChunkSource,
    FabricFailed,
    FindSource,
    LinkBroken,
    PeerRefused,
    VersionHeader,
)
from laminar.relay.transport.frames import (
    CREDIT,
    FrameChannel,
    Kind,
    decode_reason,
    encode_fetch,
    encode_json,
    reason_of,
)
from laminar.relay.transport.pieces import alive
from laminar.relay.transport.tcp import SocketLink, TcpTransport
from laminar.relay.transport.verbs_device import REGION, Device, Gid, Port, Region
from laminar.relay.transport.verbs_queue import RECEIVES, Completions, QueueEnd, QueuePair, Target

log = logging.getLogger(__name__)
T = TypeVar("T")

AVOID_S = 60.0
"""Seconds for which a relay that the device did not get through to is reached otherwise."""
LAST_WORDS_S = 2.0
"""Seconds for the peer's last word once all has arrived."""
MAX_KEYS = 4096
MAX_ADDRESS = (1 << 64) - 1


class VerbsTransport(TcpTransport):
    """By `port` and its address `gid`; the further options are those of TcpTransport, for the connections that control
    the transfers. `close` it before the arenas that it was given."""

    name = "verbs"

    def __init__(self, port: Port, gid: Gid, /, **control: object) -> None:
        super().__init__(**control)  # type: ignore[arg-type]
        self._rdma_port, self._gid = port, gid
        self._completions: Completions | None = None
        self._avoided: dict[str, float] = {}
        self._told: set[str] = set()

    @property
    def completions(self) -> Completions:
        """The device's, which is opened when it is first needed."""
        if self._completions is None:
            self._completions = Completions(Device(self._rdma_port, self._gid))
        return self._completions

    async def listen(self, find: FindSource) -> str:
        endpoint = await super().listen(find)
        log.info("weights are also served by verbs: device=%s address=%s", self._rdma_port, self._gid.address)
        return endpoint

    async def connect(self, relay: str, endpoint: str, *, deadline_s: float) -> SocketLink:
        """As TcpTransport.connect. Raises FabricFailed while the relay is reached otherwise."""
        if asyncio.get_running_loop().time() < self._avoided.get(relay, 0.0):
            raise FabricFailed(f"{relay} is not reached by verbs for now")
        return await super().connect(relay, endpoint, deadline_s=deadline_s)

    def avoid(self, relay: str, problem: FabricFailed) -> None:
        """Reach `relay` otherwise for a while."""
        self._avoided[relay] = asyncio.get_running_loop().time() + AVOID_S
        if relay not in self._told:
            self._told.add(relay)
            log.warning("relay %s is reached without RDMA for %.0f s, and so again: %s", relay, AVOID_S, problem)

    async def close(self) -> None:
        await super().close()
        if self._completions is not None:
            self._completions.close()
            self._completions.device.close()
            self._completions = None

    def _link(self, relay: str, channel: FrameChannel, round_trip_s: float) -> SocketLink:
        return VerbsLink(self, relay, channel, round_trip_s=round_trip_s)

    async def _serve_chunks(self, channel: FrameChannel, source: ChunkSource, wanted: ChunkSet, grain: int) -> None:
        _, payload = await channel.receive(Kind.QUEUE)
        total = source.header.layout.total_bytes
        their_end, target = decode_queue(payload, total)
        try:
            pair = QueuePair(self.completions, channel.peer, writable=False)
            try:
                regions = await alive(channel, self.completions.device.regions(source.arena))
                pair.connect(their_end)
                await channel.send(Kind.QUEUE, encode_queue(pair.end))
                await self._write_pieces(channel, pair, source, wanted, grain, regions, target)
            finally:
                pair.close()
        except FabricFailed as e:
            await channel.send(Kind.FAILED, reason_of(e))
            raise

    async def _write_pieces(
        self,
        channel: FrameChannel,
        pair: QueuePair,
        source: ChunkSource,
        wanted: ChunkSet,
        grain: int,
        regions: list[Region],
        target: Target,
    ) -> None:
        """Write while the asker is alive and grants credits."""
        hearing = asyncio.create_task(_hear_credits(channel, pair))
        try:
            try:
                work = _write_all(pair, source, wanted, grain, regions, target)
                complaint = f"{channel.peer} is done, but not all pieces were written"
                await alive(channel, guarded(hearing, work, complaint))
            except LinkBroken:
                raise
            except WeightsError as e:
                await channel.send(Kind.REFUSED, reason_of(e))
                raise LinkBroken(f"{channel.peer}: {e}") from e
            await channel.send(Kind.DONE)
            await hearing
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)


class VerbsLink(SocketLink):
    """Chunks come by the device, what is said about them by the connection."""

    def __init__(self, transport: VerbsTransport, relay: str, channel: FrameChannel, *, round_trip_s: float) -> None:
        super().__init__(channel, round_trip_s=round_trip_s)
        self._transport, self._relay = transport, relay

    async def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None
    ) -> AsyncGenerator[Piece, None]:
        """As `transport.base.Link.receive`; all comes whole: devices write faster than differences are computed."""
        header = self._take_found()
        missing = wanted.copy()
        arena.pins += 1
        try:
            async with self._incoming(arena, header, wanted, grain) as incoming:
                while len(missing) > 0:
                    piece = _piece_at(await incoming.arrival(), missing, grain, self._channel.peer)
                    missing.discard(piece)
                    start, end = span(piece, header.chunk_bytes, header.layout.total_bytes)
                    self.received += end - start
                    yield piece
                    incoming.used_one()
                await incoming.finish()
        except FabricFailed as e:
            self._transport.avoid(self._relay, e)
            raise
        finally:
            arena.pins -= 1

    @asynccontextmanager
    async def _incoming(
        self, arena: Arena, header: VersionHeader, wanted: ChunkSet, grain: int
    ) -> AsyncIterator[Incoming]:
        """A queue pair by which the server can write; after it nothing can."""
        completions = self._transport.completions
        total = header.layout.total_bytes
        pair = QueuePair(completions, self._channel.peer, writable=True)
        try:
            regions = await completions.device.regions(arena)
            keys = tuple(region.remote_key for region in regions[: -(-total // REGION)])
            pair.post_receives(RECEIVES)
            await self._channel.send(Kind.FETCH, encode_fetch(wanted, grain))
            await self._channel.send(Kind.QUEUE, encode_queue(pair.end, Target(arena.address, total, keys)))
            pair.connect(decode_queue_end(decode(await self._receive_queue())))
            incoming = Incoming(self._channel, pair)
            try:
                yield incoming
            finally:
                await incoming.stop()
        finally:
            pair.close()

    async def _receive_queue(self) -> bytes:
        while True:
            kind, payload = await self._channel.receive(Kind.QUEUE, Kind.WAITING, Kind.REFUSED, Kind.FAILED)
            if kind is Kind.QUEUE:
                return payload
            _raise_told(self._channel.peer, kind, payload)


class Incoming:
    """What the asker hears and says while pieces are written into its arena."""

    def __init__(self, channel: FrameChannel, pair: QueuePair) -> None:
        self._channel, self._pair = channel, pair
        self._credits = RECEIVES
        self._more = asyncio.Event()
        self._more.set()
        self._finishing = False
        self._speaking = asyncio.create_task(self._speak())
        self._hearing = asyncio.create_task(self._hear())

    async def arrival(self) -> int:
        """The first chunk of the piece that came next. Raises what the peer told, or the device."""
        if self._pair.arrived:
            return self._pair.arrived.popleft()
        # All was acknowledged by our device when the peer is done; its completions are seen a little later.
        complaint = f"{self._channel.peer} is done, but not all pieces came"
        return await guarded(self._hearing, self._pair.arrival(), complaint)

    def used_one(self) -> None:
        """A piece was used: there is room for another."""
        self._pair.post_receives(1)
        self._credits += 1
        self._more.set()

    async def finish(self) -> None:
        """All pieces came: the connection is left ready for the next request."""
        self._finishing = True
        self._more.set()
        await self._speaking
        async with _deadline(f"{self._channel.peer} wrote all pieces, but did not say that it is done"):
            await self._hearing
        await self._channel.send(Kind.DONE)

    async def stop(self) -> None:
        for task in (self._speaking, self._hearing):
            task.cancel()
        await asyncio.gather(self._speaking, self._hearing, return_exceptions=True)

    async def _speak(self) -> None:
        """Credits as they come up, and a sign of life. Never cut off within a frame while the link is to live on."""
        try:
            while not self._finishing:
                credits, self._credits = self._credits, 0
                self._more.clear()
                await self._channel.send(Kind.CREDIT, CREDIT.pack(credits))
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._more.wait()
                except TimeoutError:
                    continue
        except LinkBroken as e:
            self._pair.fail(e)

    async def _hear(self) -> None:
        while True:
            kind, payload = await self._channel.receive(Kind.DONE, Kind.WAITING, Kind.REFUSED, Kind.FAILED)
            if kind is Kind.DONE:
                return
            _raise_told(self._channel.peer, kind, payload)


# -- parts ----------------------------------------------------------------------------------------------------------


async def _write_all(
    pair: QueuePair, source: ChunkSource, wanted: ChunkSet, grain: int, regions: list[Region], target: Target
) -> None:
    header = source.header
    problem: WeightsError | None = None
    while len(wanted) > 0:
        try:
            piece = await source.ready(wanted, grain)
        except WeightsError as e:
            problem = e
            break
        start, end = span(piece, header.chunk_bytes, target.nbytes)
        await pair.write(regions, source.arena.address, target, start, end, piece.first)
        wanted.discard(piece)
    await pair.drained()
    if problem is not None:
        raise problem


async def _hear_credits(channel: FrameChannel, pair: QueuePair) -> None:
    """Until the asker says that it is done."""
    while True:
        kind, payload = await channel.receive(Kind.CREDIT, Kind.DONE)
        if kind is Kind.DONE:
            return
        if len(payload) != CREDIT.size:
            raise PeerRefused(f"a credit of {len(payload)} bytes")
        (count,) = CREDIT.unpack(payload)
        if count > RECEIVES:
            raise PeerRefused(f"{count} credits at once, {RECEIVES} are the most")
        pair.grant(count)


async def guarded(guard: asyncio.Task[None], work: Awaitable[T], complaint: str) -> T:
    """The result of `work`, which is cancelled if `guard` fails first. Raises LinkBroken with `complaint` if it does
    not come within `LAST_WORDS_S` of the guard's good end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, guard], return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and guard.exception() is None:
            await asyncio.wait([task], timeout=LAST_WORDS_S)
        if task.done():
            return task.result()
        raise guard.exception() or LinkBroken(f"{complaint} within {LAST_WORDS_S:.0f} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _piece_at(first: int, missing: ChunkSet, grain: int, peer: str) -> Piece:
    """The piece of `missing` that begins with chunk `first`; raises PeerRefused if none does."""
    piece = missing.piece_from(first, grain) if first < missing.size else None
    if piece is None:
        raise PeerRefused(f"{peer} wrote chunk {first}, which was not asked for")
    return piece


def _raise_told(peer: str, kind: Kind, payload: bytes) -> None:
    """What a frame other than a sign of life means."""
    if kind is Kind.FAILED:
        raise FabricFailed(f"{peer}: {decode_reason(payload)}")
    if kind is Kind.REFUSED:
        raise PeerRefused(f"{peer}: {decode_reason(payload)}")


@asynccontextmanager
async def _deadline(complaint: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            yield
    except TimeoutError:
        raise LinkBroken(f"{complaint} within {LAST_WORDS_S:.0f} s") from None


def encode_queue(end: QueueEnd, target: Target | None = None) -> bytes:
    message: Message = {
        "number": end.number, "sequence": end.sequence, "gid": end.gid, "lid": end.lid, "mtu": end.mtu,
        "link_layer": end.link_layer,
    }  # fmt: skip
    if target is not None:
        message |= {"address": target.address, "bytes": target.nbytes, "keys": list(target.keys)}
    return encode_json(message)


def decode_queue(payload: bytes, total_bytes: int) -> tuple[QueueEnd, Target]:
    """An asker's end and memory. Raises WeightsError unless it has room for `total_bytes`."""
    message = decode(payload)
    keys = integers(message, "keys", MAX_KEYS, 0, (1 << 32) - 1)
    address = integer(message, "address", 0, MAX_ADDRESS)
    nbytes = integer(message, "bytes", 0, MAX_ADDRESS)
    if nbytes != total_bytes or len(keys) != -(-total_bytes // REGION) or address + nbytes > MAX_ADDRESS:
        raise PeerRefused(f"memory of {nbytes} bytes in {len(keys)} regions for a version of {total_bytes}")
    return decode_queue_end(message), Target(address, nbytes, tuple(keys))


def _address(gid: str) -> str:
    """As eight groups of four digits, which is what the device's library reads."""
    try:
        return ipaddress.IPv6Address(gid).exploded
    except ValueError as e:
        raise PeerRefused(f"{gid[:64]!r} is not the address of a port") from e


def decode_queue_end(message: Message) -> QueueEnd:
    return QueueEnd(
        number=integer(message, "number", 0, (1 << 24) - 1),
        sequence=integer(message, "sequence", 0, (1 << 24) - 1),
        gid=_address(text(message, "gid", 64)),
        lid=integer(message, "lid", 0, (1 << 16) - 1),
        mtu=integer(message, "mtu", 1, 5),
        link_layer=integer(message, "link_layer", 0, 8),
    )
