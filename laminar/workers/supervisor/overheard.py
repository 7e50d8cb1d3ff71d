"""A child's output on its way to this process's own stderr: the end of it is kept, for when the child has died."""

from __future__ import annotations

import asyncio
import contextlib
import os

from laminar.workers.supervisor.last_error import READ_BYTES

STDERR = 2
END_S = 1.0
"""A child that has ended has written all; only what it left behind could still hold its output open."""


class Overheard(asyncio.Protocol):
    def __init__(self) -> None:
        self._kept = bytearray()
        self._transport: asyncio.BaseTransport | None = None
        self._ended = asyncio.Event()

    async def begin(self) -> int:
        """The descriptor for the child to write to; the caller closes its own copy once the child has it."""
        read, write = os.pipe()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(read, "rb", 0))
        return write

    def data_received(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-READ_BYTES]
        with contextlib.suppress(OSError):  # a full disk costs lines of the log, and nothing else
            while data:
                data = data[os.write(STDERR, data) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def end(self) -> None:
        """All that was written has been passed on, as far as it comes within a second."""
        if self._transport is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._ended.wait()
        self._transport.close()

    def lines(self) -> list[str]:
        """The last 64 KiB."""
        return self._kept.decode("utf-8", errors="replace").splitlines()
