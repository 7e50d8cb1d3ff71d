"""A modelled rollout: an engine, the trajectories that it owns, and the lengths that it has seen end."""

from __future__ import annotations

from laminar.simulator.scale.engine import Key
from laminar.simulator.scale.job import Job
from laminar.workers.draining import Draining, Unfinished
from laminar.workers.rollouts.reporting import Lengths

BLIND_GROWTH, BLIND_STEP_S = 1, 1e6
"""To the plan, a growth of one token that takes a week: nothing is left over for growth, and every move pays. That is
the paper's Algorithm 1."""


class Rollout:
    """`relay`: the place of its host's relay in the chain. `turn`: of each of `live`. `scoring`: those of `live` that
    only wait for their reward. `closed`: it draws no more before it holds none. `stamp`: of the newest prediction of
    its engine's next event."""

    def __init__(self, id: str, job: Job, relay: int) -> None:
        self.id = id
        self.job = job
        self.relay = relay
        self.engine = job.engine()
        self.version = 0
        self.loading = False
        self.live: set[Key] = set()
        self.acting: set[Key] = set()
        self.scoring: set[Key] = set()
        self.turn: dict[Key, int] = {}
        self.closed = False
        self.stamp = 0
        self.lengths = Lengths()

    @property
    def room(self) -> int:
        return self.engine.max_running - len(self.live)

    @property
    def held(self) -> bool:
        """Whether anything needs its engine yet: weights change beside a slow reward, which takes only its room."""
        return len(self.live) > len(self.scoring)

    def begin(self, key: Key) -> None:
        self.live.add(key)
        self.turn[key] = 0
        self.engine.submit(self.job.first(key))

    def end(self, key: Key) -> None:
        self.live.discard(key)
        self.scoring.discard(key)
        self.turn.pop(key, None)
        self.lengths.add(self.job.lengths.of(*key))

    def draining(self, *, growing: bool) -> Draining:
        """As its report would tell it now (`rollouts.reporting`); without a tail that is longer than it tells."""
        limit, engine = self.job.batch_limit, self.engine
        generating = sorted(engine.running) if engine.owned <= limit else []
        tail = tuple(self._unfinished(key, growing=growing) for key in generating)
        costs = self.job.costs
        return Draining(
            id=self.id,
            version=self.version,
            kv_tokens=round(engine.kv),
            kv_capacity=costs.kv_tokens,
            batch_limit=limit,
            tail=tail,
            running=len(engine.running),
            waiting=len(engine.waiting),
            room=self.room,
            settled=not self.acting,
            acting=len(self.acting),
            acting_tokens=sum(self._context(key) for key in self.acting),
            step_s=costs.decode.step_s(1, self.job.context) if growing else BLIND_STEP_S,
            prefill_tokens_per_s=costs.prefill_tokens_per_s,
        )

    def _context(self, key: Key) -> int:
        """Tokens once the environment has answered."""
        return self.job.prompt_tokens + sum(self.job.turns_of(key)[: self.turn[key]])

    def _unfinished(self, key: Key, *, growing: bool) -> Unfinished:
        tokens = round(self.engine.tokens_of(self.engine.running[key]))
        job = self.job.settings.job
        written = tokens - job.prompt_tokens
        growth = self.lengths.growth(written, job.max_tokens - written) if growing else BLIND_GROWTH
        return Unfinished(f"{key[0]:012d}-{key[1]:03d}", tokens, growth)
