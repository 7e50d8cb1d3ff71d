"""Three relays as processes, each with a device of its own: a broadcast along the chain, and the middle one killed."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NODE = Path(__file__).parents[2] / "benchmarks" / "relay_node.py"
DEVICES = [name for name in os.environ.get("LAMINAR_TEST_RDMA_DEVICES", "").split(",") if name]
BYTES = 8 << 20
WAIT_S = 400.0
STALL_S = 10.0
"""So long that only the end of a connection can tell, on an emulated machine too."""
pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(len(DEVICES) < 3, reason="needs three RDMA devices, as scripts/rdma makes"),
]


class RelayProcess:
    def __init__(self, name: str, device: str, *, slow_ms: float) -> None:
        options = ["--chunk-kib", "256", "--piece-kib", "256", "--device", device]
        options += ["--slow-ms", str(slow_ms), "--stall-s", str(STALL_S)]
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(NODE), name, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
                raise AssertionError(f"{self.name} ({self.process.poll()}) told nothing of {key}") from None
            if key in message:
                return message

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def relays() -> Iterator[list[RelayProcess]]:
    relays = [RelayProcess(f"r{i}", device, slow_ms=0 if i else 60) for i, device in enumerate(DEVICES[:3])]
    for relay in relays:
        relay.endpoint = relay.hear("endpoint")["endpoint"]
    for relay in relays[:2]:
        plan(relay, relays, epoch=1)
    # It does not know where r0 is: on a loaded machine it would ask that too, if r1 were late to answer.
    plan(relays[2], relays[1:], epoch=1)
    yield relays
    for relay in relays:
        relay.kill()


def plan(relay: RelayProcess, known: list[RelayProcess], *, epoch: int) -> None:
    """The chain of all, as `relay` sees it, which knows where those of `known` are."""
    order = [f"r{i}" for i in range(3)]
    relay.tell(view={"epoch": epoch, "order": order, "endpoints": {r.name: r.endpoint for r in known}, "master": "r0"})


def publish(relays: list[RelayProcess], version: int) -> None:
    relays[0].tell(publish={"version": version, "bytes": BYTES})
    name = relays[0].hear("published")["published"]
    for relay in relays:
        relay.tell(announce=name)


def report(request: pytest.FixtureRequest, line: str) -> None:
    request.config.get_terminal_writer().line(f"\n{line}")


def test_a_version_passes_along_the_chain(relays: list[RelayProcess], request: pytest.FixtureRequest) -> None:
    """Each relay checks every chunk against the digest before it passes it on or holds the version."""
    for version in (1, 2):
        publish(relays, version)
        hops = [relay.hear("held")["hop"] for relay in relays[1:]]
        assert [hop["peers"] for hop in hops] == [["r0"], ["r1"]]
        assert all(hop["nbytes"] == BYTES for hop in hops)
        for name, hop in zip(("r1", "r2"), hops, strict=True):
            report(request, f"version {version}: {name} {hop['nbytes'] / hop['seconds'] / 2**20:.1f} MiB/s")


def test_the_death_of_the_middle_one_is_gone_round(relays: list[RelayProcess], request: pytest.FixtureRequest) -> None:
    publish(relays, 3)
    relays[2].hear("quarter")
    plan(relays[2], relays, epoch=2)
    relays[1].kill()
    hop = relays[2].hear("held")["hop"]
    assert hop["peers"] == ["r1", "r0"] and len(hop["repairs"]) == 1
    report(request, f"repaired in {hop['repairs'][0]['seconds']:.2f} s: {hop['repairs'][0]['reason']}")
    assert hop["repairs"][0]["seconds"] < STALL_S, "the ended connection told, not the silence"
