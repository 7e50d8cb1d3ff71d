"""What a rollout's load report lets others expect, and when it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from laminar.buffer.keys import trajectory_name
from laminar.buffer.records import Load
from laminar.workers.rollout import Rollout
from laminar.workers.rollouts.reporting import MOST_NAMED, REMEMBERED, Lengths, Reporter, changed, flipped


def lengths(*values: int) -> Lengths:
    result = Lengths()
    for value in values:
        result.add(value)
    return result


def test_growth_is_the_mean_over_those_that_grew_longer() -> None:
    """Of a long tail: the longer it is, the more is to be expected."""
    known = lengths(*[10] * 30, *[50] * 4, 100, 400)
    assert known.growth(10, 1000) == round((4 * 50 + 500) / 6) - 10
    assert known.growth(60, 1000) == 250 - 60
    assert known.growth(60, 25) == 25, "its budget is a limit"


def test_where_too_few_are_known_it_is_as_much_again() -> None:
    assert lengths().growth(0, 1000) == 16
    assert lengths(5, 9).growth(300, 1000) == 300
    assert lengths(*[10] * 40).growth(200, 1000) == 200, "longer than all that were seen"
    assert lengths().growth(300, 0) == 0


def test_old_lengths_are_forgotten() -> None:
    known = lengths(*[1000] * 50, *range(REMEMBERED))
    assert known.growth(500, 10_000) == 506 - 500


LOAD = Load(
    version=1, running=10, waiting=0, kv_tokens=1000, kv_capacity=9000, decode_tokens_per_s=100.0, draining=False,
    tail={"000000000001-000": (100, 50)},
)  # fmt: skip


@pytest.mark.parametrize("flag", ["draining", "switching", "resting", "evaluating"])
def test_a_flip_is_told_at_once(flag: str) -> None:
    assert flipped(LOAD, LOAD.model_copy(update={flag: True}))
    assert flipped(LOAD, LOAD.model_copy(update={"version": 2}))
    assert not flipped(LOAD, LOAD.model_copy(update={"running": 1, "kv_tokens": 0}))


def test_a_change_by_more_than_a_tenth_is_worth_a_report() -> None:
    assert not changed(LOAD, LOAD.model_copy(update={"kv_tokens": 1100, "running": 11}))
    assert changed(LOAD, LOAD.model_copy(update={"kv_tokens": 1101}))
    assert changed(LOAD, LOAD.model_copy(update={"waiting": 1}))
    full = LOAD.model_copy(update={"room": 0})
    assert changed(full, LOAD.model_copy(update={"room": 1})) and changed(full, LOAD.model_copy(update={"room": -1}))
    assert changed(LOAD, LOAD.model_copy(update={"tail": {}}))
    assert not changed(LOAD, LOAD.model_copy(update={"tail": {"000000000001-000": (105, 45)}}))


def test_what_waits_in_the_inbox_takes_a_slot_like_what_lives_here() -> None:
    """One that was just taken over stands in both for a moment."""
    live = {(0, n): SimpleNamespace(name=trajectory_name(0, n)) for n in range(3)}
    inbox = SimpleNamespace(items={f"run/inbox/r-a/{trajectory_name(0, n)}": None for n in (2, 3)})
    rollout: Any = SimpleNamespace(capacity=8, live=live, inbox=inbox)
    assert Rollout.room(rollout) == 4
    rollout.capacity = 3
    assert Rollout.room(rollout) == -1


def reporter(trajectories: int, *, resting: bool = False) -> Reporter:
    live = {
        (0, n): SimpleNamespace(
            name=f"000000000000-{n:03d}", turn_state="generating", prompt_ids=[1] * 10, token_ids=[2] * n,
            policy_tokens=n,
        )
        for n in range(trajectories)
    }
    rollout: Any = SimpleNamespace(live=live, resting=resting, generation=SimpleNamespace(budget=lambda t: 100))
    return Reporter(rollout)


def test_a_tail_is_named_wholly_or_not_at_all() -> None:
    """What is not emptied gains nothing."""
    assert len(reporter(8)._tail(limit=8)) == 8
    assert reporter(9)._tail(limit=8) == {}
    assert reporter(MOST_NAMED + 1)._tail(limit=2 * MOST_NAMED) == {}
    assert reporter(3)._tail(limit=8)["000000000000-002"] == (12, 16)


def test_one_that_rests_names_what_it_can_and_the_others_when_these_have_gone() -> None:
    assert len(reporter(MOST_NAMED + 1, resting=True)._tail(limit=8)) == MOST_NAMED
