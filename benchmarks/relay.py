"""How long a version takes along a chain of relays, beside what the links allow. Needs root for the shaped links.

    python benchmarks/relay.py                      # chains of 1, 2, 4 and 8 hops; then a hop over loopback
    python benchmarks/relay.py --only loopback --repeats 9

chain     each relay in a network namespace of its own, with a link to each neighbour that is shaped to `--mbit` by tc
          tbf, so that a relay in the middle receives and sends at that rate. Printed beside the measurement: the model
          T = (p + k - 2) t for p relays (the master counts) and k pieces, with t from the rate of the link for
          TCP's payload (`--mbit` less the headers of Ethernet, IP and TCP). Link use: of the slowest hop, payload bytes
          / (seconds from its first piece to its last x that rate).
loopback  one hop between two processes, until the bytes lie in the arena and until they are checked; and one whose
          chunks nobody checks, which no run has: what the way itself costs. Beside the plain copy: sendall from one
          mapped buffer, recv_into another, in as large slices. All memory, of both, was touched before. On two cores
          checks take turns with the copy: so it is also made over two connections, by threads that each take the
          checksum of a slice as soon as it is there: about the most that can be had.
Medians of `--repeats`; each repeat is a version of its own, and all times are of one monotonic clock. On a busy machine
a relay may not answer in time, and the next one asks another: such a round is not of this chain, and is measured anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from namespaces import own_name, remove_left_over

from laminar.relay.chunks import broadcast_s, chunk_count

NODE = Path(__file__).with_name("relay_node.py")
FRAME_PAYLOAD, FRAME_BYTES = 1448, 1514
"""TCP's payload in a full frame of a 1500-byte link with timestamps; what tbf counts of it."""
WAIT_S = 300.0
MOST_ANEW = 10
"""Rounds of a chain that are measured anew at most."""


