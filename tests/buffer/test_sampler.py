"""Which groups a step takes, and what becomes of those that cannot be trained on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.buffer.sampler import ERROR, NO_SIGNAL, OpenGroups, Outcome, lengths_by_reason, select, to_retire


def outcomes(group: int, rewards: list[float | None], first_seq: int | None = None) -> list[Outcome]:
    seq = group * 100 if first_seq is None else first_seq
    return [
        Outcome(group, s, "ok" if r is not None else "reward_error", r, seq + s) for s, r in enumerate(rewards)
    ]


def opened(*groups: list[Outcome], samples: int = 2) -> OpenGroups:
    result = OpenGroups(samples)
    for group in groups:
        result.add(group)
    return result


def test_groups_are_taken_first_in_first_out_by_their_last_row() -> None:
    late = opened(outcomes(0, [0, 1], first_seq=50), outcomes(1, [0, 1], first_seq=10))
    selection = select(late, 2, "count")
    assert selection is not None and selection.trained == (1, 0)


def test_what_is_left_over_stays_for_the_next_step() -> None:
    """Case 23: 10 groups are ready, the batch is 8: 2 stay."""
    ten = opened(*(outcomes(g, [0, 1]) for g in range(10)))
    selection = select(ten, 8, "count")
    assert selection is not None
    ten.consume(selection.trained)
    assert ten.complete() == [8, 9]


def test_a_group_with_a_missing_sample_is_not_complete() -> None:
    """Cases 24 and 26: never a group of 3 in silence."""
    three = opened(outcomes(0, [0, 1, 1]), samples=4)
    assert three.complete() == [] and three.incomplete() == [0]
    assert select(three, 1, "count") is None


def test_the_same_outcome_twice_is_one() -> None:
    """Case 28."""
    twice = opened(outcomes(0, [0, 1]), outcomes(0, [1, 1]))
    assert twice.verdict(0) == ""


def test_equal_rewards_are_no_signal() -> None:
    """Case 42: rewards 1, 1."""
    assert opened(outcomes(0, [1, 1])).verdict(0) == NO_SIGNAL


def test_a_failed_sample_leaves_its_group_trainable_if_two_are_ok() -> None:
    """Case 40: one scorer of many raises: contained."""
    assert opened(outcomes(0, [0, 1, None]), samples=3).verdict(0) == ""
    assert opened(outcomes(0, [1, None]), samples=2).verdict(0) == ERROR


def test_without_a_group_baseline_equal_rewards_are_a_signal() -> None:
    single = OpenGroups(1, baseline=False)
    single.add(outcomes(0, [1.0]))
    assert single.verdict(0) == ""


def test_counting_groups_without_signal_take_a_place() -> None:
    selection = select(opened(outcomes(0, [1, 1]), outcomes(1, [0, 1]), outcomes(2, [0, 1])), 2, "count")
    assert selection is not None and selection.trained == (1,) and selection.retired == {0: NO_SIGNAL}


def test_replacing_groups_without_signal_take_none() -> None:
    selection = select(opened(outcomes(0, [1, 1]), outcomes(1, [0, 1]), outcomes(2, [0, 1])), 2, "replace")
    assert selection is not None and selection.trained == (1, 2) and selection.retired == {0: NO_SIGNAL}


def test_a_step_always_has_something_to_learn_from() -> None:
    """Case 43: every group has equal rewards: they are retired in whole batches until one has a signal."""
    flat = [outcomes(g, [1, 1]) for g in range(5)]
    assert select(opened(*flat), 2, "count") is None
    assert to_retire(opened(*flat), 2, "count") == 4
    selection = select(opened(*flat, outcomes(9, [0, 1])), 2, "count")
    assert selection is not None and selection.trained == (9,) and len(selection.retired) == 5


def test_a_short_batch_is_taken_only_at_the_end() -> None:
    """Case 21: 5 prompts, batches of 4: the fifth is trained in a short batch, or said to be left."""
    one = opened(outcomes(4, [0, 1]))
    assert select(one, 4, "count") is None
    selection = select(one, 4, "count", final=True)
    assert selection is not None and selection.trained == (4,)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=2, max_size=2), max_size=30),
    st.integers(1, 5),
    st.sampled_from(["count", "replace"]),
)
def test_every_group_is_consumed_at_most_once_and_none_is_lost(
    rewards: list[list[float | None]], size: int, mode: str
) -> None:
    groups = opened(*(outcomes(g, r) for g, r in enumerate(rewards)))
    seen: list[int] = []
    while (selection := select(groups, size, mode)) is not None:  # type: ignore[arg-type]
        assert selection.trained
        seen += [*selection.trained, *selection.retired]
        groups.consume([*selection.trained, *selection.retired])
    assert len(seen) == len(set(seen))
    assert sorted(seen + groups.complete()) == list(range(len(rewards)))


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 5))
def test_admission_never_starves_the_next_step(signal: list[bool], size: int) -> None:
    """With `to_retire` + one step's groups complete, and the rest of them with signal, a step can be made."""
    groups = opened(*(outcomes(g, [0, 1] if s else [1, 1]) for g, s in enumerate(signal)))
    if select(groups, size, "count") is not None:
        return
    extra = to_retire(groups, size, "count") + size - len(signal)
    for n in range(max(0, extra)):
        groups.add(outcomes(100 + n, [0, 1]))
    assert select(groups, size, "count") is not None


def test_drops_are_reported_by_length() -> None:
    """Case 30."""
    report = lengths_by_reason([("error", 10), ("error", 30), ("no_signal", 4)])
    assert report["error"] == {"count": 2, "mean_length": 20, "longest": 30}
    assert report["no_signal"]["count"] == 1


@pytest.mark.parametrize("mode", ["count", "replace"])
def test_nothing_complete_selects_nothing(mode: str) -> None:
    assert select(OpenGroups(2), 1, mode) is None  # type: ignore[arg-type]


def test_five_thousand_steps_leave_nothing_behind() -> None:
    """Case 60: 5,000 tiny steps: memory flat, though groups end out of order."""
    open_groups = OpenGroups(2)
    sizes = []
    for step in range(5_000):
        for group in (2 * step + 1, 2 * step):
            seq = 2 * (2 * step + (group + 1) % 2)
            open_groups.add(Outcome(group, s, "ok", float(s), seq + s) for s in range(2))
        selection = select(open_groups, 2, "count")
        assert selection is not None
        open_groups.consume(selection.trained)
        sizes.append(len(open_groups._groups) + len(open_groups._consumed))
    assert max(sizes) == 0
    open_groups.add([Outcome(7, 0, "ok", 1.0, 99_999)])
    assert open_groups.incomplete() == [], "a late row of a consumed group changes nothing"
