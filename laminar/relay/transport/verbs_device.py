"""Which RDMA device, port and address this relay uses, and the memory of arenas that the device may reach.

    ports of all devices ──select──▶ Port ──open──▶ Device: context, protection domain, registered arenas

pyverbs is no dependency of ours: its release must be that of the system's rdma-core, so the system's package is taken.
Without it, without a device or without an active port there is no RDMA here, and weights travel by tcp.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from laminar.errors import WeightsError
from laminar.relay.arena import Arena
from laminar.relay.transport.base import FabricFailed

REGION = 512 << 20
"""Bytes that are registered by one call: it pins all pages, and nothing else of this process runs meanwhile."""
CAP_IPC_LOCK = 14
ROCE_V2 = 2
ETHERNET, INFINIBAND = 2, 1


class NoRdma(WeightsError):
    """There is no RDMA device that can be used on this host, and why."""


@dataclass(frozen=True)
class Gid:
    """An address of a port. `kind`: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2."""

    index: int
    text: str
    kind: int

    @property
    def address(self) -> str:
        """The IPv4 or IPv6 address that it stands for."""
        found = ipaddress.IPv6Address(self.text)
        return str(found.ipv4_mapped or found)

    @property
    def rank(self) -> int:
        """The lower, the further it reaches: routed IPv4, routed IPv6, one link only; then the older RoCE."""
        found = ipaddress.IPv6Address(self.text)
        reach = 0 if found.ipv4_mapped else 2 if found.is_link_local else 1
        return reach if self.kind != 1 else reach + 10


@dataclass(frozen=True)
class Port:
    """An active port. `mtu` is the verbs' code, 1 (256 bytes) to 5 (4096); `max_message` bytes of one write; `lid` its
    number in an InfiniBand subnet."""

    device: str
    number: int
    link_layer: int
    mtu: int
    max_message: int
    lid: int
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


def verbs_constants() -> Any:
    """The enumerations of libibverbs by name, wherever this release of pyverbs keeps them."""
    try:
        found = importlib.import_module("pyverbs.enums")
    except ImportError:
        found = importlib.import_module("pyverbs.libibverbs_enums")
    if hasattr(found, "IBV_WR_RDMA_WRITE"):
        return found
    members = [vars(kind).get("__members__", {}) for kind in vars(found).values() if isinstance(kind, type)]
    return SimpleNamespace(**{name: int(value) for names in members for name, value in names.items()})


def active_ports() -> list[Port]:
    """All active ports of this host's devices. Raises NoRdma, saying what is missing, if there is none."""
    try:
        device = importlib.import_module("pyverbs.device")
        errors = importlib.import_module("pyverbs.pyverbs_error")
    except ImportError as e:
        raise NoRdma(f"pyverbs cannot be imported ({e}); install the system's python3-pyverbs") from e
    try:
        names = [_name(found.name) for found in device.get_device_list()]
        ports = [port for name in names for port in _ports_of(device.Context(name=name), name)]
    except errors.PyverbsError as e:
        raise NoRdma(f"the devices cannot be listed: {e}") from e
    if not ports:
        raise NoRdma(f"no active port among the devices {', '.join(names)}" if names else "there is no RDMA device")
    return ports


def select(ports: Sequence[Port], *, wanted: str = "", address: str = "") -> tuple[Port, Gid]:
    """`wanted`: DEVICE or DEVICE:PORT. Else the port that has `address`, else the first; its address that reaches
    furthest. Pure. Raises NoRdma."""
    if wanted:
        ports = [port for port in ports if wanted in (port.device, str(port))]
        if not ports:
            raise NoRdma(f"LAMINAR_RDMA_DEVICE names {wanted}, which is no active port here")
    candidates = [(port, gid) for port in ports for gid in port.gids]
    if not candidates:
        raise NoRdma(f"the ports {', '.join(str(port) for port in ports)} have no address yet")
    there = [(port, gid) for port, gid in candidates if gid.address == address]
    return min(there or [pair for pair in candidates if pair[0] is candidates[0][0]], key=lambda pair: pair[1].rank)


