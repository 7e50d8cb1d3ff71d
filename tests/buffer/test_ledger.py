"""Claims under faults: replies that are lost or late, workers that die, and workers that were only paused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from laminar.buffer import claims
from laminar.buffer.audit import check, gather
from laminar.buffer.claims import Held
from laminar.buffer.commits import TableCommitter
from laminar.buffer.coordination import created_at
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import all_claims
from laminar.buffer.memory import Fault, MemoryEtcd
from laminar.buffer.partials import Partial
from laminar.buffer.records import Claim, Cursor, Incoming, TableHead
from laminar.buffer.schema import TABLES
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.errors import Fenced, StoreError

KEYS = Keys("run")
Start = Callable[..., Awaitable[Any]]
EVERY_FAULT = pytest.mark.parametrize("fault", [None, *Fault], ids=lambda f: f.value if f else "none")
SEGMENT = Incoming(table="experience", path="incoming/experience/s.arrow", rows=2, worker="a")


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


async def draw(actor: Any, groups: int = 1, samples: int = 2) -> list[Held]:
    return list(await actor.ledger.draw(groups=lambda cursor: groups, samples_per_prompt=samples, version=0))


async def claimed(actor: Any) -> dict[tuple[int, int], Claim]:
    return {h.id: h.claim for h in (await all_claims(actor.coordination, KEYS)).values()}


def cursor_of(server: MemoryEtcd) -> int:
    kv = server.get(KEYS.cursor)
    return Cursor.parse(kv.value).next if kv else 0


# -- draw -------------------------------------------------------------------------------------------------------


@EVERY_FAULT
async def test_a_lost_reply_is_read_back_and_nothing_is_drawn_twice(start: Start, fault: Fault | None) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    a.faults.script("transact", fault)
    held = await draw(a, groups=2)
    assert [h.id for h in held] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    await asyncio.sleep(5)  # a late request has arrived by now
    assert cursor_of(server) == 2 and len(await claimed(a)) == 4


@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
async def test_what_was_drawn_is_known_even_if_the_next_request_fails(start: Start, fault: Fault) -> None:
    """The claims are read after they were drawn: a failure there must not end the worker that owns them."""
    a = await start(MemoryEtcd(), KEYS, "a")
    a.faults.script("transact", None, fault)
    assert len(await draw(a)) == 2


async def test_drawers_that_race_under_faults_never_get_the_same_group(start: Start) -> None:
    server = MemoryEtcd()
    drawers = [await start(server, KEYS, f"w{n}") for n in range(4)]
    owned: dict[str, list[tuple[int, int]]] = {d.name: [] for d in drawers}
    for d in drawers:
        d.faults.drop_reply, d.faults.late, d.faults.fail_before, d.faults.delay_s = 0.08, 0.04, 0.08, (0.0, 0.2)

    async def keep_drawing(d: Any) -> None:
        for _ in range(12):
            owned[d.name] += [h.id for h in await draw(d, groups=1 + len(owned[d.name]) % 2)]
            await asyncio.sleep(d.ledger.jitter(0.2))

    await asyncio.gather(*(keep_drawing(d) for d in drawers))
    for d in drawers:
        d.faults.drop_reply = d.faults.late = d.faults.fail_before = 0.0
    await asyncio.sleep(10)
    every = sorted(i for ids in owned.values() for i in ids)
    assert every == [(g, s) for g in range(cursor_of(server)) for s in range(2)]
    owners = {i: c.owner for i, c in (await claimed(drawers[0])).items()}
    assert owners == {i: w for w, ids in owned.items() for i in ids}
    assert sum(sum(d.faults.injected.values()) for d in drawers) > 20


async def test_the_loser_of_a_race_draws_nothing_and_is_not_fenced(start: Start) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")

    def others_are_faster(cursor: int) -> int:
        server.transact(
            claims.draw_transaction(
                KEYS, b.ledger.actor.guard(), None, groups=1, samples_per_prompt=2, owner="b", version=0, nonce="b/0"
            )
        )
        return 1

    assert await a.ledger.draw(groups=others_are_faster, samples_per_prompt=2, version=0) == []
    assert {c.owner for c in (await claimed(a)).values()} == {"b"} and cursor_of(server) == 1
    assert [h.id for h in await draw(a)] == [(1, 0), (1, 1)]


async def test_nothing_admitted_draws_nothing(start: Start) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    before = server.revision
    assert await draw(a, groups=0) == []
    assert server.revision == before


async def test_a_fenced_drawer_writes_nothing(start: Start) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    a.kill()
    before = server.revision
    with pytest.raises(Fenced, match="drops what it held"):
        await draw(a)
    assert server.revision == before


async def test_a_draw_that_arrives_after_its_worker_died_does_nothing(start: Start) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    a.faults.script("transact", Fault.LATE)
    asyncio.get_running_loop().call_later(1.0, a.kill)
    with pytest.raises(Fenced):
        await draw(a)
    await asyncio.sleep(10)
    assert cursor_of(server) == 0


# -- update, hand over, adopt -----------------------------------------------------------------------------------


@EVERY_FAULT
async def test_an_update_is_made_once_whatever_becomes_of_its_reply(start: Start, fault: Fault | None) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    held = (await draw(a))[0]
    a.faults.script("transact", fault)
    after = await a.ledger.update(held, claims.restarted(held.claim, version=0, error="boom", counts=True))
    assert after is not None and (after.claim.term, after.claim.attempts) == (2, 1)
    assert after.kv == server.get(KEYS.claim(0, 0))


async def test_an_update_of_a_claim_that_went_to_another_says_so(start: Start) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")
    held = (await draw(a))[0]
    assert await b.ledger.hand_over(held, claims.reassigned(held.claim, "b", "death"))
    assert await a.ledger.update(held, held.claim.model_copy(update={"attempts": 1})) is None
    assert (await claimed(a))[0, 0].owner == "b"


async def test_a_fenced_update_raises(start: Start) -> None:
    a = await start(MemoryEtcd(), KEYS, "a")
    held = (await draw(a))[0]
    a.kill()
    with pytest.raises(Fenced):
        await a.ledger.update(held, held.claim.model_copy(update={"attempts": 1}))


@EVERY_FAULT
async def test_a_hand_over_fills_the_inbox_and_an_adoption_empties_it(start: Start, fault: Fault | None) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")
    held = (await draw(a))[0]
    a.kill()
    manager = await start(server, KEYS, "m", "manager")
    target = server.get(KEYS.worker("rollout", "b"))
    assert target is not None
    manager.faults.script("transact", fault)
    claim = claims.reassigned(held.claim, "b", "death")
    assert await manager.ledger.hand_over(held, claim, created_at(target.key, target.create_revision))
    assert server.get(KEYS.inbox_item("b", 0, 0)) is not None

    kv = server.get(KEYS.claim(0, 0))
    assert kv is not None
    waiting = Held.of(kv)
    assert (waiting.claim.source.worker, waiting.claim.state, waiting.claim.deaths) == ("a", "waiting", 1)
    b.faults.script("transact", fault)
    taken = await b.ledger.adopt(waiting, version=0, progress=3)
    assert taken is not None
    assert (taken.claim.source.worker, taken.claim.source.term, taken.claim.deaths) == ("b", 2, 0)
    assert server.get(KEYS.inbox_item("b", 0, 0)) is None


async def test_nothing_is_handed_to_a_worker_that_has_died(start: Start) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")
    held = (await draw(a))[0]
    target = server.get(KEYS.worker("rollout", "b"))
    assert target is not None
    b.kill()
    claim = claims.reassigned(held.claim, "b", "move")
    assert not await a.ledger.hand_over(held, claim, created_at(target.key, target.create_revision))
    assert (await claimed(a))[0, 0] == held.claim and server.get(KEYS.inbox_item("b", 0, 0)) is None


async def test_a_paused_worker_finds_its_claim_gone_when_it_wakes(start: Start) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")
    held = (await draw(a))[0]
    a.kill()
    await b.ledger.hand_over(held, claims.reassigned(held.claim, "b", "death"))
    with pytest.raises(Fenced):
        await a.ledger.finish([held], "late", SEGMENT)
    assert server.get(KEYS.incoming("experience", "late")) is None and len(await claimed(b)) == 2


# -- finish -----------------------------------------------------------------------------------------------------


@EVERY_FAULT
async def test_a_finish_is_registered_exactly_once(start: Start, fault: Fault | None) -> None:
    """Case 28: the same completion is delivered twice: one row. The caller tries again with a new segment as long as
    claims are left, as the rollout does."""
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    left = await draw(a)
    a.faults.script("transact", fault)
    for number in itertools.count():
        left = await a.ledger.finish(left, f"s{number}", SEGMENT)
        if not left:
            break
    await asyncio.sleep(10)
    registered = (await a.coordination.range(KEYS.incoming_table("experience"))).items
    assert len(registered) == 1 and await claimed(a) == {}


async def test_a_finish_whose_segment_was_committed_before_its_reply_came_is_done(start: Start) -> None:
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    held = await draw(a)
    a.faults.script("transact", Fault.DROP_REPLY)
    finishing = asyncio.create_task(a.ledger.finish(held, "s", SEGMENT))
    await asyncio.sleep(1)
    b = await start(server, KEYS, "committer")
    assert await b.coordination.delete(KEYS.incoming("experience", "s"))
    assert await finishing == []


async def test_a_finish_with_a_lost_claim_returns_the_others_and_deletes_nothing(start: Start) -> None:
    server = MemoryEtcd()
    a, b = await start(server, KEYS, "a"), await start(server, KEYS, "b")
    held = await draw(a)
    await b.ledger.hand_over(held[0], claims.reassigned(held[0].claim, "b", "death"))
    assert await a.ledger.finish(held, "s0", SEGMENT) == [held[1]]
    assert server.get(KEYS.incoming("experience", "s0")) is None and len(await claimed(a)) == 2
    assert await a.ledger.finish([held[1]], "s1", SEGMENT) == []
    assert {i: c.owner for i, c in (await claimed(a)).items()} == {(0, 0): "b"}


async def test_a_claim_that_came_back_under_a_new_term_is_not_the_old_one(start: Start) -> None:
    a = await start(MemoryEtcd(), KEYS, "a")
    held = (await draw(a, samples=1))[0]
    assert await a.ledger.hand_over(held, claims.reassigned(held.claim, "a", "move"))
    assert await a.ledger.finish([held], "s", SEGMENT) == []
    assert (await claimed(a))[0, 0].term == 2


async def test_a_segment_name_is_never_registered_twice(start: Start) -> None:
    """Two finishes under one name would have one of them believe that the other's rows were its own."""
    server = MemoryEtcd()
    a = await start(server, KEYS, "a")
    first, second = await draw(a)
    assert await a.ledger.finish([first], "s", SEGMENT) == []
    value = server.get(KEYS.incoming("experience", "s"))
    await a.ledger.finish([second], "s", SEGMENT.model_copy(update={"path": "other"}))
    assert server.get(KEYS.incoming("experience", "s")) == value and list(await claimed(a)) == [(0, 1)]


