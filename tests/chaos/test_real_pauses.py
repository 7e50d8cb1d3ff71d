"""Processes that are stopped past their lease and wake again, and processes that are asked to leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import lance
import psutil
import pytest
from faults import LEASE_S, SHORT_LEASE, overcome, victim_of
from observer import Observer
from real_run import RealRun, Stopped
from recording import Recorder

from laminar.buffer.coordination import Change
from laminar.buffer.records import Intent, TableHead

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MakeRun = Callable[..., RealRun]


@pytest.mark.parametrize(
    "kind", ["rollout", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("trainer", "relay", "committer"))]
)
def test_a_process_that_wakes_after_its_lease_writes_nothing_that_counts(
    real_run: MakeRun, recorder: Recorder, kind: str
) -> None:
    """Cases 15 and 28: its work was given to another meanwhile, and is not done twice. No supervisor helps: the
    process lives all the time."""
    goes_on_meanwhile = kind in ("rollout", "relay")
    run = real_run(SHORT_LEASE, f"run.max_steps={24 if goes_on_meanwhile else 12}")
    seen = run.begin(by_hand=[kind])
    victim = victim_of(run, seen, kind)
    recovered = overcome(seen, kind, victim)
    with Stopped(seen.workers(kind)[victim].pid):
        recovery_s = run.until(recovered, f"the work of {victim} goes on without it")
        run.until(lambda: victim not in seen.workers(kind), f"the lease of {victim} has ended")
        woken = seen.revision
    run.assert_ended_well()
    assert seen.written_by(victim, after=woken) == []
    recorder.fault(f"{kind} stopped", recovery_s, lease_s=LEASE_S)


def test_workers_asked_to_leave_hand_over_at_once(real_run: MakeRun, recorder: Recorder) -> None:
    """SIGTERM. The lease is so long that nothing here waits for one to end; and nobody counts as having died."""
    run = real_run("coordination.lease_ttl=60", "run.max_steps=20", "rollout.workers=2")
    seen = run.begin()
    for kind in ("rollout", "committer", "relay", "trainer"):
        victim = victim_of(run, seen, kind)
        recovered, pid = overcome(seen, kind, victim), seen.workers(kind)[victim].pid
        os.kill(pid, signal.SIGTERM)
        recovery_s = run.until(recovered, f"the work of {victim} goes on without it")
        run.until(lambda pid=pid: not psutil.pid_exists(pid), f"{victim} has left", 30)  # type: ignore[misc]
        assert recovery_s < 45
        recorder.fault(f"{kind} asked to leave", recovery_s)
    assert {claim.deaths for claim in seen.claims().values()} <= {0}
    assert "left the run; starting it again" in run.text()
    run.assert_ended_well()


class StopAt:
    """Stops the leading committer at an instant of its next commit of experience:

    announced: the intent is in etcd, the table is untouched;
    written: the rows are on disk, and no version of the table has them;
    committed: the version is there, and etcd still says that it is to be made.
    """

    def __init__(self, run: RealRun, seen: Observer, instant: str) -> None:
        self.seen, self.instant = seen, instant
        self.table = run.store / "experience.lance"
        self.victim = seen.leader("committer")
        self.pid = seen.workers("committer")[self.victim].pid
        self.intent: Intent | None = None

    def hook(self, change: Change) -> None:
        """In the observer's thread, within a millisecond of the change."""
        if change.key != self.seen.keys.head("experience") or change.kv is None or self.intent is not None:
            return
        intent = TableHead.parse(change.kv.value).committing
        if intent is None or not (self.table / "data").is_dir():
            return
        before = set(os.listdir(self.table / "data"))
        manifest = self.table / "_versions" / f"{2**64 - 1 - intent.target}.manifest"
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and not (
            self.instant == "announced"
            or (self.instant == "written" and set(os.listdir(self.table / "data")) - before)
            or (self.instant == "committed" and manifest.exists())
        ):
            continue
        os.kill(self.pid, signal.SIGSTOP)
        self.intent = intent

    def hit(self) -> bool:
        """Whether it stands where it was to be stopped; it is woken for another try if not."""
        if self.intent is None:
            return False
        time.sleep(0.2)  # what it sent before it was stopped may still arrive
        made = lance.dataset(str(self.table)).version >= self.intent.target
        if self.seen.table().committing == self.intent and made == (self.instant == "committed"):
            return True
        self.intent = None
        os.kill(self.pid, signal.SIGCONT)
        return False


def test_a_committer_stopped_at_any_instant_of_a_commit_doubles_no_row(real_run: MakeRun, recorder: Recorder) -> None:
    run = real_run(SHORT_LEASE, "run.max_steps=16")
    seen = run.begin(step=1, by_hand=["committer"] * 3)  # one is lost with each fault
    for instant in ("announced", "written", "committed"):
        stop = StopAt(run, seen, instant)
        seen.hooks[:] = [stop.hook]
        run.until(stop.hit, f"a committer is stopped with its commit {instant}")
        seen.hooks.clear()
        recovery_s = run.until(overcome(seen, "committer", stop.victim), f"another committer resolves the {instant}")
        woken = seen.revision
        os.kill(stop.pid, signal.SIGCONT)
        recorder.fault(f"committer stopped, {instant}", recovery_s, lease_s=LEASE_S)
        run.until(lambda pid=stop.pid: _gone(pid), f"{stop.victim} has noticed", 30)  # type: ignore[misc]
        assert seen.written_by(stop.victim, after=woken) == []
    run.assert_ended_well()


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
