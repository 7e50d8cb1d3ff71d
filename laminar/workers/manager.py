"""The manager: elected among the relays, it gives orphaned trajectories to living rollouts, finishes those that
cannot go on, says which versions are still needed and how many groups are complete, and removes what nothing refers
to.

| event                          | action                                                     |
|--------------------------------|------------------------------------------------------------|
| a rollout's key vanishes       | sweep at once                                              |
| an election; each lease time   | sweep: no orphan can hide                                  |
| a relay comes or goes          | plan the chain anew; name another master if it was that    |
| a sweep found exhausted claims | finish them with an error row                              |
| draining rollouts, slow ones   | have them hand over what they have (`repacking.py`)        |
| each minute                    | clean up (`cleaning.py`)                                   |
"""

from __future__ import annotations

import logging

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import created_at
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.partials import Partial, assemble, read_partials
from laminar.buffer.prompts import locate
from laminar.buffer.records import Complete, Cursor, Load, Retain, WorkerRecord
from laminar.buffer.session import Election, Leadership
from laminar.errors import CoordinationError, CoordinationUnavailable, StoreError
from laminar.workers.context import Member, Run
from laminar.workers.managing.assignment import Candidate, assign
from laminar.workers.managing.chain_planning import ChainPlanner
from laminar.workers.managing.cleaning import Cleaner
from laminar.workers.managing.repacking import Repacker
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.tasks import until_first

log = logging.getLogger(__name__)

CLEAN_INTERVAL_S = 60.0
TELL_INTERVAL_S = 2.0
CAMPAIGN_PAUSE_S = 1.0