# -- any history ------------------------------------------------------------------------------------------------


def ended(held: Held) -> Finished:
    nothing = Partial([1], [], [], [], [], 0, "scoring", None, "stop", 0)
    return Finished(
        group=held.id[0], sample=held.id[1], prompt_index=0, epoch=0, partial=nothing, finish_reason="stop",
        status="ok", error="", reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
    )  # fmt: skip


FAULTS = st.lists(st.sampled_from([None, *Fault]), max_size=2)
WHO = st.integers(0, 9)


class QuickTable(MemoryTable):
    """The audit's one filter without an SQL engine: it is asked after every step of every history."""

    async def read(
        self, columns: Sequence[str] | None = None, filter: str | None = None, limit: int | None = None
    ) -> pa.Table:
        rows = await super().read(None, None, limit)
        if filter is not None:
            rows = rows.filter(pc.less(rows["commit_seq"], int(filter.removeprefix("commit_seq < "))))
        return rows.select(list(columns)) if columns is not None else rows


class Histories(RuleBasedStateMachine):
    """Workers that draw, die, adopt and finish; a manager; a committer. The dead go on acting, as if paused."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=lambda: loop)
        self.start_actor = start
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.tables = {name: QuickTable(schema) for name, schema in TABLES.items()}
        self.names = (f"w{n:03d}" for n in itertools.count())
        self.workers: list[Any] = []
        self.held: dict[str, dict[tuple[int, int], Held]] = {}
        for _ in range(2):
            self.new_worker()
        self.manager = self.runner.run(start(self.server, KEYS, "m0", "manager"))
        self.committers: list[tuple[Any, TableCommitter]] = []
        self.new_committer()

    def new_worker(self) -> None:
        worker = self.runner.run(self.start_actor(self.server, KEYS, next(self.names)))
        self.workers.append(worker)
        self.held[worker.name] = {}

    def new_committer(self) -> None:
        actor = self.runner.run(self.start_actor(self.server, KEYS, next(self.names), "committer"))
        table = TableCommitter(
            "experience", TABLES["experience"], self.tables["experience"], actor.coordination, KEYS, actor.ledger,
            self.storage,
        )  # fmt: skip
        self.committers.append((actor, table))

    def act(self, actor: Any, work: Any, faults: list[Fault | None]) -> Any:
        """The work's result; None if the actor was fenced, which only a dead one may be."""
        actor.faults.script("transact", *faults)
        try:
            result = self.runner.run(work)
        except Fenced:
            assert not actor.alive
            result = None
        actor.faults._script.clear()
        return result

    @rule(who=WHO, groups=st.integers(1, 2), faults=FAULTS)
    def draws(self, who: int, groups: int, faults: list[Fault | None]) -> None:
        worker = self.workers[who % len(self.workers)]
        got = self.act(worker, draw(worker, groups), faults)
        assert worker.alive or not got
        self.held[worker.name] |= {h.id: h for h in got or []}

    @rule(who=WHO, count=st.integers(1, 3), faults=FAULTS)
    def finishes(self, who: int, count: int, faults: list[Fault | None]) -> None:
        worker = self.workers[who % len(self.workers)]
        mine = self.held[worker.name]
        batch = [mine[i] for i in sorted(mine)[:count]]
        if batch:
            self.act(worker, self.finish(worker, batch), faults)
            for h in batch:
                mine.pop(h.id)

    async def finish(self, worker: Any, batch: list[Held]) -> None:
        while batch:
            segment = f"{worker.name}-{worker.ledger.nonce().split('/')[1]}"
            incoming = await write_incoming(self.storage, worker.name, segment, [ended(h) for h in batch])
            batch = await worker.ledger.finish(batch, segment, incoming)

    @rule(who=WHO, faults=FAULTS)
    def fails_an_attempt(self, who: int, faults: list[Fault | None]) -> None:
        worker = self.workers[who % len(self.workers)]
        mine = self.held[worker.name]
        if mine:
            held = mine[min(mine)]
            claim = claims.restarted(held.claim, version=0, error="boom", counts=True)
            after = self.act(worker, worker.ledger.update(held, claim), faults)
            assert (after is not None) == worker.alive
            mine[held.id] = after or held

    @rule(who=WHO)
    def dies_and_is_replaced(self, who: int) -> None:
        living = [w for w in self.workers if w.alive]
        living[who % len(living)].kill()
        self.new_worker()

    @rule(faults=FAULTS)
    def sweeps(self, faults: list[Fault | None]) -> None:
        self.act(self.manager, self.sweep(), faults)

    async def sweep(self) -> None:
        living = {w.name: w for w in self.workers if w.alive}
        for held in claims.orphans(await all_claims(self.manager.coordination, KEYS), set(living)):
            target = sorted(living)[held.id[0] % len(living)]
            kv = self.server.get(KEYS.worker("rollout", target))
            assert kv is not None
            claim = claims.reassigned(held.claim, target, "death")
            assert await self.manager.ledger.hand_over(held, claim, created_at(kv.key, kv.create_revision))

    @rule(who=WHO, faults=FAULTS)
    def adopts(self, who: int, faults: list[Fault | None]) -> None:
        worker = self.workers[who % len(self.workers)]
        self.act(worker, self.adopt(worker), faults)

    async def adopt(self, worker: Any) -> None:
        for item in (await worker.coordination.range(KEYS.inbox(worker.name))).items:
            kv = self.server.get(KEYS.claims + item.key.rsplit("/", 1)[-1])
            if kv is not None and Claim.parse(kv.value).owner == worker.name:
                taken = await worker.ledger.adopt(Held.of(kv), version=0, progress=0)
                assert taken is not None
                self.held[worker.name][taken.id] = taken

    @rule(faults=FAULTS, lose=st.booleans())
    def commits(self, faults: list[Fault | None], lose: bool) -> None:
        actor, table = self.committers[-1]
        self.tables["experience"].lose_reply = lose
        self.act(actor, _until_lost_reply(table), faults)
        self.tables["experience"].lose_reply = False

    @rule(back=st.integers(1, 2))
    def a_replaced_committer_wakes(self, back: int) -> None:
        if len(self.committers) > back:
            actor, table = self.committers[-1 - back]
            self.act(actor, table.run_once(), [])

    @rule()
    def committer_is_replaced(self) -> None:
        self.committers[-1][0].kill()
        self.new_committer()

    @invariant()
    def each_trajectory_is_in_exactly_one_place(self) -> None:
        picture = self.runner.run(
            gather(
                self.workers[-1].coordination, KEYS, self.storage, self.tables, samples_per_prompt=2,
                on_version_lost="continue",
            )
        )  # fmt: skip
        assert check(picture).problems == []
        # A worker never holds what nobody knows of: each living owner's claims are those it knows, or await it.
        for held in picture.claims:
            owner = next(w for w in self.workers if w.name == held.claim.owner)
            if owner.alive and held.claim.state != "waiting":
                assert self.held[owner.name][held.id].kv.mod_revision == held.kv.mod_revision

    def teardown(self) -> None:
        """Whatever happened, living workers bring all that was drawn to its end."""
        self.sweeps(faults=[])
        for n, worker in enumerate(self.workers):
            if worker.alive:
                self.adopts(who=n, faults=[])
                self.finishes(who=n, count=1000, faults=[])
        _, table = self.committers[-1]
        while self.runner.run(table.registered()):
            self.runner.run(table.run_once())
        head = self.server.get(KEYS.head("experience"))
        rows = TableHead.parse(head.value).rows if head else 0
        assert rows == 2 * cursor_of(self.server) == self.runner.run(self.tables["experience"].count())
        self.runner.close()


async def _until_lost_reply(table: TableCommitter) -> None:
    """One round; a table's lost reply ends it, as the committer's loop would begin the next one."""
    try:
        await table.run_once()
    except StoreError as error:
        assert "the reply to commit" in str(error)


def test_any_history_keeps_each_trajectory_in_exactly_one_place(
    virtual_time: asyncio.AbstractEventLoopPolicy, start: Start
) -> None:
    run_state_machine_as_test(
        lambda: Histories(virtual_time.new_event_loop(), start),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
