"""The packing plan: what it must never do, whatever the loads; and what it does in small cases."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.buffer.keys import trajectory_name
from laminar.buffer.records import Load
from laminar.workers import kv_space, repack
from laminar.workers.draining import MAX_KV_SHARE, Draining, Unfinished, free_slots
from laminar.workers.kv_space import MOMENTS, outlooks, tokens_at
from laminar.workers.repack import HAND_OVER_S, Handing, evacuate, held_s, plan, refill_s


def draining(
    id: str, *tokens: int, growth: int = 1000, first_group: int = 0, samples: int = 1, capacity: int = 10_000,
    limit: int = 8, version: int = 7,
) -> Draining:  # fmt: skip
    """A rollout with one trajectory for each of `tokens`, groups of `samples` from `first_group` on."""
    tail = tuple(
        Unfinished(trajectory_name(first_group + i // samples, i % samples), n, growth) for i, n in enumerate(tokens)
    )
    return Draining(id, version, sum(tokens), capacity, limit, tail)


def after(rollouts: list[Draining], handings: list[Handing]) -> dict[str, Draining]:
    """The rollouts once the plan is carried out."""
    now = {r.id: r for r in rollouts}
    for h in handings:
        source = now[h.source]
        moved = next(t for t in source.tail if t.trajectory == h.trajectory)
        rest = tuple(t for t in source.tail if t is not moved)
        now[h.source] = replace(source, tail=rest, kv_tokens=sum(t.tokens for t in rest))
        now[h.target] = now[h.target].taking([moved])
    return now


def pairs(handings: list[Handing]) -> set[tuple[str, str]]:
    return {(h.source, h.target) for h in handings}


# -- what holds for all loads -----------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> list[Draining]:
    """Up to 12 rollouts of up to three versions; groups may be spread over them."""
    source = random.Random(draw(st.integers(0, 2**32)))
    names = [trajectory_name(g, s) for g in range(40) for s in range(4)]
    source.shuffle(names)
    result = []
    for i in range(draw(st.integers(0, 12))):
        tail = tuple(
            Unfinished(names.pop(), source.randint(0, 900), source.randint(0, 900))
            for _ in range(source.choice((0, 1, 1, 2, 3, 5, 9)))
        )
        used = sum(t.tokens for t in tail)
        result.append(
            Draining(
                id=f"r{i}", version=source.randint(5, 7), kv_tokens=used + source.choice((0, 0, 100)),
                kv_capacity=source.choice((500, 3000, 20_000)), batch_limit=source.randint(1, 12), tail=tail,
                waiting=source.choice((0, 0, 0, 1)), room=source.choice((-1, 0, 2, 5, 100)),
                settled=source.random() < 0.9, acting=(acting := source.choice((0, 0, 0, 2, 6))),
                acting_tokens=acting * source.choice((0, 50, 400)),
                step_s=source.choice((0.0, 0.02, 1)), prefill_tokens_per_s=source.choice((50.0, 4000.0)),
            )
        )  # fmt: skip
    return result


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_a_plan_keeps_its_promises(rollouts: list[Draining]) -> None:
    handings = plan(rollouts)
    before, now = {r.id: r for r in rollouts}, after(rollouts, handings)
    names = [h.trajectory for h in handings]
    assert len(names) == len(set(names)), "no trajectory moves twice"
    assert sorted(t.trajectory for r in now.values() for t in r.tail) == sorted(
        t.trajectory for r in rollouts for t in r.tail
    ), "none is lost"
    sources, targets = {h.source for h in handings}, {h.target for h in handings}
    assert not sources & targets
    assert all(not now[s].tail for s in sources), "a source is emptied or left alone"
    assert all(before[h.source].version == before[h.target].version for h in handings)
    for target in targets:
        r = now[target]
        assert len(r.tail) + r.acting <= r.batch_limit and r.room >= 0 and r.used <= MAX_KV_SHARE * r.kv_capacity


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_no_plan_costs_more_than_it_gains(rollouts: list[Draining]) -> None:
    handings = plan(rollouts)
    before, now = {r.id: r for r in rollouts}, after(rollouts, handings)
    spent = HAND_OVER_S * len({h.source for h in handings})
    for target in {h.target for h in handings}:
        known = {t.trajectory for t in before[target].tail}
        spent += refill_s(before[target], [t for t in now[target].tail if t.trajectory not in known])
    held_before = sum(held_s(r) for r in rollouts)
    assert sum(held_s(r) for r in now.values()) + spent <= held_before + 1e-6


@settings(max_examples=100, deadline=None)
@given(clusters(), st.randoms())
def test_equal_loads_give_equal_plans_in_whatever_order_they_come(
    rollouts: list[Draining], source: random.Random
) -> None:
    shuffled = list(rollouts)
    source.shuffle(shuffled)
    assert sorted(map(repr, plan(rollouts))) == sorted(map(repr, plan(shuffled)))


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_an_evacuation_loses_nothing_and_overfills_nobody(rollouts: list[Draining]) -> None:
    for rollout in rollouts:
        handings = evacuate([rollout], rollouts)
        now = after(rollouts, handings)
        assert len({h.trajectory for h in handings}) == len(handings) <= len(rollout.tail)
        for target in {h.target for h in handings}:
            assert target != rollout.id and now[target].version == rollout.version
            assert now[target].used <= MAX_KV_SHARE * now[target].kv_capacity and now[target].room >= 0


# -- small cases ------------------------------------------------------------------------------------------------


def test_the_emptiest_go_wholly_into_the_fullest_that_takes_them() -> None:
    a, b, c = draining("a", 900, 900, 900, 900), draining("b", 500, 500, 500), draining("c", 100, 100)
    assert pairs(plan([a, b, c])) == {("c", "a")}, "c fills a up to 6 of 8; b has no place then"
    wide = [replace(r, batch_limit=16, kv_capacity=100_000) for r in (a, b, c)]
    assert pairs(plan(wide)) == {("c", "a"), ("b", "a")}


def test_what_acts_comes_back_into_the_batch_and_the_cache() -> None:
    """Two generate and fourteen act in A: a batch of sixteen that B's fourteen would make one of thirty."""
    a = draining("a", *[250] * 2, growth=60, limit=16)
    b = draining("b", *[250] * 14, growth=60, limit=16, first_group=9)
    assert pairs(plan([a, b])) == {("a", "b")}
    assert plan([replace(a, settled=False, acting=14), b]) == [], "neither a source nor a target"
    few = replace(a, settled=False, acting=2, acting_tokens=500)
    b = replace(b, tail=b.tail[:9], kv_tokens=9 * 250)
    assert pairs(plan([few, b])) == {("b", "a")}
    assert plan([replace(few, acting_tokens=7500), b]) == [], "they would fill the cache when they come back"


