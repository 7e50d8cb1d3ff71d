"""Evaluation of a pinned version on the held-out prompts, beside training.

The trainer asks by `evaluations/<version>`; one rollout claims it under its lease (`claims-eval/<version>`),
holds that version until all rows are durable, and registers them in the transaction that deletes the request.
An evaluation whose rollout dies is begun again by another; one that fails is tried a few times and then given up. It
never moves the cursor nor enters a batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from laminar.buffer.coordination import Delete, Put, Transaction, absent, created_at
from laminar.buffer.experience import incoming_path
from laminar.buffer.records import EvaluationRequest, Incoming, LeaderRecord
from laminar.buffer.schema import EVALUATION
from laminar.buffer.segments import encode
from laminar.buffer.session import transact_or_read_back
from laminar.errors import EnvironmentFailure
from laminar.workers.context import Member, Run
from laminar.workers.environments.base import Prompt, Transcript
from laminar.workers.mirror import Bell
from laminar.workers.pools import prompt_of
from laminar.workers.rollouts.conversation import said_by_environment
from laminar.workers.rollouts.equipment import Equipment
from laminar.workers.rollouts.generation import SILENT_S
from laminar.workers.rollouts.outbox import until_written
from laminar.workers.rollouts.silence import Silence

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Times that an evaluation may fail in one rollout life: what an engine refuses it refuses again."""
RETRY_S = 5.0
"""From a failure to the next try. A dead engine has ended this life by then: its failures are not the evaluation's."""


