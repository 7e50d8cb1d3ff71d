"""The relay worker: serves weights on this host, has its place in the chain, campaigns for the manager's role, and
keeps a committer beside it.

The committer runs in a process of its own, so that slow storage never delays a reassignment.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from laminar.buffer.records import EvaluationRequest, Retain, WeightsHead
from laminar.relay.binding import make_private
from laminar.relay.follower import Follower
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Tuning
from laminar.relay.server import RelayServer
from laminar.relay.transport.base import Transport
from laminar.workers.chain import ChainMember
from laminar.workers.committer_lives import CommitterLives, Process, keep_committer
from laminar.workers.context import Run, boot_id, joined
from laminar.workers.manager import lead
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

TOLD_S = 5.0
"""Within which a manager tells to what claims refer, and with some to spare."""
YOUNG_S = 60.0
"""Age, in seconds, below which a socket is left alone."""


def socket_folder() -> Path:
    """A folder that only this user can enter; short, since Unix socket paths are limited to 107 bytes."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return base / f"laminar-{os.getuid()}"


def socket_path(run: str) -> Path:
    return socket_folder() / f"{_prefix(run)}{secrets.token_hex(4)}.sock"


def _prefix(run: str) -> str:
    return f"{hashlib.sha256(run.encode()).hexdigest()[:8]}-"


def remove_stale(run: str) -> None:
    """Sockets at which nobody listens: each relay that was killed left one. One that has just been made may be bound
    and not yet listening, so it stays."""
    for path in socket_folder().glob(f"{_prefix(run)}*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                if time.time() - path.stat().st_mtime > YOUNG_S:
                    probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as e:
                log.debug("%s stays: %s", path, e)


class ServedWeights(Protocol):
    """What serves versions on this host while it is entered; `endpoint` is where, in the words of WorkerRecord."""

    endpoint: str
    holdings: Holdings

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def serve_weights(run: Run) -> RelayServer:
    """At a Unix socket that only this user can reach. Raises ConfigError if there is no folder for it."""
    config = run.config.relay
    path = socket_path(run.keys.run)
    make_private(path.parent)
    remove_stale(run.keys.run)
    return RelayServer(
        path,
        chunk_bytes=config.chunk_mib << 20,
        retain=config.retain,
        run=run.keys.run,
        memory_share=config.memory_share,
    )


OpenTransports = Callable[[Run, str, Holdings], Awaitable[Sequence[Transport]]]
"""What relays reach each other by: of a run, a relay's id, and what it holds."""


async def host_only(run: Run, relay: str, holdings: Holdings) -> Sequence[Transport]:
    """No other relay is reached."""
    return ()


async def relay_main(
    run: Run,
    stop: asyncio.Event,
    server: ServedWeights,
    committer: Callable[[], Process],
    open_transports: OpenTransports = host_only,
) -> None:
    """Serve until `stop`; a lost lease ends this worker (its supervisor starts a new one). `committer` makes the
    process that commits beside this relay."""
    worker = boot_id("relay", run.machine)
    async with server, AsyncExitStack() as opened:
        holdings = server.holdings
        transports: dict[str, Transport] = {}
        for transport in await open_transports(run, worker, holdings):
            opened.push_async_callback(transport.close)
            transports[transport.name] = transport
        links = {name: await transport.listen(holdings.find) for name, transport in transports.items()}
        rack = os.environ.get("LAMINAR_RACK", "")
        async with joined(run, "relay", endpoint=server.endpoint, worker=worker, links=links, rack=rack) as member:
            tuning = Tuning(streams=run.config.relay.streams, deltas=run.config.relay.delta_share > 0)
            follower = Follower(holdings, transports, worker, run.machine.host, tuning=tuning)
            holdings.fetch_elsewhere = follower.fetch
            lives = CommitterLives()
            await until_first(
                lead(run, member),
                keep_retained(run, holdings),
                keep_committer(run, committer, lives),
                ChainMember(run, member, holdings, follower, lives).run(),
                member.until_lost(),
                stop.wait(),
            )


class Recent:
    """The published versions that were the newest until less than `seconds` ago: somebody may have drawn under them of
    whom the manager has not told yet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.newest = -1
        self._until: dict[int, float] = {}

    def see(self, newest: int, now: float) -> set[int]:
        """`newest`: the published version at `now` (seconds); -1 if there is none."""
        if self.newest >= 0:
            self._until |= dict.fromkeys(range(self.newest, newest), now + self.seconds)
        self.newest = newest
        self._until = {version: until for version, until in self._until.items() if until > now}
        return set(self._until)

    def wait_s(self, now: float) -> float:
        """Seconds until one of them is none any more; a minute at most."""
        return min([60.0, *(until - now for until in self._until.values())])


async def keep_retained(run: Run, holdings: Holdings) -> None:
    """Hold on to the versions that the manager says are still referred to, to those that are to be evaluated, and to
    what was the newest a moment ago: the manager looks every few seconds only, and a new one once the lease of the one
    before is over, in which a fast trainer publishes enough to push them out."""
    bell = Bell()
    retain = Mirror(run.coordination, run.keys.retain, exact=True, bell=bell)
    requests = Mirror(run.coordination, run.keys.evaluations, bell=bell)
    weights = Mirror(run.coordination, run.keys.weights, exact=True, bell=bell)
    recent = Recent(run.config.coordination.lease_ttl + TOLD_S)
    async with retain, requests, weights:
        while True:
            requests.check()
            asked = {EvaluationRequest.parse(kv.value).version for kv in requests.items.values()}
            told, head, now = retain.only, weights.only, run.clock.monotonic()
            # Interrupted trajectories go on under whatever is newest: they need no version of their own.
            published = WeightsHead.parse(head.value).version if head and run.config.rollout.update == "drain" else -1
            versions = asked.union(Retain.parse(told.value).versions if told else ())
            holdings.retain_versions(versions, recent.see(published, now))
            await bell.wait(recent.wait_s(now))
