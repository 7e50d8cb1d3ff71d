"""The manager's part: when it plans, whom it asks, and how a move is carried out. The plan itself is the real one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from laminar.buffer.keys import parse_trajectory
from laminar.simulator.scale.engine import Request
from laminar.simulator.scale.rollout import Rollout
from laminar.workers.draining import MAX_KV_SHARE, Draining
from laminar.workers.managing.repacking import QUIET_S
from laminar.workers.repack import HAND_OVER_S, Handing, plan

if TYPE_CHECKING:
    from laminar.simulator.scale.flowing import Flowing


class Moves:
    """`plan_ms`: milliseconds of a core that each plan took."""

    def __init__(self, flowing: Flowing, *, growing: bool) -> None:
        self.flowing = flowing
        self.growing = growing
        self.moved = 0
        self.plan_ms: list[float] = []
        self._left_alone: dict[str, float] = {}
        self._by_id = {rollout.id: rollout for rollout in flowing.rollouts}

    def plan(self) -> None:
        f = self.flowing
        loads = [self._load(r) for r in f.rollouts if self._asked(r)]
        began = time.process_time()
        handings = plan(loads)
        self.plan_ms.append(1000 * (time.process_time() - began))
        for handing in handings:
            self._hand_over(handing)
        involved = {h.source for h in handings} | {h.target for h in handings}
        self._left_alone |= dict.fromkeys(involved, f.now + HAND_OVER_S + QUIET_S)
        for id in sorted(involved):
            f.changed(self._by_id[id])

    def _load(self, rollout: Rollout) -> Draining:
        rollout.engine.advance(self.flowing.now)
        return rollout.draining(growing=self.growing)

    def _asked(self, rollout: Rollout) -> bool:
        """Rollouts that take nothing new: those of an older version, and, where they take batch after batch, all."""
        f = self.flowing
        if rollout.loading or self._left_alone.get(rollout.id, 0.0) > f.now:
            return False
        return f.view(rollout).draining or (not f.policy.continuous and rollout.closed)

    def _hand_over(self, handing: Handing) -> None:
        """The trajectory stops here now, and goes on there after a moment, by prefill of all that it has."""
        f, key = self.flowing, parse_trajectory(handing.trajectory)
        source, target = self._by_id[handing.source], self._by_id[handing.target]
        request = source.engine.running[key]
        tokens = source.engine.tokens_of(request)
        if target.engine.kv + tokens > MAX_KV_SHARE * f.job.costs.kv_tokens:
            return
        request = source.engine.take(key)
        source.live.discard(key)
        target.live.add(key)
        target.turn[key] = source.turn.pop(key)
        self.moved += 1
        moved = Request(key, request.tokens, request.remaining, request.tokens)

        def arrived() -> None:
            target.engine.advance(f.now)
            target.engine.refilled += moved.tokens
            target.engine.submit(moved)
            f.changed(target)
            f.think(source)
            f.changed(source)

        f.at(f.now + HAND_OVER_S, arrived)
