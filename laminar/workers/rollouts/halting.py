"""Stopping trajectories between two tokens, so that somebody else or other weights go on with them.

    running ──halting, abort──▶ its task ends with Halted ──▶ parked ──▶ handed over, or started again here

A trajectory that comes to the end of its turn meanwhile goes on into its environment or its reward: that needs no
engine, and must not be done twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from laminar.clock import Clock
from laminar.workers.rollouts.generation import Generation
from laminar.workers.rollouts.trajectory import Trajectory

POLL_S = 0.02


class Halting:
    """`start` runs a trajectory's task again. `alone` is held by whoever has trajectories stand still."""

    def __init__(self, generation: Generation, clock: Clock, start: Callable[[Trajectory], None]) -> None:
        self.generation = generation
        self.clock = clock
        self.start = start
        self.alone = asyncio.Lock()
        self._parked: set[tuple[int, int]] = set()

    def parked(self, trajectory: Trajectory) -> None:
        """Its task has ended with Halted."""
        self._parked.add(trajectory.id)

    def forget(self, trajectory: Trajectory) -> None:
        """It is not this worker's any more."""
        self._parked.discard(trajectory.id)

    async def stop(self, trajectories: Sequence[Trajectory], within_s: float) -> list[Trajectory]:
        """Those that stand still; the others have left the engine by themselves, or did not stop within that time.
        All of them halt at their next turn until `go_on`."""
        await asyncio.gather(*(self.generation.halt(t) for t in trajectories))
        deadline = self.clock.monotonic() + within_s
        while any(t.request for t in trajectories if t.id not in self._parked) and self.clock.monotonic() < deadline:
            await self.clock.sleep(POLL_S)
        return [t for t in trajectories if t.id in self._parked]

    def go_on(self, trajectories: Iterable[Trajectory]) -> None:
        """Start again those that stand still; the others need not stop any more."""
        for t in trajectories:
            t.halting = False
            if t.id in self._parked:
                self._parked.discard(t.id)
                self.start(t)
