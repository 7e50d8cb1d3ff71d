"""Frames of `protocol` over one end of a Unix socket, and descriptors with them, for the relay's event loop."""

from __future__ import annotations

import asyncio
import logging
import socket

from laminar.relay.protocol import HEADER, MAX_FRAME, Message, ProtocolError, decode, encode, frame_length

log = logging.getLogger(__name__)
FRAME_TIMEOUT = 30.0
"""Seconds within which a frame that has begun must be complete, and a reply be taken."""


class Channel:
    """Frames over one non-blocking Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def receive(self, *, idle: float | None, limit: int = MAX_FRAME) -> Message | None:
        """The next message; None if the peer closed between two frames, or sent nothing for `idle` seconds."""
        try:
            async with asyncio.timeout(idle):
                first = await self._loop.sock_recv(self._sock, 1)
        except TimeoutError:
            log.info("closing a connection that was idle for %s s", idle)
            return None
        if not first:
            return None
        async with asyncio.timeout(FRAME_TIMEOUT):
            header = first + await self._exactly(HEADER.size - 1)
            return decode(await self._exactly(frame_length(header, limit)))

    async def send(self, message: Message, fd: int | None = None) -> None:
        data = encode(message)
        async with asyncio.timeout(FRAME_TIMEOUT):
            if fd is not None:
                data = data[await self._send_with(data, fd) :]
            await self._loop.sock_sendall(self._sock, data)

    async def refuse(self, reason: str) -> None:
        """Tell the peer why the connection is closed, if it still listens."""
        try:
            await self.send({"ok": False, "error": reason})
        except (OSError, TimeoutError) as e:
            log.debug("a refused peer did not take the reason: %r", e)

    async def _exactly(self, count: int) -> bytes:
        """Grows with what arrives, so that a false length costs no memory."""
        data = bytearray()
        while len(data) < count:
            part = await self._loop.sock_recv(self._sock, min(count - len(data), 1 << 20))
            if not part:
                raise ProtocolError(f"the connection ended after {len(data)} of {count} bytes of a frame")
            data += part
        return bytes(data)

    async def _send_with(self, data: bytes, fd: int) -> int:
        while True:
            try:
                return socket.send_fds(self._sock, [data[: HEADER.size]], [fd])
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, _resolve, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._sock)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
