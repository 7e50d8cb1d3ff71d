"""The words between relays once they have proved the secret, and how they lie on a socket.

A frame is its kind (1 byte), the length of its payload (4 bytes, big-endian), the payload and a tag (16 bytes). The
bytes of a piece follow its frame untagged: the receiver checks them against the version's checksums.

    kind     payload                                                        from
    FIND     JSON: acceptable [[version, digest]…], held_only, layout, base asker
    HEADER   JSON length (4), JSON: version, digest, …, layout, checksums   server
    FETCH    JSON: grain, wanted (a set of chunks in hexadecimal)           asker
    PIECE    first, count (4 bytes each); then the chunks' bytes            server
    DELTA    first, count, n (4 bytes each); then n bytes, see `delta`      server
    WAITING  nothing: alive, but has nothing to send yet                    server
    REFUSED  JSON: reason                                                   server
    DONE     nothing: all that was wanted has been sent                     server

Of the transport `verbs`, where pieces are written by the device and not sent (see there):

    QUEUE    JSON: a queue pair's end; the asker's names its memory too     asker, then server
    CREDIT   count (4 bytes): so many more pieces may be written            asker
    FAILED   JSON: reason, transient; a device failed, not this connection  both
    FETCH    once FAILED has come: what is missing yet, by new queue pairs  asker
    DONE     nothing: no word follows before the next FIND                  asker too
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from enum import IntEnum

from laminar.errors import WeightsError
from laminar.relay.chunks import MAX_CHUNKS, ChunkSet, Piece, chunk_count
from laminar.relay.layout import Layout
from laminar.relay.protocol import MAX_FRAME, MAX_VERSION, Message, decode, integer, text
from laminar.relay.transport.base import LinkBroken, PeerRefused, PullRequest, VersionHeader, VersionName
from laminar.relay.transport.bulk import Blocks, Bulk
from laminar.relay.transport.handshake import TAG_BYTES, Sealer

PREFIX = struct.Struct(">BI")
PIECE = struct.Struct(">II")
DELTA = struct.Struct(">III")
CREDIT = struct.Struct(">I")
JSON_LENGTH = struct.Struct(">I")
CHECKSUM_BYTES = 32
MAX_ACCEPTABLE = 64
MAX_REASON = 2000
MAX_CHUNK = 1 << 40
SLICE = 4 << 20
"""Bytes of one call to the kernel; after as many, others of this process have their turn."""
PAUSED_S = 0.1
"""A timer that fires this much too late was kept from running, and so was whatever it timed."""


class Kind(IntEnum):
    FIND = 1
    HEADER = 2
    FETCH = 3
    PIECE = 4
    WAITING = 5
    REFUSED = 6
    DONE = 7
    QUEUE = 8
    CREDIT = 9
    FAILED = 10
    DELTA = 11


LONGEST: Mapping[Kind, int] = {
    Kind.FIND: 16 << 10,
    Kind.HEADER: MAX_FRAME + MAX_CHUNKS * CHECKSUM_BYTES + JSON_LENGTH.size,
    Kind.FETCH: MAX_CHUNKS // 4 + 1024,
    Kind.PIECE: PIECE.size,
    Kind.DELTA: DELTA.size,
    Kind.WAITING: 0,
    Kind.REFUSED: 4 * MAX_REASON + 100,
    Kind.DONE: 0,
    Kind.QUEUE: 64 << 10,
    Kind.CREDIT: CREDIT.size,
    Kind.FAILED: 4 * MAX_REASON + 100,
}


class FrameChannel:
    """Frames and bytes over a non-blocking stream socket. Raises LinkBroken when it ends or is silent for too long,
    PeerRefused for what is not a frame that may come now."""

    def __init__(
        self, sock: socket.socket, *, peer: str, stall_s: float, send_s: float = 30.0, bulk: Bulk | None = None
    ) -> None:
        """`bulk`: threads for large pieces, if any come."""
        self.peer = peer
        self._bulk = bulk
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._send_s = send_s
        self._seal: Sealer | None = None
        self._open: Sealer | None = None

    def sealed_by(self, seal: Sealer, check: Sealer) -> None:
        """From now on frames may be sent and received."""
        self._seal, self._open = seal, check

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        if self._seal is None:
            raise AssertionError("no frame before the handshake")
        frame = PREFIX.pack(kind, len(payload)) + payload
        await self.send_bytes(memoryview(frame + self._seal.tag(frame)))

    async def receive(self, *kinds: Kind, silence_s: float | None = None) -> tuple[Kind, bytes]:
        """The next frame, which must be of one of `kinds`; within `silence_s` seconds, if given."""
        if self._open is None:
            raise AssertionError("no frame before the handshake")
        prefix = await self.exactly(PREFIX.size, silence_s)
        number, length = PREFIX.unpack(prefix)
        if number not in kinds:
            raise PeerRefused(f"a frame of kind {number} came, expected was {' or '.join(k.name for k in kinds)}")
        if length > LONGEST[Kind(number)]:
            raise PeerRefused(
                f"a {Kind(number).name} frame of {length} bytes is over its limit of {LONGEST[Kind(number)]}"
            )
        payload = await self.exactly(length)
        self._open.check(prefix + payload, await self.exactly(TAG_BYTES))
        return Kind(number), payload

    async def exactly(self, count: int, silence_s: float | None = None) -> bytes:
        """Grows with what arrives, so that a false length costs no memory."""
        data = bytearray()
        while len(data) < count:
            try:
                part = self._sock.recv(min(count - len(data), 1 << 18))
            except BlockingIOError:
                await self._readable(silence_s or self._stall_s, "said nothing")
                continue
            except OSError as e:
                raise LinkBroken(f"{self.peer}: {e.strerror or e}") from e
            if not part:
                raise LinkBroken(f"{self.peer} closed the connection")
            data += part
        return bytes(data)

    async def receive_into(self, target: memoryview, blocks: Blocks | None = None) -> None:
        """`blocks`: told of those that a thread receives to their end."""
        turn = 0
        while target.nbytes:
            try:
                if self._bulk is not None and (count := await self._bulk.receive(self._sock, target, blocks)):
                    target, turn = target[count:], 0
                    continue
                count = self._sock.recv_into(target[:SLICE])
            except BlockingIOError:
                await self._readable(self._stall_s, "sent nothing")
                turn = 0
                continue
            except OSError as e:
                raise LinkBroken(f"{self.peer}: {e.strerror or e}") from e
            if not count:
                raise LinkBroken(f"{self.peer} closed the connection within a piece")
            if blocks is not None:
                blocks.passed(count)
            target = target[count:]
            turn += count
            if turn >= SLICE:
                turn = 0
                await asyncio.sleep(0)

    async def _readable(self, seconds: float, what: str) -> None:
        """Wait for something to read. Nothing is read here: a deadline that cut off a read could lose its bytes."""
        loop = self._loop
        while True:
            began = loop.time()
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._sock, _resolve, ready)
            try:
                async with asyncio.timeout(seconds):
                    return await ready
            except TimeoutError:
                # A deadline noticed too late says that this process did not run: that is not the peer's silence.
                if loop.time() - began < seconds + PAUSED_S:
                    raise LinkBroken(f"{self.peer} {what} for {seconds:g} s") from None
            finally:
                loop.remove_reader(self._sock)

    async def send_bytes(self, data: memoryview) -> None:
        many = data.nbytes > SLICE
        while data.nbytes:
            async with _Deadline(self, self._send_s, "took nothing"):
                count = await self._bulk.send(self._sock, data) if self._bulk is not None else 0
                if not count:
                    count = min(SLICE, data.nbytes)
                    await self._loop.sock_sendall(self._sock, data[:count])
            data = data[count:]
            if many:
                await asyncio.sleep(0)

    def close(self) -> None:
        self._sock.close()


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class _Deadline:
    """Errors of the socket, and the passing of `seconds`, as LinkBroken."""

    def __init__(self, channel: FrameChannel, seconds: float, what: str) -> None:
        self._channel, self._seconds, self._what = channel, seconds, what
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError:
            raise LinkBroken(f"{self._channel.peer} {self._what} for {self._seconds:g} s") from None
        if isinstance(error, OSError):
            raise LinkBroken(f"{self._channel.peer}: {error.strerror or error}") from error


# -- payloads -------------------------------------------------------------------------------------------------------


def encode_json(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("utf-8")


def encode_request(request: PullRequest) -> bytes:
    names = [[name.version, name.digest] for name in request.acceptable]
    layout = request.known_layout.digest if request.known_layout else ""
    base = [request.base.version, request.base.digest] if request.base else None
    return encode_json({"acceptable": names, "held_only": request.held_only, "layout": layout, "base": base})


def decode_request(payload: bytes) -> tuple[PullRequest, str]:
    """The request, and the digest of the layout that the asker knows."""
    message = decode(payload)
    rows = message.get("acceptable")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_ACCEPTABLE:
        raise PeerRefused(f"acceptable is not a list of 1 to {MAX_ACCEPTABLE} versions")
    names = tuple(_decode_name(row) for row in rows)
    base = message.get("base")
    held_only = message.get("held_only")
    if not isinstance(held_only, bool):
        raise PeerRefused("held_only is neither true nor false")
    request = PullRequest(names, held_only, base=None if base is None else _decode_name(base))
    return request, text(message, "layout", 64)


def _decode_name(row: object) -> VersionName:
    if not isinstance(row, list) or len(row) != 2:
        raise PeerRefused("a version is not [version, digest]")
    pair: Message = {"version": row[0], "digest": row[1]}
    return VersionName(integer(pair, "version", 0, MAX_VERSION), text(pair, "digest", 64))


def encode_header(header: VersionHeader, layout: bytes) -> bytes:
    """`layout`: the layout as JSON, or nothing if the asker has it. Encoded apart, since many askers get the same."""
    name = header.name
    fields = encode_json(
        {
            "version": name.version,
            "digest": name.digest,
            "layout_digest": header.layout.digest,
            "chunk_bytes": header.chunk_bytes,
        }
    )
    body = fields[:-1] + b',"layout":' + (layout or b"null") + b"}"
    return b"".join([JSON_LENGTH.pack(len(body)), body, *header.checksums])


def decode_header(payload: bytes, known: Layout | None) -> VersionHeader:
    """Raises WeightsError for what cannot be a version's header; whether its digest fits is for `header.check`."""
    if len(payload) < JSON_LENGTH.size:
        raise PeerRefused(f"a header of {len(payload)} bytes is too short")
    end = JSON_LENGTH.size + int(JSON_LENGTH.unpack_from(payload)[0])
    if end > len(payload):
        raise PeerRefused("a header is shorter than it says")
    message = decode(payload[JSON_LENGTH.size : end])
    digest = text(message, "layout_digest", 64)
    if message.get("layout") is None:
        if known is None or known.digest != digest:
            raise PeerRefused(f"a header leaves out layout {digest[:12]}, which is not known here")
        layout = known
    else:
        layout = Layout.from_json(message["layout"])
    chunk_bytes = integer(message, "chunk_bytes", 1, MAX_CHUNK)
    chunks = chunk_count(layout.total_bytes, chunk_bytes)
    if chunks > MAX_CHUNKS or len(payload) - end != chunks * CHECKSUM_BYTES:
        raise PeerRefused(f"a header has {len(payload) - end} bytes of checksums for {chunks} chunks")
    sums = tuple(payload[i : i + CHECKSUM_BYTES] for i in range(end, len(payload), CHECKSUM_BYTES))
    name = VersionName(integer(message, "version", 0, MAX_VERSION), text(message, "digest", 64))
    return VersionHeader(name, layout, chunk_bytes, sums)


