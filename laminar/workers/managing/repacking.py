"""The manager's part of repack: when to plan, who gets a plan, when one is over; and which rollouts rest.

| event                                   | action                                                            |
|-----------------------------------------|-------------------------------------------------------------------|
| each `rollout.repack_interval`, and a   | plan (`repack.plan`), write `moves/<source>` where there is none  |
| moment after each publish               |                                                                   |
| a plan's deadline, by this clock        | delete `moves/<source>`: nothing moves by it any more             |
| a rollout is much slower than others    | write `rests/<rollout>`: it draws nothing, its trajectories go    |
| five minutes later, or when so many     | delete it: another chance                                         |
| others left that too many rest          |                                                                   |
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping
from statistics import fmean

from laminar.buffer import claims
from laminar.buffer.coordination import Delete, KeyValue, Transaction, absent, unchanged
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import Complete, Cursor, Load, Move, Moves, Rest, TrainerHead, WeightsHead
from laminar.workers.context import Run
from laminar.workers.draining import Draining
from laminar.workers.managing.slowness import Window, may_rest, slow
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.repack import Handing, evacuate, plan

log = logging.getLogger(__name__)

TICK_S = 0.5
SETTLE_S = 0.75
"""From a publish to the plan: rollouts tell within a quarter of a second that they drain."""
PLAN_S = 10.0
"""How long a plan holds at its source; here a moment longer."""
LAG_S = 1.0
"""A plan that this manager wrote so long ago and does not see has been carried out; most are in a fraction of it."""
QUIET_S = 2.0
"""After a plan is over its sources and targets are left alone, until their reports show what came of it."""
REST_S = 300.0
FULL_S = 5.0
"""After nobody had room for anything of a rollout that rests, until it is looked again."""


class Repacker:
    """`rollouts` and `loads` are the manager's mirrors; `ledger.actor` is its leadership."""

    def __init__(self, run: Run, name: str, ledger: Ledger, rollouts: Mirror, loads: Mirror) -> None:
        self.run_info = run
        self.name = name
        self.ledger = ledger
        self.clock = run.clock
        self.config = run.config.rollout
        self.rollouts = rollouts
        self.loads = loads
        self.bell = Bell()
        self.weights = Mirror(run.coordination, run.keys.weights, exact=True, bell=self.bell)
        self.trainer = Mirror(run.coordination, run.keys.trainer, exact=True)
        self.cursor = Mirror(run.coordination, run.keys.cursor, exact=True)
        self.complete = Mirror(run.coordination, run.keys.complete, exact=True)
        self.moves = Mirror(run.coordination, run.keys.moves_root)
        self.rests = Mirror(run.coordination, run.keys.rests_root)
        self._numbers = itertools.count()
        self._parsed: dict[str, tuple[int, Load]] = {}
        self._first_seen: dict[tuple[str, int], float] = {}
        self._left_alone: dict[str, float] = {}
        self._standing: dict[str, tuple[float, set[str]]] = {}
        """Since when each plan stands, by its key, and its source and targets."""
        self._windows: dict[str, Window] = {}
        self._planned_at = self._sampled_at = float("-inf")
        self._published = -1
        self._published_at = float("inf")
        self._costs: list[float] = []

    @property
    def resting(self) -> set[str]:
        return {kv.key.rsplit("/", 1)[-1] for kv in self.rests.items.values()}

    async def run(self) -> None:
        async with self.weights, self.trainer, self.cursor, self.complete, self.moves, self.rests:
            while True:
                now = self.clock.monotonic()
                for mirror in (self.moves, self.rests, self.loads, self.rollouts):
                    mirror.check()
                loads = self._living_loads()
                await self._end_overdue(now)
                await self._end_needed()
                self._leave_alone(now)
                if self._due(now):
                    await self._plan(now, loads)
                await self._rest(now, loads)
                await self.bell.wait(TICK_S)

    def _living_loads(self) -> dict[str, Load]:
        """The newest report of each living rollout; parsed once each, for there may be a thousand."""
        living = {key.rsplit("/", 1)[-1] for key in self.rollouts.items}
        parsed: dict[str, tuple[int, Load]] = {}
        for key, kv in self.loads.items.items():
            worker = key.rsplit("/", 1)[-1]
            known = self._parsed.get(worker)
            if worker in living:
                fresh = known is not None and known[0] == kv.mod_revision
                parsed[worker] = known if fresh and known else (kv.mod_revision, Load.parse(kv.value))
        self._parsed = parsed
        return {worker: load for worker, (_, load) in sorted(parsed.items())}

    # -- moves --------------------------------------------------------------------------------------------------

    def _due(self, now: float) -> bool:
        """An interval has passed, or a publish a moment ago. With `update = "interrupt"` nothing drains, and without
        partial responses in the store nobody could go on."""
        newest = WeightsHead.parse(kv.value).version if (kv := self.weights.only) else -1
        if newest != self._published:
            self._published, self._published_at = newest, now
        if not self.config.repack_interval or self.config.update != "drain" or not self.config.partials:
            return False
        if now >= self._published_at + SETTLE_S:
            self._published_at = float("inf")
            return True
        return now >= self._planned_at + self.config.repack_interval

    def _work(self, loads: Mapping[str, Load]) -> int | None:
        """Trajectories that may be drawn under the newest version now, or once the trainer has taken its next batch,
        and for which those that draw have no room. None before the trainer has begun."""
        if (head := self.trainer.only) is None:
            return None
        trainer, config = TrainerHead.parse(head.value), self.run_info.config
        cursor, complete, next_batch = self.cursor.only, self.complete.only, config.trainer.groups_per_step
        groups = claims.admitted_groups(
            cursor=Cursor.parse(cursor.value).next if cursor else 0,
            consumed=trainer.consumed_groups,
            to_retire=trainer.to_retire,
            step=trainer.decided,
            max_steps=config.run.max_steps,
            groups_per_step=config.trainer.groups_per_step,
            max_ahead=config.max_ahead_groups + next_batch,
            total_groups=config.run.epochs * self.run_info.file.prompts,
            complete=Complete.parse(complete.value).groups if complete else 0,
            max_ready=config.max_ready_groups + next_batch,
            version=self._published,
            max_staleness=config.trainer.max_staleness,
        )
        drawing = [load for load in loads.values() if load.version == self._published and not load.draining]
        free = [load.batch_limit if load.room is None else load.room for load in drawing]
        room = sum(
            max(0, min(load.batch_limit - load.running - load.waiting, slots))
            for load, slots in zip(drawing, free, strict=True)
        )  # fmt: skip
        return groups * config.sampling.samples_per_prompt - room

    async def _plan(self, now: float, loads: dict[str, Load]) -> None:
        self._planned_at = now
        began = self.clock.monotonic()
        resting = self.resting
        draining = [
            Draining.of(worker, load)
            for worker, load in loads.items()
            if load.draining and not load.switching and 0 <= load.version < self._published
            and worker not in resting and self._left_alone.get(worker, 0.0) <= now
        ]  # fmt: skip
        # In a thread: long tails of a thousand rollouts take half a second, and leases are renewed in this loop.
        handings = await asyncio.to_thread(plan, draining, self._work(loads))
        self._costs = [*self._costs[-99:], self.clock.monotonic() - began]
        if handings:
            log.info(
                "%d of %d draining rollouts are to give %d trajectories to %d; plans take %.1f ms",
                len({h.source for h in handings}), len(draining), len(handings), len({h.target for h in handings}),
                1000 * fmean(self._costs),
            )  # fmt: skip
        await self._write(now, handings, loads)

    async def _write(self, now: float, handings: Iterable[Handing], loads: dict[str, Load]) -> None:
        """Each source's part under its own key, unless an earlier plan stands there."""
        revisions = {key.rsplit("/", 1)[-1]: kv.create_revision for key, kv in self.rollouts.items.items()}
        for source, part in itertools.groupby(sorted(handings, key=_source_of), key=_source_of):
            items = [h for h in part if h.target in revisions]
            if not items:
                continue  # who was to take it is gone
            targets = {h.target for h in items}
            record = Moves(
                plan=f"{self.name}/{next(self._numbers)}",
                version=loads[source].version,
                deadline_us=self.clock.now_us() + int(PLAN_S * 1e6),
                seconds=PLAN_S,
                items=[Move(trajectory=h.trajectory, target=h.target) for h in items],
                targets={t: revisions[t] for t in sorted(targets)},
            )
            key = self.run_info.keys.moves(source)
            if not await self.ledger.guarded_put(key, record, absent(key)):
                await self.ledger.check_fence()
                continue
            self._standing[key] = now, {source, *targets}
        self._leave_alone(now)

    async def _end_overdue(self, now: float) -> None:
        """Plans past their deadline, whoever wrote them; rests that have lasted; and the memory of both."""
        await self._delete(self._overdue(self.moves, now, PLAN_S + 1.0), "plan for %s is over: it was not carried out")
        await self._delete(self._overdue(self.rests, now, REST_S), "rollout %s has rested, it draws again")
        known = {(kv.key, kv.mod_revision) for m in (self.moves, self.rests) for kv in m.items.values()}
        self._first_seen = {key: at for key, at in self._first_seen.items() if key in known}

    async def _end_needed(self) -> None:
        """Rests of rollouts without which too few would draw, those that have lasted longest first."""
        living = {key.rsplit("/", 1)[-1] for key in self.rollouts.items}
        resting = [kv for kv in self.rests.items.values() if kv.key.rsplit("/", 1)[-1] in living]
        many = len(resting) - may_rest(len(living))
        if many > 0:
            longest = sorted(resting, key=lambda kv: kv.create_revision)[:many]
            await self._delete(longest, "others left: rollout %s is needed, it draws again")

    def _leave_alone(self, now: float) -> None:
        """Whoever has part in a plan that stands, or stood a moment ago: this manager's, or an earlier one's."""
        for key, kv in self.moves.items.items():
            if key not in self._standing:
                self._standing[key] = now, {key.rsplit("/", 1)[-1], *Moves.parse(kv.value).targets}
        for key, (since, involved) in list(self._standing.items()):
            if key in self.moves.items or now < since + LAG_S:
                self._left_alone |= dict.fromkeys(involved, now + QUIET_S)
            else:
                del self._standing[key]
        self._left_alone = {worker: until for worker, until in self._left_alone.items() if until > now}

    def _overdue(self, mirror: Mirror, now: float, limit_s: float) -> list[KeyValue]:
        """Seen for longer than `limit_s` by this manager: clocks of others tell nothing."""
        seen = {kv.key: self._first_seen.setdefault((kv.key, kv.mod_revision), now) for kv in mirror.items.values()}
        return [kv for kv in mirror.items.values() if now >= seen[kv.key] + limit_s]

    async def _delete(self, overdue: Iterable[KeyValue], what: str) -> None:
        for kv in overdue:
            deletion = Transaction((self.ledger.actor.guard(), unchanged(kv)), (Delete(kv.key),))
            if (await self.run_info.coordination.transact(deletion)).succeeded:
                log.info(what, kv.key.rsplit("/", 1)[-1])
            else:
                await self.ledger.check_fence()

    # -- rests --------------------------------------------------------------------------------------------------

    async def _rest(self, now: float, loads: dict[str, Load]) -> None:
        if now >= self._sampled_at + 1.0:
            self._sampled_at = now
            resting = self.resting
            # Whoever has rested begins anew: what it reported before must not send it back at once.
            self._windows = {worker: self._windows.get(worker, Window()) for worker in loads if worker not in resting}
            for worker, window in self._windows.items():
                window.add(now, loads[worker])
            for worker, reason in slow(self._windows, resting).items():
                await self._send_to_rest(worker, reason)
        if self.config.partials:
            await self._evacuate(now, loads)

    async def _evacuate(self, now: float, loads: dict[str, Load]) -> None:
        """What resting rollouts have goes to others of their versions, except to those that are just being emptied, or
        filled with what others were. Where a plan is still under way, or nobody else has room, it goes on where it
        is."""
        resting = self.resting & loads.keys()
        full = [w for w in sorted(resting) if loads[w].tail and self._left_alone.get(w, 0.0) <= now]
        if not full:
            return
        awake = [
            Draining.of(worker, load)
            for worker, load in loads.items()
            if worker not in resting and not load.switching
            and not (load.draining and self._left_alone.get(worker, 0.0) > now)
        ]  # fmt: skip
        handings = await asyncio.to_thread(evacuate, [Draining.of(w, loads[w]) for w in full], awake)
        await self._write(now, handings, loads)
        self._left_alone |= dict.fromkeys(set(full) - {h.source for h in handings}, now + FULL_S)

    async def _send_to_rest(self, worker: str, reason: str) -> None:
        key = self.run_info.keys.rest(worker)
        record = Rest(reason=reason, until_us=self.clock.now_us() + int(REST_S * 1e6))
        if await self.ledger.guarded_put(key, record, absent(key)):
            log.warning("rollout %s is slow and rests for %.0f s: %s", worker, REST_S, reason)
        else:
            await self.ledger.check_fence()


def _source_of(handing: Handing) -> str:
    return handing.source
