"""Addresses of hosts. A literal one needs neither a resolver nor a thread; a name is looked up in a thread of its own.

    10.0.0.7, fe80::1%eth0 ──▶ at once
    node07 ──▶ being looked up? that answer ── else a thread, of LOOKUPS at most ──▶ its addresses

A name server that does not answer holds a thread for tens of seconds, longer than anybody waits for a peer. So these
are none of the threads in which pieces are checked, nor do they keep a process from ending. An answer that comes when
nobody waits any more is kept for whoever asks next: else a slow name server would be asked for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import ipaddress
import socket
import threading
from dataclasses import dataclass
from typing import Any

from laminar.relay.transport.base import PeerRefused

LOOKUPS = 32
"""Names that are looked up at once; others wait for one of these to end."""
KEPT_S = 30.0
"""Seconds for which an answer that nobody waited for is good."""

Address = tuple[int, Any]
"""A family, and a socket's address of it."""


@dataclass
class _LookUp:
    answer: asyncio.Task[list[Address]]
    waiting: int = 0
    answered_at: float = 0.0


class Names:
    """Of one relay, for all its transports. `close` it with the last of them."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(LOOKUPS)
        self._lookups: dict[str, _LookUp] = {}

    def looks_up(self, host: str) -> bool:
        """Whether `host` is a name whose addresses are still asked for."""
        return host in self._lookups and not self._lookups[host].answer.done()

    async def addresses(self, host: str, port: int) -> list[Address]:
        """All addresses of `host`, in the resolver's order. Raises OSError if there are none."""
        if (literal := literal_address(host, port)) is not None:
            return [literal]
        lookup = self._current(host) or self._begin(host)
        lookup.waiting += 1
        try:
            found = await asyncio.shield(lookup.answer)
        finally:
            lookup.waiting -= 1
            if lookup.answer.done() and self._lookups.get(host) is lookup:
                del self._lookups[host]
        return [(family, (address[0], port, *address[2:])) for family, address in found]

    def close(self) -> None:
        """Forget what nobody waits for."""
        for lookup in self._lookups.values():
            if not lookup.waiting:
                lookup.answer.cancel()
        self._lookups.clear()

    def _current(self, host: str) -> _LookUp | None:
        lookup = self._lookups.get(host)
        if lookup is None or not lookup.answer.done():
            return lookup
        return lookup if asyncio.get_running_loop().time() - lookup.answered_at < KEPT_S else None

    def _begin(self, host: str) -> _LookUp:
        self._lookups[host] = lookup = _LookUp(asyncio.create_task(self._look_up(host)))
        lookup.answer.add_done_callback(_seen)
        return lookup

    async def _look_up(self, host: str) -> list[Address]:
        try:
            async with self._room:
                return await _in_a_thread_of_its_own(host)
        finally:
            if host in self._lookups:
                self._lookups[host].answered_at = asyncio.get_running_loop().time()


def _seen(answer: asyncio.Task[list[Address]]) -> None:
    """An error that nobody waits for any more is no fault of this process."""
    if not answer.cancelled():
        answer.exception()


def literal_address(host: str, port: int) -> Address | None:
    """What `host` says itself; None if it is a name. Raises OSError for an interface that is not here."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return int(family), address


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`HOST:PORT`, with brackets around an IPv6 address. Raises PeerRefused for anything else."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise PeerRefused(f"{endpoint!r} is not an address of the form HOST:PORT")
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _in_a_thread_of_its_own(host: str) -> list[Address]:
    """Raises OSError."""
    answer: concurrent.futures.Future[list[Address]] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.set_result([(int(family), address) for family, _, _, _, address in rows])
        except Exception as e:  # for whoever waits: names that are none at all raise other errors than OSError
            answer.set_exception(e if isinstance(e, OSError) else OSError(errno.EINVAL, f"{host!r} is no name: {e}"))

    try:
        threading.Thread(target=look_up, name=f"look-up-{host}", daemon=True).start()
    except RuntimeError as e:
        raise OSError(errno.EAGAIN, f"no thread to look up {host!r}: {e}") from e
    return await asyncio.wrap_future(answer)
