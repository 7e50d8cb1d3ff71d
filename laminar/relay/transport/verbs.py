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
though its registration stays. Where a device fails while the connection works (FabricFailed), `recovery` decides:

    a device fails ──▶ FAILED: each end lets go of its queue pair, the server has said so once it is done with its own
                   ──▶ transient: FETCH and QUEUE for what is missing, as above; else the asker leaves, and reaches the
                       peer by another transport for a while
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.chunks import ChunkSet, Piece, span
from laminar.relay.protocol import decode
from laminar.relay.transport.base import (
    ChunkSource,
    FabricFailed,
    FindSource,
    Landed,
    LinkBroken,
    PeerRefused,
    VersionHeader,
)
from laminar.relay.transport.frames import FrameChannel, Kind, decode_fetch, encode_fetch, reason_of
from laminar.relay.transport.pieces import alive
from laminar.relay.transport.recovery import AVOID_S, Avoidance, Renewals, Unreached
from laminar.relay.transport.tcp import SocketLink, TcpTransport
from laminar.relay.transport.verbs_device import REGION, Device, Gid, Port, Region
from laminar.relay.transport.verbs_queue import RECEIVES, Completions, QueuePair, Target
from laminar.relay.transport.verbs_talk import Hearing, Incoming, guarded, raise_told
from laminar.relay.transport.verbs_words import decode_queue, decode_queue_end, encode_failure, encode_queue

log = logging.getLogger(__name__)


class VerbsTransport(TcpTransport):
    """By `port` and its address `gid`; the further options are those of TcpTransport, for the connections that control
    the transfers. `close` it before the arenas that it was given."""

    name = "verbs"

    def __init__(self, port: Port, gid: Gid, /, **control: object) -> None:
        super().__init__(**control)  # type: ignore[arg-type]
        self._rdma_port, self._gid = port, gid
        self._completions: Completions | None = None
        self._avoidance = Avoidance()
        self._unreached = Unreached()

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
        """As TcpTransport.connect. Raises FabricFailed while the relay is reached otherwise, or may have to be."""
        if self._avoided(relay):
            raise FabricFailed(f"{relay} is not reached by verbs for now")
        try:
            link = await super().connect(relay, endpoint, deadline_s=deadline_s)
        except LinkBroken as e:
            if not (failures := self._unreached.failed(relay)):
                raise
            raise FabricFailed(f"its control port failed {failures} times in a row: {e}") from e
        self._unreached.reached(relay)
        return link

    def passed_over(self, relay: str, problem: FabricFailed) -> None:
        """The relay lives, so do not wait for its control port each time."""
        if not self._avoided(relay):
            self.avoid(relay, problem)

    def _avoided(self, relay: str) -> bool:
        return self._avoidance.avoided(relay, asyncio.get_running_loop().time())

    def avoid(self, relay: str, problem: FabricFailed) -> None:
        """Reach `relay` otherwise for a while."""
        if self._avoidance.failed(relay, asyncio.get_running_loop().time()):
            log.warning("relay %s is reached without RDMA for %.0f s, and so again: %s", relay, AVOID_S, problem)

    def worked(self, relay: str) -> None:
        """All that was asked of `relay` came by the device."""
        if self._avoidance.worked(relay):
            log.info("relay %s is reached by RDMA again", relay)

    async def close(self) -> None:
        await super().close()
        if self._completions is not None:
            self._completions.close()
            self._completions.device.close()
            self._completions = None

    def _link(self, relay: str, channel: FrameChannel, round_trip_s: float) -> SocketLink:
        return VerbsLink(self, relay, channel, round_trip_s=round_trip_s)

    async def _serve_chunks(self, channel: FrameChannel, source: ChunkSource, wanted: ChunkSet, grain: int) -> None:
        while True:
            hearing = Hearing(channel)
            try:
                return await self._serve_by_pair(channel, hearing, source, wanted, grain)
            except FabricFailed as e:
                log.info("writing to %s: %s", channel.peer, e)
                await channel.send(Kind.FAILED, encode_failure(e))
                wanted, grain = decode_fetch(await hearing.next_fetch(), source.header.chunks)
            finally:
                await hearing.stop()

    async def _serve_by_pair(
        self, channel: FrameChannel, hearing: Hearing, source: ChunkSource, wanted: ChunkSet, grain: int
    ) -> None:
        """Raises FabricFailed if either device fails, once nothing is written for it any more."""
        _, payload = await channel.receive(Kind.QUEUE)
        total = source.header.layout.total_bytes
        their_end, target = decode_queue(payload, total)
        pair = QueuePair(self.completions, channel.peer, writable=False)
        try:
            regions = await alive(channel, self.completions.device.regions(source.arena))
            pair.connect(their_end)
            await channel.send(Kind.QUEUE, encode_queue(pair.end))
            work = _write_all(pair, source, wanted, grain, regions, target)
            await _until_done(channel, hearing.begin(pair), work)
        finally:
            pair.close()


