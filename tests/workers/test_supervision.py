"""When a worker is started again, and when the run gives up on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laminar.workers.supervision import MAX_QUICK_CRASHES, GaveUp, RestartPolicy, Supervised


def test_quick_crashes_back_off_and_end() -> None:
    policy = RestartPolicy()
    pauses = [policy.ended(1.0, killed=False) for _ in range(MAX_QUICK_CRASHES)]
    assert pauses[-1] is None
    kept = [p for p in pauses if p is not None]
    assert kept == sorted(kept) and len(kept) == MAX_QUICK_CRASHES - 1


def test_a_long_life_or_a_kill_forgives() -> None:
    policy = RestartPolicy()
    for _ in range(20):
        assert policy.ended(1.0, killed=True) is not None
        assert policy.ended(1000.0, killed=False) is not None


def supervised(command: list[str], tmp_path: Path, ended: list[int], events: list[str]) -> Supervised:
    return Supervised("x", "x-0", command, tmp_path / "x.log", ended.append, events.append)


async def test_giving_up_shows_the_last_error(tmp_path: Path) -> None:
    ended: list[int] = []
    events: list[str] = []
    worker = supervised([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path, ended, events)
    with pytest.raises(GaveUp, match="no such model"):
        await worker.run()
    assert len(ended) == MAX_QUICK_CRASHES
    assert any("exit code 1" in e for e in events)


async def test_an_end_with_zero_is_the_end(tmp_path: Path) -> None:
    ended: list[int] = []
    worker = supervised([sys.executable, "-c", ""], tmp_path, ended, [])
    await worker.run()
    assert worker.finished and len(ended) == 1
