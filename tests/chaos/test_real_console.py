"""What a person meets who runs a run twice, fills its disk, or looks at it afterwards: real processes throughout."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from privileges import memory_disk

MakeRun = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


def look(run: Any, command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "laminar.cli", command, str(run.store)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_second_laminar_run_is_refused_and_status_tells_how_it_ended(real_run: MakeRun) -> None:
    run = real_run("run.max_steps=400")
    run.start()
    run.until(lambda: run.step() >= 2, "step 2")
    second = real_run("run.max_steps=400")
    second.output = run.root / "second.log"
    second.start()
    assert second.wait(60) == 2
    assert f"in use by pid {run.process.pid} on " in second.text() and second.text().count("error:") == 1
    assert "running: " in look(run, "status")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.story()
    assert "stopped by a signal; the same command resumes it" in look(run, "status")
    lines = [line for line in run.text().splitlines() if line.startswith("step ")]
    rewards = {line.split(" | ")[0]: line.split(" | ")[1] for line in lines}
    log = run.worker_log("trainer")
    for step, reward in re.findall(r"step (\d+) trained: reward ([\d.]+)", log):
        shown = rewards.get(f"step {int(step) + 1}/400")
        assert shown in (None, f"reward {reward}"), "each line has the reward of its own step"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "store", "1200m") as folder:
        yield folder


@pytest.mark.nightly
def test_a_disk_that_fills_is_told_in_words_and_the_run_goes_on_once_there_is_space(
    small_disk: Path, real_run: MakeRun
) -> None:
    run = real_run()
    run.start()
    run.until(lambda: run.step() >= 2, "step 2")
    filler = small_disk / "fill"
    with filler.open("ab", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 16))
    run.until(lambda: "etcd cannot go on: disk is full at " in run.text(), "the full disk is told")
    filler.unlink()
    assert run.wait() == 0, run.story()
    assert f"disk is full at {small_disk}" in run.text() and "there is space again, and etcd serves" in run.text()
    assert '"level"' not in run.text(), "no JSON of etcd's log"
    run.assert_nothing_left()
    run.assert_sound()
