"""Relays as processes on loopback, killed within a broadcast: the others end with the right bytes, repaired in time."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest
from relay_process import RelayProcess, plan, publish, seal

BYTES = 16 << 20
RELAYS = 5
SLOW_MS = 40.0
"""Of the master: its broadcast takes more than a second."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def relays() -> Iterator[list[RelayProcess]]:
    relays = [RelayProcess(f"r{i}", slow_ms=0 if i else SLOW_MS) for i in range(RELAYS)]
    yield relays
    for relay in relays:
        relay.end()


@pytest.mark.parametrize("victims", [(1,), (2,), (4,), (1, 2), (1, 3)], ids=str)
def test_kill_9_within_a_broadcast_is_repaired_within_a_second(
    relays: list[RelayProcess], victims: tuple[int, ...]
) -> None:
    """Without a new plan: the reset connection is what tells. Digests are checked chunk by chunk by each relay."""
    plan(relays, 1)
    publish(relays, 1, BYTES)
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
    publish(survivors, 2, BYTES)
    for before, relay in itertools.pairwise(survivors):
        assert relay.hear("held")["hop"]["peers"] == [before.name], "the next broadcast runs along the new chain"


def test_a_stopped_relay_is_noticed_by_its_silence(relays: list[RelayProcess]) -> None:
    plan(relays, 1)
    publish(relays, 1, BYTES)
    relays[3].hear("quarter")
    relays[2].kill(signal.SIGSTOP)
    hops = {relay.name: relay.hear("held")["hop"] for relay in relays[1:] if relay is not relays[2]}
    assert "r1" in hops["r3"]["peers"], "r3 went round r2"
    relays[2].kill(signal.SIGCONT)
    assert relays[2].hear("held")["held"] == 1, "and it catches up when it goes on"


def test_the_masters_death_is_survived_when_the_bytes_are_offered_again(relays: list[RelayProcess]) -> None:
    plan(relays, 1)
    name = publish(relays, 1, BYTES)
    for relay in relays[1:]:
        relay.hear("quarter")
    relays[0].kill()
    again = RelayProcess("r0-restarted")
    relays.append(again)
    assert seal(again, 1, BYTES) == name
    living = [again, *relays[1:RELAYS]]
    plan(living, 2)
    for relay in living[1:]:
        relay.tell(announce=name)
        assert relay.hear("held")["held"] == 1
