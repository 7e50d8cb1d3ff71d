"""The output of a child that is overheard reaches the log of its parent, and its end is known when it has died."""

from __future__ import annotations

import asyncio
import sys

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.storage import MemoryStorage
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.workers.committer_lives import CommitterLives, keep_committer
from laminar.workers.context import Run
from laminar.workers.supervisor.children import Child
from laminar.workers.supervisor.last_error import READ_BYTES


async def test_both_streams_are_passed_on_and_the_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import os, sys; print('é' * 100_000); sys.stdout.flush(); sys.stderr.write('KeyError: 1\\n'); "
        "sys.stderr.flush(); os.abort()"
    )
    child = Child([sys.executable, "-c", program], overheard=True)
    await child.start()
    code = await child.wait()
    await child.stop(grace_s=1)
    assert code == -6 and child.said()[-1] == "KeyError: 1"
    assert sum(len(line.encode()) for line in child.said()) <= READ_BYTES + 3, "a cut character takes three bytes"
    assert capfd.readouterr().err == "é" * 100_000 + "\nKeyError: 1\n"


async def test_one_whose_own_child_lives_on_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    """It holds the output open, in a session of its own."""
    program = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'], "
        "start_new_session=True); print('bye')"
    )
    child = Child([sys.executable, "-c", program], overheard=True)
    await child.start()
    assert await child.wait() == 0
    await child.stop(grace_s=1)
    assert child.said() == ["bye"]


async def test_one_that_cannot_be_started_leaves_nothing_open() -> None:
    child = Child(["/nowhere/at/all"], overheard=True)
    child.command = ["\0"]
    with pytest.raises(ValueError):
        await child.start()
    await child.stop(grace_s=1)
    assert child.said() == []


async def test_a_relay_tells_what_its_committers_process_wrote_last() -> None:
    prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
    file = RunFile(run="run", created_at_us=0, config={}, model_folder="", prompts=1, held_out=0, fingerprints=prints)
    config = Config.model_validate({"model": {"path": "m"}})
    run = Run(MemoryCoordination(MemoryEtcd()), Keys("run"), MemoryStorage(), file, config, SystemClock())
    lives = CommitterLives()
    program = "print('begun', flush=True); {}['seq']"
    keeping = asyncio.create_task(
        keep_committer(run, lambda: Child([sys.executable, "-c", program], overheard=True), lives)
    )
    async with asyncio.timeout(60):
        while lives.trouble is None or lives.trouble.crashes < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert lives.trouble.how == "ended with exit code 1: KeyError: 'seq'"
    assert (lives.trouble.said[0], lives.trouble.said[-1]) == ("begun", "KeyError: 'seq'")