class VerbsLink(SocketLink):
    """Chunks come by the device, what is said about them by the connection."""

    def __init__(self, transport: VerbsTransport, relay: str, channel: FrameChannel, *, round_trip_s: float) -> None:
        super().__init__(channel, round_trip_s=round_trip_s)
        self._transport, self._relay = transport, relay

    async def receive(
        self, arena: Arena, wanted: ChunkSet, grain: int, base: Arena | None = None, landed: Landed | None = None
    ) -> AsyncGenerator[Piece, None]:
        """As `transport.base.Link.receive`; all comes whole: devices write faster than differences are computed.
        Nothing is told of as `landed`: no thread has what they wrote at hand."""
        header = self._take_found()
        missing = wanted.copy()
        renewals = Renewals()
        arena.pins += 1
        try:
            while True:
                try:
                    async with self._incoming(arena, header, missing.copy(), grain) as incoming:
                        while len(missing) > 0:
                            piece = _piece_at(await incoming.arrival(), missing, grain, self._channel.peer)
                            missing.discard(piece)
                            start, end = span(piece, header.chunk_bytes, header.layout.total_bytes)
                            self.received += end - start
                            yield piece
                            incoming.used_one()
                        await incoming.finish()
                    break
                except FabricFailed as e:
                    if len(missing) == 0 and e.transient:
                        raise LinkBroken(f"all pieces had come when the device failed: {e}") from e
                    if not renewals.granted(e):
                        self._transport.avoid(self._relay, e)
                        raise
                    log.info("relay %s goes on with a new queue pair, %d chunks: %s", self._relay, len(missing), e)
            self._transport.worked(self._relay)
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
            except FabricFailed as e:
                pair.close()
                # What the peer's device says is the cause, where ours only tells that it stopped.
                raise await incoming.give_up(e) from e
            finally:
                await incoming.stop()
        finally:
            pair.close()

    async def _receive_queue(self) -> bytes:
        while True:
            kind, payload = await self._channel.receive(Kind.QUEUE, Kind.WAITING, Kind.REFUSED, Kind.FAILED)
            if kind is Kind.QUEUE:
                return payload
            raise_told(self._channel.peer, kind, payload)


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


async def _until_done(
    channel: FrameChannel, hearing: asyncio.Task[bytes | None], work: Coroutine[Any, Any, None]
) -> None:
    """Write while the asker is alive and grants credits, then until it says that it is done too."""
    complaint = f"{channel.peer} is done, but not all pieces were written"
    try:
        await alive(channel, guarded(hearing, work, complaint))
    except LinkBroken:
        raise
    except WeightsError as e:
        await channel.send(Kind.REFUSED, reason_of(e))
        raise LinkBroken(f"{channel.peer}: {e}") from e
    await channel.send(Kind.DONE)
    await hearing


def _piece_at(first: int, missing: ChunkSet, grain: int, peer: str) -> Piece:
    """The piece of `missing` that begins with chunk `first`; raises PeerRefused if none does."""
    piece = missing.piece_from(first, grain) if first < missing.size else None
    if piece is None:
        raise PeerRefused(f"{peer} wrote chunk {first}, which was not asked for")
    return piece
