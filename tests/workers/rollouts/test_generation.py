"""The life of one trajectory, with a scripted engine and environment, a real log and a real claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from laminar.buffer import claims
from laminar.buffer.claims import MAX_ATTEMPTS, Held
from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryEtcd
from laminar.buffer.partials import Partial, PartialLog, assemble, read_partials
from laminar.buffer.records import Claim
from laminar.buffer.storage import MemoryStorage
from laminar.clock import Clock
from laminar.config import config_from
from laminar.errors import EngineError, EnvironmentFailure, Fenced
from laminar.workers.engines.base import Chunk, EngineFinish, EngineLoad
from laminar.workers.environments.base import Prompt, Score, Transcript, Turn
from laminar.workers.learning.tiny import make_tokenizer
from laminar.workers.rollouts import generation
from laminar.workers.rollouts.conversation import Conversation
from laminar.workers.rollouts.generation import Generation, Halted, Lost, Where
from laminar.workers.rollouts.outbox import Flusher
from laminar.workers.rollouts.trajectory import Trajectory

KEYS = Keys("run")
WHERE = Where(0, 4, Prompt(4, "abc", "cba"))
Join = Callable[..., Awaitable[Any]]
Chunks = Sequence[tuple[str, EngineFinish | None]]


class Engine:
    """Says what it is told to, a list of (text, finish) a request; counts requests and what they asked for."""

    def __init__(self, encode: Callable[[str], list[int]], *turns: Chunks) -> None:
        self.encode = encode
        self.turns = list(turns)
        self.requests: list[dict[str, Any]] = []
        self.before_it_ends: Callable[[], Awaitable[None]] | None = None
        self.after_each_chunk: Callable[[], Awaitable[None]] | None = None
        self.lost: set[int] = set()
        self.aborted: set[str] = set()
        self.load = EngineLoad(1, 0, 0)
        self.version = 3

    def load_report(self) -> EngineLoad:
        return self.load

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    async def generate(self, request_id: str, token_ids: Sequence[int], **asked: Any) -> AsyncIterator[Chunk]:
        self.requests.append({"id": request_id, "tokens": list(token_ids), **asked})
        for text, finish in self.turns[len(self.requests) - 1]:
            ids = self.encode(text)
            yield Chunk(ids, [-0.5] * len(ids), finish)
            if self.after_each_chunk:
                await self.after_each_chunk()
            if request_id in self.aborted:
                yield Chunk([], [], "abort")
                return
        if len(self.requests) - 1 in self.lost:
            await asyncio.Event().wait()
        if self.before_it_ends:
            await self.before_it_ends()


class Host:
    """Environment and reward as a script: each call takes the next answer, raises it if it is an error."""

    def __init__(self, *, resets: Sequence[Any] = (), steps: Sequence[Any] = (), scores: Sequence[Any] = ()) -> None:
        first = Turn([{"role": "user", "content": "abc"}], state="s0")
        self.answers = {"reset": [*resets] or [first], "step": [*steps], "score": [*scores] or [Score(1.0, {"x": 0.5})]}
        self.calls: list[tuple[str, Any]] = []

    def _next(self, call: str, what: Any) -> Any:
        self.calls.append((call, what))
        answers = self.answers[call]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reset(self, prompt: Prompt) -> Turn:
        return self._next("reset", prompt)  # type: ignore[no-any-return]

    async def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        return self._next("step", (state, reply))  # type: ignore[no-any-return]

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        return self._next("score", transcript)  # type: ignore[no-any-return]


class Stage:
    """A rollout with one drawn trajectory and everything that generates it."""

    tokenizer = make_tokenizer()

    def __init__(self, rollout: Any, held: Held, clock: Clock) -> None:
        self.rollout = rollout
        self.clock = clock
        self.storage = MemoryStorage()
        self.t = Trajectory(held=held, worker="w", version=3, digest="d3", started_at=1)
        log = PartialLog(self.storage, "w", sync=True)
        self.flusher = Flusher(log, lambda: [self.t], clock, interval_s=3600, enabled=True)
        self.end = self.tokenizer.eos_token

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def run(
        self, engine: Engine, host: Host, *, max_turns: int = 1, max_tokens: int = 20, max_model_len: int = 200
    ) -> Finished:
        config = config_from(
            {
                "model": {"path": "tiny"},
                "environment": {"max_turns": max_turns},
                "sampling": {"max_tokens": max_tokens},
                "rollout": {"max_model_len": max_model_len},
            }
        )
        made: Any = Generation(
            config, engine, host, Conversation(self.tokenizer), self.rollout.ledger, self.flusher, self.clock,  # type: ignore[arg-type]
            [self.tokenizer.eos_token_id],
        )  # fmt: skip
        self.generation = made
        flushing = asyncio.create_task(self.flusher.run())
        try:
            return await asyncio.wait_for(made.run(self.t, WHERE), 20)  # type: ignore[no-any-return]
        finally:
            flushing.cancel()

    def engine(self, *turns: Chunks) -> Engine:
        return Engine(self.encode, *turns)

    async def logged(self) -> Partial:
        return assemble((await read_partials(self.storage, "w")).rows.get((*self.t.id, 1), []))

    def claim(self) -> Claim:
        kv = self.rollout.server.get(KEYS.claim(0, 0))
        return Claim.parse(kv.value)


@pytest.fixture
async def stage(join: Join, clock: Clock) -> Stage:
    rollout = await join(MemoryEtcd(), "w")
    held = await rollout.ledger.draw(groups=lambda cursor: 1, samples_per_prompt=1, version=3)
    return Stage(rollout, held[0], clock)


# -- one turn ---------------------------------------------------------------------------------------------------


async def test_a_single_turn_is_generated_scored_and_finished(stage: Stage) -> None:
    engine, host = stage.engine([("cb", None), ("a" + stage.end, "stop")]), Host()
    finished = await stage.run(engine, host)
    assert (finished.status, finished.finish_reason, finished.reward, finished.text) == ("ok", "stop", 1.0, "cba")
    assert (finished.reward_parts, finished.prompt_index, finished.epoch, finished.attempts) == ({"x": 0.5}, 4, 0, 0)
    finished.check()
    assert finished.partial.token_ids == stage.encode("cba" + stage.end)
    assert finished.partial.policy_mask == [True] * 4 and finished.row()["turns"] == 1
    (call,) = [what for name, what in host.calls if name == "score"]
    assert (call.replies, call.finish_reason, call.tokens) == (["cba"], "stop", 4)
    assert [m["role"] for m in call.messages] == ["user", "assistant"]
    assert [name for name, _ in host.calls] == ["reset", "score"], "one turn asks the environment for no step"


async def test_the_engine_is_asked_for_what_is_left_of_the_budget(stage: Stage) -> None:
    engine = stage.engine([("c" + stage.end, "stop")])
    await stage.run(engine, Host(), max_tokens=7)
    request = engine.requests[0]
    assert request["tokens"] == stage.t.prompt_ids and request["max_tokens"] == 7
    assert request["stop_token_ids"] == [stage.tokenizer.eos_token_id] and request["temperature"] == 1.0
    assert request["id"].startswith("000000000000-000-1-")


async def test_the_models_length_bounds_the_budget_too(stage: Stage) -> None:
    engine = stage.engine([("c" + stage.end, "stop")])
    messages = [{"role": "user", "content": "a" * 150}]
    prompt = len(Conversation(stage.tokenizer).prompt_ids(messages))
    await stage.run(engine, Host(resets=[Turn(messages)]), max_tokens=20, max_model_len=prompt + 5)
    assert engine.requests[0]["max_tokens"] == 5


async def test_a_reply_that_was_cut_is_scored_as_such(stage: Stage) -> None:
    finished = await stage.run(stage.engine([("cb", "length")]), Host(), max_tokens=2)
    assert (finished.status, finished.finish_reason, finished.text) == ("ok", "length", "cb")


async def test_a_prompt_without_room_is_refused_with_the_numbers(stage: Stage) -> None:
    engine, long = stage.engine(), Turn([{"role": "user", "content": "a" * 300}])
    finished = await stage.run(engine, Host(resets=[long]))
    assert (finished.status, finished.finish_reason, finished.reward) == ("prompt_too_long", "error", None)
    assert "rollout.max_model_len is 200" in finished.error and engine.requests == []
    finished.check()


# -- several turns ----------------------------------------------------------------------------------------------


def observation(text: str, state: str) -> Turn:
    return Turn([{"role": "user", "content": text}], state=state)


async def test_turns_alternate_until_the_environment_is_done(stage: Stage) -> None:
    engine = stage.engine([("ab" + stage.end, "stop")], [("ba" + stage.end, "stop")])
    host = Host(steps=[observation("cc", "s1"), Turn(state="s2", done=True)])
    finished = await stage.run(engine, host, max_turns=5)
    assert (finished.status, finished.finish_reason, finished.row()["turns"]) == ("ok", "stop", 2)
    assert [what for name, what in host.calls if name == "step"] == [("s0", "ab"), ("s1", "ba")]
    transcript = host.calls[-1][1]
    assert transcript.replies == ["ab", "ba"] and transcript.state == "s2"
    assert [m["content"] for m in transcript.messages] == ["abc", "ab", "cc", "ba"]
    ids = Conversation(stage.tokenizer).turn_ids([{"role": "user", "content": "cc"}])
    assert finished.partial.token_ids == [*stage.encode("ab" + stage.end), *ids, *stage.encode("ba" + stage.end)]
    assert finished.partial.policy_mask == [True] * 3 + [False] * len(ids) + [True] * 3
    assert engine.requests[1]["tokens"] == [*stage.t.prompt_ids, *finished.partial.token_ids[: 3 + len(ids)]]
    assert engine.requests[1]["max_tokens"] == 17, "the budget is of the policy's tokens over all turns"
    assert engine.requests[0]["id"] != engine.requests[1]["id"]


async def test_the_last_turn_ends_a_trajectory_that_goes_on(stage: Stage) -> None:
    engine = stage.engine([("ab" + stage.end, "stop")], [("ba" + stage.end, "stop")])
    host = Host(steps=[observation("cc", "s1"), observation("dd", "s2")])
    finished = await stage.run(engine, host, max_turns=2)
    assert (finished.finish_reason, finished.row()["turns"]) == ("environment", 2)
    assert host.calls[-1][1].replies == ["ab", "ba"]


async def test_a_turn_that_was_cut_ends_the_trajectory_and_says_so(stage: Stage) -> None:
    """Case 51: turn 2 of 3 ends with "length": finish_reason says length."""
    engine = stage.engine([("ab" + stage.end, "stop")], [("baba", "length")])
    host = Host(steps=[observation("cc", "s1")])
    finished = await stage.run(engine, host, max_turns=3)
    assert (finished.finish_reason, finished.row()["turns"], finished.status) == ("length", 2, "ok")
    assert [name for name, _ in host.calls] == ["reset", "step", "score"], "a cut reply is no move"


async def test_a_budget_that_is_used_up_between_turns_ends_the_trajectory(stage: Stage) -> None:
    engine = stage.engine([("ab" + stage.end, "stop")])
    finished = await stage.run(engine, Host(steps=[observation("cc", "s1")]), max_turns=3, max_tokens=3)
    assert finished.finish_reason == "length" and len(engine.requests) == 1
    finished.check()


# -- durability -------------------------------------------------------------------------------------------------


async def test_each_reply_is_durable_before_the_environment_hears_it(stage: Stage) -> None:
    engine = stage.engine([("ab" + stage.end, "stop")], [("ba" + stage.end, "stop")])
    seen: list[Partial] = []

    class Watching(Host):
        async def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
            seen.append(await stage.logged())
            return await super().step(prompt, state, reply)

        async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
            seen.append(await stage.logged())
            return await super().score(prompt, transcript)

    host = Watching(steps=[observation("cc", "s1"), Turn(done=True)])
    await stage.run(engine, host, max_turns=3)
    assert [(p.turn, p.turn_state, p.finish_reason) for p in seen] == [
        (0, "acting", "stop"), (1, "acting", "stop"), (1, "scoring", "stop"),
    ]  # fmt: skip
    assert seen[-1] == stage.t.partial()


async def test_no_flush_finds_the_last_tokens_without_their_end(stage: Stage) -> None:
    """An engine may take its time between its last chunk and the end of its stream: a new owner that read the log
    then would go on behind the end of sequence."""
    engine = stage.engine([("cba" + stage.end, "stop")])
    seen: list[Partial] = []

    async def flush() -> None:
        await stage.flusher.flush()
        seen.append(await stage.logged())

    engine.before_it_ends = flush
    await stage.run(engine, Host())
    assert (len(seen[0].token_ids), seen[0].turn_state, seen[0].finish_reason) == (4, "acting", "stop")


@pytest.mark.parametrize(
    ("state", "requests", "calls"),
    [("generating", 1, ["step", "score"]), ("acting", 0, ["step", "score"]), ("scoring", 0, ["score"])],
)
async def test_an_adopted_trajectory_goes_on_where_it_stood(
    stage: Stage, state: str, requests: int, calls: list[str]
) -> None:
    """Nobody generates past an end that is known, asks the environment anew, or repeats what it was told."""
    t, end = stage.t, stage.encode("b" + stage.end)
    t.begin([1, 2], [{"role": "user", "content": "abc"}], "s0", at=1)
    t.policy_wrote(stage.encode("a"), [-0.5], at=2)
    if state != "generating":
        t.policy_wrote(end, [-0.5] * len(end), at=3)
        t.generation_ended("stop", at=3)
    if state == "scoring":
        t.ready_to_score("stop", "s1", "ab", at=4)
    engine, host = stage.engine([("b" + stage.end, "stop")]), Host(steps=[Turn(state="s1", done=True)])
    finished = await stage.run(engine, host, max_turns=3)
    assert (finished.text, finished.finish_reason, finished.reward) == ("ab", "stop", 1.0)
    assert len(engine.requests) == requests and [name for name, _ in host.calls] == calls
    if requests:
        assert engine.requests[0]["tokens"] == [1, 2, *stage.encode("a")] and engine.requests[0]["max_tokens"] == 19


async def test_an_adopted_trajectory_without_budget_left_is_cut(stage: Stage) -> None:
    stage.t.begin([1, 2], [{"role": "user", "content": "abc"}], "s0", at=1)
    stage.t.policy_wrote(stage.encode("ab"), [-0.5, -0.5], at=2)
    finished = await stage.run(stage.engine(), Host(), max_tokens=2)
    assert (finished.finish_reason, finished.text) == ("length", "ab")


# -- failures ---------------------------------------------------------------------------------------------------


def failing(status: str = "reward_error", message: str = "the judge is broken") -> EnvironmentFailure:
    return EnvironmentFailure(status, message)


async def test_a_scorer_that_raises_once_is_asked_again(stage: Stage) -> None:
    """Case 40: a scorer that raises is contained; the reply is not generated again."""
    engine, host = stage.engine([("cba" + stage.end, "stop")]), Host(scores=[failing(), Score(0.5)])
    finished = await stage.run(engine, host)
    assert (finished.status, finished.reward, finished.attempts, finished.error) == ("ok", 0.5, 1, "")
    assert len(engine.requests) == 1
    assert (stage.claim().attempts, stage.claim().last_error) == (1, "the judge is broken")


async def test_a_scorer_that_always_raises_ends_the_trajectory_with_its_error(stage: Stage) -> None:
    """Cases 40 and 41: no result is not reward 0: the status says what happened, and the step goes on."""
    host = Host(scores=[failing("reward_error", "connection refused")])
    finished = await stage.run(stage.engine([("cba" + stage.end, "stop")]), host)
    assert (finished.status, finished.reward, finished.finish_reason) == ("reward_error", None, "error")
    assert (finished.error, finished.attempts) == ("connection refused", MAX_ATTEMPTS)
    assert [name for name, _ in host.calls].count("score") == MAX_ATTEMPTS
    assert finished.text == "cba", "what was generated is kept"
    finished.check()


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_environment_that_fails_is_tried_again_up_to_the_limit(stage: Stage, where: str) -> None:
    error = failing("environment_timeout", "slow")
    host = Host(resets=[error]) if where == "reset" else Host(steps=[error])
    finished = await stage.run(stage.engine([("cba" + stage.end, "stop")]), host, max_turns=2)
    assert (finished.status, finished.reward, finished.attempts) == ("environment_timeout", None, MAX_ATTEMPTS)
    assert [name for name, _ in host.calls].count(where) == MAX_ATTEMPTS
    finished.check()


@pytest.mark.parametrize("content", [5, None, ["a"]], ids=["number", "null", "list"])
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_messages_that_the_chat_template_refuses_fail_one_trajectory_and_not_the_run(
    stage: Stage, where: str, content: Any
) -> None:
    odd = Turn([{"role": "user", "content": content}], state="s1")
    host = Host(resets=[odd]) if where == "reset" else Host(steps=[odd])
    finished = await stage.run(stage.engine([("cba" + stage.end, "stop")]), host, max_turns=3)
    assert (finished.status, finished.reward, finished.attempts) == ("environment_error", None, MAX_ATTEMPTS)
    assert "the chat template refuses messages with the roles" in finished.error
    finished.check()


async def test_attempts_of_former_owners_count(stage: Stage) -> None:
    claim = stage.t.held.claim.model_copy(update={"attempts": MAX_ATTEMPTS - 1})
    held = await stage.rollout.ledger.update(stage.t.held, claim)
    assert held is not None
    stage.t.held = held
    host = Host(scores=[failing()])
    finished = await stage.run(stage.engine([("cba" + stage.end, "stop")]), host)
    assert finished.status == "reward_error" and [name for name, _ in host.calls].count("score") == 1


async def test_a_claim_that_went_to_another_ends_it_without_a_trace(stage: Stage, join: Join) -> None:
    other = await join(stage.rollout.server, "other")
    held = stage.t.held
    assert await other.ledger.hand_over(held, claims.reassigned(held.claim, "other", "death"))
    with pytest.raises(Lost):
        await stage.run(stage.engine([("cba" + stage.end, "stop")]), Host(scores=[failing()]))
    assert (stage.claim().owner, stage.claim().attempts) == ("other", 0)


async def test_a_worker_that_lost_its_lease_says_so(stage: Stage) -> None:
    stage.rollout.kill()
    with pytest.raises(Fenced):
        await stage.run(stage.engine([("cba" + stage.end, "stop")]), Host(scores=[failing()]))


@pytest.mark.parametrize("finish", ["abort", None])
async def test_a_request_that_the_engine_gave_up_is_not_taken_for_an_end(
    stage: Stage, finish: EngineFinish | None
) -> None:
    """The claim is still this worker's: to forget it here would leave it to nobody."""
    with pytest.raises(EngineError, match="000000000000-000: the engine ended its request with"):
        await stage.run(stage.engine([("cb", finish)]), Host())
    assert stage.t.turn_state == "generating" and stage.t.token_ids == stage.encode("cb")


