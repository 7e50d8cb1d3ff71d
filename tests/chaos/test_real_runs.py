"""Real runs of the tiny fixture under real faults: nothing is lost, nothing is trained twice, nothing stays behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from faults import next_step, overcome, victim_of
from real_run import REPOSITORY, RealRun
from recording import Recorder

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MakeRun = Callable[..., RealRun]


def test_an_undisturbed_run_ends_sound(real_run: MakeRun) -> None:
    run = real_run()
    run.start()
    assert run.wait() == 0, run.story()
    assert "done after 12 of 12 steps" in run.text()
    run.assert_nothing_left()
    run.assert_sound()


@pytest.mark.nightly  # the ten random kills hit each kind as well
@pytest.mark.parametrize("kind", ["rollout", "trainer", "relay", "committer"])
def test_kill_9_of_any_process_is_recovered(real_run: MakeRun, recorder: Recorder, kind: str) -> None:
    """Cases 22 and 31: kill with trajectories in flight; all drawn groups are trained or retired once."""
    run = real_run()
    seen = run.begin(step=3)
    victim = victim_of(run, seen, kind)
    recovered, pid = overcome(seen, kind, victim), seen.workers(kind)[victim].pid
    os.kill(pid, signal.SIGKILL)
    recorder.fault(f"{kind} killed", run.until(recovered, f"the work of {victim} goes on without it"))
    run.assert_ended_well()


HUNG_AFTER_S = 15
SOON_HUNG = f"""
import sys
if "run" in sys.orig_argv:
    sys.path.insert(0, {str(REPOSITORY)!r})
    from laminar.workers import local
    local.HUNG_S = {HUNG_AFTER_S}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["rollout", "trainer", "relay"])
def test_a_worker_that_hangs_for_long_is_ended_and_begun_again(real_run: MakeRun, kind: str) -> None:
    """Nobody wakes it: `laminar run` has to, after 15 s here in place of 15 minutes."""
    run = real_run("run.max_steps=24")
    (run.root / "sitecustomize.py").write_text(SOON_HUNG)
    seen = run.begin(step=3, python_path=run.root)
    victim = seen.workers(kind)[victim_of(run, seen, kind)].pid
    os.kill(victim, signal.SIGSTOP)
    run.until(lambda: f"(pid {victim}) has not been in the run for {HUNG_AFTER_S} s" in run.text(), "it is ended")
    assert not psutil.pid_exists(victim)
    run.assert_ended_well()


def test_kill_9_of_a_rank_of_the_trainer_is_recovered(real_run: MakeRun, recorder: Recorder) -> None:
    """A trainer of two processes ends with either of them, and is begun again from the store."""
    run = real_run("trainer.devices=2", "trainer.threads=1")
    seen = run.begin(step=3)
    trainer = psutil.Process(seen.workers("trainer")[victim_of(run, seen, "trainer")].pid)
    rank = next(p for p in trainer.children() if "laminar.workers.learning.sharded.process" in p.cmdline())
    rank.kill()
    recorder.fault("rank of the trainer killed", next_step(run, seen))
    assert f"(process {rank.pid}) ended by SIGKILL" in run.story()
    run.assert_ended_well()


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_kill_9_of_etcd_is_recovered(real_run: MakeRun, recorder: Recorder, again: bool) -> None:
    run = real_run()
    seen = run.begin(step=3)
    [first] = run.victims("etcd")
    first.kill()

    def its_successor_is_killed() -> bool:
        successors = [p for p in run.victims("etcd") if p != first]
        for successor in successors:
            successor.kill()
        return bool(successors)

    if again:
        run.until(its_successor_is_killed, "its successor is there")
    recorder.fault("etcd killed, and its successor" if again else "etcd killed", next_step(run, seen))
    run.assert_ended_well()


def test_ten_random_kills_lose_nothing(real_run: MakeRun, chance: random.Random, recorder: Recorder) -> None:
    run = real_run("run.max_steps=25", "rollout.workers=2")
    seen = run.begin(step=1)
    killed = 0
    kinds = ["trainer", "rollout", "relay", "etcd", "rollout"]
    while killed < 10 and run.process is not None and run.process.poll() is None:
        time.sleep(chance.uniform(0.5, 4.0))
        killed += run.kill(kinds[killed % len(kinds)])
    assert killed == 10, f"the run ended after {killed} kills:\n{run.story()}"
    recorder.fault("ten random kills", next_step(run, seen), faults=killed)
    run.assert_ended_well()


