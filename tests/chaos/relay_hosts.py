"""Hosts of relays on one machine: network namespaces on a bridge, each of which can fall silent."""

from __future__ import annotations

import itertools
import os
import subprocess

from faults import privileged


class RelayHosts:
    """`prefix(i)` runs a command on host i, which others reach at `address(i)`. Skips the test where network namespaces
    are not allowed."""

    _made = itertools.count()

    def __init__(self, count: int) -> None:
        number = os.getpid() % 60_000
        self.count = count
        # The kernel takes its time to remove those of the test before.
        self.mark = f"lr{number}n{next(self._made)}"
        self.net = f"10.{170 + number // 256 % 80}.{number % 256}"
        privileged(["ip", "link", "add", f"{self.mark}b", "type", "bridge"])
        try:
            privileged(["ip", "link", "set", f"{self.mark}b", "up"])
            for i in range(count):
                self._add(i)
        except BaseException:
            self.close()
            raise

    def _add(self, i: int) -> None:
        host, outer, inner = self._host(i), f"{self.mark}o{i}", f"{self.mark}i{i}"
        for command in (
            f"ip netns add {host}",
            f"ip link add {outer} type veth peer name {inner}",
            f"ip link set {inner} netns {host}",
            f"ip link set {outer} up master {self.mark}b",
            f"ip -n {host} address add {self.address(i)}/24 dev {inner}",
            f"ip -n {host} link set {inner} up",
            f"ip -n {host} link set lo up",
        ):
            privileged(command.split())

    def _host(self, i: int) -> str:
        return f"{self.mark}h{i}"

    def prefix(self, i: int) -> list[str]:
        return ["ip", "netns", "exec", self._host(i)]

    def address(self, i: int) -> str:
        return f"{self.net}.{i + 1}"

    def cut(self, i: int) -> None:
        """Nothing comes from there any more, and nobody is told: as when a host loses its power, or its cable."""
        subprocess.run(["ip", "link", "set", f"{self.mark}o{i}", "down"], check=True)

    def mend(self, i: int) -> None:
        subprocess.run(["ip", "link", "set", f"{self.mark}o{i}", "up"], check=True)

    def close(self) -> None:
        for i in range(self.count):
            subprocess.run(["ip", "link", "delete", f"{self.mark}o{i}"], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "delete", self._host(i)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "delete", f"{self.mark}b"], check=False, stderr=subprocess.DEVNULL)
