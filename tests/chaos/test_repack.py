"""Real runs with long tails: rollouts that drain give their trajectories to each other, and whoever is killed in the
middle of a move, nothing is lost and nothing doubled."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import lance
import pytest
from observer import Observer
from real_run import REPOSITORY, RealRun

from laminar.buffer.coordination import Change
from laminar.buffer.records import Claim, Moves

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
PATHS = Path(os.pathsep.join([str(REPOSITORY / "benchmarks" / "long_tails"), str(REPOSITORY)]))
CURVE = {"STEP_S": "0.03", "KNEE": "16", "PREFILL": "20000", "MEDIAN": "12", "SIGMA": "1.2", "KV": "4096"}
PLANNED, HANDED_OVER, TAKEN_OVER = "planned", "handed over", "taken over"
VICTIMS, MOMENTS = ("source", "target", "manager"), (PLANNED, HANDED_OVER, TAKEN_OVER)


class Striker:
    """Follows each move in etcd, and kills one of those who have part in it: `strikes` are (victim, moment) in the
    order in which they are dealt. Without any it only counts what moves, in `moved`."""

    def __init__(self, seen: Observer) -> None:
        self.seen = seen
        self.strikes: list[tuple[str, str]] = []
        self.struck: list[str] = []
        self.moved: list[str] = []
        """Names of trajectories that a living source gave and a target took over, before the first strike."""
        self._claims: dict[str, Claim] = {}
        self._sources: dict[str, str] = {}
        seen.hooks.append(self.see)

    def see(self, change: Change) -> None:
        keys, name = self.seen.keys, change.key.rsplit("/", 1)[-1]
        if change.key.startswith(keys.moves_root) and change.kv is not None:
            self._strike(PLANNED, name, Moves.parse(change.kv.value).items[0].target)
        elif change.key.startswith(keys.claims):
            before = self._claims.pop(name, None)
            if change.kv is None:
                self._sources.pop(name, None)
                return
            after = self._claims[name] = Claim.parse(change.kv.value)
            if before and before.owner and after.owner not in ("", before.owner) and after.deaths == before.deaths:
                self._sources[name] = before.owner
                self._strike(HANDED_OVER, before.owner, after.owner)
            elif after.state == "generating" and name in self._sources:
                if not self.struck:
                    self.moved.append(name)
                self._strike(TAKEN_OVER, self._sources.pop(name), after.owner)

    def _strike(self, moment: str, source: str, target: str) -> None:
        if not self.strikes or self.strikes[0][1] != moment:
            return
        victim = {"source": source, "target": target, "manager": self.seen.leader("manager")}[self.strikes[0][0]]
        try:
            os.kill(int(victim.split("-")[2]), signal.SIGKILL)
        except (ProcessLookupError, IndexError):
            return  # the last strike's victim, or no manager yet: the next move then
        self.struck.append(victim)
        self.strikes.pop(0)


@pytest.fixture
def tails(real_run: Callable[..., RealRun], monkeypatch: pytest.MonkeyPatch) -> tuple[RealRun, Striker]:
    """A run of three rollouts whose lengths are log-normal, and whose steps are stretched to a curve of their own."""
    for name, value in CURVE.items():
        monkeypatch.setenv(f"LONG_TAILS_{name}", value)
    run = real_run(
        "run.max_steps=500", "rollout.workers=3", "rollout.max_running=16", "rollout.max_model_len=256",
        "rollout.repack_interval=0.5", "sampling.max_tokens=200", "sampling.samples_per_prompt=4",
        "trainer.groups_per_step=12", "trainer.max_ahead_groups=36", "trainer.threads=1", "coordination.lease_ttl=10",
    )  # fmt: skip
    run.start(python_path=PATHS)
    run.until(lambda: bool(run.run_endpoint()), "the run's etcd is there")
    return run, Striker(run.observe())


def stop_and_judge(run: RealRun) -> None:
    """Two more steps, then Ctrl-C: each drawn trajectory is exactly one of claimed, registered and committed."""
    seen = run.observe()
    step = seen.step()
    run.until(lambda: seen.step() >= step + 2, f"step {step + 2}")
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.story()
    run.assert_nothing_left()
    run.assert_sound()
    run.assert_exactly_once()


def test_tails_move_and_deaths_in_the_middle_of_moves_lose_nothing(tails: tuple[RealRun, Striker]) -> None:
    run, striker = tails
    run.until(lambda: bool(striker.moved), "a tail has moved")
    striker.strikes = [("source", PLANNED), ("target", HANDED_OVER), ("manager", HANDED_OVER)]
    run.until(lambda: not striker.strikes, "source, target and manager were killed in moves")
    stop_and_judge(run)
    rows = lance.dataset(str(run.store / "experience.lance")).to_table(columns=["group", "sample", "span_worker"])
    writers = {f"{r['group']:012d}-{r['sample']:03d}": len(set(r["span_worker"])) for r in rows.to_pylist()}
    assert any(writers.get(name, 0) > 1 for name in striker.moved), "somebody went on with what another had written"


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_at_each_step_of_a_move(tails: tuple[RealRun, Striker], victim: str, moment: str) -> None:
    run, striker = tails
    striker.strikes = [(victim, moment)] * 2
    run.until(lambda: not striker.strikes, f"the {victim} was killed twice when a move was {moment}")
    stop_and_judge(run)
