"""What a worker knows and reaches of the machine it runs on. A simulator hands out others, one a simulated process."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from laminar.relay.client import AsyncRelayClient, RelayStatus
from laminar.relay.layout import Layout
from laminar.relay.protocol import VersionInfo
from laminar.relay.writing import Invitation


class ArenaToFill(Protocol):
    """Memory for one version that comes in; gone when it is sealed or its writer dies."""

    @property
    def buffer(self) -> memoryview: ...

    @property
    def invitation(self) -> Invitation | None:
        """For other writers, if it is of a kind that they can join."""
        ...

    def drop(self) -> None:
        """No version comes of it."""
        ...


class KeptWeights(Protocol):
    """A version that stays in memory until `close`, whatever becomes of its relay."""

    @property
    def info(self) -> VersionInfo: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def buffer(self) -> memoryview: ...

    def close(self) -> None: ...


class RelayAccess(Protocol):
    """How a worker reaches the relay of its host. Raises RelayUnavailable, WeightsError."""

    async def status(self) -> RelayStatus: ...

    async def reserve(self, layout: Layout, *, writers: int = 1) -> ArenaToFill | None: ...

    async def seal(
        self, arena: ArenaToFill, version: int, *, wrote: int = 0, replaces: str = ""
    ) -> VersionInfo: ...

    async def open(self, version: int) -> KeptWeights: ...

    async def fetch(self, version: int, digest: str, timeout_s: float) -> None: ...


@dataclass(frozen=True)
class Machine:
    """`token(n)`: 2n hexadecimal digits that nobody else draws; `relay(socket, run)` reaches the relay there."""

    host: str
    pid: int
    token: Callable[[int], str]
    relay: Callable[[str, str], RelayAccess]


def this_machine() -> Machine:
    return Machine(socket.gethostname(), os.getpid(), secrets.token_hex, _relay)


def _relay(path: str, run: str) -> RelayAccess:
    access: RelayAccess = AsyncRelayClient(path, run=run)  # type: ignore[assignment]  # seals arenas of its own making
    return access
