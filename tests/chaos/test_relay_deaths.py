"""Relays as processes on loopback, killed within a broadcast: the others end with the right bytes, repaired in time."""

from __future__ import annotations

import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NODE = Path(__file__).parents[2] / "benchmarks" / "relay_node.py"
BYTES = 16 << 20
RELAYS = 5
SLOW_MS = 40.0
"""Of the master: its broadcast takes more than a second."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class RelayProcess:
    """`slow_ms`: pause before each of the 64 pieces that it sends."""

    def __init__(self, name: str, *, slow_ms: float = 0.0) -> None:
        self.name = name
        options = ["--chunk-kib", "256", "--piece-kib", "256", "--slow-ms", str(slow_ms)]
        command = [sys.executable, str(NODE), name, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.endpoint = self.hear("endpoint")["endpoint"]

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


@pytest.fixture
def relays() -> Iterator[list[RelayProcess]]:
    relays = [RelayProcess(f"r{i}", slow_ms=0 if i else SLOW_MS) for i in range(RELAYS)]
    yield relays
    for relay in relays:
        relay.kill()
        relay.process.wait()


def plan(relays: list[RelayProcess], epoch: int) -> None:
    view = {
        "epoch": epoch,
        "order": [r.name for r in relays],
        "endpoints": {r.name: r.endpoint for r in relays},
        "master": relays[0].name,
    }
    for relay in relays:
        relay.tell(view=view)


def publish(relays: list[RelayProcess], version: int) -> list[Any]:
    relays[0].tell(publish={"version": version, "bytes": BYTES})
    name: list[Any] = relays[0].hear("published")["published"]
    for relay in relays:
        relay.tell(announce=name)
    return name


@pytest.mark.parametrize("victims", [(1,), (2,), (4,), (1, 2), (1, 3)], ids=str)
def test_kill_9_within_a_broadcast_is_repaired_within_a_second(
    relays: list[RelayProcess], victims: tuple[int, ...]
) -> None:
    """Without a new plan: the reset connection is what tells. Digests are checked chunk by chunk by each relay."""
    plan(relays, 1)
    publish(relays, 1)
    for relay in relays[1:]:
        relay.hear("quarter")
    for i in victims:
        relays[i].kill()
    survivors = [relay for i, relay in enumerate(relays) if i not in victims]
    hops = [relay.hear("held")["hop"] for relay in survivors[1:]]
    repairs = [repair for hop in hops for repair in hop["repairs"]]
    assert all(repair["seconds"] < 1.0 for repair in repairs), repairs
    assert repairs or victims == (4,), "nobody waits for the last one"
    assert all(hop["nbytes"] == BYTES for hop in hops)
    plan(survivors, 2)
    publish(survivors, 2)
    for before, relay in itertools.pairwise(survivors):
        assert relay.hear("held")["hop"]["peers"] == [before.name], "the next broadcast runs along the new chain"


def test_a_stopped_relay_is_noticed_by_its_silence(relays: list[RelayProcess]) -> None:
    plan(relays, 1)
    publish(relays, 1)
    relays[3].hear("quarter")
    relays[2].kill(signal.SIGSTOP)
    hops = {relay.name: relay.hear("held")["hop"] for relay in relays[1:] if relay is not relays[2]}
    assert "r1" in hops["r3"]["peers"], "r3 went round r2"
    relays[2].kill(signal.SIGCONT)
    assert relays[2].hear("held")["held"] == 1, "and it catches up when it goes on"


def test_the_masters_death_is_survived_when_the_bytes_are_offered_again(relays: list[RelayProcess]) -> None:
    plan(relays, 1)
    name = publish(relays, 1)
    for relay in relays[1:]:
        relay.hear("quarter")
    relays[0].kill()
    again = RelayProcess("r0-restarted")
    relays.append(again)
    again.tell(publish={"version": 1, "bytes": BYTES})
    assert again.hear("published")["published"] == name
    living = [again, *relays[1:RELAYS]]
    plan(living, 2)
    for relay in living[1:]:
        relay.tell(announce=name)
        assert relay.hear("held")["held"] == 1
