from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import LaminarError
from laminar.workers.learning.advantages import ESTIMATORS, STD_EPSILON, compute_advantages


def advantages(estimator, rewards, groups):
    return compute_advantages(estimator, torch.tensor(rewards), torch.tensor(groups))


def test_grpo_by_hand():
    """Rewards 0, 0, 1, 1: mean 1/2, standard deviation with n - 1 is sqrt(1/3)."""
    result = advantages("grpo", [0.0, 0.0, 1.0, 1.0], [5, 5, 5, 5])
    expected = 0.5 / (3**-0.5 + STD_EPSILON)
    assert result.values.tolist() == pytest.approx([-expected, -expected, expected, expected])
    assert result.no_signal == frozenset()


def test_dr_grpo_by_hand():
    assert advantages("dr_grpo", [0.0, 0.0, 1.0], [1, 1, 1]).values.tolist() == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_rloo_by_hand():
    """Each reward less the mean of the others: 3 - (0 + 1) / 2, and so on."""
    assert advantages("rloo", [0.0, 1.0, 3.0], [1, 1, 1]).values.tolist() == pytest.approx([-2.0, -0.5, 2.5])


def test_reinforce_plus_plus_normalises_over_the_step():
    result = advantages("reinforce++", [0.0, 1.0, 2.0], [1, 2, 3])
    assert result.values.tolist() == pytest.approx([-1 / (1 + STD_EPSILON), 0.0, 1 / (1 + STD_EPSILON)])
    assert result.no_signal == {2}, "its only reward is the step's mean"


def test_groups_go_by_membership():
    """Case 27: groups of 4, 3 and 4 rows, shuffled through the batch, get the advantages of each group alone."""
    rewards = {7: [0.0, 1.0, 0.0, 1.0], 2: [1.0, 0.0, 0.5], 9: [0.2, 0.3, 0.1, 0.9]}
    rows = [(group, reward) for group, members in rewards.items() for reward in members]
    order = [3, 8, 0, 10, 5, 1, 9, 4, 2, 7, 6]
    for estimator in ("grpo", "dr_grpo", "rloo"):
        mixed = advantages(estimator, [rows[i][1] for i in order], [rows[i][0] for i in order]).values.tolist()
        alone = [a for g, members in rewards.items() for a in advantages(estimator, members, [g] * len(members)).values]
        assert [mixed[order.index(i)] for i in range(len(rows))] == pytest.approx([float(a) for a in alone])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_carry_no_signal(estimator):
    """Case 42: rewards 1, 1, 1, 1 give zeros and a flagged group, also where the mean rounds (0.1)."""
    result = advantages(estimator, [1.0] * 4 + [0.1] * 3 + [0.0, 1.0], [1] * 4 + [2] * 3 + [3] * 2)
    assert result.values[:7].tolist() == [0.0] * 7
    assert result.no_signal == {1, 2}


def test_a_step_of_equal_rewards_carries_no_signal_for_reinforce_plus_plus():
    result = advantages("reinforce++", [0.1] * 3, [1, 1, 2])
    assert result.values.tolist() == [0.0] * 3
    assert result.no_signal == {1, 2}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_equals_its_own_baseline(estimator):
    result = advantages(estimator, [0.7, 0.0, 1.0], [4, 5, 5])
    assert result.values[0] == 0
    assert result.no_signal == {4}


def test_one_trajectory_alone_has_no_baseline():
    assert advantages("reinforce++", [3.0], [1]).no_signal == {1}


def test_a_step_without_trajectories_is_legal():
    result = compute_advantages("grpo", torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert len(result.values) == 0
    assert result.no_signal == frozenset()


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(LaminarError, match="group 2 has the reward nan"):
        advantages("grpo", [0.0, float("nan")], [1, 2])


@given(
    st.sampled_from(sorted(ESTIMATORS)),
    st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10, width=32)), min_size=1, max_size=20),
)
def test_advantages_are_finite_and_balanced(estimator, rows):
    """Whatever the rewards: finite, and a group baseline leaves a mean of zero in each group."""
    groups = torch.tensor([g for g, _ in rows])
    result = compute_advantages(estimator, torch.tensor([r for _, r in rows]), groups)
    assert bool(result.values.isfinite().all())
    if estimator != "reinforce++":
        for group in groups.unique():
            members = result.values[groups == group]
            assert float(members.sum()) == pytest.approx(0, abs=1e-4 * (1 + float(members.abs().max())))
