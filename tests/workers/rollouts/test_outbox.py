"""What leaves a rollout: flushed before it counts as durable, registered once, kept while storage refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from laminar.buffer import claims
from laminar.buffer.claims import MAX_FINISH, Held
from laminar.buffer.coordination import KeyValue
from laminar.buffer.experience import Finished
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import all_claims
from laminar.buffer.memory import Fault, MemoryEtcd
from laminar.buffer.partials import Partial, PartialLog, assemble, read_partials
from laminar.buffer.records import Incoming
from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.segments import read_segment
from laminar.buffer.storage import MemoryStorage
from laminar.clock import Clock
from laminar.errors import Fenced, StoreError
from laminar.workers.rollouts.outbox import Done, Finisher, Flusher
from laminar.workers.rollouts.trajectory import Trajectory

KEYS = Keys("run")
LONG = 3600.0
Join = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def running(*loops: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"within 10 s it did not come to pass that {what}")


class Blocked:
    """Holds each append back until told; counts them."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.real = storage.append
        self.begun = 0
        self.go = asyncio.Event()
        storage.append = self.append  # type: ignore[method-assign]

    async def append(self, path: str, data: bytes, *, sync: bool) -> None:
        self.begun += 1
        await self.go.wait()
        await self.real(path, data, sync=sync)


# -- Flusher ----------------------------------------------------------------------------------------------------


def trajectory(sample: int = 0) -> Trajectory:
    claim = claims.drawn("w", 3)
    held = Held(claim, KeyValue(KEYS.claim(0, sample), claim.dump(), 1, 1))
    t = Trajectory(held=held, worker="w", version=3, digest="d3", started_at=1)
    t.begin([100], [{"role": "user", "content": "x"}], "", at=1)
    return t


def flusher(storage: MemoryStorage, live: list[Trajectory], clock: Clock, **changes: Any) -> Flusher:
    log = PartialLog(storage, "w", sync=True, rotate_s=changes.pop("rotate_s", LONG))
    return Flusher(log, lambda: live, clock, **{"interval_s": LONG, "enabled": True, **changes})


async def logged(storage: MemoryStorage, t: Trajectory) -> Partial:
    return assemble((await read_partials(storage, "w")).rows.get((*t.id, t.held.claim.term), []))


async def test_durable_means_that_what_was_pending_is_in_the_log(clock: Clock) -> None:
    storage, t = MemoryStorage(), trajectory()
    t.policy_wrote([1, 2], [-0.5, -0.5], at=2)
    made = flusher(storage, [t], clock)
    async with running(made.run()):
        await made.durable()
        assert await logged(storage, t) == t.partial()
        storage.crash()
        assert await logged(storage, t) == t.partial(), "one fsync a flush"


async def test_a_flush_that_is_under_way_is_no_proof_for_what_came_after_it(clock: Clock) -> None:
    storage, t = MemoryStorage(), trajectory()
    blocked = Blocked(storage)
    made = flusher(storage, [t], clock)
    async with running(made.run()):
        first = asyncio.create_task(made.durable())
        await until(lambda: blocked.begun == 1, "the first flush has begun")
        t.policy_wrote([1], [-0.5], at=2)
        t.generation_ended("stop", at=3)
        second = asyncio.create_task(made.durable())
        await asyncio.sleep(0.01)
        assert not first.done() and not second.done()
        blocked.go.set()
        await first
        blocked.go.clear()
        await until(lambda: blocked.begun == 2, "a second flush carries what came after the first had begun")
        assert not second.done() and (await logged(storage, t)).token_ids == []
        blocked.go.set()
        await second
        assert (await logged(storage, t)).turn_state == "acting"


async def test_waiters_share_a_flush(clock: Clock) -> None:
    storage, live = MemoryStorage(), [trajectory(s) for s in range(20)]
    made = flusher(storage, live, clock)
    async with running(made.run()):
        await asyncio.gather(*(made.durable() for _ in live))
    assert made.flushes == 1
    assert [await logged(storage, t) == t.partial() for t in live] == [True] * 20


async def test_streamed_tokens_are_flushed_each_interval_without_being_asked_for(clock: Clock) -> None:
    storage, t = MemoryStorage(), trajectory()
    made = flusher(storage, [t], clock, interval_s=0.01)
    async with running(made.run()):
        await until(lambda: made.flushes == 1, "the first interval is over")
        t.policy_wrote([1], [-0.5], at=2)
        await until(lambda: made.flushes == 2, "the second interval is over")
        await asyncio.sleep(0.05)
    assert made.flushes == 2, "nothing new, nothing written"
    assert (await logged(storage, t)).token_ids == [1]


