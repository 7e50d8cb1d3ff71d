"""What a step means is decided once, for ever; what a step leaves is recorded once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.archive import ArchivedStep, read_block, write_block
from laminar.buffer.coordination import Put, Transaction
from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.memory import Fault, MemoryEtcd
from laminar.buffer.partials import Partial
from laminar.buffer.prompts import locate, order
from laminar.buffer.records import BatchDecision, Cursor, Incoming, TrainerHead
from laminar.buffer.schema import EXPERIENCE, STEP_METRICS, STEPS
from laminar.buffer.segments import read_segment
from laminar.buffer.steps import BATCH, StepLog, batch_rows, decision_path, read_batch, read_decision
from laminar.buffer.storage import MemoryStorage
from laminar.buffer.table import MemoryTable
from laminar.errors import CoordinationUnavailable, CorruptSegment, Fenced, StoreError

KEYS = Keys("run")
Start = Callable[..., Awaitable[Any]]
EVERY_FAULT = pytest.mark.parametrize("fault", [None, *Fault], ids=lambda f: f.value if f else "none")
SAMPLE = {
    "step": 0, "group": 0, "sample": 0, "advantage": 0.5, "staleness": 0, "tokens": 2, "mean_ratio": 1.0,
    "clip_fraction": None, "policy_loss": 0.1, "mean_logprob": -0.5, "commit_seq": -1,
}  # fmt: skip


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class World:
    def __init__(self, start: Start) -> None:
        self.start = start
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.lives = 0

    async def trainer(self) -> tuple[Any, StepLog]:
        self.lives += 1
        actor = await self.start(self.server, KEYS, f"t{self.lives}", "trainer")
        return actor, StepLog(actor.coordination, KEYS, actor.ledger, self.storage)

    def under(self, prefix: str) -> list[str]:
        return [kv.key.rsplit("/", 1)[-1] for kv in self.server.page(prefix, "", 1000, 0).items]

    def incoming(self, table: str, name: str) -> Incoming:
        kv = self.server.get(KEYS.incoming(table, name))
        assert kv is not None
        return Incoming.parse(kv.value)

    async def decided(self) -> BatchDecision:
        kv = self.server.get(KEYS.batch(0))
        assert kv is not None
        return BatchDecision.parse(kv.value)


@pytest.fixture
def world(start: Start) -> World:
    return World(start)


def batch(uses: dict[int, str]) -> pa.Table:
    """Two rows a group, with how the step uses them."""
    partial = Partial([1, 2], [7], [True], [-0.25], [], 0, "scoring", None, "stop", 0)
    rows = [
        Finished(
            group=group, sample=sample, prompt_index=0, epoch=0, partial=partial, finish_reason="stop", status="ok",
            error="", reward=float(sample), reward_parts={}, text="", attempts=0, finished_at=0,
        ).row() | {"use": use}
        for group, use in uses.items() for sample in range(2)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=BATCH)


# -- decide -----------------------------------------------------------------------------------------------------


@EVERY_FAULT
async def test_a_step_is_decided_once_whatever_becomes_of_the_reply(world: World, fault: Fault | None) -> None:
    actor, log = await world.trainer()
    actor.faults.script("transact", fault)
    decided = await log.decide(0, batch({0: "train", 1: "no_signal"}), [0], {1: "no_signal"})
    assert decided.rows.equals(batch({0: "train", 1: "no_signal"}))
    await asyncio.sleep(10)
    head, _ = await log.head()
    assert (head.decided, head.consumed_groups, head.step) == (1, 2, 0)
    assert await read_decision(world.storage, 0) == await log.decision(0) == decided.decision


async def test_a_decided_step_is_not_decided_again(world: World) -> None:
    _, log = await world.trainer()
    first = await log.decide(0, batch({0: "train"}), [0], {})
    with pytest.raises(StoreError, match="batch 0 cannot be decided: 1 batches are decided"):
        await log.decide(0, batch({1: "train"}), [1], {})
    with pytest.raises(StoreError, match="batch 2 cannot be decided"):
        await log.decide(2, batch({1: "train"}), [1], {})
    assert (await log.read(0)).decision == first.decision
    assert (await log.head())[0].consumed_groups == 1


async def test_deciding_counts_the_retired_groups_that_waited_as_consumed(world: World) -> None:
    _, log = await world.trainer()
    await log.change_head(to_retire=1)
    await log.decide(0, batch({0: "train", 1: "error"}), [0], {1: "error"})
    head, _ = await log.head()
    assert (head.consumed_groups, head.to_retire) == (2, 0)


async def test_a_fenced_trainer_decides_nothing(world: World) -> None:
    actor, log = await world.trainer()
    actor.kill()
    with pytest.raises(Fenced):
        await log.decide(0, batch({0: "train"}), [0], {})
    assert world.server.get(KEYS.batch(0)) is None and world.server.get(KEYS.trainer) is None
    with pytest.raises(StoreError, match="no decision of step 0"):
        await read_decision(world.storage, 0)


async def test_a_late_decision_of_a_replaced_trainer_does_nothing(world: World) -> None:
    actor, old = await world.trainer()
    actor.faults.script("transact", Fault.LATE)
    deciding = asyncio.create_task(old.decide(0, batch({0: "train"}), [0], {}))
    await asyncio.sleep(1)
    actor.kill()
    _, new = await world.trainer()
    decided = await new.decide(0, batch({1: "train"}), [1], {})
    with pytest.raises(Fenced):
        await deciding
    await asyncio.sleep(10)
    assert await world.decided() == decided.decision and decided.decision.decided_by == "t2"
    assert (await new.read(0)).rows["group"].to_pylist() == [1, 1]


async def test_a_second_try_with_other_rows_is_refused(world: World) -> None:
    """The file of a decision that may have been made must not come to stand for another one."""
    actor, log = await world.trainer()
    actor.faults.script("transact", *[Fault.FAIL_BEFORE] * 100)
    with pytest.raises(CoordinationUnavailable, match="no known outcome"):
        await log.decide(0, batch({0: "train"}), [0], {})
    actor.faults._script.clear()
    with pytest.raises(StoreError, match="holds another batch"):
        await log.decide(0, batch({0: "train", 1: "train"}), [0, 1], {})
    decided = await log.decide(0, batch({0: "train"}), [0], {})
    assert decided.rows["group"].to_pylist() == [0, 0]


async def test_a_new_trainer_trains_on_the_very_batch_that_was_decided(world: World) -> None:
    """Case 31: killed with groups in flight: those that were decided are trained once, as they were decided."""
    actor, old = await world.trainer()
    decided = await old.decide(0, batch({0: "train"}), [0], {})
    actor.kill()
    _, new = await world.trainer()
    head, _ = await new.head()
    assert (head.decided, head.step, head.consumed_groups) == (1, 0, 1)
    again = await new.read(0)
    assert again.decision == decided.decision and again.rows.equals(decided.rows)
    await new.decide(1, batch({1: "train"}), [1], {})
    assert world.under(KEYS.batches) == ["000000000000", "000000000001"]


async def test_a_decision_survives_the_loss_of_etcd(world: World) -> None:
    actor, log = await world.trainer()
    decided = await log.decide(0, batch({0: "train"}), [0], {})
    await actor.coordination.delete(KEYS.batch(0))
    assert (await log.read(0)).decision == decided.decision


@pytest.mark.parametrize("change", ["flipped", "cut", "replaced"])
async def test_a_batch_file_that_has_changed_is_not_trained_on(world: World, change: str) -> None:
    _, log = await world.trainer()
    decision = (await log.decide(0, batch({0: "train"}), [0], {})).decision
    data = await world.storage.read(decision.file)
    if change == "replaced":
        _, other = await World(world.start).trainer()
        decided = await other.decide(0, batch({0: "train", 1: "train"}), [0, 1], {})
        data = await other.storage.read(decided.decision.file)
    changed = {"flipped": data[:-100] + b"\x55" + data[-99:], "cut": data[:-8], "replaced": data}[change]
    await world.storage.write(decision.file, changed, overwrite=True)
    with pytest.raises(CorruptSegment, match=r"decided was .* step 0 cannot be trained without it"):
        await read_batch(world.storage, decision)
    with pytest.raises(CorruptSegment):
        await log.read(0)


# -- the head ---------------------------------------------------------------------------------------------------


async def test_tasks_of_one_trainer_change_different_fields_and_none_is_lost(world: World) -> None:
    actor, log = await world.trainer()
    actor.faults.delay_s = (0.0, 0.2)
    actor.faults.drop_reply = 0.1
    await asyncio.gather(
        log.change_head(to_retire=3),
        log.change_head(checkpoint=5),
        log.record(0, "t1", [], {}, 1, "d", 0),
        log.record_initial("t1", "d", 0),
    )
    head, _ = await log.head()
    assert (head.to_retire, head.checkpoint, head.step, head.initial) == (3, 5, 1, True)


@EVERY_FAULT
async def test_what_goes_with_a_head_that_stays_the_same_is_written_all_the_same(
    world: World, fault: Fault | None
) -> None:
    """A request that never arrived must not pass for done because the fields were equal before."""
    actor, log = await world.trainer()
    for _ in range(2):
        actor.faults.script("transact", fault)
        await log.change_head([Put(f"{KEYS.evaluations}000000007", "x")])
        assert world.under(KEYS.evaluations) == ["000000007"] and world.server.get(KEYS.trainer) is not None
        await actor.coordination.delete(f"{KEYS.evaluations}000000007")
        await asyncio.sleep(10)


async def test_a_head_that_changed_under_its_leader_ends_the_trainer(world: World) -> None:
    _, log = await world.trainer()
    await log.change_head(to_retire=1)
    real = log.coordination.transact

    async def beaten(transaction: Transaction) -> Any:
        world.server.transact(Transaction((), (Put(KEYS.trainer, head(to_retire=9).dump()),)))
        return await real(transaction)

    log.coordination.transact = beaten  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="changed under its leader"):
        await log.change_head(to_retire=2)


def head(**changes: Any) -> TrainerHead:
    fresh = TrainerHead(step=0, decided=0, checkpoint=-1, consumed_groups=0, state="running")
    return fresh.model_copy(update=changes)


# -- record -----------------------------------------------------------------------------------------------------


@EVERY_FAULT
async def test_a_step_is_recorded_once(world: World, fault: Fault | None) -> None:
    actor, log = await world.trainer()
    actor.faults.script("transact", fault)
    await log.record(0, "t1", [SAMPLE], {"loss": 0.5, "entropy": None}, 1, "d1", 42)
    assert (await log.head())[0].step == 1
    incoming = world.incoming("steps", "step-000000000")
    assert (incoming.rows, incoming.worker) == (1, "t1")
    rows = read_segment(await world.storage.read(incoming.path), STEPS, complete=True).batches[0].to_pylist()
    assert (rows[0]["advantage"], rows[0]["clip_fraction"]) == (0.5, None)
    path = world.incoming("step_metrics", "step-000000000").path
    row = read_segment(await world.storage.read(path), STEP_METRICS, complete=True).batches[0].to_pylist()[0]
    assert (row["step"], row["version"], row["digest"]) == (0, 1, "d1")
    assert json.loads(row["metrics"]) == {"loss": 0.5, "entropy": None}


async def test_a_replayed_step_adds_nothing(world: World) -> None:
    """Whether its rows are still waiting for the committer, or were committed and unregistered long ago."""
    actor, log = await world.trainer()
    await log.record(0, "t1", [SAMPLE], {}, 1, "d1", 42)
    before = world.server.revision
    await log.record(0, "t1", [SAMPLE], {}, 1, "d1", 43)
    assert world.server.revision == before
    for table in ("steps", "step_metrics"):
        await actor.coordination.delete(KEYS.incoming(table, "step-000000000"))
    actor.kill()
    _, successor = await world.trainer()
    await successor.record(0, "t2", [SAMPLE], {}, 1, "other", 44)
    assert world.under(KEYS.incoming_root) == []


async def test_a_step_without_trained_rows_leaves_its_metrics_only(world: World) -> None:
    _, log = await world.trainer()
    await log.record(0, "t1", [], {"reward_mean": None}, 1, "", 42)
    assert world.under(KEYS.incoming_root) == ["step-000000000"]


async def test_the_initial_version_is_recorded_once(world: World) -> None:
    actor, log = await world.trainer()
    await log.record_initial("t1", "d0", 42)
    assert world.incoming("step_metrics", "initial").rows == 1
    await actor.coordination.delete(KEYS.incoming("step_metrics", "initial"))
    await log.record_initial("t1", "d0", 43)
    assert world.under(KEYS.incoming_root) == [] and (await log.head())[0].step == 0


async def test_a_fenced_trainer_records_nothing(world: World) -> None:
    actor, log = await world.trainer()
    actor.kill()
    with pytest.raises(Fenced):
        await log.record(0, "t1", [SAMPLE], {}, 1, "d1", 42)
    assert world.under(KEYS.incoming_root) == []


# -- close ------------------------------------------------------------------------------------------------------


@EVERY_FAULT
async def test_closing_retires_what_is_left_in_the_transaction_that_says_done(
    world: World, fault: Fault | None
) -> None:
    actor, log = await world.trainer()
    await log.decide(0, batch({0: "train"}), [0], {})
    actor.faults.script("transact", fault)
    await log.close(batch({1: "remainder"}), {1: "remainder"}, "one step is trained")
    head, _ = await log.head()
    assert (head.state, head.reason, head.decided, head.consumed_groups) == ("done", "one step is trained", 1, 2)
    kv = world.server.get(f"{KEYS.closings}000000001-000")
    assert kv is not None
    closing = BatchDecision.parse(kv.value)
    assert closing.trained == [] and closing.retired == {1: "remainder"}
    assert (await read_batch(world.storage, closing)).rows["group"].to_pylist() == [1, 1]
    assert world.under(KEYS.batches) == ["000000000000"], "a closing is no step"


async def test_closing_with_nothing_left_writes_no_record(world: World) -> None:
    _, log = await world.trainer()
    await log.close(batch({}), {}, "nothing was left")
    assert world.under(KEYS.closings) == [] and (await log.head())[0].state == "done"
    assert await world.storage.list("batches") == []

async def test_a_second_closing_at_the_same_step_keeps_the_first(world: World) -> None:
    """A run that ended for want of prompts is given more of them, and ends again before another step is decided."""
    actor, log = await world.trainer()
    await log.decide(0, batch({0: "train"}), [0], {})
    await log.close(batch({1: "remainder"}), {1: "remainder"}, "first")
    actor.kill()
    _, log = await world.trainer()
    await log.change_head(state="running")
    await log.close(batch({2: "error"}), {2: "error"}, "second")
    assert [c.retired for c in await log.closings()] == [{1: "remainder"}, {2: "error"}]
    assert (await log.head())[0].consumed_groups == 3
    for closing in await log.closings():
        assert (await read_batch(world.storage, closing)).rows.num_rows == 2


async def test_nothing_is_drawn_once_a_run_is_closed(world: World) -> None:
    """A rollout that has not heard of the end would draw groups that nobody ever consumes."""
    rollout = await world.start(world.server, KEYS, "w")
    draw = {"groups": lambda cursor: 1, "samples_per_prompt": 2, "version": 0}
    assert len(await rollout.ledger.draw(**draw)) == 2
    _, log = await world.trainer()
    await log.end_drawing()
    assert await rollout.ledger.draw(**draw) == [] and await rollout.ledger.cursor() == 1
    await log.close(batch({0: "remainder"}), {0: "remainder"}, "done")
    assert await rollout.ledger.draw(**draw) == []
    await log.change_head(state="running")
    await log.begin_drawing()
    assert [h.id for h in await rollout.ledger.draw(**draw)] == [(1, 0), (1, 1)]
    await log.begin_drawing()
    await log.close(batch({}), {}, "done again, with nothing left")
    assert await rollout.ledger.draw(**draw) == []


# -- old steps --------------------------------------------------------------------------------------------------


async def decide_many(log: StepLog, steps: int) -> list[BatchDecision]:
    return [(await log.decide(n, batch({n: "train"}), [n], {})).decision for n in range(steps)]


async def test_a_decision_is_found_in_etcd_beside_its_file_and_in_the_archive(world: World) -> None:
    actor, log = await world.trainer()
    decided = await decide_many(log, 4)
    await write_block(world.storage, [ArchivedStep(decision=d, offered=[]) for d in decided[:2]])
    for step in range(2):
        await world.storage.delete(decision_path(step))
        await actor.coordination.delete(KEYS.batch(step))
    await world.storage.delete(decision_path(3))
    assert [await log.decision(step) for step in range(4)] == decided
    assert await log.decisions() == decided
    assert await read_decision(world.storage, 3) == decided[3], "its copy was written again"
    with pytest.raises(StoreError, match="no decision of step 700 in etcd"):
        await log.decision(700)


async def test_a_damaged_archive_is_said(world: World) -> None:
    _, log = await world.trainer()
    [decision] = await decide_many(log, 1)
    path = await write_block(world.storage, [ArchivedStep(decision=decision, offered=["d"])])
    assert (await read_block(world.storage, path))[0].offered == ["d"]
    data = await world.storage.read(path)
    for damaged in (data.replace(b"t1", b"t2"), data[:-2], b"", b"{}\n"):
        await world.storage.write(path, damaged, overwrite=True)
        with pytest.raises(CorruptSegment, match=r"steps-000000000-000000499.jsonl is damaged"):
            await log.decisions()


@pytest.mark.parametrize("gone", [True, False])
async def test_a_batch_file_that_was_removed_or_damaged_is_made_again(world: World, gone: bool) -> None:
    _, log = await world.trainer()
    rows = batch({0: "train", 1: "no_signal", 2: "train"})
    experience = MemoryTable(EXPERIENCE)
    await experience.commit(rows.drop_columns("use").cast(EXPERIENCE), target=1, key="k")
    uses = {2: "train", 1: "no_signal"}
    decided = await log.decide(0, await batch_rows(experience, uses), [2], {1: "no_signal"})
    if gone:
        await world.storage.delete(decided.decision.file)
    else:
        await world.storage.write(decided.decision.file, b"\xaa\x55", overwrite=True)
    with pytest.raises(StoreError, match="not there" if gone else "cannot be trained without it"):
        await log.read(0)
    assert (await log.read(0, experience)).rows.equals(decided.rows)
    other = MemoryTable(EXPERIENCE)
    await other.commit(rows.drop_columns("use").slice(0, 3).cast(EXPERIENCE), target=1, key="k")
    with pytest.raises(CorruptSegment, match="the experience gives other bytes"):
        await log.read(0, other)


# -- where a resumed run goes on --------------------------------------------------------------------------------


async def test_a_run_that_stopped_at_prompt_3_goes_on_with_it(start: Start) -> None:
    """Case 35: stop at prompt 3, resume: prompt 3 comes next, not 0."""
    server = MemoryEtcd()
    first = await start(server, KEYS, "a")
    await first.ledger.draw(groups=lambda cursor: 3, samples_per_prompt=2, version=0)
    first.kill()
    second = await start(server, KEYS, "b")
    held = await second.ledger.draw(groups=lambda cursor: 1, samples_per_prompt=2, version=0)
    assert [h.id for h in held] == [(3, 0), (3, 1)]
    assert locate(held[0].id[0], 10, seed=5) == (0, 3, int(order(5, 0, 10)[3]))


async def test_a_run_that_stopped_at_an_epochs_end_goes_on_with_the_next_epoch(start: Start) -> None:
    """Case 32: resume exactly at an epoch boundary: goes on with the next epoch, in that epoch's own order."""
    server = MemoryEtcd()
    first = await start(server, KEYS, "a")
    await first.ledger.draw(groups=lambda cursor: 4, samples_per_prompt=1, version=0)
    kv = server.get(KEYS.cursor)
    assert kv is not None and Cursor.parse(kv.value).next == 4
    second = await start(server, KEYS, "b")
    drawn = await second.ledger.draw(groups=lambda cursor: 4, samples_per_prompt=1, version=0)
    places = [locate(h.id[0], 4, seed=5) for h in drawn]
    assert [(epoch, position) for epoch, position, _ in places] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert [index for _, _, index in places] == order(5, 1, 4).tolist()
    assert sorted(index for _, _, index in places) == [0, 1, 2, 3]


def test_decisions_lie_beside_their_files() -> None:
    assert decision_path(7) == "batches/000000007.json"