@dataclass(frozen=True)
class Region:
    """Registered memory from byte `start` of an arena on; the keys by which this device, and a peer's, reach it."""

    start: int
    nbytes: int
    local_key: int
    remote_key: int


class Device:
    """An open device. Everything is called from one thread. Raises FabricFailed for what the device refuses."""

    def __init__(self, port: Port, gid: Gid) -> None:
        device = importlib.import_module("pyverbs.device")
        self.errors: Any = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        self.constants = verbs_constants()
        self.port, self.gid = port, gid
        self._memory: Any = importlib.import_module("pyverbs.mr")
        self._registered: dict[int, tuple[Arena, list[Any]]] = {}
        self._registering = asyncio.Lock()
        try:
            self.context: Any = device.Context(name=port.device)
            self.domain: Any = importlib.import_module("pyverbs.pd").PD(self.context)
            # Writes with immediate data use up a receive, which must name memory though none is written.
            self.scratch: Any = self._memory.MR(self.domain, 64, self.constants.IBV_ACCESS_LOCAL_WRITE)
        except self.errors as e:
            raise FabricFailed(f"{port} cannot be opened: {e}") from e

    async def regions(self, arena: Arena) -> list[Region]:
        """The arena's memory as the device knows it; registered once for the arena's life."""
        async with self._registering:
            if id(arena) not in self._registered:
                self._registered[id(arena)] = (arena, await self._register(arena))
                arena.before_close.append(lambda: self.forget(arena))
        _, handles = self._registered[id(arena)]
        return [Region(i * REGION, handle.length, handle.lkey, handle.rkey) for i, handle in enumerate(handles)]

    async def _register(self, arena: Arena) -> list[Any]:
        check_locked_memory(arena.capacity, registered=sum(a.capacity for a, _ in self._registered.values()))
        access = self.constants.IBV_ACCESS_LOCAL_WRITE | self.constants.IBV_ACCESS_REMOTE_WRITE
        handles: list[Any] = []
        try:
            for start in range(0, arena.capacity, REGION):
                nbytes = min(REGION, arena.capacity - start)
                handles.append(self._memory.MR(self.domain, nbytes, access, address=arena.address + start))
                await asyncio.sleep(0)
        except self.errors as e:
            _close_all(handles)
            raise FabricFailed(f"{self.port} cannot register an arena of {arena.capacity} bytes: {e}") from e
        except BaseException:
            _close_all(handles)
            raise
        return handles

    def forget(self, arena: Arena) -> None:
        """The device does not reach the arena any more."""
        _, handles = self._registered.pop(id(arena), (arena, []))
        _close_all(handles)

    def close(self) -> None:
        for arena, _ in list(self._registered.values()):
            self.forget(arena)
        self.scratch.close()
        self.domain.close()
        self.context.close()


def check_locked_memory(nbytes: int, *, registered: int = 0) -> None:
    """Raises FabricFailed if this process may not pin `nbytes` beside those that are `registered` already."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or registered + nbytes <= limit or _may_lock_all():
        return
    raise FabricFailed(
        f"RDMA pins an arena of {nbytes} bytes beside {registered} others, but the limit of locked memory is {limit}: "
        "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, or `memlock` in /etc/security/limits.conf)"
    )


def _may_lock_all() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def _ports_of(context: Any, name: str) -> list[Port]:
    active = verbs_constants().IBV_PORT_ACTIVE
    ports = []
    for number in range(1, context.query_device().phys_port_cnt + 1):
        found = context.query_port(number)
        if int(found.state) != active:
            continue
        entries = [entry for entry in context.query_gid_table(found.gid_tbl_len) if entry.port_num == number]
        gids = [
            Gid(int(e.gid_index), str(context.query_gid(number, e.gid_index).gid), int(e.gid_type)) for e in entries
        ]
        ports.append(
            Port(name, number, int(found.link_layer), int(found.active_mtu), int(found.max_msg_sz), int(found.lid),
                 tuple(sorted(gids, key=lambda gid: gid.index)))
        )  # fmt: skip
    context.close()
    return ports


def _name(name: bytes | str) -> str:
    return name.decode("ascii") if isinstance(name, bytes) else name


def _close_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.close()