def encode_fetch(wanted: ChunkSet, grain: int) -> bytes:
    return encode_json({"grain": grain, "wanted": wanted.to_hex()})


def decode_fetch(payload: bytes, chunks: int) -> tuple[ChunkSet, int]:
    message = decode(payload)
    wanted = ChunkSet.from_hex(text(message, "wanted", MAX_CHUNKS // 4 + 1), chunks)
    if len(wanted) == 0:
        raise PeerRefused("a fetch wants no chunk")
    return wanted, integer(message, "grain", 1, MAX_CHUNKS)


def decode_piece(payload: bytes, wanted: ChunkSet, grain: int) -> Piece:
    """Raises WeightsError unless it is a piece of what is still wanted."""
    if len(payload) != PIECE.size:
        raise PeerRefused(f"a piece is announced in {len(payload)} bytes")
    piece = Piece(*PIECE.unpack(payload))
    if not 0 < piece.count <= grain or piece.end > wanted.size or not wanted.holds(piece):
        raise PeerRefused(f"chunks {piece.first} to {piece.end - 1} came, which were not asked for")
    return piece


def decode_delta(payload: bytes, wanted: ChunkSet, grain: int) -> tuple[Piece, int]:
    """The piece, and the bytes of its difference. Raises WeightsError unless it is a piece of what is still wanted."""
    if len(payload) != DELTA.size:
        raise PeerRefused(f"a difference is announced in {len(payload)} bytes")
    return decode_piece(payload[: PIECE.size], wanted, grain), int(DELTA.unpack(payload)[2])


def reason_of(error: WeightsError) -> bytes:
    return encode_json({"reason": str(error)[:MAX_REASON]})


def decode_reason(payload: bytes) -> str:
    return text(decode(payload), "reason", MAX_REASON)
