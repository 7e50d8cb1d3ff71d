"""An inference engine with continuous batching, as a fluid: between two events all that runs gains a token a step.

    submit ──▶ waiting ──KV cache has room──▶ running ──its last token──▶ settle() returns it
                  ▲                             │
                  └──── KV cache full: the newest one loses its part of it, and is computed again ────┘

A state machine without clock or chance: `advance` moves time, `next_event` says until when nothing happens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from laminar.simulator.scale.costs import Decode

Key = tuple[int, int]
"""(group, sample)."""
NEARLY = 1e-3
"""Of a token: what is nearer to an event than that is there."""


@dataclass
class Request:
    """`tokens`: what it has, prompt included; `remaining`: until its turn ends; `prefill`: of the tokens, those that
    are to be computed when it gets its place."""

    key: Key
    tokens: float
    remaining: float
    prefill: float
    joined: float = 0.0
    number: int = 0


@dataclass
class Engine:
    """`kv`: tokens in the KV cache; `count`: tokens that a request running from the start would have gained.

    Sums since the start: `generated` tokens, `busy_s` in which something ran, `kv_seconds` (tokens x seconds),
    `refilled` tokens computed more than once, `preempted` requests."""

    decode: Decode
    kv_tokens: int
    max_running: int
    prefill_tokens_per_s: float
    now: float = 0.0
    count: float = 0.0
    kv: float = 0.0
    generated: float = 0.0
    busy_s: float = 0.0
    kv_seconds: float = 0.0
    refilled: float = 0.0
    preempted: int = 0
    running: dict[Key, Request] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    _ends: list[tuple[float, int, Key]] = field(default_factory=list)
    _stall_s: float = 0.0
    _full: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def validate(self) -> None:
        """Raises AssertionError where the bookkeeping is off (called by tests after every event)."""
        tokens = sum(self.tokens_of(r) for r in self.running.values())
        assert abs(tokens - self.kv) < 1e-6 * max(1.0, tokens) + NEARLY, (tokens, self.kv)
        assert len(self.running) <= self.max_running
        assert len(self.running) <= 1 or self.kv <= self.kv_tokens + len(self.running) * NEARLY
        assert not self.running.keys() & {r.key for r in self.waiting}

    @property
    def owned(self) -> int:
        return len(self.running) + len(self.waiting)

    def tokens_of(self, request: Request) -> float:
        return request.tokens + self.count - request.joined

    def submit(self, request: Request) -> None:
        """At `now`."""
        self.waiting.append(request)
        self._admit()

    def take(self, key: Key) -> Request:
        """Take a request out, with the tokens that it has by now; it can go on anywhere."""
        request = self.running.pop(key, None)
        if request is None:
            request = next(r for r in self.waiting if r.key == key)
            self.waiting.remove(request)
        else:
            self._leave(request)
            self._admit()
        return request

    def swap(self, seconds: float) -> None:
        """Weights change under what runs, within `seconds`: all of its KV cache is computed anew, and that of what
        waits with its cache once it gets its place."""
        self.refilled += self.kv
        for request in self.waiting:
            if not request.prefill:
                request.prefill = request.tokens
                self.refilled += request.tokens
        self._stall_s += seconds + self.kv / self.prefill_tokens_per_s

    # -- time ---------------------------------------------------------------------------------------------------

    def next_event(self) -> float:
        """When something ends, or the KV cache is full; infinity while nothing runs."""
        if not self.running:
            return math.inf
        batch = len(self.running)
        steps = max(0.0, min(self._steps_to_end(), self._steps_to_full()))
        return self.now + self._stall_s + self.decode.steps_s(batch, self.kv, steps)

    def _steps_to_end(self) -> float:
        while True:
            count, number, key = self._ends[0]
            request = self.running.get(key)
            if request is not None and request.number == number:
                return count - self.count
            heapq.heappop(self._ends)

    def _steps_to_full(self) -> float:
        batch = len(self.running)
        return (self.kv_tokens - self.kv) / batch if batch > 1 else math.inf

    def advance(self, to: float) -> None:
        """Up to the next event at most."""
        seconds, self.now = to - self.now, to
        if seconds <= 0:
            return
        stalled = min(self._stall_s, seconds)
        self._stall_s -= stalled
        batch = len(self.running)
        if not batch:
            return
        self.busy_s += seconds
        steps = self.decode.steps_in(batch, self.kv, seconds - stalled)
        self.kv_seconds += self.kv * seconds + batch * steps * (seconds - stalled) / 2
        self.kv += batch * steps
        self.count += steps
        self.generated += batch * steps

    def settle(self) -> list[Key]:
        """What has come to the end of its turn by now; then the KV cache is seen to."""
        ended: list[Key] = []
        while self.running and self._steps_to_end() < NEARLY:
            _, _, key = heapq.heappop(self._ends)
            request = self.running.pop(key)
            self._leave(request)
            ended.append(key)
        while self._steps_to_full() < NEARLY:
            self._preempt()
        if ended:
            self._admit()
        return ended

    # -- places -------------------------------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        tokens = self.tokens_of(request)
        self.kv = self.kv - tokens if self.running else 0.0
        request.remaining -= tokens - request.tokens
        request.tokens = tokens
        self._full = False

    def _preempt(self) -> None:
        """The newest one, as vLLM does; nothing gets a place before something has left."""
        key = next(reversed(self.running))
        request = self.running.pop(key)
        self._leave(request)
        self._full = True
        request.prefill = request.tokens
        self.refilled += request.tokens
        self.preempted += 1
        self.waiting.appendleft(request)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if self.running and (self._full or self.kv + request.tokens > self.kv_tokens):
                return
            self.waiting.popleft()
            request.joined, request.number = self.count, next(self._numbers)
            self.running[request.key] = request
            self.kv += request.tokens
            self._stall_s += request.prefill / self.prefill_tokens_per_s
            heapq.heappush(self._ends, (self.count + request.remaining, request.number, request.key))
