"""What a person is told while `laminar run` works: the picture, what happens, and that etcd is away; on one display."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from laminar.buffer.outage import Outage
from laminar.workers.display import Display, Event, Snapshot
from laminar.workers.status import LiveStatus, to_snapshot

EVENTS_KEPT = 100
AWAY_AGAIN_S = 30.0
"""How often an etcd that does not come back is told of."""
SESSION = "laminar.buffer.session"
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
        self.outage = Outage(AWAY_AGAIN_S)
        self._told = 0
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
            self.event(f"etcd answers again, after {lasted:.0f} s")
        self.rewards |= live.progress.rewards if live.progress else {}
        self._last = to_snapshot(live, max_steps=self.max_steps, elapsed_s=0.0, rewards=self.rewards)
        self.refresh()

    def away(self, why: str) -> float:
        """etcd has not answered. Seconds for which it has not by now."""
        if (since := self.outage.failed(self.now())) is not None:
            waiting = f" for {since:.0f} s now" if since else ""
            self.event(f"etcd does not answer{waiting}, the run waits for it: {why}")
        self.refresh()
        return self.outage.lasts(self.now())

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
        if record.name != SESSION:  # that etcd is away is told by `Story.away`, in its own words
            self.story.event(record.getMessage())