class Manager:
    """One life of a manager under its leadership."""

    def __init__(self, run: Run, member: Member, leadership: Leadership) -> None:
        self.run_info = run
        self.member = member
        self.clock = run.clock
        self.ledger = Ledger(run.coordination, run.keys, member.id, leadership)
        self.cleaner = Cleaner(run, self.ledger)
        self.planner = ChainPlanner(run, self.ledger)
        self.bell = Bell()
        self.rollouts = Mirror(run.coordination, run.keys.workers("rollout"), bell=self.bell)
        self.loads = Mirror(run.coordination, run.keys.loads_root + "rollout/")
        self.repacker = Repacker(run, member.id, self.ledger, self.rollouts, self.loads)
        self._claims: dict[str, Held] = {}
        """As they were read last."""
        self.handed_over = 0
        self.finished = 0
        self.segments = 0
        self.term = leadership.create_revision

    async def run(self) -> None:
        async with self.rollouts, self.loads:
            await until_first(
                self._sweep_always(), self._clean_always(), self._tell_always(), self.planner.run(),
                self.repacker.run(),
            )  # fmt: skip

    # -- orphans ------------------------------------------------------------------------------------------------

    async def _sweep_always(self) -> None:
        seen: set[str] = set()
        while True:
            self.rollouts.check()
            self.loads.check()
            alive = set(self.rollouts.items)
            for key in sorted(seen - alive):
                log.warning("rollout %s is gone", key.rsplit("/", 1)[-1])
            for key in sorted(alive - seen):
                log.info("rollout %s is here", key.rsplit("/", 1)[-1])
            seen = alive
            await self.sweep()
            await self.bell.wait(self.run_info.config.coordination.lease_ttl)

    async def sweep(self) -> None:
        """Look at all claims once."""
        held = self._claims = await all_claims(self.run_info.coordination, self.run_info.keys, self._claims)
        candidates = self._candidates(held)
        lost = claims.orphans(held, {c.id for c in candidates})
        if lost:
            # The mirror may lag, as after a restart of etcd: nothing is taken from a worker that has just joined.
            living = await self.run_info.coordination.range(self.run_info.keys.workers("rollout"))
            lost = claims.orphans(held, {WorkerRecord.parse(kv.value).id for kv in living.items})
        await self._hand_over([h for h in lost if not claims.exhausted(h.claim)], candidates)
        await self._put_back(held)
        # Last, since it needs storage: whatever can go on does not wait for that.
        for orphan in [h for h in lost if claims.exhausted(h.claim)]:
            try:
                await self._give_up(orphan)
            except StoreError as e:
                name = orphan.kv.key.rsplit("/", 1)[-1]
                log.error("trajectory %s cannot be finished yet, the next sweep tries again: %s", name, e)

    async def _hand_over(self, lost: list[Held], candidates: list[Candidate]) -> None:
        moved = 0
        for orphan, target in assign(lost, candidates):
            claim = claims.reassigned(orphan.claim, target.id, "death")
            alive = created_at(self.run_info.keys.worker("rollout", target.id), target.create_revision)
            moved += await self.ledger.hand_over(orphan, claim, alive)
        if moved:
            self.handed_over += moved
            log.info("gave %d orphaned trajectories to living rollouts", moved)
        elif lost and not candidates:
            log.warning("%d trajectories wait for an owner: no rollout is alive", len(lost))

    async def _put_back(self, held: dict[str, Held]) -> None:
        """A claim that waits without an inbox item would wait as long as its owner lives. Nothing is known to lose
        one, so each is told."""
        keys, alive = self.run_info.keys, {WorkerRecord.parse(kv.value).id for kv in self.rollouts.items.values()}
        if not claims.stranded(held.values(), alive, (), keys):
            return
        inbox = {kv.key for kv in (await self.run_info.coordination.range(keys.inbox_root)).items}
        for stranded in claims.stranded(held.values(), alive, inbox, keys):
            if await self.ledger.put_back(stranded):
                name, owner = stranded.kv.key.rsplit("/", 1)[-1], stranded.claim.owner
                log.error("trajectory %s waited for %s, whose inbox did not have it: put back", name, owner)

    def _candidates(self, held: dict[str, Held]) -> list[Candidate]:
        owned: dict[str, int] = {}
        for h in held.values():
            owned[h.claim.owner] = owned.get(h.claim.owner, 0) + 1
        loads = {key.rsplit("/", 1)[-1]: Load.parse(kv.value) for key, kv in self.loads.items.items()}
        result = []
        for kv in self.rollouts.items.values():
            worker = WorkerRecord.parse(kv.value).id
            version = loads[worker].version if worker in loads else -1
            result.append(Candidate(worker, kv.create_revision, version, owned.get(worker, 0)))
        # Who leaves, or changes its version, would find what it got gone, or give it away once more.
        switching = {worker for worker, load in loads.items() if load.switching}
        staying = [c for c in result if c.id not in switching]
        return [c for c in staying if c.id not in self.repacker.resting] or staying or result

    async def _give_up(self, orphan: Held) -> None:
        """A claim that cannot go on is finished with an error status, never silently dropped."""
        reason = claims.exhausted(orphan.claim)
        group, sample = orphan.id
        source = orphan.claim.source
        term = (group, sample, source.term)
        rows = (await read_partials(self.run_info.storage, source.worker, {term})).rows.get(term, [])
        now = self.clock.now_us()
        partial = assemble(rows) if rows else Partial([], [], [], [], [], 0, "generating", None, None, now)
        epoch, _, index = locate(group, self.run_info.file.prompts, self.run_info.config.run.seed)
        finished = Finished(
            group=group, sample=sample, prompt_index=index, epoch=epoch, partial=partial, finish_reason="error",
            status="gave_up", error=reason, reward=None, reward_parts={}, text="", attempts=orphan.claim.attempts,
            finished_at=now,
        )  # fmt: skip
        # A relay has many terms: what an earlier one wrote and did not register lies in the store still.
        segment = f"{self.member.id}-{self.term}-{self.segments:06d}"
        self.segments += 1
        incoming = await write_incoming(self.run_info.storage, self.member.id, segment, [finished])
        if not await self.ledger.finish([orphan], segment, incoming):
            self.finished += 1
            log.error("trajectory %s is finished with an error: %s", orphan.kv.key.rsplit("/", 1)[-1], reason)

    # -- what the claims tell ------------------------------------------------------------------------------------

    async def _tell_always(self) -> None:
        """Relays which versions are still needed, and rollouts how many groups are complete."""
        run, told = self.run_info, dict[str, str]()
        while True:
            drawn = await run.coordination.get(run.keys.cursor)
            held = self._claims = await all_claims(run.coordination, run.keys, self._claims)
            complete = claims.complete_groups(Cursor.parse(drawn.value).next if drawn else 0, held.values())
            requests = await run.coordination.range(run.keys.evaluations)
            asked = {int(kv.key.rsplit("/", 1)[-1]) for kv in requests.items}
            # Interrupted trajectories go on under whatever is newest: they need no version of their own.
            own = held.values() if run.config.rollout.update == "drain" else ()
            versions = claims.referenced_versions(h.claim for h in own)
            retain = Retain(versions=sorted({*versions, *asked}))
            for key, record in ((run.keys.complete, Complete(groups=complete)), (run.keys.retain, retain)):
                if record.dump() == told.get(key):
                    continue
                # Under the leadership: a replaced manager's late word would stay until the claims change.
                if not await self.ledger.guarded_put(key, record, self.ledger.actor.guard()):
                    await self.ledger.check_fence()
                told[key] = record.dump()
            await self.clock.sleep(TELL_INTERVAL_S)

    # -- cleaning -----------------------------------------------------------------------------------------------

    async def _clean_always(self) -> None:
        while True:
            try:
                await self.cleaner.clean()
            except (StoreError, CoordinationUnavailable) as e:
                # What is left over harms nobody; orphans must not wait for storage to come back.
                log.error("cleaning up failed, it is tried again in %.0f s: %s", CLEAN_INTERVAL_S, e)
            await self.clock.sleep(CLEAN_INTERVAL_S)


async def lead(run: Run, member: Member) -> None:
    """Campaign for and do the manager's work, again and again, while this relay lives."""
    while True:
        election = Election(run.coordination, member.session, run.keys.leader("manager"), member.id)
        leadership = await election.campaign()
        log.info("%s is the manager", member.id)
        try:
            await until_first(Manager(run, member, leadership).run(), leadership.lost.wait())
        except (CoordinationError, StoreError) as e:
            log.warning("the manager's work was interrupted, it campaigns again: %s", e)
        try:
            await leadership.resign()
        except CoordinationUnavailable as e:
            # This relay goes on serving weights; the key goes with the lease, if etcd does not come back in time.
            log.warning("the manager could not resign: %s", e)
        await run.clock.sleep(CAMPAIGN_PAUSE_S)
