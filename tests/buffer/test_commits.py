"""The committer: whichever instant it dies or is paused at, rows enter the table exactly once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from laminar.buffer import claims, commits
from laminar.buffer.claims import Held
from laminar.buffer.commits import COMPACT_EVERY, KEEP_VERSIONS, MAX_SEGMENTS, Resolution, TableCommitter, resolve
from laminar.buffer.coordination import KeyValue, Put, Transaction
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.memory import Fault, MemoryEtcd
from laminar.buffer.partials import Partial
from laminar.buffer.records import EvaluationRequest, Incoming, Intent, TableHead
from laminar.buffer.schema import EVALUATION, EXPERIENCE, STEP_METRICS
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.errors import CoordinationUnavailable, Fenced, StoreError

KEYS = Keys("run")
Start = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Crash(BaseException):
    """The process is gone: nothing of it runs any more, not even an `except Exception`."""


class Gate:
    """Every request of a committer passes here twice: before it takes effect, and after. It stops at the `at`-th time,
    or the first time of that name."""

    def __init__(self, at: int | str = -1, stop: Callable[[], Awaitable[None]] | None = None) -> None:
        self.at = at
        self.stop = stop
        self.passed: list[str] = []

    async def __call__(self, what: str) -> None:
        self.passed.append(what)
        if self.stop is not None and self.at in (what, len(self.passed) - 1):
            stop, self.stop = self.stop, None
            await stop()


class Gated:
    """An object whose coroutine methods pass through a gate."""

    def __init__(self, target: Any, gate: Gate) -> None:
        self._target = target
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def gated(*args: Any, **kwargs: Any) -> Any:
            await self._gate(f"before {name}")
            result = await method(*args, **kwargs)
            await self._gate(f"after {name}")
            return result

        return gated


def one(server: MemoryEtcd, key: str) -> KeyValue:
    kv = server.get(key)
    assert kv is not None
    return kv


async def crash() -> None:
    raise Crash


class World:
    """One table, one rollout that finishes trajectories, and committers that come one after the other."""

    def __init__(self, start: Start, rollout: Any) -> None:
        self.start = start
        self.rollout = rollout
        self.server: MemoryEtcd = rollout.server
        self.storage = MemoryStorage()
        self.table = MemoryTable(EXPERIENCE)
        self.segments = 0
        self.actors = 0

    @classmethod
    async def make(cls, start: Start, segments: int = 2) -> World:
        world = cls(start, await start(MemoryEtcd(), KEYS, "w"))
        for _ in range(segments):
            await world.finish_a_group()
        return world

    async def finish_a_group(self) -> str:
        held = await self.rollout.ledger.draw(groups=lambda cursor: 1, samples_per_prompt=2, version=0)
        return await self.finish(self.rollout, held)

    async def finish(self, actor: Any, held: list[Held]) -> str:
        segment = f"{actor.name}-{self.segments:06d}"
        self.segments += 1
        incoming = await write_incoming(self.storage, actor.name, segment, [ended(*h.id) for h in held])
        assert await actor.ledger.finish(held, segment, incoming) == []
        return segment

    async def committer(self, gate: Gate | None = None, *, compacts: bool = False) -> tuple[Any, TableCommitter]:
        self.actors += 1
        actor = await self.start(self.server, KEYS, f"c{self.actors}", "committer")
        gate = gate or Gate()
        coordination: Any = Gated(actor.coordination, gate)
        ledger = Ledger(coordination, KEYS, actor.name, actor.ledger.actor)
        table: Any = Gated(self.table, gate)
        storage: Any = Gated(self.storage, gate)
        every = 0 if compacts else COMPACT_EVERY
        made = TableCommitter("experience", EXPERIENCE, table, coordination, KEYS, ledger, storage, compact_every=every)
        return actor, made

    async def commit_all(self, committer: TableCommitter) -> None:
        for _ in range(10):
            await committer.run_once()
            if not await committer.registered() and (await self.head()).committing is None:
                return
        raise AssertionError("the committer does not come to an end")

    async def head(self) -> TableHead:
        kv = self.server.get(KEYS.head("experience"))
        return TableHead.parse(kv.value) if kv else TableHead(lance_version=0, rows=0)

    async def rows(self) -> list[tuple[int, int]]:
        rows = (await self.table.read()).sort_by("commit_seq").to_pylist()
        assert [r["commit_seq"] for r in rows] == list(range(len(rows)))
        return [(r["group"], r["sample"]) for r in rows]

    async def assert_committed_once(self, groups: int) -> None:
        assert sorted(await self.rows()) == [(g, s) for g in range(groups) for s in range(2)]
        head = await self.head()
        assert head.rows == 2 * groups and head.committing is None
        assert await all_claims(self.rollout.coordination, KEYS) == {}


def ended(group: int, sample: int) -> Finished:
    nothing = Partial([1], [], [], [], [], 0, "scoring", None, "stop", 0)
    return Finished(
        group=group, sample=sample, prompt_index=0, epoch=0, partial=nothing, finish_reason="stop", status="ok",
        error="", reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
    )  # fmt: skip


async def points(start: Start, compacts: bool) -> list[str]:
    """What one undisturbed round of a committer passes."""
    world, gate = await World.make(start), Gate()
    _, committer = await world.committer(gate, compacts=compacts)
    assert await committer.run_once() == 4
    await world.assert_committed_once(2)
    return gate.passed


# -- every instant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacts", [False, True], ids=["", "compacting"])
async def test_a_committer_may_die_at_any_instant(start: Start, compacts: bool) -> None:
    """Case 28: between intent, commit, unregistration and deletion of the files, whatever was done or not: a
    successor leaves each row in the table once."""
    instants = await points(start, compacts)
    assert {"after commit", "before transact", "after delete"} <= set(instants)
    assert ("after compact" in instants) == compacts
    for at in range(len(instants)):
        world = await World.make(start)
        actor, committer = await world.committer(Gate(at, crash), compacts=compacts)
        with pytest.raises(Crash):
            await committer.run_once()
        actor.kill()
        _, successor = await world.committer()
        await world.commit_all(successor)
        await world.assert_committed_once(2)


@pytest.mark.parametrize("compacts", [False, True], ids=["", "compacting"])
async def test_a_committer_that_was_paused_at_any_instant_does_nothing_when_it_wakes(
    start: Start, compacts: bool
) -> None:
    """It lost its leadership meanwhile, and its successor went on: it stands back with Fenced, or had done its work."""
    for at in range(len(await points(start, compacts))):
        world = await World.make(start)
        await paused_at(world, at, compacts)
        await world.assert_committed_once(4)
        _, last = await world.committer()
        await world.finish_a_group()
        await world.commit_all(last)
        await world.assert_committed_once(5)


async def paused_at(world: World, at: int | str, compacts: bool) -> None:
    wake, asleep = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        asleep.set()
        await wake.wait()

    actor, late = await world.committer(Gate(at, pause), compacts=compacts)
    working = asyncio.create_task(late.run_once())
    await asleep.wait()
    actor.kill()
    successor_actor, successor = await world.committer()
    await world.commit_all(successor)
    await world.finish_a_group()
    await world.finish_a_group()
    await world.commit_all(successor)
    successor_actor.kill()
    wake.set()
    with suppress(Fenced):
        await working


async def test_a_late_commit_may_land_at_any_instant_of_its_successors_round(start: Start) -> None:
    """A call to the table goes on in its thread, or on the wire, when its committer has lost its leadership."""
    gate, at = Gate(), 0
    while at == 0 or at < len(gate.passed):
        world = await World.make(start)
        wake, asleep = asyncio.Event(), asyncio.Event()

        async def pause(wake: asyncio.Event = wake, asleep: asyncio.Event = asleep) -> None:
            asleep.set()
            await wake.wait()

        actor, late = await world.committer(Gate("before commit", pause))
        working = asyncio.create_task(late.run_once())
        await asleep.wait()
        actor.kill()

        async def land(wake: asyncio.Event = wake, working: asyncio.Task[int] = working) -> None:
            wake.set()
            with suppress(Fenced):
                await working

        gate = Gate(at, land)
        _, successor = await world.committer(gate)
        await world.commit_all(successor)
        await world.assert_committed_once(2)
        at += 1
    assert {"before find", "before version", "before commit", "before delete"} <= set(gate.passed)


async def test_a_replaced_committer_announces_nothing(start: Start) -> None:
    world = await World.make(start)
    actor, committer = await world.committer()
    actor.kill()
    with pytest.raises(Fenced):
        await committer.run_once()
    assert world.server.get(KEYS.head("experience")) is None and await world.table.version() == 0


async def test_without_the_tables_fence_a_late_commit_doubles_rows(start: Start) -> None:
    """What the test above is able to see: a table that rebases late commits, as Lance does without a commit lock."""
    world = await World.make(start)
    world.table.unfenced = True
    await paused_at(world, "before commit", False)
    assert len(await world.table.read()) > 8


# -- the table's answers ----------------------------------------------------------------------------------------


async def test_a_commit_whose_reply_was_lost_is_recognised(start: Start) -> None:
    world = await World.make(start)
    _, committer = await world.committer()
    world.table.lose_reply = True
    with pytest.raises(StoreError, match="was lost"):
        await committer.run_once()
    assert (await world.head()).committing is not None
    assert await committer.run_once() == 4
    await world.assert_committed_once(2)
    assert await world.table.version() == 1


async def test_a_commit_that_failed_is_made_again_under_the_same_key(start: Start) -> None:
    world = await World.make(start)
    _, committer = await world.committer()
    world.table.fail_commit = True
    with pytest.raises(StoreError, match="before it was made"):
        await committer.run_once()
    announced = (await world.head()).committing
    assert announced is not None and announced.target == 1
    assert await committer.run_once() == 4
    assert await world.table.find(announced.key) == 1
    await world.assert_committed_once(2)


async def test_an_intent_whose_target_was_taken_is_announced_anew(start: Start) -> None:
    """A replaced committer's late compaction takes the version that its successor has announced."""
    world = await World.make(start)
    actor, first = await world.committer()
    await world.commit_all(first)
    actor.kill()
    await world.finish_a_group()

    async def overtaken() -> None:
        await world.table.compact(keep=KEEP_VERSIONS)

    _, second = await world.committer(Gate("before commit", overtaken))
    assert await second.run_once() == 0
    assert (await world.head()).committing is None
    assert await second.run_once() == 2
    assert (await world.head()).lance_version == 3
    await world.assert_committed_once(3)


