"""Whoever fails within a broadcast, whenever and however, between hosts of their own: real processes, TCP, namespaces.

Versions are of small pieces, which event loops receive, or of large ones, which threads receive and check, or come as
differences to the one before. A few cases run always, the others are `nightly`. What each repair took is printed. The
same matrix, with more kinds of faults and for any number of seeds, runs in virtual time:
`tests/simulator/test_broadcasts.py`.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from recording import Recorder
from relay_hosts import RelayHosts
from relay_process import DIFFERENCES, LARGE, SMALL, RelayProcess, Way, announce, plan, publish, seal

RELAYS, PIECES = 5, 32
SLOW_MS = 40.0
"""Of the master: its pieces take more than a second."""
WAYS = {"small pieces": SMALL, "large pieces": LARGE, "differences": DIFFERENCES}
VERSION = 2
"""Of the case; the one before is what differences are to."""
AWAY_S = 3.0
"""Longer than the silence that counts as death."""
WHO = {
    "master": (0,),
    "middle": (2,),
    "last": (4,),
    "two at once": (1, 2),
    "one after the other": (2, 1),
    "master and second": (0, 1),
}
APART_S = 0.3
"""Between one and the other: those after the first have gone round it meanwhile."""
WHEN = ("before the first chunk", "midway", "before the last chunk", "held")
HOW = ("killed", "host lost", "stopped")
ALWAYS = {
    ("small pieces", "master", "midway", "killed"),
    ("small pieces", "last", "before the first chunk", "stopped"),
    ("large pieces", "middle", "before the last chunk", "host lost"),
    ("large pieces", "two at once", "midway", "killed"),
    ("large pieces", "one after the other", "midway", "killed"),
    ("differences", "middle", "before the last chunk", "host lost"),
    ("differences", "one after the other", "midway", "killed"),
}
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


def matrix() -> Iterator[Any]:
    for case in itertools.product(WAYS, WHO, WHEN, HOW):
        way, *fault = case
        marks = [] if case in ALWAYS else [pytest.mark.nightly]
        yield pytest.param(WAYS[way], *fault, marks=marks, id=", ".join(case))


class Hosts:
    """The relays on their hosts; the first has the trainer beside it."""

    def __init__(self, network: RelayHosts, way: Way) -> None:
        self.network = network
        self.way = way
        self.nbytes = PIECES * way.piece_kib << 10
        self.started: list[RelayProcess] = []
        slow_ms = SLOW_MS * way.streams
        self.relays = [self.start(i, f"r{i}", slow_ms=0 if i else slow_ms) for i in range(RELAYS)]

    def seal(self, relay: RelayProcess) -> list[Any]:
        """The version of the case; it is like the one before where differences are to be sent."""
        return seal(relay, VERSION, self.nbytes, like=VERSION - 1 if self.way.differences else None)

    def hold_the_one_before(self) -> None:
        """Where it is what differences are to."""
        if self.way.differences:
            name = publish(self.relays, VERSION - 1, self.nbytes)
            assert all(relay.hear("held")["digest"] == name[1] for relay in self.relays[1:])

    def start(self, host: int, name: str, *, slow_ms: float = 0.0) -> RelayProcess:
        address, prefix = self.network.address(host), self.network.prefix(host)
        relay = RelayProcess(name, slow_ms=slow_ms, prefix=prefix, address=address, way=self.way)
        self.started.append(relay)
        return relay

    def strike(self, i: int, how: str) -> None:
        if how == "host lost":
            self.network.cut(i)
        self.relays[i].kill(signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    def end(self) -> None:
        for relay in self.started:
            relay.end()


@pytest.fixture
def hosts(way: Way) -> Iterator[Hosts]:
    network = RelayHosts(RELAYS + 1)
    try:
        hosts = Hosts(network, way)
        try:
            yield hosts
        finally:
            hosts.end()
    finally:
        network.close()


@pytest.mark.parametrize(("way", "who", "when", "how"), matrix())
def test_who_lives_has_the_right_bytes(
    hosts: Hosts, who: str, when: str, how: str, recorder: Recorder, request: pytest.FixtureRequest
) -> None:
    """A dead master's bytes are offered again by the trainer, at a relay that was started for it. A stopped relay goes
    on later, and is to have the version as well."""
    relays, victims = hosts.relays, WHO[who]
    plan(relays, 1)
    subject = relays[1] if victims[0] == 0 else relays[victims[0]]
    hosts.hold_the_one_before()
    name = hosts.seal(relays[0])
    if when != "held" or victims[0] != 0:
        announce(relays, name)
    if when in ("midway", "before the last chunk"):
        subject.hear({"midway": "quarter", "before the last chunk": "nearly"}[when])
    elif when == "held" and victims[0] != 0:
        subject.hear("held")
    struck_at = time.monotonic()
    for i in victims:
        if i != victims[0] and who == "one after the other":
            time.sleep(APART_S)
        hosts.strike(i, how)
    if when == "held" and victims[0] == 0:
        announce([relay for i, relay in enumerate(relays) if i not in victims], name)

    living = [relay for i, relay in enumerate(relays) if i not in victims]
    if 0 in victims and how != "stopped":
        again = hosts.start(RELAYS if how == "host lost" else 0, "r0-restarted")
        assert hosts.seal(again) == name, "the same bytes"
        plan([again, *living], 2)
        announce(living, name)
    if how == "stopped":
        time.sleep(max(0.0, struck_at + AWAY_S - time.monotonic()))
        for i in victims:
            relays[i].kill(signal.SIGCONT)
        announce([relays[i] for i in victims], name)
        living = relays

    # Its master has it from the trainer; and what a relay has told before the fault, it does not tell again.
    silent = [relays[0], *([subject] if when == "held" and victims[0] != 0 else [])]
    held = {relay.name: relay.hear("held") for relay in living if relay not in silent}
    assert all([message["held"], message["digest"]] == name for message in held.values())
    if hosts.way.differences and 0 not in victims:
        assert any(message["hop"]["received"] < hosts.nbytes // 2 for message in held.values() if message["hop"])
    repairs = [(relay, repair) for relay, message in held.items() for repair in message["hop"]["repairs"]]
    for relay, repair in repairs:
        line = f"{relay}: {repair['lost']} -> {repair['found']} in {repair['seconds']:.3f} s ({repair['reason']})"
        request.config.get_terminal_writer().line(f"\n{line}")
    struck = {f"r{i}" for i in victims}
    if 0 not in victims:
        assert all(repair["seconds"] < 1.0 for relay, repair in repairs if relay not in struck), repairs
    # Of the victims it would tell how long the test kept them away; what was there before the fault needed no recovery.
    after = [message["at"] for relay, message in held.items() if relay not in struck and message["at"] > struck_at]
    if after:
        seconds, kind = max(after) - struck_at, f"relay broadcast: {who}, {how}"
        recorder.fault(kind, seconds, faults=len(victims), when=when, repairs=len(repairs))
