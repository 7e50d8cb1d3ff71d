"""What a rollout does next: a pure decision over what it sees.

A rollout draws while it holds the newest version. Once a newer one is published, or work of another version waits
for it, it stops drawing, drains, and loads that version when it is empty: `update = "drain"`. It never leaves a version
while work of it waits for room: full of trajectories whose rewards are slow, it would leave and come back for minutes.

With `update = "interrupt"` it swaps the weights under what runs, and takes over work of any version under its own. To
evaluate another version it drains all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Do(Enum):
    LOAD = "load a version"
    SWAP = "load a version under what runs"
    ADOPT = "take over what came to the inbox"
    EVALUATE = "evaluate the loaded version"
    DRAW = "draw new groups"
    WAIT = "wait for something to change"


@dataclass(frozen=True)
class Action:
    do: Do
    version: int = -1


@dataclass(frozen=True)
class View:
    """`inbox` and `evaluations` are the versions of waiting items, oldest first; `newest` is -1 before the first
    publish, `loaded` -1 before the first load. `room` counts trajectories that the engine can still take."""

    newest: int
    loaded: int
    running: int
    room: int
    inbox: tuple[int, ...] = ()
    evaluations: tuple[int, ...] = ()
    evaluating: bool = False
    admitted: int = 0
    stopping: bool = False
    resting: bool = False
    interrupt: bool = False

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.evaluating

    @property
    def wanted(self) -> int:
        """The version to hold next: that of waiting work first, so that nothing waits behind new draws, and the loaded
        one as long as any waits for that."""
        if self.owing:
            return self.loaded
        inbox = () if self.interrupt else self.inbox
        foreign = [v for v in (*inbox, *self.evaluations) if v != self.loaded]
        return foreign[0] if foreign else max(self.newest, self.loaded)

    @property
    def draining(self) -> bool:
        return self.stopping or self.resting or (self.loaded >= 0 and self.wanted != self.loaded)

    @property
    def owing(self) -> bool:
        """Whether something in the inbox can go on under no other version than the loaded one, now or once there is
        room."""
        return not self.interrupt and self.loaded >= 0 and self.loaded in self.inbox

    @property
    def adoptable(self) -> bool:
        """Whether something in the inbox can go on now."""
        if self.loaded < 0 or self.room <= 0:
            return False
        return self.owing or (self.interrupt and bool(self.inbox))


def steer(view: View) -> Action:
    if view.stopping:
        return Action(Do.WAIT)
    if view.adoptable:
        return Action(Do.ADOPT, view.loaded)
    if view.loaded in view.evaluations and not view.evaluating and view.loaded >= 0:
        return Action(Do.EVALUATE, view.loaded)
    if view.wanted != view.loaded and not view.busy:
        return Action(Do.LOAD, view.wanted)
    if view.interrupt and view.wanted == view.newest != view.loaded >= 0 and not view.evaluating:
        return Action(Do.SWAP, view.newest)
    if view.loaded >= 0 and view.loaded == view.newest and not view.draining and view.admitted > 0:
        return Action(Do.DRAW, view.loaded)
    return Action(Do.WAIT)
