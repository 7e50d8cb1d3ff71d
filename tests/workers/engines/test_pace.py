"""What an engine's own steps tell of its speed."""

from __future__ import annotations

import pytest

from laminar.workers.engines.pace import ENOUGH, Pace


def paced(seconds: dict[int, float], limit: int = 64) -> Pace:
    pace = Pace(limit)
    for batch, s in seconds.items():
        for _ in range(ENOUGH):
            pace.step(batch, 0, s)
    return pace


def test_the_batch_limit_lies_where_a_step_takes_half_as_long_again() -> None:
    pace = paced({1: 0.010, 2: 0.010, 4: 0.010, 8: 0.010, 16: 0.020, 32: 0.040})
    assert pace.step_s == 0.010
    assert pace.batch_limit == 12, "halfway between 8 and 16"


def test_without_small_batches_or_without_a_knee_the_engines_limit_counts() -> None:
    assert Pace(64).batch_limit == 64 and Pace(64).step_s == 0
    assert paced({16: 0.02, 32: 0.04}).batch_limit == 64
    assert paced({1: 0.010, 32: 0.012}).batch_limit == 64
    assert paced({1: 0.010, 64: 0.02}, limit=4).batch_limit == 4


def test_single_slow_steps_and_pauses_do_not_count() -> None:
    pace = paced({1: 0.010, 2: 0.010})
    pace.step(2, 0, 0.5)
    pace.step(2, 0, 100.0)
    assert pace.batch_limit == 64


def test_prefill_is_what_a_step_takes_longer_than_a_decode() -> None:
    pace = paced({4: 0.010})
    assert pace.prefill_tokens_per_s == 0
    pace.step(4, 1000, 0.110)
    pace.step(4, 3, 5.0)
    assert pace.prefill_tokens_per_s == pytest.approx(10_000)
