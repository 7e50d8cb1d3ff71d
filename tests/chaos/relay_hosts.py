"""Hosts of relays on one machine: network namespaces on a bridge, each of which can fall silent."""

from __future__ import annotations

import itertools
import subprocess

from namespaces import own_name, remove_left_over
from privileges import privileged


class RelayHosts:
    """`prefix(i)` runs a command on host i, which others reach at `address(i)`. Skips the test where network namespaces
    are not allowed."""

    _made = itertools.count()

    def __init__(self, count: int) -> None:
        self.count = count
        # Not those of the test before: the kernel takes its time to remove them.
        self._number = next(self._made)
        # Its own bridge, on which this host has no address: others may have the same ones.
        self.net = "10.170.0"
        privileged(["ip", "link", "add", self._name("b"), "type", "bridge"])
        try:
            remove_left_over()
            privileged(["ip", "link", "set", self._name("b"), "up"])
            for i in range(count):
                self._add(i)
        except BaseException:
            self.close()
            raise

    def _add(self, i: int) -> None:
        host, outer, inner = self._host(i), self._name(f"o{i}"), self._name(f"i{i}")
        for command in (
            f"ip netns add {host}",
            f"ip link add {outer} type veth peer name {inner}",
            f"ip link set {inner} netns {host}",
            f"ip link set {outer} up master {self._name('b')}",
            f"ip -n {host} address add {self.address(i)}/24 dev {inner}",
            f"ip -n {host} link set {inner} up",
            f"ip -n {host} link set lo up",
        ):
            privileged(command.split())

    def _host(self, i: int) -> str:
        return self._name(f"h{i}")

    def _name(self, what: str) -> str:
        return own_name(f"{self._number}{what}")

    def prefix(self, i: int) -> list[str]:
        return ["ip", "netns", "exec", self._host(i)]

    def address(self, i: int) -> str:
        return f"{self.net}.{i + 1}"

    def cut(self, i: int) -> None:
        """Nothing comes from there any more, and nobody is told: as when a host loses its power, or its cable."""
        subprocess.run(["ip", "link", "set", self._name(f"o{i}"), "down"], check=True)

    def mend(self, i: int) -> None:
        subprocess.run(["ip", "link", "set", self._name(f"o{i}"), "up"], check=True)

    def close(self) -> None:
        for i in range(self.count):
            subprocess.run(["ip", "link", "delete", self._name(f"o{i}")], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "delete", self._host(i)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "delete", self._name("b")], check=False, stderr=subprocess.DEVNULL)
