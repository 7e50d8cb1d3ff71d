"""Who of those that connect to a relay may stay: places are few, and are given before anything is proved.

    accepted ──▶ too many connections? ──▶ a stranger's place, if need be another's ──▶ proves the secret: no stranger
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from laminar.relay.transport.strangers import Strangers

MAX_STRANGERS, MAX_CONNECTIONS = 128, 640
"""Connections that have not proved the secret, of which one makes place for another; and all: more are closed."""


class Admission:
    """`told` is told of each that is closed, and why."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._strangers: Strangers[socket.socket] = Strangers(MAX_STRANGERS)

    def admits(self, sock: socket.socket, address: str, connections: int) -> bool:
        """Give a stranger a place, where there are so many connections already; else close it."""
        if connections >= MAX_CONNECTIONS:
            self._told(f"{connections} connections are open, as many as there may be: another from {address} is closed")
            sock.close()
            return False
        verdict = self._strangers.admit(sock, address, asyncio.get_running_loop().time())
        if verdict.network:
            self._told(
                f"{len(self._strangers)} connections have not proved the secret, {verdict.held} of them from "
                f"{verdict.network}: {'one of those' if verdict.taken else f'another from {address}'} is closed"
            )
        if not verdict.taken:
            sock.close()
        elif verdict.closed is not None:
            with contextlib.suppress(OSError):  # it may be gone
                verdict.closed.shutdown(socket.SHUT_RDWR)
        return verdict.taken

    def leave(self, sock: socket.socket) -> None:
        """It proved the secret, or ended: it is no stranger any more."""
        self._strangers.leave(sock)