async def test_a_full_disk_holds_back_and_loses_nothing(clock: Clock) -> None:
    storage, t = MemoryStorage(), trajectory()
    made = flusher(storage, [t], clock)
    async with running(made.run()):
        await made.durable()
        storage.capacity = storage.used_bytes
        t.policy_wrote([1], [-0.5], at=2)
        waiting = asyncio.create_task(made.durable())
        for n in range(5):
            await asyncio.sleep(0.01)
            t.policy_wrote([2 + n], [-0.5], at=3 + n)
        assert not waiting.done()
        storage.capacity = None
        await waiting
        await made.durable()
    partial = await logged(storage, t)
    assert partial.token_ids == [1, 2, 3, 4, 5, 6] and partial.gap_at is None


async def test_rotation_carries_all_that_is_live_and_deletes_the_old_segment(clock: Clock) -> None:
    storage, live = MemoryStorage(), [trajectory(0), trajectory(1)]
    made = flusher(storage, live, clock, rotate_s=0.0)
    async with running(made.run()):
        for n in range(3):
            for t in live:
                t.policy_wrote([n], [-0.5], at=n)
            await made.durable()
    assert [f.path for f in await storage.list("partials/w")] == ["partials/w/000003.arrows"]
    assert [await logged(storage, t) == t.partial() for t in live] == [True, True]


