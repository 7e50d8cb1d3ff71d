"""The order of the chain and its master."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.relay.chain import led_by, master, order

names = st.lists(st.sampled_from([f"relay-{i}" for i in range(8)]), unique=True)


@given(names, names)
def test_the_chain_is_the_living_members_and_survivors_keep_their_order(
    members: list[str], previous: list[str]
) -> None:
    chain = order(members, previous)
    assert sorted(chain) == sorted(members)
    assert [m for m in chain if m in previous] == [m for m in previous if m in members]
    assert order(members, chain) == chain, "without a change of members nothing moves"


def test_newcomers_follow_at_the_end() -> None:
    assert order(["d", "b", "a", "c"], ["c", "x", "b"]) == ["c", "b", "a", "d"]


def test_the_master_is_the_first_that_holds_the_newest_version() -> None:
    assert master(["a", "b", "c"], {"a": 6, "b": 7, "c": 7}) == "b"
    assert master(["a", "b"], {}) == "a"
    assert master([], {"a": 1}) is None


def test_a_new_master_moves_to_the_front() -> None:
    assert led_by(["a", "b", "c"], "b") == ["b", "a", "c"]
