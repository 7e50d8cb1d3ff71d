"""Evaluation of a pinned version: one rollout at a time, its rows registered once, beside training and never in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import Fault, Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import EvaluationRequest, Incoming, WorkerRecord
from laminar.buffer.schema import EVALUATION
from laminar.buffer.segments import read_segment
from laminar.buffer.session import Membership, Session
from laminar.buffer.storage import MemoryStorage
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.errors import EngineError, EnvironmentFailure
from laminar.workers.context import Member, Run
from laminar.workers.engines.base import Chunk, EngineCapacity, EngineLoad
from laminar.workers.environments.base import Score, Turn
from laminar.workers.evaluation import MAX_FAILURES, RETRY_S, Evaluator
from laminar.workers.mirror import Bell
from laminar.workers.rollouts.generation import SILENT_S

KEYS = Keys("run")
REQUEST = EvaluationRequest(version=5, digest="d5")
KEY = f"{KEYS.evaluations}{5:09d}"


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Engine:
    """Answers each prompt with its number; notes at which temperature it was asked. Refuses what real engines refuse,
    and the prompts `refused`; loses the first `lost` requests."""

    def __init__(self, max_model_len: int = 64, refused: tuple[int, ...] = (), lost: int = 0) -> None:
        self.temperatures: list[float] = []
        self.requests: list[str] = []
        self.running = self.most = 0
        self.max_model_len = max_model_len
        self.refused = refused
        self.lost = lost

    async def generate(self, request_id: str, token_ids: Sequence[int], **asked: Any) -> AsyncIterator[Chunk]:
        if token_ids[0] in self.refused or len(token_ids) >= self.max_model_len:
            raise EngineError(f"a prompt of {len(token_ids)} tokens is refused")
        assert request_id not in self.requests, "an engine may still know one that was aborted"
        self.requests.append(request_id)
        self.temperatures.append(asked["temperature"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(1 if len(self.requests) > self.lost else 1e6)
        finally:
            self.running -= 1
        yield Chunk([token_ids[0]], [-0.5], "stop")

    def load_report(self) -> EngineLoad:
        return EngineLoad(running=self.running, waiting=0, kv_tokens=0)


class Host:
    """Prompt 1 has a judge that fails; a turn is answered by what fills `reply` tokens."""

    def __init__(self, reply: int = 0) -> None:
        self.reply = reply
        self.scored: list[tuple[str, int]] = []
        self.states: set[str] = set()

    async def reset(self, prompt: Any) -> Turn:
        return Turn([{"role": "user", "content": str(prompt.prompt_index)}])

    async def step(self, prompt: Any, state: Any, reply: str) -> Turn:
        return Turn([{"role": "tool", "content": "9" * self.reply}], state=f"{state}+")

    async def score(self, prompt: Any, transcript: Any) -> Score:
        if prompt.prompt_index == 1:
            raise EnvironmentFailure("reward_error", "the judge is away")
        self.scored.append((transcript.finish_reason, len(transcript.messages)))
        self.states.add(transcript.state)
        return Score(1.0)


class Pool:
    def __len__(self) -> int:
        return 3

    def row(self, index: int) -> dict[str, Any]:
        return {"prompt_index": index, "prompt": "p", "answer": "a", "metadata": "{}"}


class World:
    def __init__(self, **config: Any) -> None:
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.config = Config.model_validate(
            {"model": {"path": "m"}, "evaluation": {"size": 3, "samples": 2}, "sampling": {"temperature": 0.7}}
            | config
        )

    async def ask(self) -> None:
        await MemoryCoordination(self.server).put(KEY, REQUEST.dump())

    async def evaluator(self, name: str) -> Evaluator:
        coordination = MemoryCoordination(self.server, Faults(random.Random(name)))
        session = await Session.open(coordination, 10)
        record = WorkerRecord(kind="rollout", id=name, host="h", pid=1, started_at_us=0)
        membership = await Membership.join(session, coordination, KEYS, record)
        prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
        file = RunFile(
            run="run", created_at_us=0, config={}, model_folder="", prompts=1, held_out=3, fingerprints=prints
        )
        run = Run(coordination, KEYS, self.storage, file, self.config, SystemClock())
        member = Member(run, name, session, membership, Ledger(coordination, KEYS, name, membership))
        conversation = SimpleNamespace(
            prompt_ids=lambda messages: [int(messages[0]["content"])], decode=lambda ids: f"reply {ids[0]}",
            turn_ids=lambda messages: [9] * len(messages[0]["content"]),
        )  # fmt: skip
        equipment: Any = SimpleNamespace(
            engine=Engine(), host=Host(), conversation=conversation, held_out=Pool(), stop_token_ids=[0],
            capacity=EngineCapacity(max_running=4, max_model_len=64, kv_tokens=1),
        )  # fmt: skip
        return Evaluator(run, member, equipment, Bell())

    async def rows(self) -> list[dict[str, Any]]:
        kv = self.server.get(KEYS.incoming("evaluation", "eval-000000005"))
        assert kv is not None and Incoming.parse(kv.value).evaluation == REQUEST
        contents = read_segment(await self.storage.read(Incoming.parse(kv.value).path), EVALUATION, complete=True)
        return [row for batch in contents.batches for row in batch.to_pylist()]


def kill(evaluator: Evaluator) -> None:
    evaluator.member.session.coordination.server.revoke(evaluator.member.session.lease)  # type: ignore[attr-defined]


async def test_one_rollout_evaluates_and_the_request_goes_with_the_registration() -> None:
    """Case 3: evaluations have keys of their own, and the cursor does not move."""
    world = World()
    await world.ask()
    first, second = await world.evaluator("r1"), await world.evaluator("r2")
    await first.claim_requests([REQUEST])
    await second.claim_requests([REQUEST])
    assert first.claimed_versions == (5,) and second.claimed_versions == ()
    first.start(5, "d5")
    assert first.running
    await asyncio.sleep(10)
    assert not first.running and first.claimed_versions == ()
    assert world.server.get(KEY) is None and world.server.get(KEYS.cursor) is None
    rows = await world.rows()
    assert len(rows) == 9 and {r["version"] for r in rows} == {5} and {r["digest"] for r in rows} == {"d5"}
    assert sorted((r["mode"], r["sample"]) for r in rows if r["prompt_index"] == 0) == [
        ("greedy", 0), ("sampled", 0), ("sampled", 1),
    ]  # fmt: skip
    engine: Any = first.equipment.engine
    assert sorted(engine.temperatures) == [0.0] * 3 + [0.7] * 6
    assert engine.most == 4, "not more at once than the engine runs"
    assert first.tokens == 9, "they count as what its engine makes"


async def test_a_rollout_that_rests_or_leaves_claims_nothing_new_and_keeps_what_it_has() -> None:
    world = World()
    await world.ask()
    resting, other = await world.evaluator("r1"), await world.evaluator("r2")
    await resting.claim_requests([REQUEST], more=False)
    assert resting.claimed_versions == ()
    await other.claim_requests([REQUEST])
    await other.claim_requests([REQUEST], more=False)
    assert other.claimed_versions == (5,)


async def test_a_judge_that_fails_gives_no_result_instead_of_a_zero() -> None:
    """Case 41, for evaluations."""
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(10)
    outcomes = {(r["prompt_index"], r["status"], r["reward"]) for r in await world.rows()}
    assert outcomes == {(0, "ok", 1.0), (1, "reward_error", None), (2, "ok", 1.0)}


async def test_an_evaluation_whose_rollout_dies_is_begun_again_by_another() -> None:
    world = World()
    await world.ask()
    dead, heir = await world.evaluator("r1"), await world.evaluator("r2")
    await dead.claim_requests([REQUEST])
    dead.start(5, "d5")
    await asyncio.sleep(0.5)
    kill(dead)
    await heir.claim_requests([REQUEST])
    assert heir.claimed_versions == (5,)
    heir.start(5, "d5")
    await asyncio.sleep(10)
    assert {r["version"] for r in await world.rows()} == {5}
    assert len([f for f in await world.storage.list("incoming") if "r2" in f.path]) == 1
    kv = world.server.get(KEYS.incoming("evaluation", "eval-000000005"))
    assert kv is not None and Incoming.parse(kv.value).worker == "r2", "what the dead one finishes late does not count"


async def test_an_evaluation_that_is_stopped_leaves_its_request() -> None:
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(0.5)
    await evaluator.stop()
    assert world.server.get(KEY) is not None and await world.storage.list("incoming") == []


async def test_a_reply_that_fills_the_model_ends_the_conversation_as_length() -> None:
    """As in training: the engine is not asked for what it would refuse."""
    world = World(environment={"max_turns": 3}, rollout={"max_model_len": 64}, sampling={"max_tokens": 32})
    await world.ask()
    evaluator = await world.evaluator("r1")
    host = Host(reply=62)
    evaluator.equipment.host = host  # type: ignore[misc, assignment]
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(10)
    rows = await world.rows()
    assert {(r["finish_reason"], r["status"], len(r["token_ids"])) for r in rows if r["prompt_index"] != 1} == {
        ("length", "ok", 1)
    }
    assert set(host.scored) == {("length", 3)}, "the judge sees the environment's reply"


async def test_the_environment_sees_the_last_reply_before_the_judge_looks_at_its_state() -> None:
    """As in training, where such a conversation ends as "environment"."""
    world = World(environment={"max_turns": 2}, rollout={"max_model_len": 64}, sampling={"max_tokens": 32})
    await world.ask()
    evaluator = await world.evaluator("r1")
    host = Host(reply=1)
    evaluator.equipment.host = host  # type: ignore[misc, assignment]
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(10)
    assert {r["finish_reason"] for r in await world.rows()} == {"environment"}
    assert host.states == {"++"} and set(host.scored) == {("environment", 4)}


async def test_a_held_out_prompt_that_leaves_no_room_has_no_reward() -> None:
    world = World(rollout={"max_model_len": 64}, sampling={"max_tokens": 32})
    await world.ask()
    evaluator = await world.evaluator("r1")
    ids = evaluator.equipment.conversation.prompt_ids
    evaluator.equipment.conversation.prompt_ids = lambda m: ids(m) * (64 if m[0]["content"] == "2" else 1)  # type: ignore[method-assign]
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(10)
    outcomes = {(r["status"], r["finish_reason"], r["reward"]) for r in await world.rows() if r["prompt_index"] == 2}
    assert outcomes == {("prompt_too_long", "error", None)}


async def test_an_evaluation_that_fails_again_and_again_is_given_up() -> None:
    """Else the rollout would begin it for ever, and never load another version."""
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    engine = Engine(refused=(2,))
    evaluator.equipment.engine = engine  # type: ignore[misc, assignment]
    begun = 0
    for _ in range(int(20 * MAX_FAILURES * RETRY_S)):
        await evaluator.claim_requests([REQUEST] if world.server.get(KEY) else [])
        if evaluator.claimed_versions and not evaluator.running:
            begun += 1
            evaluator.start(5, "d5")
        await asyncio.sleep(0.1)
        assert evaluator.running or engine.running == 0, "what a failed one has begun does not go on"
    assert begun == MAX_FAILURES and evaluator.claimed_versions == ()
    assert world.server.get(KEY) is None and await world.storage.list("incoming") == []


async def test_an_evaluation_whose_request_the_engine_lost_is_tried_again() -> None:
    """Else it would run for ever, and the rollout would never load another version."""
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    engine = Engine(lost=1)
    evaluator.equipment.engine = engine  # type: ignore[misc, assignment]
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(SILENT_S + 1)
    assert not evaluator.running and engine.running == 0
    await asyncio.sleep(RETRY_S)
    await evaluator.claim_requests([REQUEST])
    evaluator.start(5, "d5")
    await asyncio.sleep(10)
    assert len(await world.rows()) == 9


@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
async def test_a_lost_reply_registers_the_rows_once(fault: Fault) -> None:
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    await evaluator.claim_requests([REQUEST])
    evaluator.member.run.coordination.faults.script("transact", fault)  # type: ignore[attr-defined]
    evaluator.start(5, "d5")
    await asyncio.sleep(30)
    assert len(await world.rows()) == 9 and world.server.get(KEY) is None


async def test_a_version_that_is_lost_is_given_up() -> None:
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    await evaluator.give_up(5)
    assert world.server.get(KEY) is not None, "it is not this rollout's to give up"
    await evaluator.claim_requests([REQUEST])
    await evaluator.give_up(5)
    assert world.server.get(KEY) is None and evaluator.claimed_versions == ()


async def test_a_claim_whose_request_is_gone_is_forgotten() -> None:
    world = World()
    await world.ask()
    evaluator = await world.evaluator("r1")
    await evaluator.claim_requests([REQUEST])
    await evaluator.claim_requests([])
    assert evaluator.claimed_versions == ()
