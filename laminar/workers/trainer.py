"""The trainer worker: a deterministic state machine over a write-ahead log of batches.

    experience ──sample──▶ decide (etcd) ──▶ train ──▶ stage weights ──▶ record step n   ──▶ checkpoint
                             step n means       │            │           (steps, metrics)     every k steps
                             this batch         version n+1  └─seal, announce (background)

Restart: load the newest checkpoint, train the decided batches after it again, each under the settings that were
recorded with it (the same versions come out), go on. A second trainer waits in the election as a standby.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NoReturn

import pyarrow as pa

from laminar.buffer.coordination import Put
from laminar.buffer.ledger import Ledger
from laminar.buffer.records import Cursor, EvaluationRequest, TrainerHead
from laminar.buffer.sampler import REMAINDER, Selection, select, to_retire
from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.session import Leadership
from laminar.buffer.steps import DecidedBatch, StepLog, batch_rows
from laminar.buffer.table import Table
from laminar.errors import Fenced, LaminarError, StoreError, WeightsError
from laminar.workers.checkpoints import load_newest, prune_checkpoints, save_checkpoint
from laminar.workers.context import Member, Run
from laminar.workers.learning.base import Learner
from laminar.workers.metrics import MetricSinks
from laminar.workers.mirror import Bell, Mirror
from laminar.workers.patience import patient, patient_table, patiently
from laminar.workers.training.gradients import Gradients
from laminar.workers.training.intake import FreshTrajectories, Intake
from laminar.workers.training.progress import Progress
from laminar.workers.training.publishing import Publisher, Staged
from laminar.workers.training.step_metrics import all_truncated, step_metrics, step_rows
from laminar.workers.training.stepping import TrainedStep, train_decided

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
EVALUATION_WAIT_S = 600.0
COMPARE_EVERY = 5
"""Steps between two comparisons of the engine's logprobs with the trainer's on fresh trajectories."""
REPORT_INTERVAL_S = 1.0
EMPTY = pa.Table.from_batches([], schema=EXPERIENCE)


class Trainer:
    """One life of a trainer under its leadership."""

    def __init__(
        self, run: Run, member: Member, leadership: Leadership, learner: Learner, tables: Mapping[str, Table],
        sinks: MetricSinks,
    ) -> None:  # fmt: skip
        """`tables`: `experience` and `step_metrics`."""
        self.run_info = run
        self.member = member
        self.config = run.config
        self.clock = run.clock
        self.leadership = leadership
        self.learner = learner
        # Of this life: replayed steps use those of theirs.
        self.settings = dict(learner.settings)
        self.compared = -COMPARE_EVERY
        self.experience = patient_table(tables["experience"], run.clock)
        self.step_metrics = patient_table(tables["step_metrics"], run.clock)
        self.sinks = sinks
        self.ledger = Ledger(run.coordination, run.keys, member.id, leadership)
        self.steps = StepLog(run.coordination, run.keys, self.ledger, patient(run.storage, run.clock))
        self.intake = Intake(run.config, self.experience, run.clock)
        self.open = self.intake.open
        self.gradients = Gradients()
        self.progress = Progress()
        self.bell = Bell()
        self.relays = Mirror(run.coordination, run.keys.workers("relay"), bell=self.bell)
        self.table_head = Mirror(run.coordination, run.keys.head("experience"), exact=True, bell=self.bell)
        self.cursor = Mirror(run.coordination, run.keys.cursor, exact=True, bell=self.bell)
        self.publisher = Publisher(run, self.ledger, self.relays)
        self.after_step: asyncio.Task[None] | None = None
        self.digests: dict[int, str] = {}
        self.recorded: dict[int, str] = {}
        """Digests of versions that earlier lives published, for those that this one trains again."""
        self.recorded_before = 0
        """Versions up to this one had the record of their step when this life began."""
        self.refused = ""

    async def run(self) -> None:
        """Until the run is done. Raises Fenced or LeaseLost when this life is over."""
        try:
            await self._run()
        finally:
            await self._abandon()

    async def _run(self) -> None:
        async with self.relays, self.table_head, self.cursor:
            await self._restore()
            head, _ = await self.steps.head()
            if head.state == "running" and head.decided < self.config.run.max_steps:
                await self.steps.begin_drawing()
            while head.state == "running":
                if head.decided >= self.config.run.max_steps:
                    await self._finish(f"{head.decided} steps are trained (run.max_steps)")
                    break
                selection = await self._next_batch()
                if selection is None:
                    break
                batch = await self._decide(selection)
                self.gradients.trained(await self._train(batch))
                await self._end_if(self.gradients.failure())
                head, _ = await self.steps.head()
            await self._settle()

    # -- starting -----------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        """Load the newest checkpoint, replay the decided batches after it, offer the weights."""
        head, kv = await self.steps.head()
        self.progress.activity = "loading"
        info = await patiently(
            self.clock, "loading a checkpoint", lambda: load_newest(self.run_info.storage, self.learner, head.decided)
        )
        if info is not None:
            log.info("loaded the checkpoint of version %d", info.version)
        if kv is None:
            await self.steps.change_head(checkpoint=-1)
        for decision in await self.steps.decisions():
            self.open.consume([*decision.trained, *decision.retired])
        for closing in await self.steps.closings():
            self.open.consume(closing.retired)
        await self.intake.scan()
        self.intake.forgive()
        if self.learner.version == head.decided:
            await self._offer()
        else:
            self.recorded = await self.steps.digests(self.step_metrics)
            self.recorded_before = head.step
            published = await self.publisher.published()
            if published is None or published.version <= self.learner.version:
                await self._offer()
        for step in range(self.learner.version, head.decided):
            log.info("replaying step %d from its decided batch", step)
            await self._train(await self.steps.read(step, self.experience))
        await self._settle()

    async def _offer(self) -> None:
        """The first thing a trainer does is to make its weights available: nobody can generate before (a rollout
        waits for weights, the trainer for experience)."""
        self.progress.activity = "offering weights"
        version = self.learner.version
        published = await self.publisher.published()
        held = await self.publisher.held(version)
        digest = held
        if not held or published is None or published.version < version:
            # A relay may hold a version that its trainer had no time to announce.
            digest = await self.publisher.offer(self.learner)
        if not digest:
            self.refused = held or ""
            return
        self.digests[version] = digest
        if version == 0:
            also = self._evaluation_of(0, digest)
            await self.steps.record_initial(self.member.id, digest, self.clock.now_us(), also)

    # -- sampling -----------------------------------------------------------------------------------------------

    async def _next_batch(self) -> Selection | None:
        """The next step's groups; None when the run has ended instead."""
        t = self.config.trainer
        while True:
            await self.intake.scan()
            await self._end_if(self.intake.failure())
            selection = select(self.open, t.groups_per_step, t.no_signal)
            if selection is not None:
                self.progress.barren = ""
                return selection
            waiting = to_retire(self.open, t.groups_per_step, t.no_signal)
            self.progress.barren = self.intake.barren(waiting)
            await self._end_if(self.intake.too_barren(waiting))
            head, _ = await self.steps.head()
            if waiting != head.to_retire:
                head = await self.steps.change_head(to_retire=waiting)
            if self._nothing_will_come(head):
                return await self._last_batch()
            self.progress.activity = "waiting for experience"
            await self._keep_offering()
            await self.bell.wait(LOOK_AGAIN_S)

    def _drawn(self) -> int:
        kv = self.cursor.only
        return Cursor.parse(kv.value).next if kv else 0

    def _nothing_will_come(self, head: TrainerHead) -> bool:
        """All prompts are drawn, and each drawn group is either consumed or complete."""
        total = self.config.run.epochs * self.run_info.file.prompts
        return self._drawn() >= total and head.consumed_groups + len(self.open.complete()) >= total

    async def _last_batch(self) -> Selection | None:
        t = self.config.trainer
        final = select(self.open, t.groups_per_step, t.no_signal, final=True)
        if final is not None and t.last_batch == "train":
            return final
        await self._finish("every prompt of every epoch has been drawn and has ended")
        return None

    async def _end_if(self, reason: str) -> None:
        if reason:
            await self._fail(reason)

    async def _fail(self, reason: str) -> NoReturn:
        await self._settle()  # a step that is recorded counts as it is when the run is tried again
        await self.steps.change_head(state="failed", reason=reason)
        raise LaminarError(reason)

    async def _keep_offering(self) -> None:
        """A relay that was restarted holds nothing: give it the newest weights again while there is time."""
        await self._settle()
        version = self.learner.version
        published = await self.publisher.published()
        if published is not None and published.version > version:
            return
        held = await self.publisher.held(version)
        announced = published is not None and published.version == version
        if held == "" or (held and not announced and held != self.refused):
            await self._offer()

    # -- training -----------------------------------------------------------------------------------------------

    async def _decide(self, selection: Selection) -> DecidedBatch:
        head, _ = await self.steps.head()
        uses = {**dict.fromkeys(selection.trained, "train"), **selection.retired}
        rows = await batch_rows(self.experience, uses)
        batch = await self.steps.decide(
            head.decided, rows, selection.trained, dict(selection.retired), self.settings
        )
        self.open.consume(uses)
        return batch

    async def _train(self, batch: DecidedBatch) -> dict[str, float | None]:
        """One optimizer step, whose metrics these are; its rows are recorded and its version announced while the next
        batch is sampled."""
        step = batch.decision.step
        self.progress.activity = f"training step {step}"
        before = self.clock.monotonic()
        try:
            trained = await self._learn(batch)
        except LaminarError as e:
            # It is decided: a restart would meet the same batch, under the same settings, again and again.
            await self._fail(f"step {step} cannot be trained: {e}")
        train_s = self.clock.monotonic() - before
        await self._settle()
        if not self.leadership.held:
            raise Fenced(f"{self.member.id} lost its leadership while it trained step {step}")
        staged = await self.publisher.stage(self.learner)
        self.after_step = asyncio.create_task(self._after(batch, trained, staged, train_s))
        if self.learner.version % self.config.trainer.checkpoint_every == 0:
            await self._settle()
            try:
                await self._checkpoint()
            except StoreError as e:
                log.error("%s; training goes on, a restart would begin at the checkpoint before", e)
        return trained.result.metrics

    async def _learn(self, batch: DecidedBatch) -> TrainedStep:
        """Every few steps the engine's logprobs are compared on what rollouts finish meanwhile; a step in which
        nothing was finished in time leaves it to the next."""
        step = batch.decision.step
        if step < self.compared + COMPARE_EVERY:
            return await train_decided(self.learner, batch)
        fresh = FreshTrajectories(self.experience, self.clock, self.learner.version)
        collecting = asyncio.create_task(fresh.collect())
        try:
            trained = await train_decided(self.learner, batch, fresh=fresh)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if trained.result.metrics.get("kl_engine_trainer") is not None:
            self.compared = step
        return trained

    async def _after(self, batch: DecidedBatch, trained: TrainedStep, staged: Staged | None, train_s: float) -> None:
        """Announce the version, then record the step with the digest it got."""
        step = batch.decision.step
        digest = ""
        if staged is not None:
            try:
                expected = self.recorded.get(staged.version, "")
                recorded = staged.version <= self.recorded_before
                digest = await self.publisher.announce(staged, expected_digest=expected, recorded=recorded)
                self.digests[staged.version] = digest
            except (WeightsError, OSError) as e:
                log.error("version %d was not published: %s", staged.version, e)
        newest = await self.publisher.published()
        published = newest.digest if newest is not None and newest.version == step + 1 else digest
        metrics = step_metrics(batch, trained.rows, trained.result, version_before=step, started=train_s)
        if staged is not None:
            metrics |= {"publish_copy_s": staged.copy_s, "publish_cast_s": staged.cast_s}
        metrics |= await self.publisher.spread()
        metrics |= self.intake.lengths.consumed(trained.rows)
        metrics["publishes_skipped"] = float(self.publisher.skipped)
        version = step + 1
        every = self.config.evaluation.every
        due = digest and (version % every == 0 or version == self.config.run.max_steps)
        await self.steps.record(
            step, self.member.id, step_rows(step, trained.rows, trained.result), metrics, version, published,
            self.clock.now_us(), self._evaluation_of(version, digest) if due else (),
        )  # fmt: skip
        self.progress.trained(step, metrics)
        self.progress.truncated = all_truncated(metrics, self.config.sampling.max_tokens)
        if self.progress.truncated:
            log.warning("step %d: %s", step, self.progress.truncated)
        self.sinks.log(step, metrics, at_us=self.clock.now_us())
        log.info(
            "step %d trained: reward %s, %d groups trained, %d retired, staleness %.2f, %.1f s",
            step, _number(metrics["reward_mean"]), len(batch.decision.trained), len(batch.decision.retired),
            metrics["staleness_mean"] or 0.0, train_s,
        )  # fmt: skip

    async def _settle(self) -> None:
        """Wait for what the last step left to do."""
        task, self.after_step = self.after_step, None
        if task is not None:
            await task

    async def _abandon(self) -> None:
        """End what the last step left to do: this life has ended on something else, and the next one replays it."""
        task, self.after_step = self.after_step, None
        if task is None:
            return
        task.cancel()
        [failed] = await asyncio.gather(task, return_exceptions=True)
        if isinstance(failed, Exception):
            log.error("the last step was not recorded either: %s", failed)

    async def _checkpoint(self) -> None:
        version = self.learner.version
        self.progress.activity = f"writing the checkpoint of version {version}"
        before = self.clock.monotonic()
        digest, fence = self.digests.get(version, ""), self.ledger.check_fence
        await save_checkpoint(self.run_info.storage, self.learner, digest, self.member.id, fence=fence)
        head, _ = await self.steps.head()
        if version > head.checkpoint:
            await self.steps.change_head(checkpoint=version)
        await prune_checkpoints(self.run_info.storage, self.learner, self.config.trainer.keep_checkpoints)
        log.info("wrote the checkpoint of version %d in %.1f s", version, self.clock.monotonic() - before)

    def _evaluation_of(self, version: int, digest: str) -> list[Put]:
        """The request, to be written with the version's record: a replayed step asks for nothing twice."""
        if self.config.evaluation.size == 0:
            return []
        request = EvaluationRequest(version=version, digest=digest)
        return [Put(f"{self.run_info.keys.evaluations}{version:09d}", request.dump())]

    # -- ending -------------------------------------------------------------------------------------------------

    async def _finish(self, reason: str) -> None:
        """The last checkpoint, the last evaluations, the rest retired; then the run is done."""
        await self._settle()
        await patiently(self.clock, "the last checkpoint", self._checkpoint)
        await self._await_evaluations()
        await self.steps.end_drawing()
        rest = await self._rest()
        await self.steps.close(await batch_rows(self.experience, rest) if rest else EMPTY, rest, reason)
        log.info("the run is done: %s", reason)

    async def _await_evaluations(self) -> None:
        self.progress.activity = "waiting for the last evaluation"
        pending = Mirror(self.run_info.coordination, self.run_info.keys.evaluations)
        async with pending:
            deadline = self.clock.monotonic() + EVALUATION_WAIT_S
            while pending.items and self.clock.monotonic() < deadline:
                await self._keep_offering()
                await pending.wait_for(lambda: not pending.items, 2.0)
            if pending.items:
                log.error("%d evaluations did not end within %.0f s", len(pending.items), EVALUATION_WAIT_S)

    async def _rest(self) -> dict[int, str]:
        """Groups that were drawn and can no longer be trained on, with the reason of their retirement."""
        self.progress.activity = "retiring the rest"
        head, _ = await self.steps.head()
        # Not the mirrored cursor: a group that it does not show yet would be left over for ever.
        while await self.ledger.cursor() > head.consumed_groups + len(self.open.complete()):
            await self.intake.scan()
            await self._keep_offering()
            await self.bell.wait(LOOK_AGAIN_S)
        return {g: self.open.verdict(g) or REMAINDER for g in self.open.complete()}

    async def report(self) -> None:
        """Keep this worker's load record fresh; at once after each step, so that a display need not wait for it."""
        key, progress = self.run_info.keys.load("trainer", self.member.id), self.progress
        while True:
            head, _ = await self.steps.head()
            record = progress.record(head.step)
            await self.run_info.coordination.put(key, record.dump(), lease=self.member.session.lease)
            await progress.bell.wait(REPORT_INTERVAL_S)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
