"""A process that lives and is in its run no more is ended, after ample time in which somebody could have seen it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.supervisor.hung import HUNG_S, UNSEEN_S, Hung
from laminar.workers.supervisor.supervision import Supervised


def test_a_process_that_left_its_run_and_lives_on_is_ended_after_a_while() -> None:
    hung = Hung()
    assert hung.look({7, 8}, {7, 8}, 0.0) == []
    moments = [float(s) for s in range(1, int(HUNG_S) + 1)]
    assert [s for s in moments if hung.look({7, 8}, {8}, s)] == [HUNG_S]
    assert hung.look({8, 9}, {8, 9}, HUNG_S + 1) == []


def test_one_that_never_joined_loads_its_model_for_however_long() -> None:
    hung = Hung()
    assert not any(hung.look({7}, (), float(s)) for s in range(int(3 * HUNG_S)))


def test_one_that_comes_back_begins_anew() -> None:
    hung = Hung()
    joined = [s % int(HUNG_S / 2) == 0 for s in range(int(4 * HUNG_S))]
    assert not any(hung.look({7}, {7} if j else (), float(s)) for s, j in enumerate(joined))


def test_time_in_which_etcd_was_away_counts_against_nobody() -> None:
    hung = Hung()
    hung.look({7}, {7}, 0.0)
    assert hung.look({7}, (), 5 * HUNG_S) == []
    assert hung.look({7}, (), 5 * HUNG_S + UNSEEN_S) == []
    late = [s for s in range(int(7 * HUNG_S)) if hung.look({7}, (), 5 * HUNG_S + UNSEEN_S + s)]
    assert late[0] == HUNG_S - UNSEEN_S


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([True, False, False, False])), max_size=60))
def test_nobody_is_ended_without_having_been_missed_for_so_long_by_somebody_who_looked(
    looks: list[tuple[int, bool]],
) -> None:
    hung, now, missed = Hung(limit_s=40.0), 0.0, None
    for gap, joined in looks:
        now += gap
        missed = 0.0 if joined else missed + (gap if gap <= UNSEEN_S else 0.0) if missed is not None else None
        assert (hung.look({7}, {7} if joined else (), now) == [7]) == (missed is not None and missed >= 40)


async def test_what_is_ended_so_is_started_again(tmp_path: Path) -> None:
    """However it hangs: one that ignores SIGTERM as well."""
    program = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(60)"
    ended: list[int] = []
    events: list[str] = []

    async def is_over() -> bool:
        return False

    command = [sys.executable, "-c", program]
    worker = Supervised("x", "x-0", command, tmp_path / "x.log", ended.append, events.append, is_over)
    running = asyncio.create_task(worker.run())
    try:
        await _until(lambda: _lives(tmp_path) == 1)
        first = worker.pid
        worker.end("is hung")
        await _until(lambda: _lives(tmp_path) == 2)
        assert worker.pid not in (0, first)
    finally:
        await worker.stop(0.1)
        await asyncio.wait_for(running, 30)
    assert ended[0] == first and events[0] == f"x-0 (pid {first}) is hung; it is ended"
    assert events[1].startswith("x-0 was killed (signal 9); starting it again")


def _lives(folder: Path) -> int:
    log = folder / "x.log"
    return log.read_text().count("up") if log.exists() else 0


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within 30 s")