def test_growth_counts_against_the_cache() -> None:
    """Two tails that fit now and are not to be expected to later stay where they are."""
    a, b = draining("a", 1000, growth=3000, capacity=4500), draining("b", 1000, growth=3000, capacity=4500)
    assert plan([a, b]) == []
    assert pairs(plan([replace(a, kv_capacity=8000), replace(b, kv_capacity=8000)])) == {("a", "b")}


def test_the_short_are_to_be_expected_to_go_while_the_long_grow() -> None:
    """Their ends all together, 21,000 tokens, would not fit; there is no moment at which they are all there."""
    a = draining("a", 1000, growth=6000, capacity=11_000)
    short = draining("b", *[1500] * 4, growth=250, first_group=5).tail
    b = draining("b", 1000, growth=6000, first_group=9, capacity=11_000).taking(short)
    assert pairs(plan([a, b])) == {("a", "b")}
    assert plan([replace(a, kv_capacity=8000), replace(b, kv_capacity=8000)]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=12), st.integers(0, 2**32))
def test_what_is_expected_is_what_random_ends_come_to(tail: list[tuple[int, int]], seed: int) -> None:
    """Against trajectories that end at random: at each moment, the mean and its deviation."""
    chance = np.random.default_rng(seed)
    rounds = 4000
    growth = np.array([g for _, g in tail])
    ends = chance.exponential(np.maximum(growth, 1e-9), size=(rounds, len(tail)))
    moments = float(growth.max()) * MOMENTS
    told = outlooks([Unfinished(trajectory_name(0, i), *each) for i, each in enumerate(tail)], moments).sum(axis=0)
    for k, moment in enumerate(moments):
        held = np.where(ends >= moment, np.array([tokens for tokens, _ in tail]) + moment, 0).sum(axis=1)
        error = 6 * np.sqrt(told[1, k] / rounds) + 1e-6
        assert abs(held.mean() - told[0, k]) <= error, moment
        assert abs(held.var() - told[1, k]) <= 0.25 * told[1, k] + error * 50, moment


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_the_moments_that_are_looked_at_miss_little(rollouts: list[Draining]) -> None:
    """Whom a plan fills, or an evacuation: at any of 400 moments, a twelfth above its cache at most. More than what all
    hold together if none has ended by then nobody holds, whatever the deviation says."""
    for handings in (plan(rollouts), evacuate(rollouts[:2], rollouts)):
        now = after(rollouts, handings)
        for target in {h.target for h in handings}:
            r = now[target]
            moments = np.linspace(0, 2 * max(t.growth for t in r.tail), 400)
            all_there = sum(t.tokens for t in r.tail) + len(r.tail) * moments
            held = np.minimum(tokens_at(outlooks(r.tail, moments).sum(axis=0)), all_there)
            fullest = r.beside + held.max()
            assert fullest <= 13 / 12 * MAX_KV_SHARE * r.kv_capacity


