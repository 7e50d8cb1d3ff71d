"""When a rollout counts as slow."""

from __future__ import annotations

import pytest

from laminar.buffer.records import Load
from laminar.workers.slowness import WINDOW_S, Window, slow


def window(rate: float, running: int | list[int] = 8, seconds: int = 31) -> Window:
    """A report a second; `rate`: tokens a second of each trajectory."""
    result = Window()
    for at in range(seconds):
        n = running if isinstance(running, int) else running[min(at, len(running) - 1)]
        load = Load(
            version=1, running=n, waiting=0, kv_tokens=0, kv_capacity=1, decode_tokens_per_s=rate * n, draining=False
        )
        result.add(float(at), load)
    return result


def test_one_of_four_at_a_fourth_of_the_rate_is_slow() -> None:
    found = slow({"a": window(10), "b": window(11), "c": window(9), "d": window(2.5)}, set())
    assert list(found) == ["d"]
    assert found["d"].startswith("2.5 tokens a second for each of 8 trajectories over 30 s; 3 others")
    assert found["d"].endswith("make 10.0")


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (window(3.5), "more than a third of the others"),
        (window(1, seconds=20), "not seen for long enough"),
        (window(1, running=64), "its batch is larger than theirs"),
        (window(1, running=[0, 8]), "it was idle for a moment"),
        (window(1, running=[8] * 25 + [32]), "its batch has grown, and the rate that it reports lags behind"),
    ],
)
def test_what_does_not_make_a_rollout_slow(last: Window, why: str) -> None:
    assert not slow({"a": window(10), "b": window(11), "c": window(9), "d": last}, set()), why


def test_two_rollouts_tell_nothing_of_each_other() -> None:
    assert not slow({"a": window(10), "b": window(1)}, set())


def test_at_most_a_third_rests() -> None:
    windows = {name: window(10) for name in "abcd"} | {"x": window(1), "y": window(2)}
    assert list(slow(windows, set())) == ["x", "y"]
    assert list(slow(windows, {"a"})) == ["x"]
    assert not slow(windows, {"a", "b"})


def test_old_reports_are_forgotten() -> None:
    assert window(10, seconds=100).samples[0].at == 99 - WINDOW_S
