"""The baselines in which everybody waits for the slowest: in turns, one step stale, streamed mini-batches.

    in turns   | generate 0 | train 0 | generate 1 | train 1 |
    one step   | generate 0 | generate 1 | generate 2 |            weights change for all at |, when generation
                            | train 0    | train 1    |            and training both have ended
    stream     | generate 0  |  generate 1  |
               |  train 0 ····|   train 1 ····|                    mini-batch by mini-batch, as they are complete

A batch is spread over the engines in equal parts before its generation begins, as verl does; which groups make a
mini-batch is the trainer's own rule (`buffer.sampler`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from laminar.buffer.sampler import OpenGroups, Outcome, select
from laminar.simulator.scale.costs import RELOAD_S
from laminar.simulator.scale.engine import Engine, Key, Request
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Meter
from laminar.simulator.scale.meters import Outcome as Measured
from laminar.simulator.scale.policies import POLICIES, Pipeline
from laminar.simulator.scale.split import Split

SAMPLES_A_BATCH = 50
"""Points of the curve of KV use, of each batch."""


class Barriers:
    """One job under one of the three policies."""

    def __init__(self, name: str, job: Job, split: Split) -> None:
        self.policy = POLICIES[name]
        self.job = job
        self.split = split
        self.engines = [job.engine() for _ in range(self.split.rollouts)]
        self.meter = Meter(name, job, self.split, self.engines)
        self.samples = job.settings.job.samples_per_prompt
        self.batches: list[Sequence[int]] = []
        """The groups of each step."""

    def run(self) -> Measured:
        match self.policy.pipeline:
            case Pipeline.TURNS:
                self._turns()
            case Pipeline.ONE_STEP:
                self._one_step()
            case _:
                self._stream()
        return self.meter.outcome()

    # -- the three ----------------------------------------------------------------------------------------------

    def _turns(self) -> None:
        now = 0.0
        while not self.meter.complete:
            groups = self._groups(self.meter.steps)
            ends = self._generate(groups, now)
            # Weights are resharded in place, and the engine's memory is given away and taken again.
            ready = max(ends.values()) + RELOAD_S
            train_s = self.job.train_s(groups, self.split.trainer_gpus)
            now = ready + train_s + RELOAD_S
            self._trained(now, groups, 0, train_s)

    def _one_step(self) -> None:
        batch = self._groups(0)
        now = max(self._generate(batch, 0.0).values())
        while not self.meter.complete:
            following = self._groups(self.meter.steps + 1)
            generated = max(self._generate(following, now).values())
            train_s = self.job.train_s(batch, self.split.trainer_gpus)
            now = max(generated, now + train_s) + self.job.costs.weights.together_s
            # The first batch was generated under the weights that it trains.
            age = 1 if self.meter.steps else 0
            self._trained(now, batch, age, train_s)
            batch = following

    def _stream(self) -> None:
        now = 0.0
        job = self.job.settings.job
        size = max(1, job.groups_per_step // job.mini_batches)
        while not self.meter.complete:
            groups = self._groups(self.meter.steps)
            ends = sorted((at, key) for key, at in self._generate(groups, now).items())
            opened = OpenGroups(self.samples, baseline=self.samples > 1)
            missing = dict.fromkeys(groups, self.samples)
            free, train_s, trained = now, 0.0, 0
            for place, (at, key) in enumerate(ends):
                opened.add([Outcome(*key, "ok", float(key[1] % 2), place)])
                missing[key[0]] -= 1
                selection = None if missing[key[0]] else select(opened, min(size, len(groups) - trained), "count")
                if selection is not None:
                    opened.consume(selection.trained)
                    trained += len(selection.trained)
                    seconds = self.job.train_s(selection.trained, self.split.trainer_gpus, 1)
                    free, train_s = max(free, at) + seconds, train_s + seconds
            now = free + self.job.costs.weights.together_s
            self._trained(now, groups, 0, train_s)

    # -- generation ---------------------------------------------------------------------------------------------

    def _groups(self, batch: int) -> list[int]:
        size = self.job.settings.job.groups_per_step
        return list(range(batch * size, (batch + 1) * size))

    def _trained(self, now: float, groups: Sequence[int], age: int, train_s: float) -> None:
        self.batches.append(groups)
        self.meter.trained(now, groups, Counter({age: len(groups) * self.samples}), train_s)

    def _generate(self, groups: Sequence[int], now: float) -> dict[Key, float]:
        """When each trajectory of a batch has its reward, if generation begins `now`."""
        keys = [(g, s) for g in groups for s in range(self.samples)]
        ends: dict[Key, float] = {}
        curves: list[list[tuple[float, float]]] = []
        for engine, part in zip(self.engines, np.array_split(np.arange(len(keys)), len(self.engines)), strict=True):
            engine.advance(now)
            curves.append(self._drive(engine, [keys[i] for i in part], ends))
        self._sample(curves, now, max(ends.values()))
        return ends

    def _drive(self, engine: Engine, keys: Sequence[Key], ends: dict[Key, float]) -> list[tuple[float, float]]:
        """Let an engine generate these, and tell its KV tokens over time."""
        turn, reward_s = dict.fromkeys(keys, 0), self.job.settings.environment.reward_s
        acting: list[tuple[float, Key]] = []
        curve: list[tuple[float, float]] = []
        for key in keys:
            engine.submit(self.job.first(key))
        while engine.owned or acting:
            due = acting[0][0] if acting else float("inf")
            engine.advance(min(engine.next_event(), due))
            if acting and engine.now >= due:
                _, key = heapq.heappop(acting)
                turns = self.job.turns_of(key)
                if turn[key] < len(turns):
                    tokens = self.job.prompt_tokens + sum(turns[: turn[key]])
                    engine.submit(Request(key, tokens, turns[turn[key]], 0.0))
                else:
                    ends[key] = engine.now + reward_s
            for key in engine.settle():
                turn[key] += 1
                if self.job.turns > 1:
                    # The environment hears the last turn too.
                    heapq.heappush(acting, (engine.now + self.job.acting_s(key, turn[key]), key))
                else:
                    ends[key] = engine.now + reward_s
            curve.append((engine.now, engine.kv))
        return curve

    def _sample(self, curves: list[list[tuple[float, float]]], begin: float, end: float) -> None:
        """Add the KV use of all engines to the curve."""
        capacity = sum(e.kv_tokens for e in self.engines)
        times = np.linspace(begin, end, SAMPLES_A_BATCH, endpoint=False)
        total = np.zeros(len(times))
        for curve in filter(None, curves):
            at, kv = np.array([point[0] for point in curve]), np.array([point[1] for point in curve])
            # Tokens between two events grow about evenly; after the last one nothing is left.
            total += np.interp(times, at, kv, right=0.0)
        self.meter.kv_over_time += [(float(t), float(k) / capacity) for t, k in zip(times, total, strict=True)]
