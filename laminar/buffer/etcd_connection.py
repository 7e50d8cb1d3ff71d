"""The connection to etcd: names to addresses, channels, TLS, user and password, and what its errors mean.

Plain connections to addresses of one family share one channel, which balances over all members and drops dead
ones by itself. With TLS each endpoint has a channel of its own, since a certificate is checked against the name of
its endpoint; calls then move to the next channel when one fails.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from laminar.buffer import requests
from laminar.buffer.etcd3_shim import rpc
from laminar.buffer.etcd_access import parse_endpoint
from laminar.buffer.outage import Outage
from laminar.errors import ConfigError, CoordinationError, CoordinationFull, CoordinationUnavailable, LeaseLost

log = logging.getLogger(__name__)

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.lb_policy_name", "round_robin"),
    # etcd drops clients that ping more often than every 5 s, or while nothing is under way.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # This one bounds how long a frozen peer goes unnoticed: 60 s without it.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # Clients of one process and equal options would share a connection, and a broken one with it.
    ("grpc.use_local_subchannel_pool", 1),
)
STILL_AWAY_S = 30.0
"""How often an etcd that stays away is told of; what it means for a lease is told by the session."""
RESOLVE_AGAIN_S = 10.0
"""After a failure, names are resolved again if the last time is this long ago (members of a cluster do move)."""

TOKEN_IS_NEW_S = 1.0
"""A user whose token is younger lacks the right that he was refused: the token was not forgotten by etcd."""
LOGIN_S = 5.0
"""Deadline of a login: etcd spends tenths of a second on each password, on purpose, and all clients come at once."""
DISTRUST = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "WRONG_VERSION_NUMBER")
"""How gRPC's errors begin when a member's certificate, or that it has none, is why there is no connection."""

MAY_HAVE_COMMITTED = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,  # a stream reset by the transport, not an answer of etcd
    }
)


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files. `ca` empty: the system's roots. `certificate` and `key`: this client's own, both or none."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def credentials(self) -> Any:
        """Raises ConfigError naming the file that cannot be read."""
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("TLS to etcd: give both the client's certificate and its key, or neither")
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(self.ca), private_key=_pem(self.key), certificate_chain=_pem(self.certificate)
        )


def _pem(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS to etcd: {path} cannot be read: {error.strerror}") from error


class Compacted(CoordinationUnavailable):
    """The revision asked for has been compacted away: list again."""


@dataclass(frozen=True)
class Target:
    """What one channel connects to: a gRPC address list, and the name on the certificate (empty without TLS)."""

    address: str
    name: str = ""


class Link:
    """One channel and its stubs."""

    def __init__(self, target: Target, tls: Tls | None) -> None:
        self.target = target
        if tls is None:
            self.channel = grpc.aio.insecure_channel(target.address, options=OPTIONS)
        else:
            options = (*OPTIONS, ("grpc.ssl_target_name_override", target.name))
            self.channel = grpc.aio.secure_channel(target.address, tls.credentials(), options=options)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)


class EtcdConnection:
    """Unary calls with a deadline, and streams. Bound to the event loop of its first call; one per process, made
    after the process was spawned (gRPC does not survive a fork)."""

    def __init__(
        self, endpoints: list[str], *, timeout_s: float, tls: Tls | None = None, user: str = "", password: str = ""
    ) -> None:
        if not endpoints:
            raise ConfigError("no etcd endpoint was given; set coordination.endpoints or use --etcd HOST:PORT,…")
        self.endpoints = [parse_endpoint(e, tls is not None) for e in endpoints]
        self.name = "etcd at " + ",".join(f"{host}:{port}" for host, port in self.endpoints)
        self.timeout_s = timeout_s
        self.closed = False
        self._tls = tls
        self._user = user
        self._password = password
        self._token = ""
        self._token_at = 0.0
        self._targets: list[Target] = []
        self._links: list[Link] = []
        self._current = 0
        self._resolved_at = 0.0
        self._resolve_again = False
        self._lock = asyncio.Lock()
        self._login = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._outage = Outage(STILL_AWAY_S)
        self._distrusted: set[str] = set()

    async def call(
        self, method: Callable[[Link], Any], request: Any, what: str, *, timeout_s: float | None = None
    ) -> Any:
        """One unary call. Raises CoordinationUnavailable (it may have committed), or CoordinationError."""
        renewed = False
        while True:
            link = await self.link()
            used = self._token
            try:
                reply = await method(link)(request, timeout=timeout_s or self.timeout_s, metadata=self.metadata())
                self._distrusted.clear()
                self.answered()
                return reply
            except grpc.aio.AioRpcError as error:
                if not renewed and token_refused(error) and self.renew_token(used):
                    renewed = True
                    continue
                raise self.failed(link, error, what) from error
            except asyncio.CancelledError:
                self.check_open(what)
                raise

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    async def link(self) -> Link:
        """The channel for the next call; connects, resolves again and authenticates as needed."""
        if self.closed:
            raise requests.closed(self.name)
        if not self._links or self._resolve_again:
            async with self._lock:
                if not self._links or self._resolve_again:
                    await self._connect()
        if self._user and not self._token:
            async with self._login:
                if not self._token:
                    await self._authenticate()
        return self._links[self._current % len(self._links)]

    async def _authenticate(self) -> None:
        """Take a new token from the first member that gives one. Raises CoordinationError if etcd refuses user or
        password."""
        unreached = len(self._links) - 1
        while True:
            try:
                return await self._authenticate_at(self._links[self._current % len(self._links)])
            except CoordinationUnavailable as error:
                if unreached <= 0 or self.closed:
                    raise
                unreached -= 1
                log.debug("%s; trying the next member", error)

    async def _authenticate_at(self, link: Link) -> None:
        what = f"login of user {self._user!r}"
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        try:
            reply = await link.auth.Authenticate(request, timeout=max(self.timeout_s, LOGIN_S))
        except grpc.aio.AioRpcError as error:
            raise self.failed(link, error, what) from error
        except asyncio.CancelledError:
            self.check_open(what)
            raise
        self._token = reply.token
        self._token_at = asyncio.get_running_loop().time()

    def failed(self, link: Link, error: grpc.aio.AioRpcError, what: str) -> CoordinationError:
        """The error to raise; after an unavailability later calls try the next channel and look up names again."""
        if token_refused(error) and self.renew_token():
            return CoordinationUnavailable(f"{what}: {self.name} refused the token; logging in again")
        translated = self._distrust(link, error, what) or translate(error, what, self.name)
        self._away(translated)
        if isinstance(translated, CoordinationUnavailable) and not isinstance(translated, Compacted):
            if self._links and link is self._links[self._current % len(self._links)]:
                self._current += 1
            if asyncio.get_running_loop().time() - self._resolved_at > RESOLVE_AGAIN_S:
                self._resolve_again = any(not _is_address(host) for host, _ in self.endpoints)
        return translated

    def _distrust(self, link: Link, error: grpc.aio.AioRpcError, what: str) -> CoordinationError | None:
        """An error that no retry mends, once every endpoint was refused for its certificate and none has answered."""
        if self._tls is None or not any(sign in (error.details() or "") for sign in DISTRUST):
            return None
        self._distrusted.add(link.target.address)
        if len(self._distrusted) < len(self._links):
            return None
        return CoordinationError(
            f"{what}: no trusted connection to {self.name}: {error.details()}. Check that coordination.ca (--etcd-ca, "
            f"now {self._tls.ca or 'the authorities of this system'}) vouches for its certificates, that they are made "
            "out to the names in the endpoints, and that it speaks TLS"
        )

    def _away(self, error: CoordinationError) -> None:
        """Told here once for all calls and watches of this process, which each try again on their own."""
        if self.closed or not isinstance(error, CoordinationUnavailable) or isinstance(error, Compacted):
            return
        if (since := self._outage.failed(asyncio.get_running_loop().time())) is not None:
            log.info("%s does not answer (for %.0f s now): %s", self.name, since, error)

    def answered(self) -> None:
        """A call has had its answer."""
        if (lasted := self._outage.over(asyncio.get_running_loop().time())) is not None:
            log.info("%s answers again after %.1f s", self.name, lasted)

    def renew_token(self, used: str | None = None, *, doubtful: bool = False) -> bool:
        """Forget the token that was refused (`used`, if a call of its own has not replaced it since), for the next call
        to take a new one; False if another would not help. `doubtful`: etcd refused a right, which for an old token can
        mean that it was forgotten."""
        age = asyncio.get_running_loop().time() - self._token_at
        if not self._user or (doubtful and age < TOKEN_IS_NEW_S):
            return False
        if used in (None, self._token):
            self._token = ""
        return True

    def check_open(self, what: str) -> None:
        """gRPC shows a channel closed under a call as a cancellation of the waiting task. Raise
        CoordinationUnavailable if that is what happened, return if the task was really cancelled."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise CoordinationUnavailable(f"{what}: the connection to {self.name} was closed meanwhile")

    async def close(self) -> None:
        self.closed = True
        links, self._links = self._links, []
        await asyncio.gather(*(link.channel.close(None) for link in links), *self._closing)

    async def each_member(self) -> list[Link]:
        """A link of its own for every endpoint, for calls that act on one member; the caller closes them."""
        return [Link(target, self._tls) for e in self.endpoints for target in await self._resolve([e])]

    async def _connect(self) -> None:
        targets = self._targets
        try:
            targets = await self._resolve(self.endpoints)
        except CoordinationUnavailable as error:
            if not self._links:
                raise
            log.warning("%s; going on with the addresses known so far", error)
        self._resolved_at = asyncio.get_running_loop().time()
        self._resolve_again = False
        if targets == self._targets and self._links:
            return
        old, self._links = self._links, [Link(target, self._tls) for target in targets]
        self._targets, self._current = targets, 0
        for link in old:
            # Calls under way may finish first.
            task = asyncio.create_task(link.channel.close(self.timeout_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _resolve(self, endpoints: list[tuple[str, int]]) -> list[Target]:
        """Address literals, since a channel of several members cannot take names. IPv4 first, as etcd listens there."""
        found: dict[str, list[str]] = {}
        targets: list[Target] = []
        for host, port in endpoints:
            family, addresses = await self._look_up(host)
            literals = [f"[{a}]:{port}" if family == "ipv6" else f"{a}:{port}" for a in addresses]
            if self._tls is not None:
                targets.append(Target(f"{family}:{','.join(literals)}", host))
            else:
                found.setdefault(family, []).extend(literals)
        return targets + [Target(f"{family}:{','.join(literals)}") for family, literals in found.items()]

    async def _look_up(self, host: str) -> tuple[str, list[str]]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(self.timeout_s, 5.0)):
                rows = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise CoordinationUnavailable(f"etcd endpoint {host!r}: the name cannot be resolved: {error}") from error
        by_family = {
            "ipv4": sorted({str(r[4][0]) for r in rows if r[0] == socket.AF_INET}),
            "ipv6": sorted({str(r[4][0]) for r in rows if r[0] == socket.AF_INET6}),
        }
        family = "ipv4" if by_family["ipv4"] else "ipv6"
        return family, by_family[family]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def token_refused(error: grpc.aio.AioRpcError) -> bool:
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or says_token_refused(error.details() or "")


def says_token_refused(details: str) -> bool:
    """How members say it that restarted, let a token expire, or have seen changes of users since it was given."""
    return "invalid auth token" in details or "auth store is old" in details


def translate(error: grpc.aio.AioRpcError, what: str, server: str) -> CoordinationError:
    """etcd's status codes as our exceptions."""
    code, details = error.code(), error.details() or "no details"
    if "has been compacted" in details:
        return Compacted(f"{what}: {details}")
    if "database space exceeded" in details:
        endpoints = server.removeprefix("etcd at ")
        return CoordinationFull(
            f"{what}: the space quota of {server} is exhausted, it takes no writes until space is freed. `laminar run` "
            "does so for an etcd of its own; for any other type: "
            f"export ETCDCTL_ENDPOINTS={endpoints}; "
            "etcdctl compact $(etcdctl get / --limit=1 -w fields | sed -n 's/^\"Revision\" : //p'); "
            "etcdctl defrag; etcdctl alarm disarm (if it is full again soon, raise its --quota-backend-bytes)"
        )
    if code == grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseLost(f"{what}: {details}; the lease has expired or was revoked")
    if code in MAY_HAVE_COMMITTED or "too many requests" in details:
        return CoordinationUnavailable(f"{what}: {server} did not answer ({code.name}: {details})")
    hint = "; it asks for a user: set coordination.user, or --etcd-user" if "user name is empty" in details else ""
    return CoordinationError(f"{what}: refused by {server} ({code.name}: {details}){hint}")
