"""A job in which nobody waits for others, in virtual time: rollouts, trainer and manager as events.

    ends of turns, environments ──▶ rollout: steer ──draw──▶ engine       (real: steering, admission, size of a draw)
    complete groups ──▶ trainer: select ──train_s──▶ publish ──▶ rollouts  (real: which groups a step means)
    each interval, after each publish ──▶ manager: plan ──▶ moves         (real: the plan, growth, its limits)

What is called as it is, and what is modelled, is told in `scale/__init__.py`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar.buffer import claims
from laminar.buffer.sampler import OpenGroups, Outcome, select
from laminar.errors import ConfigError
from laminar.simulator.scale.engine import Key, Request
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Meter
from laminar.simulator.scale.meters import Outcome as Measured
from laminar.simulator.scale.moves import Moves
from laminar.simulator.scale.policies import POLICIES, Repack
from laminar.simulator.scale.rollout import Rollout
from laminar.simulator.scale.split import Split
from laminar.workers.managing.repacking import SETTLE_S
from laminar.workers.rollouts.steering import Do, View, steer

ENDLESS = 1 << 60
SAMPLE_S = 5.0
"""Between two points of the curve of KV use."""
MOST_STILL_S = 1e6
"""Simulated seconds in which nothing ends, after which nothing is waited for any more: eleven days."""
MOST_EVENTS_AT_ONCE = 1_000_000
"""Events without any progress of time: a fault of the simulator, not of a job."""


@dataclass
class Trainer:
    """The head of the trainer as etcd has it, and what its intake has seen."""

    opened: OpenGroups
    decided: int = 0
    version: int = 0
    consumed: int = 0
    busy: bool = False
    complete: int = 0
    missing: dict[int, int] = field(default_factory=dict)
    """Samples of each open group that have not ended yet."""


class Flowing:
    """One job under one of the policies in which nobody waits."""

    def __init__(self, name: str, job: Job, split: Split) -> None:
        self.policy = POLICIES[name]
        self.job = job
        self.split = split
        self.now = 0.0
        self.cursor = 0
        self.groups_per_step = job.settings.job.groups_per_step
        self.max_ahead = job.settings.max_ahead_groups
        self.max_ready = job.settings.max_ready_groups if self.policy.ready else ENDLESS
        self.max_staleness = job.settings.job.max_staleness
        self.moved_at = 0.0
        """When a turn or a step ended last."""
        self.versions: dict[Key, int] = {}
        """Under which version each unfinished or untrained trajectory was begun."""
        self.samples = job.samples
        self.trainer = Trainer(OpenGroups(self.samples, baseline=self.samples > 1))
        machine = max(1, job.settings.cluster.gpus_per_machine // job.costs.tensor_parallel)
        self.rollouts = [
            # The master is on the trainer's machine.
            Rollout(f"rollout-{i:05d}", job, relay=1 + i // machine)
            for i in range(self.split.rollouts)
        ]
        self.published_at = {0: -1e9}
        self.moves = Moves(self, growing=self.policy.repack is Repack.GROWING)
        self.meter = Meter(name, job, self.split, [r.engine for r in self.rollouts])
        self.chance = random.Random(f"flowing/{job.settings.job.seed}")
        self.batches: list[Sequence[int]] = []
        """The groups of each decided step."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # -- time ---------------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), do))

    def run(self) -> Measured:
        self.at(0.0, self.wake_all)
        self._each(SAMPLE_S, lambda: self.meter.sample(self._all_advanced()))
        if self.policy.repack is not Repack.OFF:
            self._each(self.job.settings.rollout.repack_interval, self.moves.plan)
        idle = 0
        while not self.meter.complete:
            when, _, do = heapq.heappop(self._events)
            idle = 0 if when > self.now else idle + 1
            if idle > MOST_EVENTS_AT_ONCE:
                raise RuntimeError(f"{self.meter.name}: time stands still at {self.now:.3f} s")
            self.now = when
            if when > self.moved_at + MOST_STILL_S:
                raise ConfigError(
                    f"{self.meter.name}: nothing has ended for {MOST_STILL_S:.0f} s of simulated time, after "
                    f"{self.trainer.decided} steps were begun: something takes far too long, such as decoding "
                    "(costs.decode), a prefill (costs.prefill_tokens_per_s) or training (costs.train_tokens_per_s)"
                )
            do()
        return self.meter.outcome(self.moves.moved, self.moves.plan_ms)

    def _each(self, seconds: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.at(self.now + seconds, again)

        self.at(self.now + seconds, again)

    def _all_advanced(self) -> float:
        for rollout in self.rollouts:
            rollout.engine.advance(self.now)
        return self.now

    def changed(self, rollout: Rollout) -> None:
        """Something was given to or taken from its engine: its next event is another one."""
        rollout.stamp += 1
        stamp = rollout.stamp
        when = rollout.engine.next_event()
        if when < float("inf"):
            self.at(when, lambda: self._engine_event(rollout, stamp))

    def _engine_event(self, rollout: Rollout, stamp: int) -> None:
        if stamp != rollout.stamp:
            return
        rollout.engine.advance(self.now)
        for key in rollout.engine.settle():
            self._turn_ended(rollout, key)
        if self._may_do(rollout):
            self.think(rollout)
        self.changed(rollout)

    # -- rollouts -----------------------------------------------------------------------------------------------

    def view(self, rollout: Rollout) -> View:
        room = rollout.room
        admitted = 0
        if room > 0 and not rollout.closed:
            admitted = claims.draw_size(room, self._groups_left(rollout.version), self.samples)
        return View(
            newest=self.trainer.version,
            loaded=rollout.version,
            running=len(rollout.live) - len(rollout.scoring),
            room=room,
            admitted=admitted,
            interrupt=self.policy.interrupt,
        )

    def _groups_left(self, version: int) -> int:
        return claims.admitted_groups(
            cursor=self.cursor,
            consumed=self.trainer.consumed,
            to_retire=0,
            step=self.trainer.decided,
            max_steps=ENDLESS,
            groups_per_step=self.groups_per_step,
            max_ahead=self.max_ahead,
            total_groups=ENDLESS,
            complete=self.trainer.consumed + self.trainer.complete,
            max_ready=self.max_ready,
            version=version,
            max_staleness=self.max_staleness,
        )

    def wake_all(self) -> None:
        """Who comes first is chance; each gets what one draw takes, as long as anybody gets anything."""
        order = list(self.rollouts)
        self.chance.shuffle(order)
        while order:
            order = [rollout for rollout in order if self.think(rollout, draws=1)]

    def _may_do(self, rollout: Rollout) -> bool:
        """Whether it is worth asking: one that is busy and cannot draw does nothing but wait, whatever it sees."""
        newest = rollout.version == self.trainer.version
        return not rollout.held or (newest and rollout.room >= self.samples) or self.policy.interrupt

    def think(self, rollout: Rollout, draws: int = ENDLESS) -> bool:
        """What a rollout does next, until it waits or has drawn so often; whether it might draw more."""
        while not rollout.loading:
            if not rollout.held:
                rollout.closed = False
            action = steer(self.view(rollout))
            if action.do is Do.DRAW:
                if not draws:
                    return True
                draws -= 1
                self._draw(rollout)
            elif action.do is Do.LOAD or action.do is Do.SWAP:
                self._take_version(rollout, action.version, swap=action.do is Do.SWAP)
            else:
                rollout.closed = rollout.held and not self.policy.continuous
                return False
        return False

    def _draw(self, rollout: Rollout) -> None:
        count = claims.draw_size(rollout.room, self._groups_left(rollout.version), self.samples)
        rollout.engine.advance(self.now)
        for group in range(self.cursor, self.cursor + count):
            self.trainer.missing[group] = self.samples
            for sample in range(self.samples):
                key = (group, sample)
                self.versions[key] = rollout.version
                rollout.begin(key)
        self.cursor += count
        self.changed(rollout)

    def _take_version(self, rollout: Rollout, version: int, *, swap: bool) -> None:
        """From the relay of its host, once that has the version; or with all others, from the trainer."""
        weights, published = self.job.costs.weights, self.published_at[version]
        arrives = published if self.policy.together else published + weights.arrival_s(rollout.relay)
        rollout.loading = True
        load_s = weights.together_s if self.policy.together else weights.load_s

        def loaded() -> None:
            rollout.version = version
            rollout.loading = False
            self.think(rollout)

        def swapped() -> None:
            rollout.engine.advance(self.now)
            rollout.engine.swap(load_s)
            loaded()
            self.changed(rollout)

        if swap:
            self.at(max(self.now, arrives), swapped)
        else:
            self.at(max(self.now, arrives) + load_s, loaded)

    def _turn_ended(self, rollout: Rollout, key: Key) -> None:
        """To the environment, which hears the last turn too; where there is one turn, there is no environment."""
        rollout.turn[key] += 1
        self.moved_at = self.now
        if self.job.turns == 1:
            self._score(rollout, key)
            return
        rollout.acting.add(key)
        version = rollout.version
        acting_s = self.job.acting_s(key, rollout.turn[key])
        self.at(self.now + acting_s, lambda: self._replied(rollout, key, version))

    def _replied(self, rollout: Rollout, key: Key, version: int) -> None:
        """The environment's reply to a turn that ended under `version`: under another, all it has is computed anew."""
        rollout.acting.discard(key)
        turns, turn = self.job.turns_of(key), rollout.turn[key]
        if turn == len(turns):
            self._score(rollout, key)
            if self._may_do(rollout):
                self.think(rollout)
            return
        tokens = self.job.prompt_tokens + sum(turns[:turn])
        anew = tokens if rollout.version != version else 0
        rollout.engine.advance(self.now)
        rollout.engine.refilled += anew
        rollout.engine.submit(Request(key, tokens, turns[turn], anew))
        self.changed(rollout)

    def _score(self, rollout: Rollout, key: Key) -> None:
        reward_s = self.job.settings.environment.reward_s
        if reward_s:
            rollout.scoring.add(key)
            self.at(self.now + reward_s, lambda: self._finished(rollout, key))
        else:
            self._finished(rollout, key, thinks=False)

    def _finished(self, rollout: Rollout, key: Key, *, thinks: bool = True) -> None:
        """With its reward, and registered. What commits it is left out: a fraction of a second."""
        rollout.end(key)
        trainer, (group, sample) = self.trainer, key
        trainer.opened.add([Outcome(group, sample, "ok", float(sample % 2), next(self._numbers))])
        trainer.missing[group] -= 1
        if not trainer.missing[group]:
            del trainer.missing[group]
            trainer.complete += 1
            self._decide()
        if thinks:
            self.think(rollout)
            self.changed(rollout)

    # -- trainer ------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """The next step's batch, if the trainer has time and there is one."""
        trainer, size = self.trainer, self.groups_per_step
        if trainer.busy or trainer.complete < size:
            return
        selection = select(trainer.opened, size, "count")
        assert selection is not None
        groups = selection.trained
        self.batches.append(groups)
        trainer.opened.consume(groups)
        trainer.complete -= len(groups)
        trainer.consumed += selection.consumed
        step, trainer.decided, trainer.busy = trainer.decided, trainer.decided + 1, True
        ages = Counter(step - self.versions.pop((g, s)) for g in groups for s in range(self.samples))
        train_s = self.job.train_s(groups, self.split.trainer_gpus)
        self.at(self.now + train_s, lambda: self._trained(groups, ages, train_s))
        self.at(self.now, self.wake_all)

    def _trained(self, groups: Sequence[int], ages: Counter[int], train_s: float) -> None:
        weights = self.job.costs.weights
        publish_s = weights.together_s if self.policy.together else weights.publish_s

        def published() -> None:
            self.moved_at = self.now
            self.trainer.busy = False
            self.trainer.version += 1
            self.published_at[self.trainer.version] = self.now
            self._all_advanced()
            self.meter.trained(self.now, groups, ages, train_s + publish_s)
            if self.policy.repack is not Repack.OFF:
                self.at(self.now + SETTLE_S, self.moves.plan)
            self._decide()
            self.wake_all()

        self.at(self.now + publish_s, published)
