"""When a rollout counts as slow."""

from __future__ import annotations

import random
import time

import pytest

from laminar.buffer.records import Load
from laminar.workers.managing.slowness import WINDOW_S, Window, may_rest, slow


def load(tokens: float, running: int) -> Load:
    return Load(
        version=1, running=running, waiting=0, kv_tokens=0, kv_capacity=1, decode_tokens_per_s=0, draining=False,
        tokens=round(tokens),
    )  # fmt: skip


def window(rate: float, running: int | list[int] = 8, seconds: int = 31) -> Window:
    """A report a second; `rate`: tokens a second of each trajectory."""
    result, tokens = Window(), 0.0
    for at in range(seconds):
        n = running if isinstance(running, int) else running[min(at, len(running) - 1)]
        result.add(float(at), load(tokens, n))
        tokens += rate * n
    return result


def test_one_of_four_at_a_fourth_of_the_rate_is_slow() -> None:
    found = slow({"a": window(10), "b": window(11), "c": window(9), "d": window(2.5)}, set())
    assert list(found) == ["d"]
    assert found["d"].startswith("2.5 tokens a second for each of 8 trajectories over 30 s; 3 others")
    assert found["d"].endswith("make 10.0")


def test_short_pauses_and_other_batches_hide_nothing() -> None:
    """Whoever takes a new version is empty for a moment, the slow one too."""
    pausing = [8] * 10 + [0] + [16] * 12 + [0] + [8]
    others = {name: window(10, running=pausing) for name in "abc"}
    assert list(slow(others | {"d": window(2.5, running=[0, *pausing])}, set())) == ["d"]
    assert not slow(others | {"d": window(9.0, running=[0, *pausing])}, set())


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (window(3.5), "more than a third of the others"),
        (window(1, seconds=20), "not seen for long enough"),
        (window(1, running=64), "its batch is larger than theirs"),
        (window(1, running=[8] * 5 + [0]), "it was idle nearly all the time"),
        (window(10, running=[1] * 25 + [32]), "its batch has grown"),
    ],
)
def test_what_does_not_make_a_rollout_slow(last: Window, why: str) -> None:
    assert not slow({"a": window(10), "b": window(11), "c": window(9), "d": last}, set()), why


def test_others_that_are_idle_for_want_of_admission_tell_all_the_same() -> None:
    """A slow rollout holds up the groups that the trainer waits for, and so the drawing of all."""
    others = {name: window(10, running=[8, 8, 8, 0, 0, 0, 0, 8, 8, 8, 0, 8]) for name in "abc"}
    assert list(slow(others | {"d": window(1)}, set())) == ["d"]


def test_few_tokens_tell_nothing() -> None:
    """One of equals that makes 3 tokens where others make 12 is no slower, only counted at another moment."""
    others = {name: window(0.1, running=4) for name in "abc"}
    assert not slow(others | {"d": window(0.025, running=4)}, set())
    assert not slow({name: window(0.5, running=1) for name in "abc"} | {"d": window(0, running=1)}, set())


def test_one_that_makes_nothing_is_slow_once_the_others_have_made_enough() -> None:
    others = {name: window(1, running=1) for name in "abc"}
    assert list(slow(others | {"d": window(0, running=1)}, set())) == ["d"]


@pytest.mark.parametrize("seed", range(5))
def test_equal_engines_are_not_found_slow_by_chance(seed: int) -> None:
    """A day of windows of six equal ones, that count tokens in grains."""
    chance = random.Random(seed)
    for _ in range(500):
        rate, running = chance.choice([0.05, 0.1, 0.3, 1.0]), chance.choice([1, 2, 4])
        windows = {}
        for name in "abcdef":
            result, tokens = Window(), 0
            for at in range(31):
                result.add(float(at), load(tokens, running))
                tokens += sum(chance.random() < rate for _ in range(running))
            windows[name] = result
        assert not slow(windows, set())


def test_two_rollouts_tell_nothing_of_each_other() -> None:
    assert not slow({"a": window(10), "b": window(1)}, set())


def test_at_most_a_third_rests() -> None:
    windows = {name: window(10) for name in "abcd"} | {"x": window(1), "y": window(2)}
    assert list(slow(windows, set())) == ["x", "y"]
    assert list(slow(windows, {"a"})) == ["x"]
    assert not slow(windows, {"a", "b"})


def test_somebody_is_awake_however_few_are_left() -> None:
    assert [may_rest(n) for n in (0, 1, 2, 3, 5, 6, 9, 1000)] == [0, 0, 1, 1, 1, 2, 3, 333]


def test_old_reports_are_forgotten() -> None:
    assert window(10, seconds=100).samples[0].at == 99 - WINDOW_S


def test_a_thousand_rollouts_are_compared_in_a_moment() -> None:
    """Every second: comparing each with each, one by one, took the manager longer than that."""
    windows = {f"r{i:04d}": window(1.0 + i % 9, running=4 + i % 60) for i in range(1000)}
    began = time.process_time()
    slow(windows, set())
    took = time.process_time() - began
    assert took < 0.5, f"{took:.3f} s of CPU"
