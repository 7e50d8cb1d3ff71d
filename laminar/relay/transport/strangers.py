"""Who may hold one of the few places of connections that have not proved the secret. No I/O.

A full house takes in a newcomer at the cost of the network that holds most places, so that one that opens many
connections and says nothing keeps out only itself; and of that network's connections at the cost of the oldest, if it
has had time to prove the secret. So who proves it at once comes in, however many others never do from elsewhere; of
its own network it has its share of the places that become free. To refuse somebody costs a look at each network, not at
each place: there may be many to refuse.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

PATIENCE_S = 0.05
"""Seconds that a connection has for sure: a proof takes milliseconds. The longer, the fewer places become free for who
proves it beside many of its network that never do. Beside 400 of these, which come back whenever they are closed, one
in three attempts came in with half a second, two with a tenth, and nearly all with a twentieth."""
MAPPED = bytes(10) + b"\xff\xff"
"""What an IPv6 address that means an IPv4 one begins with."""


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
        self._networks: dict[K, str] = {}
        self._since: dict[str, dict[K, float]] = {}
        """Of each network that holds any, the oldest first."""

    def __len__(self) -> int:
        return len(self._networks)

    def admit(self, key: K, address: str, now: float) -> Verdict[K]:
        """Give a newcomer from this address a place, if need be another's."""
        network = network_of(address)
        if len(self) < self._places:
            self._enter(key, network, now)
            return Verdict(taken=True)
        most = max(map(len, self._since.values()))
        own = len(self._since.get(network, ()))
        # Of networks that hold equally many, the newcomer's own: nobody else pays for a network's many connections.
        fullest = network if own == most else next(n for n, places in self._since.items() if len(places) == most)
        oldest, since = next(iter(self._since[fullest].items()))
        fairer = own + 1 < most
        if not fairer and now - since < self._patience_s:
            return Verdict(taken=False, network=fullest, held=most)
        self.leave(oldest)
        self._enter(key, network, now)
        return Verdict(taken=True, closed=oldest, network=fullest, held=most)

    def leave(self, key: K) -> None:
        """It proved the secret, or ended; one that has lost its place leaves none."""
        network = self._networks.pop(key, None)
        if network is None:
            return
        places = self._since[network]
        del places[key]
        if not places:
            del self._since[network]

    def _enter(self, key: K, network: str, now: float) -> None:
        self._networks[key] = network
        self._since.setdefault(network, {})[key] = now


def network_of(address: str) -> str:
    """What one attacker easily has all addresses of: an IPv4 address, or the 64 leading bits of an IPv6 one. What is
    no address, as that of a Unix socket, is a network of its own."""
    if ":" not in address:
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address
    if packed.startswith(MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(MAPPED) :])
    return f"{socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))}/64"
