"""The relay's Unix socket: local processes reserve, seal, open and wait for versions. See `protocol` for the words.

connection ──▶ same user? ──▶ hello ──▶ requests, one at a time ──▶ closed: its reservation and holds are gone
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType

from laminar.errors import WeightsError
from laminar.relay.accepting import accept_all
from laminar.relay.arena import ArenaState
from laminar.relay.binding import bind
from laminar.relay.channel import FRAME_TIMEOUT, Channel
from laminar.relay.holdings import Held, Holdings
from laminar.relay.layout import Layout
from laminar.relay.memory import SPARE
from laminar.relay.protocol import (
    MAX_FETCH,
    MAX_HELLO,
    MAX_RETAINED,
    MAX_VERSION,
    MAX_WAIT,
    PROTOCOL,
    Message,
    ProtocolError,
    checked_socket_path,
    integer,
    integers,
    number,
    peer_user,
    text,
)
from laminar.relay.reservation import MAX_WRITERS, Reservation
from laminar.relay.transport.base import VersionName

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 512
IDLE_TIMEOUT = 600.0
"""Seconds without a request after which a connection that neither reserved nor holds anything is closed."""
RESERVATION_TIMEOUT = 3600.0
"""Seconds for which an arena stays reserved: a step may be long, a stopped trainer must not keep it for ever."""


class RelayServer:
    """Serves `holdings` at `socket_path` (mode 0600, in a folder that only this user can enter).

    `chunk_bytes` is one for all relays of a run: digests depend on it. `weights_bytes`, if known, lets memory be
    checked and touched at start. `spare` more versions than `retain` fit at least, for claims and slow readers, and
    for claims as many as `memory_share` of the host's memory has room for.
    """

    def __init__(
        self,
        socket_path: str | Path,
        *,
        chunk_bytes: int = 16 << 20,
        retain: int = 2,
        run: str = "",
        spare: int = SPARE,
        memory_share: float = 0.0,
        weights_bytes: int = 0,
        threads: int = 1,
    ) -> None:
        self.socket_path = checked_socket_path(socket_path)
        self.run = run
        self.boot = uuid.uuid4().hex
        self.holdings = Holdings(
            chunk_bytes=chunk_bytes,
            retain=retain,
            spare=spare,
            memory_share=memory_share,
            weights_bytes=weights_bytes,
            threads=threads,
        )
        self.endpoint = f"unix:{self.socket_path}"
        self.reservations: dict[str, Reservation] = {}
        """By their tickets, while others may join them."""
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._sessions: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ConfigError if the socket, the kernel or memory do not allow a relay here."""
        self._listener = bind(self.socket_path)
        try:
            await self.holdings.start()
        except BaseException:
            await self.stop()
            raise
        self._accepting = asyncio.create_task(accept_all(self._listener, self._begin, self.holdings.record_error))
        log.info("relay serves run=%s at %s", self.run, self.socket_path)

    async def stop(self) -> None:
        """Close all connections and let go of all memory; versions that readers have mapped stay theirs."""
        tasks = [*self._sessions, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self.socket_path.unlink(missing_ok=True)
            self._listener = None
        await self.holdings.stop()

    async def __aenter__(self) -> RelayServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _begin(self, sock: socket.socket, _: object) -> None:
        task = asyncio.create_task(self._serve(sock))
        self._sessions.add(task)
        task.add_done_callback(self._ended)

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        channel = Channel(sock)
        session = Session(self, channel)
        try:
            self._admit(sock)
            await session.run()
        except ProtocolError as e:
            self.holdings.record_refusal(f"refused a connection: {e}")
            await channel.refuse(str(e))
        except (OSError, TimeoutError) as e:
            log.debug("a connection ended: %r", e)
        finally:
            session.close()
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        uid = peer_user(sock)
        if uid != os.getuid():
            raise ProtocolError(f"a process of user {uid} may not use the relay of user {os.getuid()}")
        if len(self._sessions) > MAX_CONNECTIONS:
            raise ProtocolError(f"{MAX_CONNECTIONS} connections are open already")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sessions.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self.holdings.record_error(f"internal error: {failure!r}")
            log.error("a relay session failed", exc_info=failure)


class Session:
    """One connection: what it reserved and holds, and the commands it may give."""

    def __init__(self, server: RelayServer, channel: Channel) -> None:
        self._server = server
        self._holdings = server.holdings
        self._channel = channel
        self._reserved: Reservation | None = None
        self._joined: Reservation | None = None
        self._holds: list[Held] = []
        self._commands: dict[str, Callable[[Message], Awaitable[None]]] = {
            "status": self._status,
            "reserve": self._reserve,
            "join": self._join,
            "wrote": self._wrote,
            "seal": self._seal,
            "open": self._open,
            "wait": self._wait,
            "retain": self._retain,
            "fetch": self._fetch,
        }

    async def run(self) -> None:
        if not await self._hello():
            return
        while True:
            request = await self._channel.receive(idle=self._patience())
            if request is None:
                return
            name = text(request, "command", 32)
            if name not in self._commands:
                raise ProtocolError(f"unknown command {name!r}; known are {', '.join(self._commands)}")
            try:
                await self._commands[name](request)
            except ProtocolError:
                raise
            except WeightsError as e:
                await self._channel.send({"ok": False, "error": str(e)})

    def _patience(self) -> float | None:
        if self._holds:
            return None
        return RESERVATION_TIMEOUT if self._reserved or self._joined else IDLE_TIMEOUT

    def close(self) -> None:
        if self._joined is not None:
            self._joined.lose("one of its writers ended before it was done")
            self._joined = None
        if self._reserved is not None:
            log.info("a publish ended before its seal: its arena is freed")
            self._give_up("the process that reserved it ended before it sealed it")
        for held in self._holds:
            held.holds -= 1
        self._holds.clear()
        self._holdings.pool.reclaim()

    def _give_up(self, problem: str) -> None:
        reservation = self._end_reservation()
        reservation.lose(problem)
        self._holdings.release(reservation.arena)

    def _end_reservation(self) -> Reservation:
        """Nobody can join it any more."""
        assert self._reserved is not None
        reservation, self._reserved = self._reserved, None
        self._server.reservations.pop(reservation.ticket, None)
        return reservation

    async def _hello(self) -> bool:
        """False if it ended before it said anything, or said nothing for so long."""
        request = await self._channel.receive(idle=FRAME_TIMEOUT, limit=MAX_HELLO)
        if request is None:
            return False
        if text(request, "command", 32) != "hello":
            raise ProtocolError("a connection must open with hello")
        protocol = integer(request, "protocol", 0, 1 << 31)
        if protocol != PROTOCOL:
            raise ProtocolError(f"protocol {protocol} is not spoken here, {PROTOCOL} is: use one Laminar everywhere")
        run = text(request, "run", 256)
        if run and run != self._server.run:
            raise ProtocolError(f"this is the relay of run {self._server.run!r}, not of {run!r}")
        chunk_bytes = self._holdings.chunk_bytes
        await self._reply(protocol=PROTOCOL, run=self._server.run, boot=self._server.boot, chunk_bytes=chunk_bytes)
        return True

    async def _status(self, request: Message) -> None:
        holdings = self._holdings
        holdings.pool.reclaim()
        newest = holdings.newest
        await self._reply(
            run=self._server.run,
            boot=self._server.boot,
            newest=newest.version if newest else None,
            versions=[
                {**held.info.to_json(), "holds": held.holds, "mapped": not held.arena.is_exclusive()}
                for held in holdings.versions()
            ],
            arenas={state.value: holdings.pool.count(state) for state in ArenaState},
            retained=sorted(holdings.retained),
            errors=list(holdings.errors),
            refusals=holdings.refusals,
            last_refusal=holdings.last_refusal,
        )

    async def _reserve(self, request: Message) -> None:
        if self._reserved is not None or self._joined is not None:
            raise ProtocolError("this connection has reserved or joined an arena already")
        writers = integer({"writers": 1, **request}, "writers", 1, MAX_WRITERS)
        layout = await asyncio.to_thread(Layout.from_json, request.get("layout"))
        arena = await self._holdings.reserve(layout)
        if arena is None:
            await self._reply(reserved=False, reason="busy: no free arena")
            return
        self._reserved = reservation = Reservation(arena, layout, writers, secrets.token_hex(16))
        self._server.reservations[reservation.ticket] = reservation
        await self._reply_writable(reservation, reserved=True, ticket=reservation.ticket)

    async def _join(self, request: Message) -> None:
        if self._reserved is not None or self._joined is not None:
            raise ProtocolError("this connection has reserved or joined an arena already")
        reservation = self._server.reservations.get(text(request, "ticket", 64))
        if reservation is None:
            raise WeightsError("no arena is reserved under this ticket: it was sealed or given up; reserve another")
        reservation.join()
        self._joined = reservation
        await self._reply_writable(reservation, layout_digest=reservation.layout.digest)

    async def _wrote(self, request: Message) -> None:
        nbytes = integer(request, "bytes", 0, MAX_VERSION)
        if self._joined is None:
            raise ProtocolError("nothing was joined on this connection that could have been written")
        reservation, self._joined = self._joined, None
        reservation.wrote(nbytes)
        await self._reply()

    async def _reply_writable(self, reservation: Reservation, **content: object) -> None:
        fd = reservation.arena.open_for_writing()
        try:
            await self._reply(fd=fd, **content)
        finally:
            os.close(fd)

    async def _seal(self, request: Message) -> None:
        version = integer(request, "version", 0, MAX_VERSION)
        own_bytes = integer({"bytes": 0, **request}, "bytes", 0, MAX_VERSION)
        replaces = text({"replaces": "", **request}, "replaces", 128)
        if self._reserved is None:
            raise ProtocolError("seal without a reservation on this connection")
        try:
            await self._reserved.complete(own_bytes)
        except WeightsError as e:
            self._give_up(str(e))
            self._holdings.record_error(f"version {version}: {e}")
            raise
        reservation = self._end_reservation()
        info = await self._holdings.seal(reservation.arena, reservation.layout, version, replaces=replaces)
        await self._reply(version=info.to_json())

    async def _open(self, request: Message) -> None:
        version = None if request.get("version") is None else integer(request, "version", 0, MAX_VERSION)
        held = self._holdings.get(version)
        held.holds += 1
        self._holds.append(held)
        fd = held.arena.open_for_reading()
        try:
            chunk_bytes = self._holdings.chunk_bytes
            await self._reply(fd=fd, version=held.info.to_json(), layout=held.layout.to_json(), chunk_bytes=chunk_bytes)
        finally:
            os.close(fd)

    async def _wait(self, request: Message) -> None:
        newer_than = integer(request, "newer_than", -1, MAX_VERSION)
        info = await self._holdings.wait(newer_than, number(request, "timeout", 0.0, MAX_WAIT))
        await self._reply(version=info.to_json() if info else None)

    async def _retain(self, request: Message) -> None:
        self._holdings.retain_versions(integers(request, "versions", MAX_RETAINED, 0, MAX_VERSION))
        await self._reply()

    async def _fetch(self, request: Message) -> None:
        name = VersionName(integer(request, "version", 0, MAX_VERSION), text(request, "digest", 64))
        await self._holdings.fetch(name, number(request, "timeout", 0.0, MAX_FETCH))
        await self._reply()

    async def _reply(self, fd: int | None = None, **content: object) -> None:
        await self._channel.send({"ok": True, **content}, fd)