async def test_old_segments_that_cannot_be_deleted_go_with_the_next_rotation(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, live = MemoryStorage(), [trajectory(0)]
    made = flusher(storage, live, clock, rotate_s=0.0)
    refusing = True

    async def refused(path: str) -> None:
        if refusing:
            raise StoreError(f"cannot delete {path}: 503 Slow Down")
        await delete(path)

    delete = storage.delete
    monkeypatch.setattr(storage, "delete", refused)
    async with running(made.run()):
        for n in range(3):
            refusing = n < 2
            live[0].policy_wrote([n], [-0.5], at=n)
            await made.durable()
    assert [f.path for f in await storage.list("partials/w")] == ["partials/w/000003.arrows"]
    assert await logged(storage, live[0]) == live[0].partial()


async def test_rotation_carries_what_was_handed_over_and_not_read_yet(clock: Clock) -> None:
    """Its new owner waits for room: the rows stand in this log alone until then."""
    storage, live, unread = MemoryStorage(), [trajectory(0), trajectory(1)], list[Trajectory]()
    made = flusher(storage, live, clock, rotate_s=0.0, unread=lambda: unread)
    async with running(made.run()):
        for n in range(3):
            for t in live:
                t.policy_wrote([n], [-0.5], at=n)
            await made.durable()
            unread += live[1:]
            del live[1:]
    assert [f.path for f in await storage.list("partials/w")] == ["partials/w/000003.arrows"]
    assert [await logged(storage, t) == t.partial() for t in (*live, *unread)] == [True, True]


async def test_without_partial_logs_nothing_is_written_nor_kept(clock: Clock) -> None:
    storage, t = MemoryStorage(), trajectory()
    made = flusher(storage, [t], clock, enabled=False, interval_s=0.01)
    async with running(made.run()):
        await made.durable()
        await until(lambda: t.pending == [], "pending rows do not pile up")
    assert await storage.list("") == []


# -- Finisher ---------------------------------------------------------------------------------------------------


def ended(held: Held) -> Finished:
    nothing = Partial([1], [], [], [], [], 0, "scoring", None, "stop", 0)
    return Finished(
        group=held.id[0], sample=held.id[1], prompt_index=0, epoch=0, partial=nothing, finish_reason="stop",
        status="ok", error="", reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
    )  # fmt: skip


class Office:
    """A rollout with drawn trajectories, and its finisher."""

    def __init__(self, rollout: Any, held: list[Held], clock: Clock) -> None:
        self.rollout = rollout
        self.held = held
        self.storage = MemoryStorage()
        self.gone: list[tuple[int, int]] = []
        self.finisher = Finisher(self.storage, rollout.ledger, clock, lambda done: self.gone.append(done.held.id))

    @classmethod
    async def open(cls, join: Join, clock: Clock, samples: int = 3) -> Office:
        rollout = await join(MemoryEtcd(), "w")
        held: list[Held] = []
        while len(held) < samples:
            size = min(samples - len(held), 100)
            held += await rollout.ledger.draw(groups=lambda cursor: 1, samples_per_prompt=size, version=0)
        return cls(rollout, held, clock)

    async def finish(self, held: list[Held] | None = None) -> None:
        for h in self.held if held is None else held:
            self.finisher.put(Done(h, ended(h)))
        await until(lambda: self.finisher.idle, "everything is finished")

    async def registered(self) -> dict[str, list[tuple[int, int]]]:
        """Trajectories by registered segment, read from the files."""
        found = {}
        for kv in (await self.rollout.coordination.range(KEYS.incoming_table("experience"))).items:
            incoming = Incoming.parse(kv.value)
            contents = read_segment(await self.storage.read(incoming.path), EXPERIENCE, complete=True)
            rows = [r for b in contents.batches for r in b.to_pylist()]
            assert len(rows) == incoming.rows == len(incoming.trajectories)
            found[kv.key.rsplit("/", 1)[-1]] = [(r["group"], r["sample"]) for r in rows]
        return found

    async def claimed(self) -> list[tuple[int, int]]:
        return [h.id for h in (await all_claims(self.rollout.coordination, KEYS)).values()]


async def test_what_is_ready_together_becomes_one_segment(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock)
    async with running(office.finisher.run()):
        await office.finish()
    assert await office.registered() == {"w-000000": [(0, 0), (0, 1), (0, 2)]}
    assert await office.claimed() == [] and office.gone == [(0, 0), (0, 1), (0, 2)]


async def test_more_than_one_transaction_takes_are_finished_in_several(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock, MAX_FINISH + 20)
    async with running(office.finisher.run()):
        await office.finish()
    assert {name: len(rows) for name, rows in (await office.registered()).items()} == {
        "w-000000": MAX_FINISH, "w-000001": 20,
    }  # fmt: skip
    assert await office.claimed() == []


async def test_a_lost_claim_is_left_out_and_the_rest_is_written_again(join: Join, clock: Clock) -> None:
    """Exactly one owner can ever finish: the row of a claim that went to another is in no registered segment."""
    office = await Office.open(join, clock)
    other = await join(office.rollout.server, "other")
    moved = office.held[1]
    assert await other.ledger.hand_over(moved, claims.reassigned(moved.claim, "other", "death"))
    async with running(office.finisher.run()):
        await office.finish()
    assert await office.registered() == {"w-000001": [(0, 0), (0, 2)]}
    assert await office.claimed() == [(0, 1)]
    assert sorted(office.gone) == [(0, 0), (0, 1), (0, 2)], "the lost one has left this worker too"
    assert len(await office.storage.list("incoming")) == 2, "writers never delete segments"


async def test_a_trajectory_that_is_lost_altogether_is_registered_by_nobody(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock, 1)
    await office.rollout.ledger.hand_over(office.held[0], claims.reassigned(office.held[0].claim, "", "stop"))
    async with running(office.finisher.run()):
        await office.finish()
    assert await office.registered() == {} and office.gone == [(0, 0)]


async def test_a_full_disk_is_waited_for(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock)
    office.storage.capacity = 10
    async with running(office.finisher.run()):
        for h in office.held:
            office.finisher.put(Done(h, ended(h)))
        await until(lambda: office.finisher.segments >= 3, "it is tried again and again")
        assert office.gone == [] and len(await office.claimed()) == 3
        office.storage.capacity = None
        await until(lambda: office.finisher.idle, "it is finished")
    assert [rows for rows in (await office.registered()).values()] == [[(0, 0), (0, 1), (0, 2)]]


async def test_a_try_whose_outcome_is_unknown_is_made_again_under_a_new_name(join: Join, clock: Clock) -> None:
    """A write that failed may have left its file: what it left is never registered nor overwritten."""
    office = await Office.open(join, clock)
    real = office.storage.write

    async def written_but_said_to_fail(path: str, data: bytes, *, overwrite: bool = False) -> None:
        office.storage.write = real  # type: ignore[method-assign]
        await real(path, data[: len(data) // 2], overwrite=overwrite)
        raise StoreError("the network store went away")

    office.storage.write = written_but_said_to_fail  # type: ignore[method-assign]
    async with running(office.finisher.run()):
        await office.finish()
    assert await office.registered() == {"w-000001": [(0, 0), (0, 1), (0, 2)]}


@pytest.mark.parametrize("fault", list(Fault), ids=lambda f: f.value)
async def test_a_lost_reply_gives_one_row_each(join: Join, clock: Clock, fault: Fault) -> None:
    """Case 28: the same completion is delivered twice: one row."""
    office = await Office.open(join, clock)
    office.rollout.faults.script("transact", fault)
    async with running(office.finisher.run()):
        await office.finish()
    await asyncio.sleep(0.1)
    assert [rows for rows in (await office.registered()).values()] == [[(0, 0), (0, 1), (0, 2)]]
    assert await office.claimed() == []


async def test_a_worker_that_lost_its_lease_finishes_nothing(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock)
    office.rollout.kill()
    async with running(office.finisher.run()) as (task,):
        office.finisher.put(Done(office.held[0], ended(office.held[0])))
        with pytest.raises(Fenced):
            await asyncio.wait_for(task, 5)
    other = await join(office.rollout.server, "other")
    office.rollout = other
    assert await office.registered() == {} and len(await office.claimed()) == 3 and office.gone == []


async def test_it_is_not_idle_while_it_registers(join: Join, clock: Clock) -> None:
    office = await Office.open(join, clock)
    office.storage.capacity = 10
    assert office.finisher.idle
    async with running(office.finisher.run()):
        office.finisher.put(Done(office.held[0], ended(office.held[0])))
        await until(lambda: office.finisher.segments >= 1, "it is being written")
        assert office.finisher.queue.empty() and not office.finisher.idle
