"""Which gaps of a record are stops of the run, and which are generation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.simulator.scale.stops import without_stops

NONE = np.array([])


def chain(tokens: list[float], seconds_each: float = 0.1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One after another, without a pause."""
    ended = np.cumsum(np.array(tokens) * seconds_each)
    return np.concatenate([[0.0], ended[:-1]]), ended, np.array(tokens)


@given(
    tokens=st.lists(st.floats(1, 10_000), min_size=2, max_size=40), place=st.integers(0, 39),
    stopped_s=st.floats(1e6, 1e8), seconds_each=st.floats(0.01, 10),
)  # fmt: skip
def test_a_long_stop_is_found_wherever_it_is_and_nothing_else(
    tokens: list[float], place: int, stopped_s: float, seconds_each: float
) -> None:
    tokens += [1.0, 1.0, 1.0]
    began, ended, counts = chain(tokens, seconds_each)
    same = without_stops(began, ended, counts, NONE)
    assert same[2] == 0, "the longest of all is in flight alone, and nothing ends meanwhile"
    assert np.ptp(same[0]) == pytest.approx(np.ptp(began))
    place %= len(tokens)
    late_began, late_ended = began + stopped_s * (began > began[place]), ended + stopped_s * (ended >= ended[place])
    new_began, new_ended, found_s = without_stops(late_began, late_ended, counts, NONE)
    assert found_s == pytest.approx(stopped_s, abs=ended[-1] + 1e-6 * stopped_s)
    assert (new_ended > new_began).all() and new_ended[-1] < 2 * ended[-1] + 1


def test_steps_that_are_written_meanwhile_tell_that_the_run_is_at_work() -> None:
    """A single environment that takes an hour for its reply, while the trainer works through what is there."""
    began, ended = np.array([0.0] * 4 + [4.0]), np.array([1.0, 2.0, 3.0, 4.0, 3604.0])
    tokens = np.array([10.0] * 5)
    assert without_stops(began, ended, tokens, NONE)[2] > 3000
    assert without_stops(began, ended, tokens, np.arange(5.0, 3600.0, 8.0))[2] == 0


def test_time_between_trajectories_is_left_as_it_is() -> None:
    began, ended = np.array([0.0, 1.0, 5000.0]), np.array([1.0, 2.0, 5001.0])
    assert without_stops(began, ended, np.array([10.0] * 3), NONE)[2] == 0