def test_a_slot_that_waits_for_a_reward_is_none() -> None:
    a, b = draining("a", 100, 100), draining("b", 900)
    assert pairs(plan([a, replace(b, room=2)])) == {("a", "b")}
    assert plan([a, replace(b, room=1, settled=False)]) == []
    assert evacuate([a], [replace(b, room=0)]) == []
    assert len(evacuate([a], [replace(b, room=1)])) == 1


def test_work_is_counted_by_the_slots_that_an_emptied_rollout_has_for_it() -> None:
    tails = [draining(id, 100, first_group=10 * i) for i, id in enumerate("abc")]
    assert pairs(plan(tails, work=3)) == {("a", "b")}
    assert pairs(plan([replace(tails[0], room=1), *tails[1:]], work=3)) == {("a", "b"), ("c", "b")}


def test_a_rollout_that_draws_takes_a_few_beyond_its_room_and_one_that_drains_none() -> None:
    load = Load(
        version=3, running=2, waiting=0, kv_tokens=7, kv_capacity=5000, decode_tokens_per_s=10.0, draining=True,
        batch_limit=64, room=0,
    )  # fmt: skip
    assert free_slots(load) == 0 and free_slots(load.model_copy(update={"draining": False})) == 4
    assert free_slots(load.model_copy(update={"draining": False, "room": -4})) == 0, "those wait already"
    assert free_slots(load.model_copy(update={"room": None})) > 1000


def test_a_tail_that_nobody_takes_whole_is_spread_by_groups() -> None:
    source = draining("s", 100, 100, 100, 100, samples=2)
    others = [draining(id, 500, 500, limit=4, first_group=10 * i) for i, id in enumerate("ab", 1)]
    handings = plan([source, *others])
    assert pairs(handings) == {("s", "a"), ("s", "b")}
    for group in ("000000000000", "000000000001"):
        assert len({h.target for h in handings if h.trajectory.startswith(group)}) == 1


def test_among_equals_samples_come_to_their_group() -> None:
    source = draining("s", 100, first_group=3)
    stranger, sibling = draining("a", 500, first_group=1), draining("b", 500, first_group=3)
    sibling = replace(sibling, tail=(replace(sibling.tail[0], trajectory=trajectory_name(3, 1)),))
    # Only one of the two is to be a destination: what neither takes twice.
    stranger, sibling = replace(stranger, settled=False), replace(sibling, settled=False)
    assert pairs(plan([source, stranger, sibling])) == {("s", "b")}


def test_what_ends_soon_is_not_worth_a_move() -> None:
    """Also where the prefill is slow, and the tail long in what it has and short in what is to come."""
    assert plan([draining("a", 900, growth=5), draining("b", 900, growth=5)]) == []
    slow = [replace(draining(id, 4000, growth=60, capacity=100_000), prefill_tokens_per_s=100) for id in "ab"]
    assert plan(slow) == []
    assert pairs(plan([replace(r, prefill_tokens_per_s=20_000) for r in slow])) == {("a", "b")}


