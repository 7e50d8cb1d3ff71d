"""Why a version does not come: what a relay reports of it, and what its log tells how often."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from laminar.relay.hindrance import MAX_KINDS, STALLED_S, Hindrances, Stall, kind

REFUSED = "10.0.0.7:4311: Connection refused"


def test_a_version_that_comes_is_no_stall_and_one_that_does_not_is_with_its_last_error() -> None:
    hindrances = Hindrances()
    assert hindrances.stall(100.0) is None, "nothing is wanted"
    hindrances.wants(8, 100.0, newest_here=7)
    assert hindrances.stall(100.0 + 0.9 * STALLED_S) is None
    hindrances.failed("b", REFUSED, 102.0, reached=False)
    assert hindrances.stall(104.0) == Stall(8, 100.0, f"b: {REFUSED}", 102.0)
    hindrances.progress(8, 105.0)
    assert hindrances.stall(105.0 + 0.9 * STALLED_S) is None
    assert hindrances.stall(200.0) == Stall(8, 105.0), "what failed before the last piece is no reason"
    hindrances.wants(None, 201.0, newest_here=8)
    assert hindrances.stall(300.0) is None


def test_versions_published_meanwhile_do_not_hide_since_when_nothing_comes() -> None:
    hindrances = Hindrances()
    for version in range(8, 20):
        hindrances.wants(version, 10.0 * version, newest_here=7)
    assert hindrances.stall(200.0) == Stall(19, 80.0)
    hindrances.progress(5, 200.0)
    assert hindrances.stall(200.0) == Stall(19, 80.0), "an older one, which a reader asked for, is no step towards it"
    hindrances.progress(12, 200.0)
    assert hindrances.stall(201.0) is None, "while one version is under way newer ones wait"
    hindrances.wants(19, 210.0, newest_here=12)
    assert hindrances.stall(212.0) is None


def test_a_pull_given_up_for_a_reason_of_our_own_is_told() -> None:
    hindrances = Hindrances()
    hindrances.wants(8, 0.0)
    hindrances.gave_up("no arena is free for it", 9.0)
    assert hindrances.stall(10.0) == Stall(8, 0.0, "no arena is free for it", 9.0)


def test_a_neighbour_is_told_once_for_each_kind_of_reason_and_again_after_it_was_reached() -> None:
    hindrances = Hindrances()
    hindrances.wants(8, 0.0)
    told = [
        hindrances.failed("b", f"10.0.0.7:{4000 + i}: Connection refused", float(i), reached=False) for i in range(5)
    ]
    assert told == [True, False, False, False, False]
    assert hindrances.failed("b", "it has too many connections (64)", 5.0, reached=False)
    assert hindrances.failed("c", REFUSED, 5.0, reached=False), "another neighbour"
    (c, b) = sorted(hindrances.troubles(), key=lambda trouble: trouble.relay, reverse=True)
    assert (b.since, b.at, b.reason) == (0.0, 5.0, "it has too many connections (64)") and c.since == 5.0
    assert hindrances.reached("b", 6.5) == 6.5 and hindrances.reached("b", 6.6) is None
    assert [trouble.relay for trouble in hindrances.troubles()] == ["c"]
    assert hindrances.failed("b", REFUSED, 7.0, reached=False)


def test_reasons_without_end_do_not_fill_the_log() -> None:
    hindrances = Hindrances()
    told = [hindrances.failed("b", f"reason {'x' * i}", float(i), reached=False) for i in range(100)]
    assert sum(told) == MAX_KINDS


def test_who_refused_is_in_trouble_until_it_gives_something_or_the_version_is_here() -> None:
    hindrances = Hindrances()
    hindrances.wants(8, 0.0)
    for relay in ("b", "c"):
        assert hindrances.failed(relay, "version 8 (abc123) is not here; held are [5, 6]", 1.0, reached=True)
        assert not hindrances.failed(relay, "version 8 (abc123) is not here; held are [6, 7, 8]", 2.0, reached=True)
        assert hindrances.reached(relay, 3.0) is None
    hindrances.gave("b")
    assert [trouble.relay for trouble in hindrances.troubles()] == ["c"]
    hindrances.wants(None, 4.0, newest_here=8)
    assert hindrances.troubles() == []


def test_who_left_the_chain_is_nobodys_neighbour() -> None:
    hindrances = Hindrances()
    for relay in ("b", "c"):
        hindrances.failed(relay, REFUSED, 1.0, reached=False)
    hindrances.see(["a", "c"])
    assert [trouble.relay for trouble in hindrances.troubles()] == ["c"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.7:4311: Connection refused", "10.0.0.9:80: Connection refused", True),
        ("b said nothing for 2 s", "b said nothing for 2.5 s", True),
        ("version 8 (0a1b2c3d4e5f) is not here; held are []", "version 9 (0f1b) is not here; held are []", True),
        ("held are [1, 2]", "held are [4, 5, 6]", True),
        ("10.0.0.7:4311: Connection refused", "10.0.0.7:4311: No route to host", False),
    ],
)
def test_kinds_of_reasons(one: str, other: str, same: bool) -> None:
    assert (kind(one) == kind(other)) == same


class Histories(RuleBasedStateMachine):
    """Whatever happens, ages fit, and nothing is told that is over."""

    def __init__(self) -> None:
        super().__init__()
        self.hindrances = Hindrances()
        self.now = 0.0
        self.moved_at = 0.0
        self.wanted: int | None = None
        self.here = -1

    @rule(seconds=st.floats(0.0, 10.0))
    def time(self, seconds: float) -> None:
        self.now += seconds

    @rule(more=st.integers(0, 3))
    def publish(self, more: int) -> None:
        if self.wanted is None:
            self.moved_at = self.now
        self.wanted = max(self.wanted or 0, self.here) + 1 + more
        self.hindrances.wants(self.wanted, self.now, newest_here=self.here)

    @rule()
    def hold(self) -> None:
        self.here, self.wanted = self.wanted if self.wanted is not None else self.here, None
        self.hindrances.wants(None, self.now, newest_here=self.here)

    @rule(version=st.integers(0, 20))
    def piece(self, version: int) -> None:
        self.hindrances.progress(version, self.now)
        if self.wanted is not None and self.here < version <= self.wanted:
            self.moved_at = self.now

    @rule(relay=st.sampled_from("abc"), reason=st.sampled_from(["x 1", "x 2", "y"]), reached=st.booleans())
    def fail(self, relay: str, reason: str, reached: bool) -> None:
        self.hindrances.failed(relay, reason, self.now, reached=reached)

    @rule(relay=st.sampled_from("abc"))
    def reach(self, relay: str) -> None:
        self.hindrances.reached(relay, self.now)
        assert all(trouble.reached for trouble in self.hindrances.troubles() if trouble.relay == relay)

    @invariant()
    def agrees(self) -> None:
        self.hindrances.validate()
        stall = self.hindrances.stall(self.now)
        assert (stall is None) == (self.wanted is None or self.now - self.moved_at < STALLED_S)
        if stall is not None:
            assert (stall.version, stall.since) == (self.wanted, self.moved_at)
            assert not stall.reason or stall.since <= stall.at <= self.now


TestHistories = Histories.TestCase


def test_what_was_not_foreseen_is_told_once_for_each_kind_until_something_comes() -> None:
    hindrances = Hindrances()
    hindrances.wants(8, 0.0)
    assert hindrances.unforeseen("no room: OSError(24)", 1.0)
    assert not hindrances.unforeseen("no room: OSError(23)", 2.0)
    assert hindrances.stall(10.0) == Stall(8, 0.0, "no room: OSError(23)", 2.0)
    assert hindrances.unforeseen("no thread", 3.0)
    assert sum(hindrances.unforeseen("x" * count, 4.0) for count in range(2 * MAX_KINDS)) == MAX_KINDS - 2
    hindrances.progress(8, 5.0)
    assert hindrances.unforeseen("no thread", 6.0)