def test_ctrl_c_and_the_same_command_again(real_run: MakeRun) -> None:
    run = real_run()
    run.start()
    run.until(lambda: run.step() >= 3, "step 3")
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.story()
    run.assert_nothing_left()
    run.assert_sound()
    run.start()
    assert run.wait() == 0, run.story()
    run.assert_nothing_left()
    run.assert_sound()
    assert "done after 12 of 12 steps" in run.text()


def test_kill_9_of_the_supervisor_leaves_no_process_and_resumes(real_run: MakeRun, recorder: Recorder) -> None:
    run = real_run()
    run.start()
    run.until(lambda: run.step() >= 3, "step 3")
    run.run_endpoint()
    assert run.process is not None
    run.process.kill()
    run.wait(10)
    run.assert_nothing_left()
    started = time.monotonic()
    run.begin(step=4)
    recorder.fault("supervisor killed", time.monotonic() - started)
    run.assert_ended_well()


@pytest.mark.nightly
def test_a_done_run_says_so_and_can_be_given_more_steps(real_run: MakeRun) -> None:
    run = real_run("run.max_steps=4")
    run.start()
    assert run.wait() == 0, run.story()
    run.start()
    assert run.wait() == 0, run.story()
    longer = real_run("run.max_steps=6")
    longer.start()
    assert longer.wait() == 0, longer.story()
    assert "done after 6 of 6 steps" in longer.text()
    longer.assert_sound()


@pytest.mark.nightly
def test_a_changed_data_set_is_refused_by_name(real_run: MakeRun) -> None:
    """Case 37: a changed learning rate is allowed and said, a changed data set is refused, naming both fingerprints."""
    run = real_run("run.max_steps=3")
    run.start()
    assert run.wait() == 0, run.story()
    changed = real_run("run.max_steps=3", "prompts.seed=77")
    changed.start()
    assert changed.wait() == 2
    assert "prompts: the run has" in changed.text()
    allowed = real_run("run.max_steps=4", "trainer.learning_rate=1e-4")
    allowed.start()
    assert allowed.wait() == 0, allowed.story()
    assert "trainer.learning_rate" in allowed.text()


def test_a_reward_that_always_raises_ends_the_run_with_its_error(real_run: MakeRun) -> None:
    """Case 17."""
    run = real_run('reward.name="always_raises:reward"')
    (run.root / "always_raises.py").write_text(
        "def reward(prompt, transcript):\n    raise ValueError('broken judge')\n"
    )
    run.start(python_path=run.root)
    assert run.wait() == 1, run.story()
    assert "broken judge" in run.text()
    run.assert_nothing_left()


BROKEN_COMMITTER = f"""
import sys
if "committer" in sys.orig_argv:
    sys.path.insert(0, {str(REPOSITORY)!r})
    from laminar.workers import committer
    def broken(committers):
        raise KeyError("seq")
    committer.commit_once = broken
"""


@pytest.mark.nightly
def test_a_committer_that_crashes_at_each_start_ends_the_run_with_its_last_lines(real_run: MakeRun) -> None:
    run = real_run()
    (run.root / "sitecustomize.py").write_text(BROKEN_COMMITTER)
    run.start(python_path=run.root)
    assert run.wait(500) == 1, run.story()
    assert "ended with exit code 1: KeyError: 'seq'; it is started again (crash 1 since a row was" in run.text()
    given_up = run.text().rpartition("error: the committer beside relay-")[2]
    assert " times with no row committed between them, " in given_up and "\n  KeyError: 'seq'" in given_up, run.story()
    assert "KeyError: 'seq'" in run.worker_log("relay"), "what it wrote is in its relay's log"
    run.assert_nothing_left()


@pytest.mark.nightly
def test_five_prompts_and_batches_of_four_end_with_the_rest_named(real_run: MakeRun) -> None:
    """Case 21."""
    run = real_run("prompts.size=5", "run.epochs=1", "trainer.groups_per_step=4", 'trainer.last_batch="retire"')
    run.start()
    assert run.wait() == 0, run.story()
    assert "every prompt of every epoch has been drawn" in run.text()
    run.assert_sound()