@pytest.mark.parametrize(
    ("found", "version", "resolution"),
    [
        (8, 8, Resolution.UNREGISTER),
        (8, 9, Resolution.UNREGISTER),
        (None, 7, Resolution.COMMIT),
        (None, 8, Resolution.VOID),
        (None, 9, Resolution.VOID),
    ],
)
def test_what_a_table_says_of_an_intent(found: int | None, version: int, resolution: Resolution) -> None:
    assert resolve(Intent(target=8, key="k", segments=[]), found, version) is resolution


# -- etcd's answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
@pytest.mark.parametrize("nth", [0, 1])
async def test_a_lost_reply_of_etcd_changes_nothing(start: Start, fault: Fault, nth: int) -> None:
    world = await World.make(start)
    actor, committer = await world.committer()
    actor.faults.script("transact", *[None] * nth, fault)
    assert await committer.run_once() == 4
    await asyncio.sleep(10)
    await world.assert_committed_once(2)


async def test_a_head_that_somebody_else_changed_is_left_to_him(start: Start) -> None:
    world = await World.make(start)

    async def changed() -> None:
        world.server.transact(Transaction((), (Put(KEYS.head("experience"), '{"lance_version": 0, "rows": 0}'),)))

    _, committer = await world.committer(Gate("before transact", changed))
    with pytest.raises(Fenced, match="changed by somebody else"):
        await committer.run_once()
    assert await world.table.version() == 0