def test_a_queue_a_tool_call_or_an_evaluation_keeps_a_rollout_from_being_emptied() -> None:
    a, b = draining("a", 100), draining("b", 900)
    assert plan([replace(a, waiting=1), b]) == []
    assert pairs(plan([replace(a, settled=False), b])) == {("b", "a")}
    assert plan([replace(a, settled=False), replace(b, settled=False)]) == []


def test_versions_do_not_mix() -> None:
    assert plan([draining("a", 100, version=6), draining("b", 100, version=7)]) == []


def test_a_load_report_says_what_the_plan_needs() -> None:
    load = Load(
        version=3, running=2, waiting=0, kv_tokens=700, kv_capacity=5000, decode_tokens_per_s=10.0, draining=True,
        batch_limit=6, tail={trajectory_name(1, 0): (300, 50), trajectory_name(0, 1): (350, 60)},
    )  # fmt: skip
    rollout = Draining.of("r", load)
    assert [t.trajectory for t in rollout.tail] == [trajectory_name(0, 1), trajectory_name(1, 0)]
    assert (rollout.used, rollout.beside, rollout.settled) == (700, 50, True)
    assert not Draining.of("r", load.model_copy(update={"acting": 1})).settled
    assert not Draining.of("r", load.model_copy(update={"evaluating": True})).settled


def test_an_evacuation_spreads_evenly() -> None:
    slow = draining("s", *[100] * 6, first_group=50)
    handings = evacuate([slow], [slow, draining("a", 100, 100), draining("b"), draining("c", version=6)])
    assert sorted(h.target for h in handings) == ["a", "a", "b", "b", "b", "b"]


def test_several_that_rest_share_what_the_others_take() -> None:
    """What the first gives counts for the second."""
    first, second = draining("s", 900, 900), draining("t", 900, 900, first_group=20)
    others = [replace(draining("a"), room=1), replace(draining("b"), room=2), draining("c", version=6)]
    handings = evacuate([first, second], [*others, first, second])
    assert [(h.source, h.target) for h in handings] == [("s", "a"), ("s", "b"), ("t", "b")]


def test_an_evacuation_looks_ahead_once_for_each_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager does it between two of its other duties, with hundreds of trajectories and a thousand rollouts."""
    looked: list[int] = []

    def outlooks_of(tail: Sequence[Unfinished], moments: np.ndarray) -> np.ndarray:
        looked.append(len(tail))
        return outlooks(tail, moments)

    for module in (kv_space, repack):
        monkeypatch.setattr(module, "outlooks", outlooks_of)
    others = [draining(f"r{i}", 100, 100, first_group=10 * i) for i in range(20)]
    assert len(evacuate([draining("s", *[100] * 50, first_group=900)], others)) == 50
    assert sum(looked) == 50 + 2 * len(others)


@pytest.mark.parametrize("tight", [{"limit": 5}, {"capacity": 4200}], ids=["slots", "cache"])
def test_a_plan_in_vain_refuses_at_once_what_fits_nowhere(
    monkeypatch: pytest.MonkeyPatch, tight: dict[str, int]
) -> None:
    """It is made again every few seconds: no single place is looked at for any of the tails, or the groups in them."""
    looked: list[int] = []

    def tokens(outlook: np.ndarray) -> np.ndarray:
        looked.append(outlook.shape[-1])
        return tokens_at(outlook)

    monkeypatch.setattr(kv_space, "tokens_at", tokens)
    rollouts = [draining(f"r{i}", *[1000] * 4, first_group=10 * i, samples=2, **tight) for i in range(9)]
    assert plan(rollouts) == [] and looked == [len(rollouts)]


def test_a_thousand_rollouts_are_planned_in_a_moment() -> None:
    source = random.Random(1)
    rollouts = [
        draining(
            f"r{i:04d}", *(source.randint(500, 8000) for _ in range(source.randint(1, 20))), first_group=100 * i,
            capacity=400_000, limit=64,
        )
        for i in range(1000)
    ]  # fmt: skip
    plan(rollouts[:10])
    started = time.process_time()
    handings = plan(rollouts)
    took = time.process_time() - started
    assert len({h.source for h in handings}) > 600
    assert took < 0.5, f"{took:.3f} s of CPU; on a quiet machine it is a twentieth of a second"
