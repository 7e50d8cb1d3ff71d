"""What is done to a run: whom it hits, how one sees that it was overcome, and faults that need more than a signal."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from namespaces import own_name, remove_left_over
from observer import Observer
from privileges import memory_disk, privileged
from real_run import RealRun

from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.segments import _scan
from laminar.workers.supervisor.etcd_process import EtcdProcess

LEASE_S = 4.0
SHORT_LEASE = f"coordination.lease_ttl={LEASE_S}"
"""So that a test need not wait long until a worker that stopped counts as dead."""
ROLES = {"trainer": "trainer", "relay": "manager", "committer": "committer"}
FEW_CLAIMS = 4


def victim_of(run: RealRun, seen: Observer, kind: str) -> str:
    """The id of the worker of this kind whose loss matters now: the leader, or a rollout that owns trajectories."""
    if kind != "rollout":
        run.until(lambda: bool(seen.leader(ROLES[kind])), f"there is a {ROLES[kind]}")
        return seen.leader(ROLES[kind])

    def most() -> tuple[int, str]:
        return max(((len(seen.claims_of(w)), w) for w in seen.workers("rollout")), default=(0, ""))

    run.until(lambda: most()[0] >= FEW_CLAIMS, f"a rollout owns {FEW_CLAIMS} trajectories")
    return most()[1]


def overcome(seen: Observer, kind: str, victim: str) -> Callable[[], bool]:
    """Says whether what `victim` did is with another worker and goes on, compared with now."""
    step, version, rows = seen.step(), seen.version(), seen.table().rows
    if kind == "rollout":
        return lambda: not seen.claims_of(victim)

    def replaced() -> bool:
        return seen.leader(ROLES[kind]) not in ("", victim)

    goes_on: dict[str, Callable[[], bool]] = {
        "trainer": lambda: seen.step() > step,
        "relay": lambda: seen.version() > version,
        "committer": lambda: seen.table().rows > rows,
    }
    return lambda: replaced() and goes_on[kind]()


def next_step(run: RealRun, seen: Observer) -> float:
    """Seconds until a further step is trained that was not under way."""
    step = seen.step()
    return run.until(lambda: seen.step() > step + 1, f"step {step + 2}")


class Etcds:
    """An etcd, or a cluster of several, that the test keeps beside the run. `also`: a further address to listen at."""

    def __init__(self, folder: Path, members: int = 1, also: str = "") -> None:
        ports, peers = _free_ports(members), _free_ports(members)
        cluster = ",".join(f"member{i}=http://127.0.0.1:{peer}" for i, peer in enumerate(peers))
        self.members: list[EtcdProcess] = []
        for i, (port, peer) in enumerate(zip(ports, peers, strict=True)):
            # The last of two equal flags counts: these replace those of a single node.
            flags = ["--name", f"member{i}", "--initial-cluster", cluster]
            if also:
                flags += ["--listen-client-urls", f"http://127.0.0.1:{port},http://{also}:{port}"]
            folder.mkdir(parents=True, exist_ok=True)
            self.members.append(
                EtcdProcess(folder / f"member{i}", client_port=port, peer_port=peer, flags=tuple(flags))
            )

        async def start() -> None:
            await asyncio.gather(*(m.start() for m in self.members))

        asyncio.run(start())

    @property
    def endpoints(self) -> list[str]:
        return [m.endpoint for m in self.members]

    def leader(self) -> EtcdProcess:
        async def find() -> EtcdProcess:
            for member in self.members:
                client = EtcdCoordination([member.endpoint])
                try:
                    status = await client.status()
                finally:
                    await client.close()
                if status["member"] == status["leader"]:
                    return member
            raise AssertionError("no member of the cluster leads")

        return asyncio.run(find())

    def kill(self, member: EtcdProcess) -> None:
        os.kill(member.pid, signal.SIGKILL)

    def restart(self, member: EtcdProcess) -> None:
        """On the same data and port."""
        asyncio.run(member.restart())

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(m.stop() for m in self.members))

        asyncio.run(stop())


class SmallDisk:
    """A memory file system that can be made full and free again. Skips the test where mounting is not allowed."""

    ROOMY = "3g"

    def __init__(self, folder: Path) -> None:
        self._mounted = ExitStack()
        self.folder = self._mounted.enter_context(memory_disk(folder, self.ROOMY))

    def fill(self) -> None:
        """Until not one byte is left; the disk is first made small, so that memory is not what gets filled."""
        found = os.statvfs(self.folder)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        self._resize(str(used + (4 << 20)))
        with open(self.folder / "filler", "ab", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as e:
                assert e.errno == errno.ENOSPC, e

    def free(self) -> None:
        (self.folder / "filler").unlink()
        self._resize(self.ROOMY)

    def _resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def close(self) -> None:
        self._mounted.close()


class CutNetwork:
    """A network of its own for a process that `prefix` starts: it reaches this host at `address` until `cut`, and
    after `mend`. Skips the test where network namespaces are not allowed."""

    def __init__(self) -> None:
        number = os.getpid() % 60_000
        self.name, self.outer, inner = own_name("ch"), own_name("co"), own_name("ci")
        net = f"10.{100 + number // 16_384}.{number // 64 % 256}"
        low = number % 64 * 4
        self.address, there = f"{net}.{low + 1}", f"{net}.{low + 2}"
        privileged(["ip", "netns", "add", self.name])
        try:
            remove_left_over()
            for command in (
                f"ip link add {self.outer} type veth peer name {inner}",
                f"ip link set {inner} netns {self.name}",
                f"ip address add {self.address}/30 dev {self.outer}",
                f"ip link set {self.outer} up",
                f"ip -n {self.name} address add {there}/30 dev {inner}",
                f"ip -n {self.name} link set {inner} up",
                f"ip -n {self.name} link set lo up",
            ):
                privileged(command.split())
        except BaseException:
            self.close()
            raise
        self.prefix = ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        subprocess.run(["ip", "link", "set", self.outer, "down"], check=True)

    def mend(self) -> None:
        subprocess.run(["ip", "link", "set", self.outer, "up"], check=True)

    def close(self) -> None:
        subprocess.run(["ip", "link", "delete", self.outer], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "netns", "delete", self.name], check=True)


def ends_of(segment: Path) -> tuple[int, ...]:
    """Where each good batch of a segment ends, in bytes."""
    return _scan(segment.read_bytes(), 0).ends


def tear_end(segment: Path) -> None:
    """As a crash leaves it: the last write is cut short."""
    os.truncate(segment, segment.stat().st_size - 20)


def flip_bit(segment: Path) -> None:
    """In the last batch but two."""
    ends, data = ends_of(segment), bytearray(segment.read_bytes())
    data[(ends[-4] + ends[-3]) // 2] ^= 8
    segment.write_bytes(data)


def zero_page(segment: Path) -> None:
    """As a disk returns what it has lost: 4,096 bytes, before the last batch."""
    ends, data = ends_of(segment), bytearray(segment.read_bytes())
    start, end = ends[-5], min(ends[-5] + 4096, ends[-2])
    data[start:end] = bytes(end - start)
    segment.write_bytes(data)


def _free_ports(count: int) -> list[int]:
    """Held open together while they are looked for, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