# -- segments that cannot be read -------------------------------------------------------------------------------


async def damage(world: World, segment: str, how: str) -> None:
    path = f"incoming/experience/{segment}.arrow"
    if how == "missing":
        await world.storage.delete(path)
    elif how == "cut":
        await world.storage.write(path, (await world.storage.read(path))[:-20], overwrite=True)
    else:
        world.storage.damage(path, 2000, b"\xaa\x55\xaa")


async def assert_reissued_and_finished(world: World, committer: TableCommitter, groups: int) -> None:
    """The damaged segment's group (1) waits for an owner; the rollout takes and finishes it."""
    waiting = await all_claims(world.rollout.coordination, KEYS)
    assert sorted(h.id for h in waiting.values()) == [(1, 0), (1, 1)]
    assert {(h.claim.owner, h.claim.state) for h in waiting.values()} == {("", "waiting")}
    taken = []
    for held in waiting.values():
        assert await world.rollout.ledger.hand_over(held, claims.reassigned(held.claim, "w", "death"))
        waits = Held.of(one(world.server, held.kv.key))
        adopted = await world.rollout.ledger.adopt(waits, version=0, progress=0)
        assert adopted is not None and adopted.claim.deaths == 0
        taken.append(adopted)
    await world.finish(world.rollout, taken)
    await world.commit_all(committer)
    await world.assert_committed_once(groups)


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
async def test_trajectories_of_an_unreadable_segment_are_issued_again(start: Start, how: str) -> None:
    world = await World.make(start, 3)
    await damage(world, "w-000001", how)
    _, committer = await world.committer()
    await world.commit_all(committer)
    assert sorted(await world.rows()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert world.server.get(KEYS.incoming("experience", "w-000001")) is None
    await assert_reissued_and_finished(world, committer, 3)


async def unreadable(world: World, table: str, segment: str, request: EvaluationRequest | None) -> None:
    path = f"incoming/{table}/w-{segment}.arrow"
    await world.storage.write(path, b"no segment")
    incoming = Incoming(table=table, path=path, rows=96, worker="w", evaluation=request)
    assert await world.rollout.ledger.register(table, segment, incoming, Transaction((), ()))
    actor, _ = await world.committer()
    schema = {"evaluation": EVALUATION, "step_metrics": STEP_METRICS}[table]
    committer = TableCommitter(
        table, schema, MemoryTable(schema), actor.coordination, KEYS, actor.ledger, world.storage
    )
    assert await committer.run_once() == 0
    assert world.server.get(KEYS.incoming(table, segment)) is None


async def test_an_unreadable_evaluation_is_asked_for_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    world = await World.make(start, 0)
    request = EvaluationRequest(version=15, digest="d")
    await unreadable(world, "evaluation", "eval-000000015", request)
    assert EvaluationRequest.parse(one(world.server, f"{KEYS.evaluations}000000015").value) == request
    assert "version 15 is evaluated again" in caplog.text


async def test_what_cannot_be_had_again_is_said_to_be_lost(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    await unreadable(await World.make(start, 0), "step_metrics", "000000003-t1", None)
    assert "w-000000003-t1.arrow" in caplog.text and "its 96 rows are lost" in caplog.text


@pytest.mark.parametrize("how", ["flipped", "missing"])
async def test_a_segment_that_became_unreadable_after_its_commit_was_announced(start: Start, how: str) -> None:
    """The announced version must be taken before the intent is given up: the one who announced it may only be slow."""
    world = await World.make(start, 3)
    wake, asleep = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        asleep.set()
        await wake.wait()

    actor, late = await world.committer(Gate("before commit", pause))
    working = asyncio.create_task(late.run_once())
    await asleep.wait()
    actor.kill()
    await damage(world, "w-000001", how)
    _, committer = await world.committer()
    assert await committer.run_once() == 0 and (await world.head()).committing is None
    wake.set()
    with pytest.raises(Fenced):
        await working
    await world.commit_all(committer)
    assert sorted(await world.rows()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    await assert_reissued_and_finished(world, committer, 3)


async def test_a_late_request_does_not_issue_trajectories_a_third_time(start: Start) -> None:
    world = await World.make(start, 1)
    await damage(world, "w-000000", "flipped")
    actor, committer = await world.committer()
    actor.faults.script("transact", Fault.LATE)
    actor.faults.delay_s = (0.5, 0.5)
    with pytest.raises(CoordinationUnavailable):
        await committer.run_once()
    actor.faults.delay_s = (0.0, 0.0)
    assert await committer.run_once() == 0
    held = Held.of(one(world.server, KEYS.claim(0, 0)))
    assert await world.rollout.ledger.hand_over(held, claims.reassigned(held.claim, "w", "death"))
    await asyncio.sleep(10)
    assert Held.of(one(world.server, KEYS.claim(0, 0))).claim.owner == "w"


async def test_a_readable_segment_with_other_rows_than_registered_is_not_taken(start: Start) -> None:
    world = await World.make(start, 1)
    key = KEYS.incoming("experience", "w-000000")
    lying = Incoming.parse(one(world.server, key).value).model_copy(update={"rows": 3})
    world.server.transact(Transaction((), (Put(key, lying.dump()),)))
    _, committer = await world.committer()
    await world.commit_all(committer)
    assert await world.rows() == [] and len(await all_claims(world.rollout.coordination, KEYS)) == 2


# -- sizes ------------------------------------------------------------------------------------------------------


async def test_many_segments_are_committed_in_the_order_of_their_registration(start: Start) -> None:
    world = await World.make(start, MAX_SEGMENTS + 5)
    _, committer = await world.committer()
    assert await committer.run_once() == 2 * MAX_SEGMENTS
    assert await committer.run_once() == 10
    assert await committer.run_once() == 0
    assert await world.rows() == [(g, s) for g in range(MAX_SEGMENTS + 5) for s in range(2)]
    assert await world.storage.list("incoming") == []


async def test_a_table_is_compacted_every_so_many_commits_of_whichever_committer(start: Start) -> None:
    """Committers that never live for many commits must not let the files grow without end."""
    world = await World.make(start, 0)
    compactions = 0
    for _ in range(12):
        await world.finish_a_group()
        actor, committer = await world.committer()
        committer.compact_every = 4
        await world.commit_all(committer)
        assert await committer.run_once() == 0, "nothing waits, nothing is done"
        compactions += committer.compactions
        actor.kill()
    assert compactions == 2
    assert (await world.head()).lance_version == await world.table.version() == 14
    await world.assert_committed_once(12)


async def test_a_compaction_that_fails_holds_no_commit_up_and_is_tried_again_some_commits_later(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await World.make(start, 0)
    tries: list[int] = []
    monkeypatch.setattr(commits, "COMPACT_AGAIN_AFTER", 3)
    _, committer = await world.committer()
    committer.compact_every = 2
    compact = world.table.compact

    async def damaged(*, keep: int) -> int:
        tries.append(await world.table.version())
        if len(tries) < 3:
            raise StoreError("an old fragment does not open")
        return await compact(keep=keep)

    monkeypatch.setattr(world.table, "compact", damaged)
    for _ in range(10):
        await world.finish_a_group()
        assert await committer.run_once() == 2
    assert tries == [2, 5, 8] and committer.compactions == 1
    await world.assert_committed_once(10)
