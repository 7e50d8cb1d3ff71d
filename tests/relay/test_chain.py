"""The order of the chain, its master, and whom a relay asks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.relay.chain import Place, candidates, led_by, master, order

names = st.lists(st.sampled_from([f"relay-{i}" for i in range(8)]), unique=True)
places = st.builds(Place, host=st.sampled_from(["h1", "h2", "h3"]), rack=st.sampled_from(["", "r1", "r2"]))


@given(names, names, st.data())
def test_the_chain_is_the_living_members_and_survivors_keep_their_order(
    members: list[str], previous: list[str], data: st.DataObject
) -> None:
    where = {member: data.draw(places) for member in members}
    chain = order(where, previous)
    assert sorted(chain) == sorted(members)
    assert [m for m in chain if m in previous] == [m for m in previous if m in members]
    assert order(where, chain) == chain, "without a change of members nothing moves"


def test_newcomers_follow_at_the_end() -> None:
    assert order({m: Place(m) for m in "dbac"}, ["c", "x", "b"]) == ["c", "b", "a", "d"]


def test_a_newcomer_stands_with_its_host_else_with_its_rack() -> None:
    where = {"a": Place("h1", "r1"), "b": Place("h2", "r1"), "c": Place("h3", "r2"), "d": Place("h4", "")}
    chain = order(where, [])
    assert chain == ["a", "b", "c", "d"]
    assert order({**where, "e": Place("h1", "r1")}, chain) == ["a", "e", "b", "c", "d"]
    assert order({**where, "e": Place("h9", "r1")}, chain) == ["a", "b", "e", "c", "d"]
    assert order({**where, "e": Place("h9", "")}, chain) == ["a", "b", "c", "d", "e"]


@given(names.filter(len), st.sampled_from([f"relay-{i}" for i in range(8)]))
def test_a_relay_asks_those_before_it_first_and_never_itself(chain: list[str], me: str) -> None:
    asked = candidates(chain, me)
    assert sorted(c.relay for c in asked) == sorted(set(chain) - {me})
    place = chain.index(me) if me in chain else len(chain)
    assert [c.relay for c in asked if not c.held_only] == chain[:place][::-1]


def test_the_master_is_the_first_that_holds_the_newest_version() -> None:
    assert master(["a", "b", "c"], {"a": 6, "b": 7, "c": 7}) == "b"
    assert master(["a", "b"], {}) == "a"
    assert master([], {"a": 1}) is None


def test_a_new_master_moves_to_the_front() -> None:
    assert led_by(["a", "b", "c"], "b") == ["b", "a", "c"]
    assert led_by(["a", "b", "c"], "gone") == ["a", "b", "c"]
