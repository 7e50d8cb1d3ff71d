"""A resumed run with another learning rate, and one that failed and is tried again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

MakeRun = Callable[..., Any]

pytestmark = pytest.mark.slow


def test_a_changed_learning_rate_before_the_first_checkpoint(real_run: MakeRun) -> None:
    """Case 37, stopped between checkpoints: the decided steps are trained again at the rate that they were decided
    under, so the newest version comes out with the bits that were published, which went with the relay. Case 33: with
    one step's groups admitted the trainer can only go on with what rollouts generate under that version."""
    tight = ("trainer.max_ahead_groups=16",)
    run = real_run(*tight)
    run.start()
    run.until(lambda: run.step() >= 3, "step 3")
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143, run.story()
    again = real_run(*tight, "trainer.learning_rate=1e-4")
    again.start()
    assert again.wait(180) == 0, again.story()
    assert "resuming with trainer.learning_rate = 0.0001 (was 0.0003)" in again.text(), again.story()
    assert "replay_drift" not in (again.store / "logs" / "trainer.log").read_text(), again.story()
    again.assert_nothing_left()
    again.assert_sound()


def test_a_run_that_failed_is_judged_anew_when_it_is_tried_again(real_run: MakeRun) -> None:
    """Case 17, and what follows it: the judge is repaired, and old errors do not end the run again."""
    run = real_run('reward.name="judge:reward"', "run.max_steps=3")
    judge = run.root / "judge.py"
    judge.write_text("def reward(prompt, transcript):\n    raise ValueError('broken judge')\n")
    run.start(python_path=run.root)
    assert run.wait() == 1, run.story()
    judge.write_text(
        "def reward(prompt, transcript):\n    return float(sum(map(ord, transcript.replies[-1])) % 2)\n"
    )
    run.start(python_path=run.root)
    assert run.wait(180) == 0, run.story()
    assert "done after 3 of 3 steps" in run.text()
    run.assert_sound()
