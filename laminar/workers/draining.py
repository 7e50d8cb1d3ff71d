"""What a plan of moves knows of a rollout: its unfinished tail, and how much of it would fit elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from laminar.buffer.keys import parse_trajectory
from laminar.buffer.records import Load

MAX_KV_SHARE = 0.99
"""Of a KV cache that a plan fills, growth included (the paper's C_max)."""
WAITING_SHARE = 1 / 16
"""Of its batch limit: so many may wait for a slot of a rollout that draws, which gives it to them first."""
UNBOUNDED = 1 << 30
"""Slots, as far as nobody has told of a bound."""
TYPICAL_STEP_S, TYPICAL_PREFILL = 0.03, 4000.0
"""Seconds of a decode step, prefilled tokens a second: where an engine has not measured its own yet."""


@dataclass(frozen=True)
class Unfinished:
    """A trajectory that is being generated: its tokens now, and how many more are to be expected."""

    trajectory: str
    tokens: int
    growth: int

    @cached_property
    def group(self) -> int:
        return parse_trajectory(self.trajectory)[0]


@dataclass(frozen=True)
class Draining:
    """A rollout that drains, or, as a target of `evacuate`, any other. `kv_tokens` may exceed the sum of its `tail`;
    `settled`: nothing keeps it but its tail (no environment that acts, no evaluation), so that it is free without.
    `room`: trajectories that it takes beside its tail, whatever its batch limit. `acting` wait for their environment,
    and come back into the batch and with `acting_tokens` into the KV cache."""

    id: str
    version: int
    kv_tokens: int
    kv_capacity: int
    batch_limit: int
    tail: tuple[Unfinished, ...]
    running: int = 0
    waiting: int = 0
    room: int = UNBOUNDED
    settled: bool = True
    acting: int = 0
    acting_tokens: int = 0
    step_s: float = TYPICAL_STEP_S
    prefill_tokens_per_s: float = TYPICAL_PREFILL

    @classmethod
    def of(cls, worker: str, load: Load) -> Draining:
        tail = tuple(Unfinished(name, tokens, growth) for name, (tokens, growth) in sorted(load.tail.items()))
        return cls(
            id=worker,
            version=load.version,
            kv_tokens=load.kv_tokens,
            kv_capacity=load.kv_capacity,
            batch_limit=load.batch_limit,
            tail=tail,
            running=load.running,
            waiting=load.waiting,
            room=free_slots(load),
            settled=not load.acting and not load.evaluating,
            acting=load.acting,
            acting_tokens=load.acting_tokens,
            step_s=load.step_s or TYPICAL_STEP_S,
            prefill_tokens_per_s=load.prefill_tokens_per_s or TYPICAL_PREFILL,
        )

    @cached_property
    def unfinished(self) -> int:
        """Tokens of its tail."""
        return sum([t.tokens for t in self.tail])

    @cached_property
    def used(self) -> int:
        """Tokens in its KV cache, now or once all that it has is in a batch."""
        return max(self.kv_tokens, self.unfinished) + self.acting_tokens

    @property
    def beside(self) -> int:
        """Those of them that are not of its tail."""
        return self.used - self.unfinished

    @cached_property
    def longest(self) -> int:
        """The growth of the one that is to be expected to end last."""
        return max([t.growth for t in self.tail], default=0)

    @property
    def slots(self) -> int:
        """Trajectories that it takes without becoming slow."""
        return min(self.batch_limit - len(self.tail) - self.acting, self.room)

    def is_candidate(self) -> bool:
        """Nothing waits in it, and it is below both limits: the tail of a drain, not its bulk."""
        batch = len(self.tail) + self.acting
        below = self.used < MAX_KV_SHARE * self.kv_capacity and batch < self.batch_limit
        return bool(self.tail) and not self.waiting and below

    def taking(self, tail: Sequence[Unfinished]) -> Draining:
        """With `tail` beside its own."""
        added = sum([t.tokens for t in tail])
        used, longest = self.used + added, max([self.longest, *[t.growth for t in tail]])
        # A plan fills some places with many tails, one after the other: what is known is neither summed up each time
        # nor checked by a constructor.
        filled = object.__new__(Draining)
        filled.__dict__.update(self.__dict__)
        filled.__dict__.update(
            tail=(*self.tail, *tail), kv_tokens=used - self.acting_tokens, room=self.room - len(tail),
            unfinished=self.unfinished + added, used=used, longest=longest,
        )  # fmt: skip
        return filled


def free_slots(load: Load) -> int:
    """Trajectories that a rollout takes from others. One that drains may be full of what waits for a slow reward, so
    that what came beyond its room would stand still for as long; one that draws takes some more."""
    if load.room is None:
        return UNBOUNDED
    return load.room if load.draining else load.room + max(1, int(WAITING_SHARE * load.batch_limit))