class NodeProcess:
    """A relay; `before`: what its command is run by (a network namespace)."""

    def __init__(self, name: str, options: Sequence[str], before: Sequence[str] = ()) -> None:
        command = [*before, sys.executable, str(NODE), name, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.endpoint = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def tell(self, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str) -> dict[str, Any]:
        while True:
            try:
                message: dict[str, Any] = json.loads(self.lines.get(timeout=WAIT_S))
            except queue.Empty:
                raise RuntimeError(f"{self.name} told nothing of {key} within {WAIT_S} s") from None
            if key in message:
                return message

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def chain(names: Sequence[str], options: Sequence[str], namespaces: Sequence[str] = ()) -> Iterator[list[NodeProcess]]:
    """A relay for each of `names`, in the namespace of the same place where there are any."""
    nodes: list[NodeProcess] = []
    try:
        for i, name in enumerate(names):
            bind = "0.0.0.0" if namespaces else "127.0.0.1"
            before = ["ip", "netns", "exec", namespaces[i]] if namespaces else []
            nodes.append(NodeProcess(name, [*options, "--bind", bind], before))
        for i, node in enumerate(nodes):
            endpoint = node.hear("endpoint")["endpoint"]
            # The one that asks it is its next neighbour, by the link between them.
            node.endpoint = endpoint.replace("0.0.0.0", f"10.77.{i}.1")
        view = {
            "epoch": 1,
            "order": list(names),
            "endpoints": {node.name: node.endpoint for node in nodes},
            "master": names[0],
        }
        for node in nodes:
            node.tell(view=view)
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def broadcast(nodes: Sequence[NodeProcess], version: int, nbytes: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the announcement until the last relay holds the version, and each relay's hop."""
    nodes[0].tell(publish={"version": version, "bytes": nbytes})
    return _announce(nodes)


def broadcast_file(nodes: Sequence[NodeProcess], version: int, file: Path) -> list[dict[str, Any]]:
    """Each relay's hop of a version with the bytes of `file`."""
    nodes[0].tell(publish_file={"version": version, "path": str(file)})
    return _announce(nodes)[1]


def _announce(nodes: Sequence[NodeProcess]) -> tuple[float, list[dict[str, Any]]]:
    name = nodes[0].hear("published")["published"]
    began = time.monotonic()
    for node in nodes[1:]:
        node.tell(announce=name)
    held = [node.hear("held") for node in nodes[1:]]
    return max(message["at"] for message in held) - began, [message["hop"] for message in held]


@dataclass(frozen=True)
class Round:
    """One broadcast: seconds until the last relay held it, and each relay's hop."""

    seconds: float
    hops: Sequence[dict[str, Any]]

    @property
    def peers(self) -> list[list[str]]:
        """Whom each relay but the first asked."""
        return [hop["peers"] for hop in self.hops]


def along(names: Sequence[str], wanted: int, measure: Callable[[int], Round]) -> tuple[list[Round], int]:
    """`wanted` rounds in which each relay had all from the one before it, and how many others were measured anew. Calls
    `measure` with 1, 2, … Raises RuntimeError after MOST_ANEW others."""
    chain, others = [[name] for name in names[:-1]], 0
    rounds: list[Round] = []
    while len(rounds) < wanted:
        found = measure(len(rounds) + others + 1)
        if found.peers == chain:
            rounds.append(found)
            continue
        others += 1
        if others > MOST_ANEW:
            raise RuntimeError(
                f"{others} of {len(rounds) + others} rounds did not follow the chain of {len(names)} relays, "
                f"{MOST_ANEW} are allowed; in the last one they asked {found.peers}: this machine is too busy, end "
                "what else runs or measure shorter chains (--hops)"
            )
        print(
            f"round {len(rounds) + others} did not follow the chain and is measured anew: {found.peers}",
            file=sys.stderr,
        )
    return rounds, others


# -- shaped links ---------------------------------------------------------------------------------------------------


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


@contextmanager
def shaped(count: int, mbit: float) -> Iterator[list[str]]:
    """`count` namespaces, by their names, with a pair of interfaces between neighbours; both directions are shaped to
    `mbit`. What earlier processes left is removed first."""
    if left := remove_left_over():
        print(f"removed what a process that is dead had left: {', '.join(left)}", file=sys.stderr)
    names = [own_name(f"r{i}") for i in range(count)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        for i, (left, right) in enumerate(itertools.pairwise(names)):
            run("ip", "link", "add", "next", "netns", left, "type", "veth", "peer", "name", "before", "netns", right)
            for name, device, address in ((left, "next", f"10.77.{i}.1/24"), (right, "before", f"10.77.{i}.2/24")):
                inside = ("ip", "netns", "exec", name)
                # Segments as they are on a wire: else tbf would meet packets of 64 KiB.
                run(*inside, "ip", "link", "set", "dev", device, "gso_max_segs", "1", "gso_max_size", "1514")
                run(*inside, "ip", "address", "add", address, "dev", device)
                run(*inside, "ip", "link", "set", device, "up")
                # A burst is what passes unshaped: little, beside a piece.
                shape = ("rate", f"{mbit}mbit", "burst", "8kb", "latency", "100ms")
                run(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            run("ip", "netns", "delete", name, check=False)


def measure_chain(arguments: argparse.Namespace) -> None:
    nbytes = arguments.megabytes << 20
    rate = arguments.mbit * 1e6 / 8 * FRAME_PAYLOAD / FRAME_BYTES
    piece = arguments.piece_kib << 10
    k = chunk_count(nbytes, piece)
    print(f"{arguments.megabytes} MiB in {k} pieces of {arguments.piece_kib} KiB, links of {arguments.mbit:g} Mbit/s")
    print(f"{'hops':>4} {'seconds':>8} {'model':>8} {'/ model':>8} {'/ 1 hop':>8} {'link use':>8}")
    first, anew = 0.0, 0
    for hops in arguments.hops:
        names = [f"r{i}" for i in range(hops + 1)]
        options = ["--chunk-kib", str(arguments.piece_kib), "--piece-kib", str(arguments.piece_kib), "--whole"]
        with shaped(hops + 1, arguments.mbit) as namespaces, chain(names, options, namespaces) as nodes:
            broadcast(nodes, 0, nbytes)  # touches the arenas
            rounds, others = along(names, arguments.repeats, partial(_round, nodes, nbytes))
        anew += others
        seconds = statistics.median(found.seconds for found in rounds)
        first = first or seconds
        model = broadcast_s(nbytes, hops + 1, piece, 1 / rate)
        # From a relay's first piece on: before it the chain fills, which the model counts for itself.
        streaming = [[hop["seconds"] - hop["filling_s"] for hop in found.hops] for found in rounds]
        use = statistics.median((nbytes - piece) / max(hop_s) / rate for hop_s in streaming)
        print(
            f"{hops:4} {seconds:8.2f} {model:8.2f} {seconds / model:8.3f} {seconds / first:8.3f} {use:8.1%}", flush=True
        )
    print(f"rounds measured anew, since they did not follow the chain: {anew}")


def _round(nodes: Sequence[NodeProcess], nbytes: int, version: int) -> Round:
    return Round(*broadcast(nodes, version, nbytes))


# -- loopback -------------------------------------------------------------------------------------------------------

COPY = """
import mmap, socket, sys, threading
import blake3
port, nbytes, size, rounds, connections, checks = map(int, sys.argv[1:])
target = mmap.mmap(-1, nbytes)
target.write(bytes(nbytes))
view = memoryview(target)

def receive(i):
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(bytes([i]))
        for _ in range(rounds):
            for start in range(i * size, nbytes, connections * size):
                at, end = start, min(start + size, nbytes)
                while at < end:
                    at += sock.recv_into(view[at:end])
                if checks:
                    blake3.blake3(view[start:end]).digest()
            sock.sendall(b"d")

threads = [threading.Thread(target=receive, args=(i,)) for i in range(connections)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def plain_copy(nbytes: int, size: int, rounds: int, *, connections: int = 1, checks: bool = False) -> list[float]:
    """Seconds of each plain copy between two processes' mapped buffers, by a thread each for a connection. `checks`:
    each takes the checksum of a slice before it receives the next."""
    source = mmap.mmap(-1, nbytes)
    source.write(os.urandom(1 << 20) * -(-nbytes // (1 << 20)) if nbytes < 1 << 20 else os.urandom(1 << 20))
    for start in range(1 << 20, nbytes, 1 << 20):
        source[start : min(nbytes, start + (1 << 20))] = source[: min(1 << 20, nbytes - start)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        numbers = map(str, (port, nbytes, size, rounds, connections, int(checks)))
        with subprocess.Popen([sys.executable, "-c", COPY, *numbers]), memoryview(source) as view:
            peers = dict(_numbered(server) for _ in range(connections))

            def send(place: int) -> None:
                for start in range(place * size, nbytes, connections * size):
                    peers[place].sendall(view[start : start + size])
                peers[place].recv(1)

            times = []
            with ThreadPoolExecutor(connections) as pool:
                for _ in range(rounds):
                    began = time.monotonic()
                    list(pool.map(send, peers))
                    times.append(time.monotonic() - began)
            for peer in peers.values():
                peer.close()
    return times


def _numbered(server: socket.socket) -> tuple[int, socket.socket]:
    """A connection, by the number with which it begins."""
    peer, _ = server.accept()
    return peer.recv(1)[0], peer


def measure_loopback(arguments: argparse.Namespace) -> None:
    nbytes = arguments.loopback_megabytes << 20
    print(f"one hop over loopback, {arguments.loopback_megabytes} MiB, {arguments.repeats} repeats")
    options = ["--chunk-kib", "4096", "--streams", str(arguments.streams), "--whole", "--silent"]
    with chain(["r0", "r1"], options) as nodes, chain(["u0", "u1"], [*options, "--unchecked"]) as others:
        for version in range(3):  # touches all arenas
            broadcast(nodes, version, nbytes)
            broadcast(others, version, nbytes)
        landed, hop, bare, plain, checked = [], [], [], [], []
        for version in range(3, 3 + arguments.repeats):
            _, received = broadcast(nodes, version, nbytes)
            landed.append(received[0]["landed_s"])
            hop.append(received[0]["seconds"])
            bare.append(broadcast(others, version, nbytes)[1][0]["seconds"])
            plain.append(plain_copy(nbytes, 4 << 20, 2)[1])
            checked.append(plain_copy(nbytes, 4 << 20, 2, connections=2, checks=True)[1])
    print(f"{'plain socket copy':19} {_gigabytes(nbytes, plain)}")
    print(f"{'two of them, checked':19} {_gigabytes(nbytes, checked)}")
    for name, times in (("hop without checks", bare), ("relay hop, landed", landed), ("relay hop, checked", hop)):
        whole, same = (statistics.median(p / t for p, t in zip(copy, times, strict=True)) for copy in (plain, checked))
        shares = f"{whole:6.1%} of the plain copy's rate, {same:6.1%} of the checked one's"
        print(f"{name:19} {_gigabytes(nbytes, times)}  {shares}")
    print("shares are medians of pairs")


def _gigabytes(nbytes: int, times: Sequence[float]) -> str:
    seconds = statistics.median(times)
    return f"{nbytes / seconds / 1e9:6.2f} GB/s {seconds * 1e3:8.1f} ms"


def tidy_when_told_to_end() -> None:
    """What this process made goes before it does, also when it is told to end: by an exception, once."""
    told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, frame: object) -> None:
        for each in told:
            signal.signal(each, signal.SIG_IGN)  # a second one would cut the removal off
        raise SystemExit(128 + number)

    for each in told:
        signal.signal(each, stop)


def main() -> None:
    tidy_when_told_to_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["chain", "loopback"])
    parser.add_argument("--megabytes", type=int, default=16, help="MiB of a version in the chains")
    parser.add_argument("--loopback-megabytes", type=int, default=512, help="MiB of a version over loopback")
    parser.add_argument("--mbit", type=float, default=40.0, help="rate of each link")
    parser.add_argument("--piece-kib", type=int, default=256)
    parser.add_argument("--hops", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=int, default=0, help="connections of the loopback hop; 0: as a run has")
    arguments = parser.parse_args()
    if arguments.only != "loopback":
        if os.geteuid() != 0:
            raise SystemExit("network namespaces need root; `--only loopback` does not")
        measure_chain(arguments)
    if arguments.only != "chain":
        measure_loopback(arguments)


if __name__ == "__main__":
    main()
