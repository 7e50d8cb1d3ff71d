"""When a worker is started again, and when the run gives up on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import WorkerRecord
from laminar.buffer.session import Election, Membership, Session
from laminar.workers.supervisor import supervision
from laminar.workers.supervisor.last_error import last_error
from laminar.workers.supervisor.supervision import (
    MAX_FRUITLESS,
    MAX_QUICK_CRASHES,
    GaveUp,
    RestartPolicy,
    Supervised,
    sign_off,
)


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


def test_crashes_between_which_no_step_is_finished_end_the_run_however_long_the_lives() -> None:
    policy = RestartPolicy()
    pauses = [policy.ended(3600.0, killed=False, fruits=7) for _ in range(MAX_FRUITLESS)]
    assert pauses[-1] is None and None not in pauses[:-1]
    assert policy.given_up() == f"crashed {MAX_FRUITLESS} times after step 7, without finishing another"


def test_a_step_more_forgives_all_crashes_before_it_and_a_kill_neither_counts_nor_forgives() -> None:
    policy = RestartPolicy()
    for step in range(5):
        for _ in range(MAX_FRUITLESS - 1):
            assert policy.ended(3600.0, killed=False, fruits=step) is not None
            assert policy.ended(3600.0, killed=True, fruits=step) is not None
    assert policy.ended(3600.0, killed=False, fruits=4) is None


def test_before_anybody_knows_the_step_no_crash_is_held_against_it() -> None:
    policy = RestartPolicy()
    assert all(policy.ended(3600.0, killed=False, fruits=None) is not None for _ in range(3 * MAX_FRUITLESS))


def supervised(
    command: list[str], tmp_path: Path, ended: list[int], events: list[str], over: Sequence[bool] = (True,)
) -> Supervised:
    answers = iter(over)

    async def is_over() -> bool:
        return next(answers)

    return Supervised("x", "x-0", command, tmp_path / "x.log", ended.append, events.append, is_over)


async def test_giving_up_shows_the_last_error(tmp_path: Path) -> None:
    ended: list[int] = []
    events: list[str] = []
    worker = supervised([sys.executable, "-c", "raise SystemExit('error: no such model')"], tmp_path, ended, events)
    with pytest.raises(GaveUp, match="no such model"):
        await worker.run()
    assert len(ended) == MAX_QUICK_CRASHES
    assert events[0] == (
        f"x-0 ended with exit code 1: no such model (log: {tmp_path / 'x.log'}); starting it again in 1.0 s"
    )


async def test_a_worker_that_does_without_fruits_is_given_up_and_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "QUICK_S", 0.0)  # every life is a long one
    monkeypatch.setattr(supervision, "FIRST_BACKOFF_S", 0.001)
    ended: list[int] = []
    worker = supervised([sys.executable, "-c", "raise SystemExit('error: batch 3 is odd')"], tmp_path, ended, [])
    worker.fruits = lambda: 2
    with pytest.raises(GaveUp, match=f"(?s)x-0 crashed {MAX_FRUITLESS} times after step 2, .*batch 3 is odd"):
        await worker.run()
    assert len(ended) == MAX_FRUITLESS


async def test_a_line_that_tells_no_error_stands_for_none(tmp_path: Path) -> None:
    """The last thing that a worker wrote, a moment or an hour before, need not have to do with its end."""
    events: list[str] = []
    program = "print('2026-01-01T00:00:00.000 WARNING etcd answers again'); raise SystemExit(9)"
    worker = supervised([sys.executable, "-c", program], tmp_path, [], events)
    with pytest.raises(GaveUp, match="etcd answers again"):  # among the last lines, which are shown as such
        await worker.run()
    assert events[0] == f"x-0 ended with exit code 9 (log: {tmp_path / 'x.log'}); starting it again in 1.0 s"


async def test_the_error_is_that_of_the_process_that_died(tmp_path: Path) -> None:
    """A log holds all lives of a worker: the error of an earlier one must not stand for this one's."""
    (tmp_path / "x.log").write_text("ValueError: of a life before\n")
    worker = supervised([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, [], [])
    with pytest.raises(GaveUp, match="it wrote nothing") as gave_up:
        await worker.run()
    assert "a life before" not in str(gave_up.value)


async def test_without_etcd_nothing_is_started_and_no_crash_counts(tmp_path: Path) -> None:
    """While etcd is away every worker ends with an error: after four the run would be given up."""
    starts: list[int] = []
    ended: list[int] = []

    async def may_start() -> None:
        starts.append(len(ended))
        if len(starts) == MAX_QUICK_CRASHES + 3:
            worker.stopping = True

    worker = supervised([sys.executable, "-c", "raise SystemExit('no etcd')"], tmp_path, ended, [])
    worker.may_start, worker.excused = may_start, lambda: True
    await worker.run()
    assert starts == list(range(MAX_QUICK_CRASHES + 3)) and len(ended) == MAX_QUICK_CRASHES + 2


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("12:00 INFO x joined\nerror: disk is full\n", "disk is full"),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\nleaked semaphore objects\n", "KeyError: 'a'"),
        ("Traceback …\nlaminar.errors.StoreError: gone\nremedy\n\n", "laminar.errors.StoreError: gone"),
        ("12:00 ERROR   the disk is gone\n12:01 WARNING etcd answers again\n", "the disk is gone"),
        ("12:00 CRITICAL no space\n", "no space"),
        ("ValueError: a\n12:00 ERROR   b\n12:01 INFO c\n", "b"),
        ("12:00 ERROR   a\nTraceback …\nValueError: b\n", "ValueError: b"),
        ("error: the batch is damaged\n12:00 ERROR   Task exception was never retrieved\n", "the batch is damaged"),
        ("12:00 INFO    an ERROR is no level here\n", ""),
        ("12:00 INFO    x joined\netcd answers again\n\n", ""),
        ("", ""),
        ("error: " + "x" * 400, "x" * 299 + "…"),
    ],
)
def test_the_line_that_says_why(log: str, error: str) -> None:
    assert last_error(log.splitlines()) == error


async def test_a_worker_that_was_asked_to_leave_a_living_run_is_started_again(tmp_path: Path) -> None:
    """A SIGTERM from outside ends a worker with 0; a run without its trainer would wait for ever."""
    ended: list[int] = []
    events: list[str] = []
    worker = supervised([sys.executable, "-c", ""], tmp_path, ended, events, over=(False, True))
    await worker.run()
    assert worker.finished and len(ended) == 2
    assert events == ["x-0 left the run; starting it again in 0.5 s"]


async def test_an_end_with_zero_is_the_end(tmp_path: Path) -> None:
    ended: list[int] = []
    worker = supervised([sys.executable, "-c", ""], tmp_path, ended, [])
    await worker.run()
    assert worker.finished and len(ended) == 1


async def test_signing_off_frees_all_that_a_dead_process_held_at_once() -> None:
    """Its leadership too, which would else block a successor until the lease expires."""
    coordination, keys = MemoryCoordination(MemoryEtcd()), Keys("a-run")
    session = await Session.open(coordination, 60.0)
    record = WorkerRecord(kind="trainer", id="trainer-here-7-aa", host="here", pid=7, started_at_us=0)
    await Membership.join(session, coordination, keys, record)
    await Election(coordination, session, keys.leader("trainer"), record.id).campaign()
    await sign_off(coordination, keys, host="elsewhere", pid=7)
    assert await coordination.get(keys.leader("trainer")) is not None
    await sign_off(coordination, keys, host="here", pid=7)
    assert await coordination.get(keys.leader("trainer")) is None
    assert await coordination.get(keys.worker("trainer", record.id)) is None
    await session.close()
