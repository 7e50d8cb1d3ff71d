"""What a rollout tells of itself: written at once when something flips, on a change of more than a tenth at most each
second, and at least every five."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import TYPE_CHECKING

from laminar.buffer.records import Load
from laminar.workers.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from laminar.workers.rollout import Rollout

POLL_S = 0.25
AT_MOST_EACH_S = 1.0
AT_LEAST_EACH_S = 5.0
CHANGE = 0.1
FIGURES = (
    "running", "waiting", "kv_tokens", "decode_tokens_per_s", "batch_limit", "room", "acting", "finished", "moved_in",
)  # fmt: skip
RATE_S = 10
"""The decode rate is a mean over as many seconds: single seconds swing between a drain and a burst."""
MOST_NAMED = 256
"""Trajectories that a report names at most: a record in etcd stays small."""
REMEMBERED = 512
ENOUGH = 16
SHORTEST_GUESS = 16


class Lengths:
    """The lengths of the last trajectories that ended here, in policy tokens, and what they let expect of others."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        if len(self._recent) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(length)
        insort(self._sorted, length)

    def growth(self, tokens: int, budget: int) -> int:
        """Tokens that one with so many is to be expected to grow by, `budget` at most: the mean over those that grew
        longer than it is; where too few are known, as much again, as it is with long tails."""
        longer = self._sorted[bisect_right(self._sorted, tokens) :]
        if len(self._recent) < ENOUGH or not longer:
            guess = max(tokens, SHORTEST_GUESS)
        else:
            guess = round(sum(longer) / len(longer)) - tokens
        return max(0, min(guess, budget))


class Reporter:
    """Writes `load/rollout/<id>` under the worker's lease."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.lengths = Lengths()
        self.finished = 0
        self._history: deque[tuple[float, int]] = deque(maxlen=RATE_S + 1)
        self._last: Load | None = None
        self._last_at = 0.0
        self._writing = asyncio.Lock()

    def ended(self, policy_tokens: int) -> None:
        """A trajectory has ended here."""
        self.finished += 1
        self.lengths.add(policy_tokens)

    async def run(self) -> None:
        clock = self.rollout.clock
        while True:
            now, record = clock.monotonic(), self.record()
            since = now - self._last_at
            if self._last is None or since >= AT_LEAST_EACH_S or flipped(self._last, record):
                await self.write()
            elif since >= AT_MOST_EACH_S and changed(self._last, record):
                await self.write()
            await clock.sleep(POLL_S)

    async def write(self) -> None:
        """Now, and as it stands when its turn comes: a later report never overtakes an earlier one."""
        r = self.rollout
        async with self._writing:
            record = self.record()
            await r.run_info.coordination.put(
                r.run_info.keys.load("rollout", r.member.id), record.dump(), lease=r.member.session.lease
            )
            self._last, self._last_at = record, r.clock.monotonic()

    def record(self) -> Load:
        r = self.rollout
        load, draining = r.engine.load_report(), r.draining()
        limit = min(load.batch_limit or r.capacity, r.capacity)
        acting = [t for t in r.live.values() if t.turn_state == "acting" or not t.prompt_ids]
        return Load(
            version=r.engine.version,
            running=load.running,
            waiting=load.waiting + len(r.inbox.items),
            kv_tokens=load.kv_tokens,
            kv_capacity=r.equipment.capacity.kv_tokens,
            decode_tokens_per_s=self._rate(),
            draining=draining,
            finished=self.finished,
            tokens=self._tokens(),
            batch_limit=limit,
            step_s=round(load.step_s, 6),
            prefill_tokens_per_s=round(load.prefill_tokens_per_s, 1),
            room=r.room(),
            acting=len(acting),
            acting_tokens=sum(len(t.prompt_ids) + len(t.token_ids) for t in acting),
            evaluating=r.evaluator.running,
            switching=r.switching or r.stopping,
            resting=r.resting,
            tail=self._tail(limit) if draining else {},
            moved_out=r.mover.moved_out,
            moved_in=r.mover.moved_in,
            refilled_tokens=r.mover.refilled_tokens,
        )

    def _tail(self, limit: int) -> dict[str, tuple[int, int]]:
        """Of what generates: of a rollout that drains all or nothing, since it is emptied or left alone; of one that
        rests as many as can be named, the others next time."""
        r = self.rollout
        generating = [t for t in r.live.values() if t.turn_state == "generating" and t.prompt_ids]
        if len(generating) > min(limit, MOST_NAMED) and not r.resting:
            return {}
        return {t.name: (len(t.prompt_ids) + len(t.token_ids), self._growth(t)) for t in generating[:MOST_NAMED]}

    def _growth(self, t: Trajectory) -> int:
        return self.lengths.growth(t.policy_tokens, self.rollout.generation.budget(t))

    def _tokens(self) -> int:
        """All that its engine generates: what is evaluated runs in the same batch."""
        return self.rollout.generation.tokens + self.rollout.evaluator.tokens

    def _rate(self) -> float:
        """Tokens a second over the last ten seconds."""
        now, tokens = self.rollout.clock.monotonic(), self._tokens()
        if not self._history or now - self._history[-1][0] >= 1.0:
            self._history.append((now, tokens))
        since, before = self._history[0]
        return round(max(0.0, (tokens - before) / (now - since)), 2) if now > since else 0.0


def flipped(before: Load, after: Load) -> bool:
    """Whether something changed that others act on, rather than grew or shrank."""
    flags = ("version", "draining", "switching", "resting", "evaluating")
    return any(getattr(before, name) != getattr(after, name) for name in flags)


def changed(before: Load, after: Load) -> bool:
    """Whether some figure changed by more than a tenth, or the tail by a member."""
    if before.tail.keys() != after.tail.keys():
        return True
    figures = ((getattr(before, name) or 0, getattr(after, name) or 0) for name in FIGURES)
    return any(abs(now - then) > CHANGE * abs(then) for then, now in figures)
