"""The life of one trajectory in a rollout, from its first prompt to its reward.

    generating ──engine──▶ acting ──environment──▶ generating …
                             │ done, last turn, or length
                             ▼
                          scoring ──reward──▶ finished

Each arrow is durable before the next begins: nobody generates past an end, or repeats a tool call.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar.buffer import claims
from laminar.buffer.experience import Finished
from laminar.buffer.ledger import Ledger
from laminar.clock import Clock
from laminar.config import Config
from laminar.errors import EngineError, EnvironmentFailure
from laminar.workers.engines.base import Engine, EngineFinish
from laminar.workers.environments.base import Prompt, Score, Transcript
from laminar.workers.environments.host import EnvironmentHost
from laminar.workers.rollouts.conversation import Conversation, said_by_environment
from laminar.workers.rollouts.outbox import Flusher
from laminar.workers.rollouts.silence import Silence
from laminar.workers.rollouts.trajectory import Trajectory

log = logging.getLogger(__name__)

SILENT_S = 300.0
"""A request without a token for so long, in an engine where none waits for room, is taken for lost."""
MAX_LOST = 3
"""Requests that may be lost one after another, without a token between them, before the engine is given up."""


@dataclass(frozen=True)
class Where:
    """Which prompt a trajectory belongs to."""

    epoch: int
    prompt_index: int
    prompt: Prompt


@dataclass
class Outcome:
    status: str = "ok"
    error: str = ""
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


class Lost(Exception):
    """The claim went to somebody else: drop the trajectory without a trace."""


class Halted(Exception):
    """It stopped between two tokens, as `halting` asked for: all of it is in the trajectory, and can go on anywhere."""


class Generation:
    """Runs trajectories; holds no state of its own between them. `tokens` counts what was generated here."""

    def __init__(
        self, config: Config, engine: Engine, host: EnvironmentHost, conversation: Conversation, ledger: Ledger,
        flusher: Flusher, clock: Clock, stop_token_ids: Sequence[int],
    ) -> None:  # fmt: skip
        self.config = config
        self.engine = engine
        self.host = host
        self.conversation = conversation
        self.ledger = ledger
        self.flusher = flusher
        self.clock = clock
        self.stop_token_ids = list(stop_token_ids)
        self.tokens = 0
        self._requests = itertools.count()

    async def halt(self, t: Trajectory) -> None:
        """Ask a trajectory to stop where it can go on elsewhere; its task ends with Halted, unless it comes to the end
        of its turn first."""
        t.halting = True
        if t.request:
            t.aborted = True
            await self.engine.abort(t.request)

    async def run(self, t: Trajectory, where: Where) -> Finished:
        """Generate to the end. Raises Lost when the claim is gone, Halted when it was asked to stop before its end,
        EngineError when the engine is gone."""
        failure: EnvironmentFailure | None = None
        while True:
            try:
                outcome = await self._advance(t, where)
                break
            except EnvironmentFailure as e:
                failure = e
                claim = t.held.claim.model_copy(
                    update={"attempts": t.held.claim.attempts + 1, "last_error": str(e)[:500]}
                )
                held = await self.ledger.update(t.held, claim)
                if held is None:
                    raise Lost(t.name) from e
                t.held = held
                log.warning("trajectory %s: %s (%s), attempt %d", t.name, e, e.status, claim.attempts)
                if claims.exhausted(claim):
                    outcome = Outcome(failure.status, str(failure))
                    break
        return self._finished(t, where, outcome)

    async def _advance(self, t: Trajectory, where: Where) -> Outcome:
        if not t.prompt_ids:
            refusal = await self._begin(t, where)
            if refusal is not None:
                return refusal
        while t.turn_state != "scoring":
            if t.turn_state == "generating":
                await self._generate(t)
            else:
                await self._act(t, where)
            await self.flusher.durable()
        return await self._score(t, where)

    async def _begin(self, t: Trajectory, where: Where) -> Outcome | None:
        turn = await self.host.reset(where.prompt)
        with said_by_environment():
            prompt_ids = self.conversation.prompt_ids(turn.messages)
        room = self.config.rollout.max_model_len - len(prompt_ids)
        if room < 1:
            return Outcome(
                "prompt_too_long",
                f"prompt {where.prompt_index} has {len(prompt_ids)} tokens, rollout.max_model_len is "
                f"{self.config.rollout.max_model_len}",
            )
        t.begin(prompt_ids, turn.messages, turn.state, self.clock.now_us())
        return None

    def budget(self, t: Trajectory) -> int:
        """Policy tokens that it may still grow by."""
        room = self.config.rollout.max_model_len - len(t.prompt_ids) - len(t.token_ids)
        return min(room, self.config.sampling.max_tokens - t.policy_tokens)

    async def _generate(self, t: Trajectory) -> None:
        """Generate until the turn has an end. A request that is lost in the engine is issued again."""
        lost = 0
        while t.turn_state == "generating":
            if (end := self._known_end(t)) is not None:
                t.generation_ended(end, self.clock.now_us())
                return
            if t.halting:
                raise Halted(t.name)
            before = len(t.token_ids)
            try:
                await self._request(t)
            except TimeoutError as e:
                lost = 1 if len(t.token_ids) > before else lost + 1
                silence = f"trajectory {t.name}: no token for {SILENT_S:.0f} s, {len(t.token_ids)} are there"
                if lost >= MAX_LOST:
                    raise EngineError(f"{silence}; {lost} requests in a row were lost (limit {MAX_LOST})") from e
                log.warning("%s; its request is issued again", silence)

    def _known_end(self, t: Trajectory) -> EngineFinish | None:
        """The end of the turn as its tokens tell it, whatever the engine has said of it."""
        if t.policy_mask[-1:] == [True] and t.token_ids[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.budget(t) <= 0 else None

    async def _request(self, t: Trajectory) -> None:
        """One request for what is left of the turn. Raises TimeoutError when nothing more comes of it."""
        reason: str | None = None
        t.aborted = False
        # A number of its own each: an engine may still know one that was aborted, or lost.
        t.request = f"{t.name}-{t.held.claim.term}-{t.turn}-{next(self._requests)}"
        async with Silence(SILENT_S, lambda: self.engine.load_report().waiting > 0) as silence:
            async for chunk in self.engine.generate(
                t.request,
                [*t.prompt_ids, *t.token_ids],
                max_tokens=self.budget(t),
                temperature=self.config.sampling.temperature,
                stop_token_ids=self.stop_token_ids,
            ):
                silence.heard()
                t.policy_wrote(chunk.token_ids, chunk.logprobs, self.clock.now_us())
                self.tokens += len(chunk.token_ids)
                reason = chunk.finish_reason
                if reason in ("stop", "length"):
                    # In the same breath as the last tokens: a flush that found them alone would have a new owner go
                    # on after the end.
                    t.generation_ended(reason, self.clock.now_us())
        t.request = ""
        if reason not in ("stop", "length") and not t.aborted:
            # Nobody here aborted it: the claim is still ours, so it must not be forgotten.
            raise EngineError(f"trajectory {t.name}: the engine ended its request with {reason!r}")

    async def _act(self, t: Trajectory, where: Where) -> None:
        """The environment's reply to a turn, if there is one; what ends the trajectory otherwise."""
        reply = self.conversation.decode(t.turn_tokens())
        now = self.clock.now_us
        if t.finish_reason == "length":
            t.ready_to_score("length", t.environment_state, reply, now())
            return
        if self.config.environment.max_turns == 1:
            t.ready_to_score("stop", t.environment_state, reply, now())
            return
        turn = await self.host.step(where.prompt, t.environment_state, reply)
        if turn.done:
            t.ready_to_score("stop", turn.state, reply, now())
        elif t.turn + 1 >= self.config.environment.max_turns:
            t.ready_to_score("environment", turn.state, reply, now())
        else:
            with said_by_environment():
                ids = self.conversation.turn_ids(turn.messages)
            t.environment_replied(ids, turn.messages, turn.state, reply, now())
            if self.budget(t) <= 0:
                t.ready_to_score("length", turn.state, "", now())

    async def _score(self, t: Trajectory, where: Where) -> Outcome:
        transcript = Transcript(
            replies=[self.conversation.decode(r) for r in t.replies()],
            messages=t.messages,
            finish_reason=t.finish_reason or "stop",
            state=t.environment_state,
            tokens=t.policy_tokens,
        )
        score: Score = await self.host.score(where.prompt, transcript)
        return Outcome(reward=score.reward, parts=dict(score.parts))

    def _finished(self, t: Trajectory, where: Where, outcome: Outcome) -> Finished:
        reason = t.finish_reason if outcome.status == "ok" and t.finish_reason else "error"
        return Finished(
            group=t.id[0],
            sample=t.id[1],
            prompt_index=where.prompt_index,
            epoch=where.epoch,
            partial=t.partial(),
            finish_reason=reason,
            status=outcome.status,
            error=outcome.error,
            reward=outcome.reward,
            reward_parts=outcome.parts,
            text=self.conversation.decode(t.token_ids),
            attempts=t.held.claim.attempts,
            finished_at=self.clock.now_us(),
        )
