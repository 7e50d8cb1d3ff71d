"""What a person is told of a run on the console: also while etcd is away, and without a flood."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from laminar.buffer.records import CommitterTrouble, TrainerHead, TrainerProgress
from laminar.workers.training.step_metrics import all_truncated
from laminar.workers.viewing.display import Display
from laminar.workers.viewing.status import LiveStatus
from laminar.workers.viewing.story import EventHandler, Story


class Told:
    """A story on a plain display; `lines()` is what was printed since the last look."""

    def __init__(self) -> None:
        self.at = 0.0
        self.file = io.StringIO()
        self.story = Story("a-run", 10, lambda: self.at)
        self.story.display = Display(plain=True, console=Console(file=self.file, width=80))

    def lines(self) -> list[str]:
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        return text.splitlines()


def live(
    step: int, rewards: dict[int, float | None], warnings: Sequence[str] = (), leaders: Mapping[str, str] | None = None
) -> LiveStatus:
    head = TrainerHead(step=step, decided=step, checkpoint=0, consumed_groups=0, state="running")
    progress = TrainerProgress(step=step, activity="", metrics={}, rewards=rewards, warnings=list(warnings))
    return LiveStatus("a-run", 1, head, None, 0, {}, 0, {}, dict(leaders or {}), (), progress)


def test_while_etcd_is_away_it_is_told_once_then_now_and_then_then_its_end() -> None:
    told = Told()
    told.story.show(live(1, {0: 0.5}))
    assert [line.split(" | ")[:2] for line in told.lines()] == [["step 1/10", "reward 0.500"]]
    for second in range(40):
        told.at = float(second)
        told.story.away("connection refused")
    lines = [line for line in told.lines() if not line.startswith("step ")]
    assert lines == [
        "etcd gives no answer for 5 s now, the run waits for it: connection refused",
        "etcd gives no answer for 35 s now, the run waits for it: connection refused",
    ]
    assert told.story.etcd_was_away
    told.at = 41.0
    told.story.show(live(2, {0: 0.5, 1: 0.7}))
    lines = told.lines()
    assert lines[0] == "etcd answers again, after 41 s"
    assert lines[1].startswith("step 2/10 | reward 0.700 | mean10 0.600 |")
    assert told.story.etcd_was_away, "a worker that dies of it now is not to blame"
    told.at = 70.0
    assert not told.story.etcd_was_away


def test_steps_that_go_back_after_a_death_are_explained() -> None:
    told = Told()
    told.story.show(live(7, {step: 0.5 for step in range(7)}))
    told.lines()
    told.story.show(live(5, {step: 0.5 for step in range(5)}))
    why, line = told.lines()
    assert "from its checkpoint" in why and "from 5 to 7" in why
    assert line.startswith("step 5/10 |")
    told.story.show(live(6, {step: 0.5 for step in range(6)}))
    assert [line.split(" | ")[0] for line in told.lines()] == ["step 6/10"]


def test_a_role_that_passes_to_another_worker_is_told_once() -> None:
    told = Told()
    for leaders in ({"committer": "relay-a-1"}, {}, {"committer": "relay-a-2"}, {"committer": "relay-a-2"}):
        told.story.show(live(1, {0: 0.5}, leaders=leaders))
    assert [line for line in told.lines() if "committer" in line] == ["relay-a-2 is the committer now, after relay-a-1"]


def test_each_crash_of_a_committer_is_told_once() -> None:
    told = Told()
    first = CommitterTrouble(crashes=1, how="ended with exit code 1: KeyError: 'seq'")
    second = first.model_copy(update={"crashes": 2})
    for trouble in (None, first, first, second, None, first):
        told.story.show(replace(live(1, {0: 0.5}), committers={"relay-a-1": trouble}))
    said = "the committer beside relay-a-1 ended with exit code 1: KeyError: 'seq'; it is started again (crash"
    assert [line for line in told.lines() if "committer" in line] == [
        f"{said} {n} since a row was committed)" for n in (1, 2, 1)
    ]


def test_a_short_silence_of_etcd_on_a_busy_machine_is_not_told() -> None:
    told = Told()
    told.story.away("no answer within 3 s")
    assert told.story.outage.on
    told.at = 3.0
    told.story.show(live(1, {0: 0.5}))
    assert all(line.startswith("step ") for line in told.lines())


def test_an_event_is_one_line_and_old_ones_are_let_go() -> None:
    told = Told()
    told.story.event("two\n\n  lines")
    told.story.refresh()
    assert told.lines()[0] == "two lines"
    for number in range(1000):
        told.story.event(f"event {number}")
    told.story.refresh()
    assert len(told.story.events) == 100 and told.lines()[-1] == "event 999"


def test_warnings_of_the_supervisor_itself_become_events() -> None:
    told = Told()
    logger = logging.getLogger("laminar.workers.supervisor.etcd_process")
    handler = EventHandler(told.story)
    logger.addHandler(handler)
    try:
        logger.warning("etcd (pid %d) did not stop", 7)
    finally:
        logger.removeHandler(handler)
    assert [event.text for event in told.story.events] == ["etcd (pid 7) did not stop"]


def test_a_warning_of_the_trainer_is_told_once_each_time_that_it_begins() -> None:
    """Case 50: at most 4 tokens where 10 are needed: a warning that everything is cut off, in front of the user."""
    told = Told()
    cut = all_truncated({"truncated_share": 1.0}, 4)
    for step, warnings in enumerate([[cut], [cut], [], [cut]]):
        told.story.show(live(step, {}, warnings))
    assert [line for line in told.lines() if not line.startswith("step ")] == [cut, cut]
    assert "sampling.max_tokens = 4" in cut


def test_some_that_are_cut_off_are_no_reason_to_warn() -> None:
    assert all_truncated({"truncated_share": 0.99}, 4) == all_truncated({"truncated_share": None}, 4) == ""
