"""What is said of a kind of worker that has nobody left."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from laminar.workers.viewing.absence import AWAY_S, Absences
from laminar.workers.viewing.display import Display, Snapshot, WorkerView

TRAINER, ROLLOUT = (WorkerView(f"{kind}-host-1-a", kind) for kind in ("trainer", "rollout"))


def test_a_kind_is_missed_once_it_was_there_and_has_been_away_for_a_while() -> None:
    absences = Absences()
    assert absences.look({"rollout"}, 0.0) == []
    assert absences.look({"rollout"}, 100.0) == [], "a trainer was never there"
    assert absences.look({"rollout", "trainer"}, 101.0) == []
    assert absences.look({"rollout"}, 101.0 + AWAY_S - 0.1) == []
    [told] = absences.look({"rollout"}, 101.0 + AWAY_S)
    assert told.startswith("no trainer is alive for 15 s: the lease of the last one ended")
    assert absences.look({"rollout"}, 150.0) == [], "said once"
    assert absences.away == {"trainer": 49.0}
    assert absences.look({"rollout", "trainer"}, 160.0) == ["a trainer is alive again, after 59 s"]
    assert absences.away == {}


def test_one_that_is_started_again_soon_is_not_missed() -> None:
    absences = Absences()
    absences.look({"trainer"}, 0.0)
    absences.look(set(), 1.0)
    assert absences.look({"trainer"}, AWAY_S - 1) == [] and not absences.away


def test_a_display_tells_of_it() -> None:
    out = io.StringIO()
    display = Display(plain=True, console=Console(file=out))
    snapshot = Snapshot(run="r", step=1, max_steps=9, workers=(TRAINER, ROLLOUT))
    for elapsed_s, workers in ((0, (TRAINER, ROLLOUT)), (10, (ROLLOUT,)), (20, (ROLLOUT,)), (22, (TRAINER, ROLLOUT))):
        display.update(replace(snapshot, elapsed_s=elapsed_s, workers=workers))
    lines = out.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith("step")] == [
        "no trainer is alive for 20 s",
        "a trainer is alive again, after 22 s",
    ]
