from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.learning.batching import MicroBatch, Row, pack

row_lists = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=25).map(
    lambda items: [Row(i, prompt, 5 + 3 * prompt, length) for i, (prompt, length) in enumerate(items)]
)


def test_a_shared_prompt_is_paid_once():
    rows = [Row(i, "p", 10, 4) for i in range(3)]
    (shared,) = pack(rows, budget=100, share_prompts=True)
    assert (shared.rows, shared.padded_tokens) == ((0, 1, 2), 10 + 3 * 4)
    (plain,) = pack(rows, budget=100, share_prompts=False)
    assert plain.padded_tokens == 3 * (10 + 4)


def test_groups_stay_together_when_they_fit():
    rows = [Row(i, i // 4, 10, 5) for i in range(12)]
    batches = pack(rows, budget=65, share_prompts=True)
    assert [b.rows for b in batches] == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11)]


def test_a_group_beyond_the_budget_is_cut():
    rows = [Row(i, "p", 10, 10) for i in range(5)]
    batches = pack(rows, budget=30, share_prompts=True)
    assert [b.rows for b in batches] == [(0, 1), (2, 3), (4,)]


def test_a_row_beyond_the_budget_stands_alone():
    batches = pack([Row(0, "a", 10, 100), Row(1, "b", 10, 2)], budget=20, share_prompts=False)
    assert [b.rows for b in batches] == [(0,), (1,)]


def test_nothing_to_pack():
    assert pack([], budget=16, share_prompts=True) == []


@given(row_lists, st.integers(16, 200), st.booleans())
def test_each_row_once_within_the_budget(rows: list[Row], budget: int, share: bool):
    batches = pack(rows, budget=budget, share_prompts=share)
    assert sorted(row for batch in batches for row in batch.rows) == [row.index for row in rows]
    for batch in batches:
        assert batch.padded_tokens <= budget or len(batch.rows) == 1
        assert_one_prompt_a_block(batch, rows)
    assert pack(rows, budget=budget, share_prompts=share) == batches


def assert_one_prompt_a_block(batch: MicroBatch, rows: list[Row]) -> None:
    for block in batch.blocks:
        assert len({rows[i].prompt for i in block.rows}) == 1
        assert block.response_length == max(rows[i].response_length for i in block.rows)
