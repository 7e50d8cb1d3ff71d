"""What `laminar audit` says in one line."""

from __future__ import annotations

import pytest

from laminar.workers.viewing.auditing import counted


@pytest.mark.parametrize(
    ("n", "what", "told"),
    [
        (1, "leftovers of ended workers", "1 leftover of an ended worker"),
        (0, "leftovers of ended workers", "0 leftovers of ended workers"),
        (1, "trajectories committed", "1 trajectory committed"),
        (2, "batches decided", "2 batches decided"),
        (1, "claimed", "1 claimed"),
        (1, "problems", "1 problem"),
    ],
)
def test_numbers_are_told_in_right_grammar(n: int, what: str, told: str) -> None:
    assert counted(n, what) == told
