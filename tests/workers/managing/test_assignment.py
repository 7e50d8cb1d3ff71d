"""Who takes over orphaned trajectories."""

from __future__ import annotations

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import KeyValue
from laminar.buffer.keys import Keys
from laminar.workers.managing.assignment import Candidate, assign


def orphan(group: int, version: int) -> Held:
    claim = claims.drawn("dead", version)
    return Held(claim, KeyValue(Keys("run").claim(group, 0), claim.dump(), 1, 1))


def test_a_rollout_of_the_same_version_is_preferred() -> None:
    plan = assign([orphan(0, 2)], [Candidate("a", 1, 3, 0), Candidate("b", 1, 2, 50)])
    assert [c.id for _, c in plan] == ["b"]


def test_the_load_is_spread_over_equals() -> None:
    plan = assign([orphan(g, 2) for g in range(4)], [Candidate("a", 1, 2, 0), Candidate("b", 1, 2, 1)])
    assert [c.id for _, c in plan] == ["a", "a", "b", "a"]


def test_an_absent_version_goes_to_one_rollout() -> None:
    plan = assign([orphan(g, 1) for g in range(3)], [Candidate("a", 1, 2, 0), Candidate("b", 1, 3, 0)])
    assert {c.id for _, c in plan} == {"a"}


def test_with_nobody_alive_they_stay() -> None:
    assert assign([orphan(0, 0)], []) == []
