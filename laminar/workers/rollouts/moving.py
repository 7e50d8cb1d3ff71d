"""A rollout's part of a planned move: stop, make durable, and give each trajectory to its new owner.

    moves/<me> appears ──▶ halt ──▶ flush ──▶ one transaction each ──▶ delete moves/<me>
                                                 │ compares: I live, the claim is mine, the target lives and still holds
                                                 ▼ the version, the plan still stands
                                             refused: it goes on here

The new owner finds it in its inbox, copies what this worker's log has, and goes on by prefill. Until it has, the rows
stand in this log alone: a rotation carries them (`unread`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import Delete, KeyValue, Transaction, created_at, unchanged
from laminar.buffer.records import Load, Moves
from laminar.errors import CoordinationUnavailable
from laminar.workers.draining import MAX_KV_SHARE, free_slots
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.rollouts.trajectory import Trajectory

if TYPE_CHECKING:
    from laminar.workers.rollout import Rollout

log = logging.getLogger(__name__)

STOP_S = 3.0
"""Within which a trajectory leaves the engine, a few decode steps at most; what does not goes on here."""
TRIES = 3
"""Hand-overs that fail because the target has just reported its load are tried again so often."""
LOOK_S = 30.0
"""How often it is looked whether new owners have read what was handed to them."""


@dataclass
class Given:
    """What a plan has handed to one target: `tokens` in all, and `trajectories` since the target's report of
    `revision`, which knows of those before."""

    tokens: int = 0
    trajectories: int = 0
    revision: int = 0

    def reported(self, revision: int) -> None:
        if revision != self.revision:
            self.revision, self.trajectories = revision, 0

    def add(self, t: Trajectory) -> None:
        self.tokens += len(t.prompt_ids) + len(t.token_ids)
        self.trajectories += 1


class Mover:
    """`moved_in` counts trajectories that came from others unfinished, by whatever way, `refilled_tokens` theirs."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.bell = Bell()
        self.plans = Mirror(
            rollout.run_info.coordination, rollout.run_info.keys.moves(rollout.member.id), exact=True, bell=self.bell
        )
        self.moved_out = 0
        self.moved_in = 0
        self.refilled_tokens = 0
        self._handed: dict[tuple[tuple[int, int], int], Trajectory] = {}

    def arrived(self, trajectory: Trajectory) -> None:
        if trajectory.prompt_ids:
            self.moved_in += 1
            self.refilled_tokens += len(trajectory.prompt_ids) + len(trajectory.token_ids)

    # -- what others have yet to read ---------------------------------------------------------------------------

    @property
    def unread(self) -> Iterable[Trajectory]:
        """Handed over, and perhaps not yet copied by their new owners: their rows stand in this worker's log alone."""
        return self._handed.values()

    def handed(self, trajectory: Trajectory) -> None:
        """It is another's now."""
        self._handed[trajectory.id, trajectory.held.claim.term] = trajectory

    async def _forget_read(self) -> None:
        coordination = self.rollout.run_info.coordination
        for key, t in list(self._handed.items()):
            kv = await coordination.get(t.held.kv.key)
            source = Held.of(kv).claim.source if kv else None
            if source is None or (source.worker, source.term) != (self.rollout.member.id, t.held.claim.term):
                self._handed.pop(key, None)

    # -- moves --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with self.plans:
            seen = 0
            while True:
                kv = self.plans.only
                if kv is not None and kv.mod_revision > seen:
                    seen = kv.mod_revision
                    await self._carry_out(kv)
                await self.bell.wait(LOOK_S)
                try:
                    await self._forget_read()
                except CoordinationUnavailable as e:
                    # They are kept until it can be known: that costs memory, nothing else.
                    log.debug("it is not known yet who has read what was handed over: %s", e)

    async def _carry_out(self, kv: KeyValue) -> None:
        r, moves = self.rollout, Moves.parse(kv.value)
        began = r.clock.monotonic()
        targets = {m.trajectory: m.target for m in moves.items}
        moved = 0
        async with r.halting.alone:
            chosen = [t for t in list(r.live.values()) if t.name in targets and self._movable(t, moves)]
            standing = await r.halting.stop(chosen, min(STOP_S, moves.seconds))
            try:
                async with asyncio.timeout(max(0.1, moves.seconds - (r.clock.monotonic() - began))):
                    await r.flusher.durable()
                moved = await self._hand_over_all(standing, targets, kv, moves, began + moves.seconds)
            except TimeoutError:
                log.warning("plan %s: the log could not be written in %.1f s; nothing moves", moves.plan, moves.seconds)
            finally:
                if not r.stopping:
                    r.halting.go_on([t for t in chosen if t.id in r.live])
        log.info(
            "plan %s: %d of %d trajectories of version %d handed over in %.2f s",
            moves.plan, moved, len(moves.items), moves.version, r.clock.monotonic() - began,
        )  # fmt: skip
        await self._delete(kv)

    def _movable(self, t: Trajectory, moves: Moves) -> bool:
        r = self.rollout
        enabled = r.config.rollout.partials and not r.stopping and r.engine.version == moves.version
        return enabled and t.turn_state == "generating" and t.id in r.tasks

    async def _hand_over_all(
        self, standing: list[Trajectory], targets: dict[str, str], kv: KeyValue, moves: Moves, until: float
    ) -> int:
        r = self.rollout
        given: defaultdict[str, Given] = defaultdict(Given)
        moved = 0
        for t in standing:
            if r.stopping or r.clock.monotonic() >= until:
                break
            target = targets[t.name]
            if await self._hand_over(t, target, moves.targets[target], kv, given[target]):
                moved += 1
                given[target].add(t)
        self.moved_out += moved
        return moved

    async def _hand_over(self, t: Trajectory, target: str, create_revision: int, plan: KeyValue, given: Given) -> bool:
        """Whether it is another's now: the target's, or, as it turned out, already somebody's."""
        r, keys = self.rollout, self.rollout.run_info.keys
        alive = created_at(keys.worker("rollout", target), create_revision)
        for _ in range(TRIES):
            report = await r.run_info.coordination.get(keys.load("rollout", target))
            if report is None:
                return False
            given.reported(report.mod_revision)
            if not self._takes(Load.parse(report.value), t, given):
                return False
            claim = claims.reassigned(t.held.claim, target, "move")
            if await r.ledger.hand_over(t.held, claim, alive, unchanged(report), unchanged(plan)):
                r.gave(t)
                return True
            held = await r.ledger.still_mine(t.held)
            if held is None:
                r.gave(t)
                return True
            t.held = held
        return False

    def _takes(self, load: Load, t: Trajectory, given: Given) -> bool:
        """The fit, checked again: the plan was made from an older report."""
        tokens = len(t.prompt_ids) + len(t.token_ids) + given.tokens
        held = load.kv_tokens + load.acting_tokens + tokens
        fits = held <= MAX_KV_SHARE * load.kv_capacity and given.trajectories < free_slots(load)
        return fits and load.version == t.version and not load.switching

    async def _delete(self, kv: KeyValue) -> None:
        """The plan is carried out; its key is gone already if its deadline has passed."""
        r = self.rollout
        deletion = Transaction((r.member.membership.guard(), unchanged(kv)), (Delete(kv.key),))
        try:
            if not (await r.run_info.coordination.transact(deletion)).succeeded:
                await r.ledger.check_fence()
        except CoordinationUnavailable as e:
            log.warning("%s was not deleted, the manager does it at its deadline: %s", kv.key, e)
