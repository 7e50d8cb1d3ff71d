"""By what relays reach each other: verbs first where this host has a device for it, tcp always.

Each relay tells etcd an endpoint of every transport that it offers, and asks by the first of its own that the other
offers too. So two hosts with devices use them, and a host without any still takes part. Where the better one does not
get through (FabricFailed), the next one is tried, and what it shows is told to the one that was passed over.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Mapping
from typing import Literal

from laminar.errors import ConfigError
from laminar.relay.transport.base import FabricFailed, Link, PeerRefused, Transport
from laminar.relay.transport.names import Names
from laminar.relay.transport.tcp import TcpTransport
from laminar.relay.transport.verbs import VerbsTransport
from laminar.relay.transport.verbs_device import NoRdma, active_ports, select

log = logging.getLogger(__name__)

Choice = Literal["auto", "tcp", "verbs"]


def open_transports(
    choice: Choice,
    *,
    secret: bytes,
    run: str,
    relay: str,
    bind: str,
    port: int = 0,
    advertise: str = "",
    stall_s: float = 2.0,
    delta_share: float = 0.5,
    on_refusal: Callable[[str], None] = lambda reason: None,
    on_error: Callable[[str], None] = lambda problem: None,
) -> list[Transport]:
    """Best first; for the arguments see TcpTransport. A fixed `port` is that of tcp, the one after it that of verbs.

    LAMINAR_RDMA_DEVICE names a device; else the one that has the address `bind` is taken. Raises ConfigError if
    `choice` is verbs and there is no RDMA here."""
    names = Names()
    tcp = TcpTransport(
        secret=secret, run=run, relay=relay, bind=bind, port=port, advertise=advertise, stall_s=stall_s,
        delta_share=delta_share, on_refusal=on_refusal, on_error=on_error, names=names,
    )  # fmt: skip
    # An address that only this host reaches says that no weights are to leave it.
    if choice == "tcp" or (choice == "auto" and _is_loopback(bind)):
        return [tcp]
    try:
        device, gid = select(active_ports(), wanted=os.environ.get("LAMINAR_RDMA_DEVICE", ""), address=bind)
    except NoRdma as e:
        if choice == "verbs":
            raise ConfigError(f'relay.transport = "verbs", but this host has no RDMA: {e}') from e
        log.info("weights travel by tcp, this host has no RDMA: %s", e)
        return [tcp]
    verbs = VerbsTransport(
        device, gid, secret=secret, run=run, relay=relay, bind=bind, port=port + 1 if port else 0, advertise=advertise,
        stall_s=stall_s, on_refusal=on_refusal, on_error=on_error, names=names,
    )  # fmt: skip
    return [verbs, tcp]


async def connect_best(
    transports: Mapping[str, Transport], relay: str, endpoints: Mapping[str, str], *, deadline_s: float
) -> Link:
    """To `relay`, by the first of `transports` that has an endpoint there and gets through, within `deadline_s` seconds
    for each. Raises LinkBroken, or PeerRefused if there is none."""
    shared = [name for name in transports if name in endpoints]
    passed_over: list[tuple[Transport, FabricFailed]] = []
    for name in shared:
        try:
            link = await transports[name].connect(relay, endpoints[name], deadline_s=deadline_s)
        except FabricFailed as e:
            if name == shared[-1]:
                raise
            passed_over.append((transports[name], e))
            continue
        for transport, problem in passed_over:
            transport.passed_over(relay, problem)
        return link
    offered = ", ".join(endpoints) or "none"
    raise PeerRefused(f"{relay} can be reached by {offered}, this relay speaks {', '.join(transports)}")


def _is_loopback(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        return bind == "localhost"