# -- what an engine loses ---------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SILENT_S", 0.05)


async def test_a_request_that_is_lost_in_the_engine_is_issued_again(
    stage: Stage, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 15: the completion of one request never comes: a deadline passes, the log names the trajectory, and it is
    issued again, from the last token that came."""
    engine = stage.engine([("c", None)], [("ba" + stage.end, "stop")])
    engine.lost = {0}
    finished = await stage.run(engine, Host())
    assert finished.text == "cba" and finished.status == "ok"
    first, second = engine.requests
    assert second["tokens"] == first["tokens"] + stage.encode("c") and second["id"] != first["id"]
    assert second["max_tokens"] == first["max_tokens"] - 1
    assert "trajectory 000000000000-000: no token for" in caplog.text


@pytest.mark.parametrize(("last", "budget", "reason"), [("ba", 3, "length"), ("b", 20, "stop")])
async def test_an_end_that_the_engine_did_not_tell_is_read_from_the_tokens(
    stage: Stage, impatient: None, last: str, budget: int, reason: str
) -> None:
    """Case 15, where only the end was lost: nobody generates past it."""
    engine = stage.engine([("c" + last + (stage.end if reason == "stop" else ""), None)])
    engine.lost = {0}
    finished = await stage.run(engine, Host(), max_tokens=budget)
    assert (finished.finish_reason, len(engine.requests)) == (reason, 1)


async def test_an_engine_that_loses_every_request_is_given_up(stage: Stage, impatient: None) -> None:
    engine = stage.engine([], [], [])
    engine.lost = {0, 1, 2}
    with pytest.raises(EngineError, match=r"000000000000-000.* 3 requests in a row were lost"):
        await stage.run(engine, Host())


async def test_a_request_that_waits_for_room_is_not_lost(stage: Stage, impatient: None) -> None:
    engine = stage.engine([("cba" + stage.end, "stop")])
    engine.load = EngineLoad(1, 1, 0)
    engine.before_it_ends = lambda: asyncio.sleep(0.2)
    await stage.run(engine, Host())
    assert len(engine.requests) == 1


async def test_a_span_carries_the_version_at_dispatch(stage: Stage) -> None:
    """Case 1: the version is bumped meanwhile: the span carries the one at dispatch, not one read afterwards."""
    engine = stage.engine([("cb", None), ("a" + stage.end, "stop")])

    async def bumped() -> None:
        engine.version = 4

    engine.before_it_ends = bumped
    finished = await stage.run(engine, Host())
    assert [(s.start, s.version, s.digest) for s in finished.partial.spans] == [(0, 3, "d3")]
    assert finished.row()["version"] == 3


# -- stopping between two tokens --------------------------------------------------------------------------------


async def test_a_halted_trajectory_stops_with_all_that_was_generated(stage: Stage) -> None:
    """And goes on from there: what was there is the prompt of the next request."""
    engine = stage.engine([("c", None), ("never", "stop")], [("ba" + stage.end, "stop")])

    async def halt() -> None:
        if len(engine.requests) == 1:
            await stage.generation.halt(stage.t)

    engine.after_each_chunk = halt
    with pytest.raises(Halted):
        await stage.run(engine, Host())
    assert stage.t.token_ids == stage.encode("c") and stage.t.turn_state == "generating" and not stage.t.request
    stage.t.halting = False
    engine.aborted.clear()
    finished = await stage.run(engine, Host())
    assert finished.text == "cba" and engine.requests[1]["tokens"][-1:] == stage.encode("c")
    assert stage.generation.tokens == len(stage.encode("ba" + stage.end)), "what was there already is not made twice"


async def test_one_that_was_aborted_and_need_not_stop_any_more_goes_on(stage: Stage) -> None:
    """A plan that died meanwhile: the engine has ended its request, the trajectory is not lost."""
    engine = stage.engine([("c", None), ("never", "stop")], [("ba" + stage.end, "stop")])

    async def halt() -> None:
        if len(engine.requests) == 1:
            await stage.generation.halt(stage.t)
            stage.t.halting = False

    engine.after_each_chunk = halt
    assert (await stage.run(engine, Host())).text == "cba"
    assert engine.requests[0]["id"] != engine.requests[1]["id"]


async def test_the_end_of_a_turn_comes_before_a_halt(stage: Stage) -> None:
    """Its environment and its reward are not asked twice: not here and then at another owner."""
    engine, host = stage.engine([("cba" + stage.end, "stop")]), Host()
    engine.after_each_chunk = lambda: stage.generation.halt(stage.t)
    finished = await stage.run(engine, host)
    assert finished.status == "ok" and [c for c, _ in host.calls] == ["reset", "score"]


async def test_in_a_longer_conversation_it_stops_before_its_next_turn(stage: Stage) -> None:
    engine = stage.engine([("cb" + stage.end, "stop")])
    host = Host(steps=[Turn([{"role": "user", "content": "a"}], state="s1")])
    engine.after_each_chunk = lambda: stage.generation.halt(stage.t)
    with pytest.raises(Halted):
        await stage.run(engine, host, max_turns=2)
    assert (stage.t.turn, stage.t.environment_state, len(engine.requests)) == (1, "s1", 1)
    assert (await stage.logged()).turn == 1, "the reply is durable: its next owner does not ask for it again"
