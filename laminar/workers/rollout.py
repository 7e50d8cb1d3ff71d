"""The rollout worker: draws groups, generates trajectories, finishes them with a reward.

| task      | consumes                       | waits for                      | unblocked by               |
|-----------|--------------------------------|--------------------------------|----------------------------|
| steer     | weights, inbox, trainer head   | room, admission, a new version | etcd watches, finished work|
| generate  | one trajectory each            | engine, environment, flush     | chunks, replies            |
| flusher   | pending rows                   | flush interval                 | time, a wanted flush       |
| finisher  | finished trajectories          | a finished trajectory          | generate                   |
| reporter  | engine load                    | a change, or time              | time                       |
| mover     | moves                          | a plan                         | etcd watch                 |

One version a trajectory: weights change only when the engine is empty, unless `update = "interrupt"`. The engine
outlives a lost lease: the worker then drops what it held and joins again under a new id.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import Delete, Transaction, unchanged
from laminar.buffer.ledger import Ledger
from laminar.buffer.partials import PartialLog, PartialRows, TrajectoryTerm, assemble, read_partials
from laminar.buffer.prompts import locate
from laminar.buffer.records import Complete, EvaluationRequest, TrainerHead, WeightsHead
from laminar.workers.context import Member, Run
from laminar.workers.environments.base import Prompt
from laminar.workers.evaluation import Evaluator
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.patience import patiently
from laminar.workers.pools import prompt_of
from laminar.workers.rollouts.equipment import Equipment
from laminar.workers.rollouts.generation import Generation, Halted, Lost, Where
from laminar.workers.rollouts.halting import Halting
from laminar.workers.rollouts.loading import Loader
from laminar.workers.rollouts.moving import Mover
from laminar.workers.rollouts.outbox import Done, Finisher, Flusher
from laminar.workers.rollouts.reporting import Reporter
from laminar.workers.rollouts.steering import Action, Do, View, steer
from laminar.workers.rollouts.trajectory import Trajectory
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

STEER_INTERVAL_S = 1.0
"""How often a rollout looks again without having been told of a change."""


class Rollout:
    """One life of a rollout worker under one lease."""

    def __init__(self, run: Run, member: Member, equipment: Equipment) -> None:
        self.run_info = run
        self.member = member
        self.equipment = equipment
        self.config = run.config
        self.clock = run.clock
        self.engine = equipment.engine
        self.ledger: Ledger = member.ledger
        self.live: dict[tuple[int, int], Trajectory] = {}
        self.tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.capacity = min(self.config.rollout.max_running, equipment.capacity.max_running)
        self.stopping = False
        self.switching = False
        """Another version is about to be loaded: nobody hands over anything of the present one any more."""
        self.bell = Bell()
        self._cursor_seen = 0
        self._failure: BaseException | None = None
        partials = PartialLog(run.storage, member.id, sync=self.config.rollout.fsync)
        self.mover = Mover(self)
        self.flusher = Flusher(
            partials,
            lambda: self.live.values(),
            run.clock,
            interval_s=self.config.flush_interval,
            enabled=self.config.rollout.partials,
            unread=lambda: self.mover.unread,
        )
        self.finisher = Finisher(run.storage, self.ledger, run.clock, self._ended)
        self.generation = Generation(
            self.config, self.engine, equipment.host, equipment.conversation, self.ledger, self.flusher, run.clock,
            equipment.stop_token_ids,
        )  # fmt: skip
        self.halting = Halting(self.generation, run.clock, self._start)
        self.evaluator = Evaluator(run, member, equipment, self.bell)
        self.reporter = Reporter(self)
        self.loader = Loader(self)
        keys = run.keys
        self.weights = Mirror(run.coordination, keys.weights, exact=True, bell=self.bell)
        self.trainer = Mirror(run.coordination, keys.trainer, exact=True, bell=self.bell)
        self.inbox = Mirror(run.coordination, keys.inbox(member.id), bell=self.bell)
        self.evaluations = Mirror(run.coordination, keys.evaluations, bell=self.bell)
        self.rest = Mirror(run.coordination, keys.rest(member.id), exact=True, bell=self.bell)
        self.complete = Mirror(run.coordination, keys.complete, exact=True)
        self.relays = Mirror(run.coordination, keys.workers("relay"))

    async def serve(self) -> None:
        """Until the run is done. Raises LeaseLost or Fenced when this life is over, EngineError when the engine is,
        ConfigChanged when the whole worker must begin anew."""
        # A load that the life before began may go on: what is drawn before its end would be labelled wrongly.
        await self.engine.settled()
        async with self.weights, self.trainer, self.inbox, self.evaluations, self.relays, self.rest, self.complete:
            try:
                await until_first(
                    self._steer(),
                    self.flusher.run(),
                    self.finisher.run(),
                    self.reporter.run(),
                    self.mover.run(),
                    self.member.until_lost(),
                    self.member.until_changed(),
                    self._watch_engine(),
                )
            finally:
                for task in self.tasks.values():
                    task.cancel()
                await asyncio.gather(*self.tasks.values(), return_exceptions=True)
                # The engine outlives this life: what still generated would meet the next one's weights.
                await self.evaluator.stop()
                for trajectory in self.live.values():
                    await self.engine.abort(trajectory.request)

    # -- what is seen -------------------------------------------------------------------------------------------

    def head(self) -> TrainerHead | None:
        kv = self.trainer.only
        return TrainerHead.parse(kv.value) if kv else None

    def published(self) -> WeightsHead | None:
        kv = self.weights.only
        return WeightsHead.parse(kv.value) if kv else None

    @property
    def resting(self) -> bool:
        return self.rest.only is not None

    def draining(self) -> bool:
        return self.view([]).draining

    async def waiting(self) -> list[Held]:
        """The claims in this worker's inbox, in the order of drawing."""
        result: list[Held] = []
        for key, item in sorted(self.inbox.items.items()):
            name = key.rsplit("/", 1)[-1]
            kv = await self.run_info.coordination.get(self.run_info.keys.claims + name)
            held = Held.of(kv) if kv else None
            if held is None or held.claim.owner != self.member.id:
                # The item that was seen: the trajectory may be back by now, with another of the same name.
                await self.run_info.coordination.transact(Transaction((unchanged(item),), (Delete(key),)))
            elif held.id not in self.live:
                result.append(held)
        return result

    def room(self) -> int:
        """Slots that neither what lives here nor what waits in the inbox takes; below 0 if more waits than fits."""
        taken = {trajectory.name for trajectory in self.live.values()}
        return self.capacity - len(taken.union(key.rsplit("/", 1)[-1] for key in self.inbox.items))

    def view(self, waiting: list[Held]) -> View:
        """What steering decides by; `waiting` is what came to the inbox, in the order of drawing."""
        published = self.published()
        room = self.capacity - len(self.live)
        return View(
            newest=published.version if published else -1,
            loaded=self.engine.version,
            # What scores needs no engine any more: weights may change beside a slow reward.
            running=sum(t.turn_state != "scoring" for t in self.live.values()),
            room=room,
            inbox=tuple(h.claim.version for h in waiting),
            evaluations=self.evaluator.claimed_versions,
            evaluating=self.evaluator.running,
            admitted=self._admitted(room) if room > 0 else 0,
            stopping=self.stopping,
            resting=self.resting,
            interrupt=self.config.rollout.update == "interrupt",
        )

    def _admitted(self, room: int) -> int:
        """Groups that may be drawn, as far as the last seen cursor tells; the draw itself asks again."""
        return claims.draw_size(room, self._groups_left(self._cursor_seen), self.config.sampling.samples_per_prompt)

    def _groups_left(self, cursor: int) -> int:
        head = self.head()
        if head is None or head.state != "running":
            return 0
        complete = self.complete.only
        return claims.admitted_groups(
            cursor=cursor,
            consumed=head.consumed_groups,
            to_retire=head.to_retire,
            step=head.decided,
            max_steps=self.config.run.max_steps,
            groups_per_step=self.config.trainer.groups_per_step,
            max_ahead=self.config.max_ahead_groups,
            total_groups=self.config.run.epochs * len(self.equipment.pool),
            complete=Complete.parse(complete.value).groups if complete else 0,
            max_ready=self.config.max_ready_groups,
            version=self.engine.version,
            max_staleness=self.config.trainer.max_staleness,
        )

    # -- what is done -------------------------------------------------------------------------------------------

    async def _steer(self) -> None:
        while True:
            head = self.head()
            if head is not None and head.state != "running" and not self.live and not self.evaluator.running:
                return
            await self.evaluator.claim_requests(
                [EvaluationRequest.parse(kv.value) for _, kv in sorted(self.evaluations.items.items())],
                more=not (self.stopping or self.resting),
            )
            waiting = await self.waiting() if self.inbox.items else []
            view = self.view(waiting)
            action = steer(view)
            progressed = await self._do(action, waiting, view)
            if not progressed:
                await self.bell.wait(STEER_INTERVAL_S)

    async def _do(self, action: Action, waiting: list[Held], view: View) -> bool:
        if action.do is Do.LOAD:
            return await self.loader.load(action.version)
        if action.do is Do.SWAP:
            return await self.loader.swap(action.version)
        if action.do is Do.ADOPT:
            await self._adopt([h for h in waiting if view.interrupt or h.claim.version == action.version][: view.room])
            return True
        if action.do is Do.EVALUATE:
            self.evaluator.start(action.version, self.engine.digest)
            return True
        if action.do is Do.DRAW:
            return await self._draw(view.room)
        return False

    async def _draw(self, room: int) -> bool:
        samples = self.config.sampling.samples_per_prompt

        def groups(cursor: int) -> int:
            self._cursor_seen = cursor
            return claims.draw_size(room, self._groups_left(cursor), samples)

        held = await self.ledger.draw(groups=groups, samples_per_prompt=samples, version=self.engine.version)
        for h in held:
            self._start(self._trajectory(h))
        if held:
            self._cursor_seen = held[-1].id[0] + 1
            log.info("drew groups %d to %d under version %d", held[0].id[0], held[-1].id[0], self.engine.version)
        return bool(held)

    def _trajectory(self, held: Held) -> Trajectory:
        return Trajectory(
            held=held,
            worker=self.member.id,
            version=self.engine.version,
            digest=self.engine.digest,
            started_at=self.clock.now_us(),
        )

    def _start(self, trajectory: Trajectory) -> None:
        self.live[trajectory.id] = trajectory
        task = asyncio.create_task(self._generate(trajectory), name=f"generate {trajectory.name}")
        self.tasks[trajectory.id] = task
        task.add_done_callback(self._generated)

    async def _generate(self, trajectory: Trajectory) -> None:
        try:
            finished = await self.generation.run(trajectory, self._where(trajectory.id[0]))
        except Lost:
            self.gave(trajectory)
            return
        except Halted:
            self.tasks.pop(trajectory.id, None)
            self.halting.parked(trajectory)
            return
        self.finisher.put(Done(trajectory.held, finished))

    def _generated(self, task: asyncio.Task[None]) -> None:
        """Whatever ended a trajectory's task (the engine or the lease is gone, a fault of ours) ends this life: the
        trajectory would stay claimed, by a worker that does nothing for it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.bell.ring()

    def _where(self, group: int) -> Where:
        epoch, _, index = locate(group, len(self.equipment.pool), self.config.run.seed)
        prompt: Prompt = prompt_of(self.equipment.pool.row(index))
        return Where(epoch, index, prompt)

    def _ended(self, done: Done) -> None:
        self.reporter.ended(sum(done.finished.partial.policy_mask))
        self.live.pop(done.held.id, None)
        self.tasks.pop(done.held.id, None)
        self.bell.ring()

    def _forget(self, id: tuple[int, int]) -> None:
        self.live.pop(id, None)
        self.tasks.pop(id, None)
        self.bell.ring()

    def gave(self, trajectory: Trajectory) -> None:
        """It is another worker's now, who may have to read it from this one's log yet."""
        self.halting.forget(trajectory)
        self.mover.handed(trajectory)
        self._forget(trajectory.id)

    # -- adoption -----------------------------------------------------------------------------------------------

    async def _adopt(self, waiting: list[Held]) -> None:
        """Copy what the last source made durable into this worker's log, then become the source."""
        wanted: dict[str, set[TrajectoryTerm]] = {}
        for h in waiting:
            wanted.setdefault(h.claim.source.worker, set()).add((*h.id, h.claim.source.term))
        storage = self.run_info.storage
        logs = {
            s: await patiently(self.clock, f"reading the partial log of {s}", partial(read_partials, storage, s, terms))
            for s, terms in wanted.items()
        }
        for damage in (d for rows in logs.values() for d in rows.damage):
            log.error("adopting from a damaged log, what it lost is generated again: %s", damage)
        adopting: list[Trajectory] = []
        for held in waiting:
            adopting.append(self._restored(held, logs[held.claim.source.worker]))
            await asyncio.sleep(0)  # long trajectories take milliseconds each: generation and the lease go on meanwhile
        self.live |= {t.id: t for t in adopting}
        # One flush for all: a flush each would keep the last of 256 from generating for seconds.
        await self.flusher.durable()
        for trajectory in adopting:
            source = trajectory.held.claim.source.worker
            progress = trajectory.policy_tokens
            taken = await self.ledger.adopt(trajectory.held, version=self.engine.version, progress=progress)
            if taken is None:
                self._forget(trajectory.id)
                continue
            trajectory.held = taken
            self.mover.arrived(trajectory)
            log.info(
                "adopted trajectory %s from %s with %d tokens under version %d (term %d)",
                trajectory.name, source, len(trajectory.token_ids), self.engine.version, taken.claim.term,
            )  # fmt: skip
            self._start(trajectory)

    def _restored(self, held: Held, log_of_source: PartialRows) -> Trajectory:
        trajectory = self._trajectory(held)
        rows = log_of_source.rows.get((*held.id, held.claim.source.term), [])
        if rows:
            partial = assemble(rows)
            if partial.gap_at is not None:
                log.warning("trajectory %s: rows after token %d are lost", trajectory.name, partial.gap_at)
            trajectory.restore(partial)
        trajectory.pending = trajectory.all_rows(self.clock.now_us())
        return trajectory

    # -- watching -----------------------------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        while True:
            await self.engine.check()
            if self._failure is not None:
                raise self._failure
            for mirror in (self.inbox, self.evaluations, self.relays, self.rest):
                mirror.check()
            await self.clock.sleep(0.5)

    # -- leaving ------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Graceful stop: what runs is flushed and handed to whoever the manager chooses, and so is what waits."""
        self.stopping = True
        for task in list(self.tasks.values()):
            task.cancel()
        await self.flusher.durable()
        # From this report on nobody moves anything here any more.
        await self.reporter.write()
        unfinished = [*(t.held for t in self.live.values()), *await self.waiting()]
        released = 0
        for held in unfinished:
            released += await self.ledger.hand_over(held, claims.reassigned(held.claim, "", "stop"))
        log.info("left %d of %d unfinished trajectories to others", released, len(unfinished))
