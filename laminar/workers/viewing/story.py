"""What a person is told while `laminar run` works: the picture, what happens, and that etcd is away; on one display."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from laminar.buffer.outage import Outage
from laminar.buffer.records import CommitterTrouble
from laminar.workers.viewing.display import Display, Event, Snapshot
from laminar.workers.viewing.status import LiveStatus, to_snapshot

EVENTS_KEPT = 100
AWAY_S = 5.0
"""A silence of etcd that is shorter is told to nobody: a busy machine has such."""
AWAY_AGAIN_S = 30.0
"""How often an etcd that does not come back is told of."""
SESSION, UPKEEP = "laminar.buffer.session", "laminar.workers.supervisor.etcd_upkeep"
FORGIVEN_S = 20.0
"""For so long after etcd's return a worker's crash is put down to its absence."""


class Story:
    """`now()` gives monotonic seconds. Without a display (before and after the picture) events wait for one."""

    def __init__(self, run: str, max_steps: int, now: Callable[[], float]) -> None:
        self.max_steps = max_steps
        self.now = now
        self.started = now()
        self.display: Display | None = None
        self.rewards: dict[int, float | None] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.outage = Outage()
        self._away_told_at: float | None = None
        self._told = 0
        self._warnings: set[str] = set()
        self._leaders: dict[str, str] = {}
        self._committers: dict[str, CommitterTrouble | None] = {}
        self._back_at = float("-inf")
        self._last = Snapshot(run=run, max_steps=max_steps)

    def event(self, text: str) -> None:
        """One line, whatever the text: it stands among others."""
        self.events.append(Event(self._told, " ".join(text.split())))
        self._told += 1

    def show(self, live: LiveStatus) -> None:
        """etcd has answered: the new picture."""
        if (lasted := self.outage.over(self.now())) is not None:
            self._back_at = self.now()
            if self._away_told_at is not None:
                self.event(f"etcd answers again, after {lasted:.0f} s")
            self._away_told_at = None
        if live.progress is not None:
            self.rewards |= live.progress.rewards
            self._warn(live.progress.warnings)
        self._lead(live.leaders)
        self._crashed(live.committers)
        before = self._last.step
        self._last = to_snapshot(live, max_steps=self.max_steps, elapsed_s=0.0, rewards=self.rewards)
        if self._last.step < before:
            self.event(
                f"the trainer goes on from its checkpoint: the steps from {self._last.step} to {before} are computed "
                "again, on the batches that were decided for them"
            )
        self.refresh()

    def _lead(self, leaders: Mapping[str, str]) -> None:
        """Each role that has passed from one worker to another: no supervisor tells of a committer's end."""
        for role, worker in leaders.items():
            if (before := self._leaders.get(role, worker)) != worker:
                self.event(f"{worker} is the {role} now, after {before}")
        self._leaders |= leaders

    def _crashed(self, committers: Mapping[str, CommitterTrouble | None]) -> None:
        """Each crash of a committer: its relay starts it again, and only its log says so."""
        for relay, trouble in committers.items():
            if trouble is not None and trouble != self._committers.get(relay):
                since = f"crash {trouble.crashes} since a row was committed"
                self.event(f"the committer beside {relay} {trouble.how}; it is started again ({since})")
        self._committers = dict(committers)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Each once, as long as the trainer goes on giving it."""
        for warning in warnings:
            if warning not in self._warnings:
                self.event(warning)
        self._warnings = set(warnings)

    def away(self, why: str) -> float:
        """etcd has not answered, or not what it should. Seconds for which that has been so."""
        self.outage.failed(self.now())
        lasts = self.outage.lasts(self.now())
        told_at = self._away_told_at
        if lasts >= AWAY_S and (told_at is None or self.now() >= told_at + AWAY_AGAIN_S):
            self._away_told_at = self.now()
            self.event(f"etcd gives no answer for {lasts:.0f} s now, the run waits for it: {why}")
        self.refresh()
        return lasts

    @property
    def etcd_was_away(self) -> bool:
        return self.outage.on or self.now() - self._back_at < FORGIVEN_S

    def refresh(self) -> None:
        """The last picture again, with the newest events."""
        if self.display is not None:
            elapsed = self.now() - self.started
            self.display.update(replace(self._last, elapsed_s=elapsed, events=tuple(self.events)))


class EventHandler(logging.Handler):
    """Warnings of this process become events: printed, they would tear the picture."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.WARNING)
        self.story = story

    def emit(self, record: logging.LogRecord) -> None:
        # That etcd is away is told by `Story.away`, in its own words.
        if record.name != SESSION and not (record.name == UPKEEP and self.story.outage.on):
            self.story.event(record.getMessage())
