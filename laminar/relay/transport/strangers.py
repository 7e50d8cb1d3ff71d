"""Who may hold one of the few places of connections that have not proved the secret. No I/O.

A full house takes in a newcomer at the cost of the network that holds most places, so that one that opens many
connections and says nothing keeps out only itself; and of that network's connections at the cost of the oldest, if it
has had time to prove the secret. So who proves it at once comes in, however many others never do.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

PATIENCE_S = 0.5
"""Seconds that a connection has for sure: many times what a proof takes."""


@dataclass(frozen=True)
class _Place:
    network: str
    since: float


@dataclass(frozen=True)
class Verdict(Generic[K]):
    """`taken`: the newcomer has a place. `closed` lost its place to it and is to be closed."""

    taken: bool
    closed: K | None = None
    network: str = ""
    """Whose place was taken, or whose many places kept the newcomer out."""
    held: int = 0
    """How many it held."""


class Strangers(Generic[K]):
    """`places` for connections named by a key; times are seconds of any one clock."""

    def __init__(self, places: int, patience_s: float = PATIENCE_S) -> None:
        self._places = places
        self._patience_s = patience_s
        self._held: dict[K, _Place] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._held)

    def admit(self, key: K, address: str, now: float) -> Verdict[K]:
        """Give a newcomer from this address a place, if need be another's."""
        network = network_of(address)
        if len(self._held) < self._places:
            self._held[key] = _Place(network, now)
            return Verdict(taken=True)
        held = Counter(place.network for place in self._held.values())
        most = max(held.values())
        # Of networks that hold equally many, the newcomer's own: nobody else pays for a network's many connections.
        fullest = network if held[network] == most else max(held, key=lambda n: held[n])
        oldest = next(k for k, place in self._held.items() if place.network == fullest)
        fairer = held[network] + 1 < most
        if not fairer and now - self._held[oldest].since < self._patience_s:
            return Verdict(taken=False, network=fullest, held=most)
        del self._held[oldest]
        self._held[key] = _Place(network, now)
        return Verdict(taken=True, closed=oldest, network=fullest, held=most)

    def leave(self, key: K) -> None:
        """It proved the secret, or ended; one that has lost its place leaves none."""
        self._held.pop(key, None)


def network_of(address: str) -> str:
    """What one attacker easily has all addresses of: an IPv4 address, or the 64 leading bits of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