class Evaluator:
    """Of one rollout life. At most one evaluation runs at a time."""

    def __init__(self, run: Run, member: Member, equipment: Equipment, bell: Bell) -> None:
        self.run_info = run
        self.member = member
        self.equipment = equipment
        self.bell = bell
        self.claimed: dict[int, EvaluationRequest] = {}
        self.task: asyncio.Task[None] | None = None
        self.failures: dict[int, int] = {}
        """By version."""
        self.begun = 0
        self.attempts = 0
        self.tokens = 0
        """Generated for evaluations, since this life began."""
        self._again_at = float("-inf")

    @property
    def claimed_versions(self) -> tuple[int, ...]:
        return tuple(sorted(self.claimed))

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def _claim_key(self, version: int) -> str:
        return f"{self.run_info.keys.evaluation_claims}{version:09d}"

    def _request_key(self, version: int) -> str:
        return f"{self.run_info.keys.evaluations}{version:09d}"

    async def claim_requests(self, requests: Sequence[EvaluationRequest], *, more: bool = True) -> None:
        """Claim the oldest request that nobody works on, unless one is claimed here already. With `more` = False
        what is claimed is kept, and nothing new is. One that has failed MAX_FAILURES times is deleted instead."""
        self.claimed = {v: r for v, r in self.claimed.items() if self.running or r in requests}
        if self.claimed or not more or self.run_info.clock.monotonic() < self._again_at:
            return
        for request in requests:
            if not await self._claim(request):
                continue
            if self.failures.get(request.version, 0) < MAX_FAILURES:
                self.claimed[request.version] = request
                return
            if await self.run_info.coordination.delete(self._request_key(request.version)):
                log.error(
                    "version %d is not evaluated: that failed %d times (limit %d), for the reasons logged above",
                    request.version, self.failures[request.version], MAX_FAILURES,
                )  # fmt: skip

    async def _claim(self, request: EvaluationRequest) -> bool:
        key = self._claim_key(request.version)
        value = LeaderRecord(worker=self.member.id).dump()
        coordination = self.run_info.coordination
        held = await coordination.get(key)
        if held is not None:
            return held.value == value

        async def committed() -> bool:
            kv = await coordination.get(key)
            return kv is not None and kv.value == value

        put = Put(key, value, lease=self.member.session.lease)
        return await transact_or_read_back(
            coordination, Transaction((self.member.membership.guard(), absent(key)), (put,)), committed=committed
        )

    def start(self, version: int, digest: str) -> None:
        self.begun += 1
        self.task = asyncio.create_task(self._evaluate(version, digest), name=f"evaluate version {version}")
        self.task.add_done_callback(lambda task: self._ended(version, task))

    def _ended(self, version: int, task: asyncio.Task[None]) -> None:
        self.claimed.pop(version, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            failures = self.failures[version] = self.failures.get(version, 0) + 1
            self._again_at = self.run_info.clock.monotonic() + RETRY_S
            log.error("the evaluation of version %d failed (%d of %d): %r", version, failures, MAX_FAILURES, error)
        self.bell.ring()

    async def stop(self) -> None:
        """End what runs; its claim goes with the lease, and the request to another rollout."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def give_up(self, version: int) -> None:
        """The version is lost: nobody can evaluate it any more."""
        if version in self.claimed:
            log.warning("version %d is lost and is not evaluated", version)
            await self.run_info.coordination.delete(self._request_key(version))
            del self.claimed[version]

    async def _evaluate(self, version: int, digest: str) -> None:
        pool = self.equipment.held_out
        if pool is None:
            await self.run_info.coordination.delete(self._request_key(version))
            return
        samples = self.run_info.config.evaluation.samples
        temperature = self.run_info.config.sampling.temperature
        log.info("evaluating version %d on %d held-out prompts", version, len(pool))
        plan = [("greedy", 0, 0.0), *(("sampled", k, temperature) for k in range(samples))]
        limit = asyncio.Semaphore(self.equipment.capacity.max_running)

        async def one(index: int, mode: str, sample: int, heat: float) -> dict[str, Any]:
            async with limit:
                return await self._one(prompt_of(pool.row(index)), version, digest, mode, sample, heat)

        # Of a group, whose other members end with the first that fails: the engine must be free of them by then.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, *p)) for i in range(len(pool)) for p in plan]
        await self._register(version, [task.result() for task in tasks])

    async def _one(
        self, prompt: Prompt, version: int, digest: str, mode: str, sample: int, temperature: float
    ) -> dict[str, Any]:
        config, conversation = self.run_info.config, self.equipment.conversation
        host, engine = self.equipment.host, self.equipment.engine
        tokens: list[int] = []
        replies: list[str] = []
        finish, status, reward = "error", "ok", None
        try:
            turn = await host.reset(prompt)
            messages = list(turn.messages)
            state = turn.state
            with said_by_environment():
                sequence = conversation.prompt_ids(messages)
            budget = config.evaluation.max_tokens or config.sampling.max_tokens
            for n in range(config.environment.max_turns):
                new: list[int] = []
                room = min(budget, config.rollout.max_model_len - len(sequence))
                if room < 1 and n == 0:
                    raise EnvironmentFailure("prompt_too_long", f"prompt {prompt.prompt_index}: {len(sequence)} tokens")
                if room < 1:
                    finish = "length"
                    break
                async with Silence(SILENT_S, lambda: engine.load_report().waiting > 0) as silence:
                    async for chunk in engine.generate(
                        f"eval-{version}-{prompt.prompt_index}-{mode}-{sample}-{n}-{self.member.id}-{self.begun}",
                        sequence, max_tokens=room, temperature=temperature,
                        stop_token_ids=self.equipment.stop_token_ids,
                    ):  # fmt: skip
                        silence.heard()
                        new += chunk.token_ids
                        self.tokens += len(chunk.token_ids)
                        finish = chunk.finish_reason or finish
                tokens += new
                sequence = [*sequence, *new]
                budget -= len(new)
                replies.append(conversation.decode(new))
                messages.append({"role": "assistant", "content": replies[-1]})
                # As in training: the environment sees the last reply too, for its state is what a reward may look at.
                if finish == "length" or config.environment.max_turns == 1:
                    break
                turn = await host.step(prompt, state, replies[-1])
                state = turn.state
                if turn.done:
                    break
                if n + 1 == config.environment.max_turns:
                    finish = "environment"
                    break
                messages += turn.messages
                with said_by_environment():
                    sequence = [*sequence, *conversation.turn_ids(turn.messages)]
            score = await host.score(prompt, Transcript(replies, messages, finish, state, len(tokens)))
            reward = score.reward
        except EnvironmentFailure as e:
            status = e.status
        return {
            "version": version, "mode": mode, "prompt_index": prompt.prompt_index, "sample": sample,
            "token_ids": tokens, "finish_reason": finish, "status": status, "reward": reward,
            "text": "\n".join(replies), "digest": digest, "at": self.run_info.clock.now_us(), "commit_seq": -1,
        }  # fmt: skip

    async def _register(self, version: int, rows: Sequence[dict[str, Any]]) -> None:
        run, segment = self.run_info, f"eval-{version:09d}"
        batch = pa.RecordBatch.from_pylist(list(rows), schema=EVALUATION)
        path = await until_written(run.clock, "an evaluation", partial(self._write, segment, batch))
        request = await run.coordination.get(self._request_key(version))
        if request is None:
            return
        incoming = Incoming(
            table="evaluation", path=path, rows=len(rows), worker=self.member.id,
            evaluation=EvaluationRequest.parse(request.value),
        )  # fmt: skip
        registered = await self.member.ledger.register(
            "evaluation",
            segment,
            incoming,
            Transaction(
                (created_at(request.key, request.create_revision),),
                (Delete(request.key), Delete(self._claim_key(version))),
            ),
        )
        if registered:
            log.info("version %d is evaluated: %d rows", version, len(rows))
            return
        await self.member.ledger.check_fence()
        log.warning("the evaluation of version %d is dropped: it was asked for anew meanwhile", version)

    async def _write(self, segment: str, batch: pa.RecordBatch) -> str:
        """Each try has a name of its own: an earlier one may have been written, or even registered."""
        path = incoming_path("evaluation", f"{self.member.id}-{segment}-{self.attempts:03d}")
        self.attempts += 1
        await self.run_info.storage.write(path, encode(EVALUATION, [batch]))
        return path
