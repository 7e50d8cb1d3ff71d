"""Relays as processes without etcd (`benchmarks/relay_node.py`): the test says what etcd would say."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NODE = Path(__file__).parents[2] / "benchmarks" / "relay_node.py"


@dataclass(frozen=True)
class Way:
    """How versions travel: in what pieces, over how many connections; `differences`: to the version before."""

    chunk_kib: int = 256
    piece_kib: int = 256
    streams: int = 1
    differences: bool = False


SMALL = Way()
"""Pieces that event loops receive."""
LARGE = Way(1024, 2048, streams=2)
"""As large versions do: threads receive the pieces, and check their chunks."""
DIFFERENCES = Way(differences=True)


class RelayProcess:
    """`slow_ms`: pause before each piece that it sends. `prefix`: what its command is run by, such as `ip netns exec`;
    there it listens at all addresses, and others reach it at `address`."""

    def __init__(
        self, name: str, *, slow_ms: float = 0.0, prefix: Sequence[str] = (), address: str = "", way: Way = SMALL
    ) -> None:
        self.name = name
        options = ["--chunk-kib", str(way.chunk_kib), "--piece-kib", str(way.piece_kib), "--slow-ms", str(slow_ms)]
        options += ["--streams", str(way.streams), *(["--retain", "2"] if way.differences else [])]
        options += ["--bind", "0.0.0.0"] if address else []
        command = [*prefix, sys.executable, str(NODE), name, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = address

    @property
    def endpoint(self) -> str:
        """Waits until it listens."""
        if not hasattr(self, "_endpoint"):
            found: str = self.hear("endpoint")["endpoint"]
            self._endpoint = found.replace("0.0.0.0", self.address) if self.address else found
        return self._endpoint

    def tell(self, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def hear(self, key: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next line that tells of `key`."""
        while True:
            try:
                message: dict[str, Any] = json.loads(self.lines.get(timeout=timeout_s))
            except queue.Empty:
                raise AssertionError(f"{self.name} ({self.process.poll()}) told nothing of {key}") from None
            if key in message:
                return message

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.kill()
        self.process.wait()


def plan(relays: Sequence[RelayProcess], epoch: int) -> None:
    """The first one is master."""
    view = {
        "epoch": epoch,
        "order": [r.name for r in relays],
        "endpoints": {r.name: r.endpoint for r in relays},
        "master": relays[0].name,
    }
    for relay in relays:
        relay.tell(view=view)


def seal(relay: RelayProcess, version: int, nbytes: int, like: int | None = None) -> list[Any]:
    """As a trainer on its host does; the version's number and digest. `like`: it differs little from that version."""
    assert relay.endpoint, "it must have been heard before anything that is said later"
    relay.tell(publish={"version": version, "bytes": nbytes, "like": version if like is None else like})
    name: list[Any] = relay.hear("published")["published"]
    return name


def publish(relays: Sequence[RelayProcess], version: int, nbytes: int) -> list[Any]:
    """At the first one; all are told."""
    name = seal(relays[0], version, nbytes)
    announce(relays, name)
    return name


def announce(relays: Sequence[RelayProcess], name: list[Any]) -> None:
    for relay in relays:
        relay.tell(announce=name)
