"""The manager on the in-process etcd, in virtual time: nothing orphaned stays so, nothing that nobody needs stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pyarrow as pa
import pytest
from world import KEYS, World, draw, kill

from laminar.buffer import claims
from laminar.buffer.archive import BLOCK, read_archive
from laminar.buffer.claims import Held
from laminar.buffer.coordination import Delete, KeyValue, Put, Transaction
from laminar.buffer.experience import Finished, write_incoming
from laminar.buffer.incoming import write_copied
from laminar.buffer.keys import trajectory_name
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.memory import MemoryCoordination
from laminar.buffer.partials import Partial, PartialLog, PartialRow
from laminar.buffer.records import BatchDecision, Complete, Cursor, EvaluationRequest, Retain, WeightsHead
from laminar.buffer.schema import EXPERIENCE, STEP_METRICS
from laminar.buffer.segments import read_segment
from laminar.buffer.steps import BATCH, StepLog, decision_path
from laminar.buffer.storage import FileInfo
from laminar.errors import CoordinationUnavailable, Fenced, StoreError
from laminar.relay.holdings import Holdings
from laminar.workers.manager import CLEAN_INTERVAL_S, TELL_INTERVAL_S, Manager, lead
from laminar.workers.managing.cleaning import STALE_S, step_of
from laminar.workers.relay import TOLD_S, keep_retained


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


def ended(group: int, sample: int) -> Finished:
    nothing = Partial([1], [], [], [], [], 0, "scoring", None, "stop", 0)
    return Finished(
        group=group, sample=sample, prompt_index=0, epoch=0, partial=nothing, finish_reason="stop", status="ok",
        error="", reward=1.0, reward_parts={}, text="", attempts=0, finished_at=0,
    )  # fmt: skip


async def under_way(manager: Manager, work: Awaitable[Any], seconds: float) -> None:
    """Let the manager's loops run for some seconds."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    assert not task.done() or task.exception() is None, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- orphans ----------------------------------------------------------------------------------------------------


async def test_trajectories_of_a_dead_rollout_go_to_one_of_their_version() -> None:
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    for name, version in (("r-new", 5), ("r-same", 3)):
        await world.report(await world.member("rollout", name), version)
    await draw(dead, version=3)
    kill(dead)
    async with manager.rollouts, manager.loads:
        await manager.sweep()
    for held in (await world.claims()).values():
        assert (held.claim.owner, held.claim.term, held.claim.state) == ("r-same", 2, "waiting")
        assert held.claim.source.worker == "r-dead" and held.claim.deaths == 1
    assert world.under(KEYS.inbox("r-same")) == ["000000000000-000", "000000000000-001"]


@pytest.mark.parametrize("others", [True, False])
async def test_who_leaves_or_changes_its_version_gets_nothing_while_there_are_others(others: bool) -> None:
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.report(await world.member("rollout", "r-leaving"), 3, switching=True)
    if others:
        await world.report(await world.member("rollout", "r-stays"), 5)
    await draw(dead, version=3)
    kill(dead)
    async with manager.rollouts, manager.loads:
        await manager.sweep()
    owners = {held.claim.owner for held in (await world.claims()).values()}
    assert owners == {"r-stays" if others else "r-leaving"}


async def test_a_death_is_noticed_without_waiting_for_the_next_sweep() -> None:
    """Case 22: within a second of the key's end, not a lease time later."""
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.member("rollout", "r-heir")
    await draw(dead)
    running = asyncio.create_task(manager.run())
    await asyncio.sleep(3)
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-dead"}
    kill(dead)
    await asyncio.sleep(0.5)
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-heir"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_taken_from_a_rollout_that_joined_a_moment_ago() -> None:
    """The mirror may lag behind the claims, as after a restart of etcd."""
    world = World()
    manager = await world.manager()
    await world.member("rollout", "r-old")
    async with manager.rollouts, manager.loads:
        late = await world.member("rollout", "r-late")
        await draw(late)
        manager.rollouts.items = {k: v for k, v in manager.rollouts.items.items() if "r-late" not in k}
        await manager.sweep()
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-late"}


async def test_a_waiting_trajectory_is_put_back_into_the_inbox_that_lost_it(caplog: pytest.LogCaptureFixture) -> None:
    """Its owner lives, so no sweep would give it to another, and would never learn of it."""
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.member("rollout", "r-heir")
    await draw(dead)
    kill(dead)
    async with manager.rollouts, manager.loads:
        await manager.sweep()
        items = world.under(KEYS.inbox_root)
        await manager.sweep()
        assert len(items) == 2 and "put back" not in caplog.text
        await manager.run_info.coordination.transact(Transaction((), (Delete(KEYS.inbox_root + items[0]),)))
        for _ in range(2):
            await manager.sweep()
            assert world.under(KEYS.inbox_root) == items and caplog.text.count("put back") == 1


async def test_orphans_wait_while_no_rollout_lives_and_are_not_lost() -> None:
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await draw(dead)
    kill(dead)
    running = asyncio.create_task(manager.run())
    await asyncio.sleep(60)
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-dead"}
    await world.member("rollout", "r-heir")
    await asyncio.sleep(0.5)
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-heir"}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_exhausted_trajectory_is_finished_with_an_error_and_what_is_known_of_it() -> None:
    """Never dropped in silence: its row says who gave up and why, with the tokens that were durable."""
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.member("rollout", "r-heir")
    first, second = await draw(dead)
    log = PartialLog(world.storage, "r-dead", sync=False)
    rows = [("prompt", 0, [1, 2], []), ("policy", 0, [7, 8], [-0.5, -0.25])]
    await log.append(
        [
            PartialRow(0, 0, 1, 0, at, role, ids, logprobs, 0, "d", "r-dead", None, "generating", None, 5, 6)
            for role, at, ids, logprobs in rows
        ]
    )
    dying = first.claim.model_copy(update={"deaths": claims.MAX_DEATHS})
    assert await dead.ledger.update(first, dying)
    kill(dead)
    async with manager.rollouts, manager.loads:
        await manager.sweep()
        await manager.sweep()
    assert set(await world.claims()) == {second.id} and manager.finished == 1
    [path] = await world.paths("incoming")
    [batch] = read_segment(await world.storage.read(path), EXPERIENCE, complete=True).batches
    [row] = batch.to_pylist()
    assert (row["status"], row["reward"], row["token_ids"], row["finish_reason"]) == ("gave_up", None, [7, 8], "error")
    assert row["error"] == "8 owners died without a new token (limit 8)"
    [segment] = world.under(KEYS.incoming_table("experience"))
    assert path == f"incoming/experience/{segment}.arrow"


async def test_a_term_that_ended_before_its_error_row_counted_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its segment lies in the store already, under the name of the same relay."""
    world = World()
    dead = await world.member("rollout", "r-dead")
    first, second = await draw(dead)
    assert await dead.ledger.update(first, first.claim.model_copy(update={"deaths": claims.MAX_DEATHS}))
    kill(dead)
    await world.member("rollout", "r-heir")
    member = await world.member("relay", "relay-1")
    real, tries = Ledger.finish, 0

    async def finish(self: Ledger, *registered: Any) -> list[Held]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise CoordinationUnavailable("etcd is away")
        return await real(self, *registered)

    monkeypatch.setattr(Ledger, "finish", finish)
    leading = asyncio.create_task(lead(member.run, member))
    await asyncio.sleep(10)
    assert set(await world.claims()) == {second.id} and tries == 2
    assert len(await world.paths("incoming")) == 2, "the first is removed once it is old"
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


async def test_storage_that_refuses_an_error_row_keeps_no_other_orphan_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.member("rollout", "r-heir")
    for spent in (await draw(dead, groups=2))[:3]:
        assert await dead.ledger.update(spent, spent.claim.model_copy(update={"deaths": claims.MAX_DEATHS}))
    kill(dead)
    real, refused = world.storage.write, 0

    async def write(path: str, data: bytes, **options: Any) -> None:
        nonlocal refused
        refused += 1
        if refused <= 4:
            raise StoreError("the store is full")
        await real(path, data, **options)

    monkeypatch.setattr(world.storage, "write", write)
    async with manager.rollouts, manager.loads:
        await manager.sweep()
        owners = {id: h.claim.owner for id, h in (await world.claims()).items()}
        assert owners == {(0, 0): "r-dead", (0, 1): "r-dead", (1, 0): "r-dead", (1, 1): "r-heir"} and refused == 3
        await manager.sweep()
        assert len(await world.claims()) == 2, "one fails, the others do not wait for it"
        await manager.sweep()
    assert set(await world.claims()) == {(1, 1)} and manager.finished == 3


async def test_a_replaced_manager_hands_nothing_over() -> None:
    world = World()
    manager, dead = await world.manager(), await world.member("rollout", "r-dead")
    await world.member("rollout", "r-heir")
    await draw(dead)
    async with manager.rollouts, manager.loads:
        kill(manager.member)
        kill(dead)
        await manager.sweep()
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-dead"}
    successor = await world.manager("relay-2")
    async with successor.rollouts, successor.loads:
        await successor.sweep()
    assert {h.claim.owner for h in (await world.claims()).values()} == {"r-heir"}


async def test_a_relay_whose_term_ended_campaigns_again() -> None:
    world = World()
    member = await world.member("relay", "relay-1")
    leading = asyncio.create_task(lead(member.run, member))
    await asyncio.sleep(1)
    before = world.server.get(KEYS.leader("manager"))
    await member.run.coordination.delete(KEYS.leader("manager"))
    await asyncio.sleep(5)
    after = world.server.get(KEYS.leader("manager"))
    assert before and after and before.create_revision != after.create_revision
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)


# -- retention --------------------------------------------------------------------------------------------------


def retained(world: World) -> KeyValue:
    kv = world.server.get(KEYS.retain)
    assert kv is not None
    return kv


async def test_versions_that_claims_and_evaluations_name_are_retained() -> None:
    world = World()
    manager, rollout = await world.manager(), await world.member("rollout", "r")
    await draw(rollout, version=3)
    await draw(rollout, version=4)
    request = EvaluationRequest(version=1, digest="d")
    await rollout.run.coordination.put(f"{KEYS.evaluations}{1:09d}", request.dump())
    running = asyncio.create_task(manager._tell_always())
    await asyncio.sleep(0.1)
    first = retained(world)
    assert Retain.parse(first.value).versions == [1, 3, 4]
    await asyncio.sleep(3 * TELL_INTERVAL_S)
    assert retained(world).mod_revision == first.mod_revision, "it is written when it changes"
    await rollout.run.coordination.delete(f"{KEYS.evaluations}{1:09d}")
    await asyncio.sleep(2 * TELL_INTERVAL_S)
    assert Retain.parse(retained(world).value).versions == [3, 4]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_manager_tells_how_many_groups_are_complete() -> None:
    """Also those that earlier managers told, and those that nobody tells of because they are consumed."""
    world = World()
    manager, rollout = await world.manager(), await world.member("rollout", "r")
    for _ in range(3):
        await draw(rollout, version=0)
    running = asyncio.create_task(manager._tell_always())
    told: list[int] = []

    async def later() -> None:
        await asyncio.sleep(2 * TELL_INTERVAL_S)
        kv = world.server.get(KEYS.complete)
        assert kv is not None
        told.append(Complete.parse(kv.value).groups)

    await later()
    for held in list((await all_claims(rollout.run.coordination, KEYS)).values())[:-1]:
        await rollout.run.coordination.delete(held.kv.key)
    await later()
    drawn = Cursor.parse(world.server.get(KEYS.cursor).value).next  # type: ignore[union-attr]
    assert told == [0, drawn - 1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_only_claims_that_have_changed_are_parsed_again() -> None:
    """A manager looks at all of them every two seconds, and there may be a hundred thousand."""
    rollout = await World().member("rollout", "r")
    await draw(rollout, groups=2)
    coordination = rollout.run.coordination
    first = await all_claims(coordination, KEYS)
    changed, gone, *same = first.values()
    assert same
    update = Put(changed.kv.key, changed.claim.model_copy(update={"progress": 7}).dump())
    await coordination.transact(Transaction((), (update, Delete(gone.kv.key))))
    again = await all_claims(coordination, KEYS, first)
    assert again.keys() == first.keys() - {gone.kv.key}
    assert again[changed.kv.key].claim.progress == 7
    assert all(again[held.kv.key] is held for held in same)


async def test_a_relay_holds_a_version_from_the_moment_its_evaluation_is_asked_for() -> None:
    """Before the manager says so: the trainer may publish two more versions until then."""
    world = World()
    member = await world.member("relay", "relay-1")
    holdings = Holdings(chunk_bytes=1 << 20, retain=2)
    keeping = asyncio.create_task(keep_retained(member.run, holdings))
    world.server.transact(Transaction((), (Put(KEYS.retain, Retain(versions=[3]).dump()),)))
    await asyncio.sleep(0.01)
    assert holdings.retained == {3}
    request = EvaluationRequest(version=7, digest="d")
    world.server.transact(Transaction((), (Put(f"{KEYS.evaluations}{7:09d}", request.dump()),)))
    await asyncio.sleep(0.01)
    assert holdings.retained == {3, 7}
    await member.run.coordination.delete(f"{KEYS.evaluations}{7:09d}")
    await asyncio.sleep(0.01)
    assert holdings.retained == {3}
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_relay_holds_what_was_just_drawn_under_before_the_manager_says_so() -> None:
    """Two more versions may come between two looks of the manager at claims, or while there is none."""
    world = World()
    member = await world.member("relay", "relay-1")
    holdings = Holdings(chunk_bytes=1 << 20, retain=2)
    keeping = asyncio.create_task(keep_retained(member.run, holdings))
    lasts = world.config.coordination.lease_ttl + TOLD_S
    for version in (3, 4, 5):
        head = WeightsHead(version=version, digest="d", layout_digest="l", bytes=1, master="relay-1")
        await member.run.coordination.put(KEYS.weights, head.dump())
        await asyncio.sleep(0.6)
    assert (holdings.retained, holdings.recent) == (frozenset(), {3, 4})
    await asyncio.sleep(lasts - 1.0)
    assert holdings.recent == {4}
    await asyncio.sleep(0.6)
    assert not holdings.recent
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


# -- cleaning: logs, segments, keys -----------------------------------------------------------------------------


async def test_logs_of_the_dead_go_when_no_claim_names_them() -> None:
    world = World()
    manager = await world.manager()
    alive, named, unnamed = [await world.member("rollout", n) for n in ("r-alive", "r-named", "r-unnamed")]
    await draw(named)
    for rollout in (alive, named, unnamed):
        await world.storage.append(f"partials/{rollout.id}/000000.arrows", b"x", sync=False)
    kill(named)
    kill(unnamed)
    assert await manager.cleaner.clean() == 1
    assert await world.paths("partials") == ["partials/r-alive/000000.arrows", "partials/r-named/000000.arrows"]


async def test_segments_go_when_they_are_not_registered_and_their_writer_is_gone() -> None:
    world = World()
    manager = await world.manager()
    alive, dead = await world.member("rollout", "r-alive"), await world.member("rollout", "r-dead")
    for rollout in (alive, dead):
        held = await draw(rollout)
        incoming = await write_incoming(world.storage, rollout.id, f"{rollout.id}-0", [ended(*h.id) for h in held])
        await rollout.ledger.finish(held, f"{rollout.id}-0", incoming)
        await write_incoming(world.storage, rollout.id, f"{rollout.id}-1", [ended(9, 9)])
    kill(dead)
    assert await manager.cleaner.clean() == 1
    assert await world.paths("incoming/experience") == [
        "incoming/experience/r-alive-0.arrow",
        "incoming/experience/r-alive-1.arrow",
        "incoming/experience/r-dead-0.arrow",
    ]


async def test_the_copy_of_a_segment_stays_as_long_as_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A living trainer's and a dead one's; one segment of each is registered, one is not."""
    world = World()
    manager = await world.manager()
    alive, dead = await world.member("trainer", "t-alive"), await world.member("trainer", "t-dead")
    rows = pa.Table.from_pylist([{"step": 0, "version": 1, "digest": "", "metrics": "{}", "at": 0}], STEP_METRICS)
    for trainer in (alive, dead):
        for n in range(2):
            incoming = await write_copied(world.storage, "step_metrics", f"{trainer.id}-{n}", rows, trainer.id)
            if n == 0:
                await trainer.ledger.register("step_metrics", f"{trainer.id}-0", incoming, Transaction((), ()))
    kill(dead)
    assert await manager.cleaner.clean() == 2
    kept = ("t-alive-0", "t-alive-1", "t-dead-0")
    assert await world.paths("incoming") == [
        f"{folder}/step_metrics/{name}.arrow" for folder in ("incoming/copies", "incoming") for name in kept
    ]
    monkeypatch.setattr(world.clock, "now_us", lambda: 2**60)
    assert await manager.cleaner.clean() == 2, "the living trainer's old ones, registered by nobody"


async def test_what_a_committer_had_no_time_to_delete_goes_though_its_writer_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    manager, alive = await world.manager(), await world.member("rollout", "r-alive")
    await write_incoming(world.storage, alive.id, "r-alive-0", [ended(0, 0)])
    [file] = await world.storage.list("incoming")
    for age, there in ((STALE_S - 1, True), (STALE_S + 1, False)):
        monkeypatch.setattr(world.clock, "now_us", lambda age=age: file.modified_us + int(age * 1e6))
        await manager.cleaner.clean()
        assert (await world.paths("incoming") != []) == there


async def test_temporary_files_go_when_no_write_can_still_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    manager = await world.manager()
    real, now, looks, deleted = world.storage.list, world.clock.now_us(), 0, []

    async def listed(prefix: str, *, temporary: bool = False) -> list[FileInfo]:
        nonlocal looks
        if not temporary:
            return await real(prefix)
        looks += 1
        return [FileInfo(p, 1, now - int(age * 1e6)) for p, age in (("old", STALE_S + 1), ("new", STALE_S - 99))]

    async def delete(path: str) -> None:
        deleted.append(path)

    monkeypatch.setattr(world.storage, "list", listed)
    monkeypatch.setattr(world.storage, "delete", delete)
    for _ in range(3):
        await manager.cleaner.clean()
    assert deleted == ["old"] and looks == 1
    await asyncio.sleep(STALE_S / 4)
    await manager.cleaner.clean()
    assert deleted == ["old", "old", "new"]


async def test_inboxes_of_the_dead_are_emptied_in_transactions_that_etcd_takes() -> None:
    world = World()
    manager = await world.manager()
    alive = await world.member("rollout", "r-alive")
    for worker, items in (("r-alive", 1), ("r-dead", 250)):
        for n in range(items):
            await alive.run.coordination.put(KEYS.inbox_item(worker, n, 0), "1")
    assert await manager.cleaner.clean() == 250
    assert world.under(KEYS.inbox_root) == [f"r-alive/{trajectory_name(0, 0)}"]


async def test_a_rollout_that_joins_while_the_manager_cleans_keeps_what_is_its_own() -> None:
    """At whatever moment, and however slow storage and etcd are: an inbox item that is lost strands its claim for
    ever, since the owner lives."""
    world = World()
    manager = await world.manager()
    world.storage.delay_s = 0.3
    manager.run_info.coordination.faults.delay_s = (0.05, 0.05)  # type: ignore[attr-defined]
    cleaning = asyncio.create_task(manager.cleaner.clean())
    joined = 0
    while not cleaning.done():
        rollout = await world.member("rollout", f"r-{joined}")
        for key in (KEYS.inbox_item(rollout.id, 0, 0), KEYS.moves(rollout.id), KEYS.rest(rollout.id)):
            await rollout.run.coordination.put(key, "1")
        joined += 1
        await asyncio.sleep(0.04)
    assert await cleaning == 0 and joined > 30
    for root in (KEYS.inbox_root, KEYS.moves_root, KEYS.rests_root):
        assert len(world.under(root)) == joined, root


async def test_a_replaced_manager_deletes_no_keys() -> None:
    world = World()
    manager = await world.manager()
    await manager.member.run.coordination.put(KEYS.inbox_item("r-dead", 0, 0), "1")
    kill(manager.member)
    with pytest.raises(Exception, match="no longer this worker's"):
        await manager.cleaner.clean()
    assert len(world.under(KEYS.inbox_root)) == 1


async def test_a_manager_from_which_a_recovery_took_the_run_deletes_no_files() -> None:
    """A recovery ends all leases, writes a new generation and removes the keys of the old one: to its manager, cut off
    meanwhile, nothing is referred to any more."""
    world = World()
    manager, rollout = await world.manager(), await world.member("rollout", "r")
    held = await draw(rollout)
    incoming = await write_incoming(world.storage, "r", "r-0", [ended(*h.id) for h in held])
    await rollout.ledger.finish(held, "r-0", incoming)
    await world.storage.write("partials/r/000000.arrows", b"x")
    await world.storage.write("batches/000000000000-r.arrow", b"x")
    before = await world.paths()
    kill(rollout)
    kill(manager.member)
    outside = MemoryCoordination(world.server)
    for key in world.under(KEYS.prefix):
        await outside.transact(Transaction((), (Delete(KEYS.prefix + key),)))
    for part in (
        manager.cleaner._partial_logs({"r"}),
        manager.cleaner._segments(await world.storage.list("incoming"), set()),
        manager.cleaner._batches([p for p in before if p.startswith("batches/")], set(), 0),
    ):
        with pytest.raises(Fenced):
            await part
    assert await world.paths() == before


async def test_storage_that_fails_while_it_is_cleaned_does_not_end_the_managers_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    manager = await world.manager()
    tries = 0

    async def fail(prefix: str, **options: Any) -> list[Any]:
        nonlocal tries
        tries += 1
        raise StoreError("the store is away")

    monkeypatch.setattr(world.storage, "list", fail)
    await under_way(manager, manager.run(), 2.5 * CLEAN_INTERVAL_S)
    assert tries == 3


# -- cleaning: steps --------------------------------------------------------------------------------------------


def batch(group: int) -> pa.Table:
    rows = [ended(group, sample).row() | {"use": "train"} for sample in range(2)]
    return pa.Table.from_pylist(rows, schema=BATCH)


async def decide(log: StepLog, steps: int) -> list[BatchDecision]:
    return [(await log.decide(n, batch(n), [n], {})).decision for n in range(steps)]


async def checkpoint(world: World, *versions: int) -> None:
    for version in versions:
        await world.storage.write(f"checkpoints/step-{version:09d}/checkpoint.json", b"{}")


async def test_batches_before_the_oldest_kept_checkpoint_go() -> None:
    """A restart, and an offline replay, from the oldest checkpoint that is kept finds all batches after it."""
    world = World()
    manager, (_, log) = await world.manager(), await world.trainer()
    decided = await decide(log, 6)
    await world.storage.write("checkpoints/.writing-x/checkpoint.json", b"{}")
    assert await manager.cleaner.clean() == 0, "without a checkpoint all of them are needed"
    await checkpoint(world, 4, 5)
    assert await manager.cleaner.clean() == 4
    arrows = [p for p in await world.paths("batches") if p.endswith(".arrow")]
    assert arrows == [d.file for d in decided[4:]]
    for step in (4, 5):
        assert (await log.read(step)).rows.num_rows == 2
    assert await log.decisions() == decided, "what each step meant is still known"


async def test_all_batches_are_kept_if_the_config_says_so() -> None:
    world = World(trainer={"keep_batches": "all"})
    manager, (_, log) = await world.manager(), await world.trainer()
    await decide(log, 3)
    await checkpoint(world, 3)
    assert await manager.cleaner.clean() == 0


async def test_batch_files_of_dead_trainers_that_were_never_decided_go() -> None:
    world = World(trainer={"keep_batches": "all"})
    manager, (trainer, log) = await world.manager(), await world.trainer()
    decided = await decide(log, 1)
    await log.close(batch(1), {1: "remainder"}, "done")
    for name in ("000000000-trainer-0", "000000001-trainer-1", "closing-000000001-001-trainer-1"):
        await world.storage.write(f"batches/{name}.arrow", b"x")
    assert await manager.cleaner.clean() == 1, "the living one may be about to decide"
    kill(trainer)
    await world.trainer("trainer-2")
    assert await manager.cleaner.clean() == 2
    arrows = [p for p in await world.paths("batches") if p.endswith(".arrow")]
    assert arrows == [decided[0].file, "batches/closing-000000001-000-trainer-1.arrow"]


async def many_steps(world: World, log: StepLog, steps: int) -> list[BatchDecision]:
    """Steps as a trainer leaves them, quicker."""
    decisions = []
    for step in range(steps):
        file = f"batches/{step:09d}-trainer-1.arrow"
        decision = BatchDecision(step=step, file=file, sha256="s", trained=[step], retired={}, decided_by="trainer-1")
        world.server.transact(Transaction((), (Put(KEYS.batch(step), decision.dump()),)))
        await world.storage.write(decision_path(step), decision.dump().encode())
        decisions.append(decision)
    await log.change_head(decided=steps, step=steps, consumed_groups=steps)
    return decisions


async def test_old_decisions_move_from_etcd_to_the_archive_a_block_at_a_time() -> None:
    world = World()
    manager, (_, log) = await world.manager(), await world.trainer()
    decided = await many_steps(world, log, 2 * BLOCK + 20)
    for version in (3, BLOCK + 7):
        world.server.transact(Transaction((), (Put(f"{KEYS.offers_of(version)}d{version}", "{}"),)))
    await checkpoint(world, BLOCK + 10, 2 * BLOCK + 10)
    await manager.cleaner.clean()
    assert len(world.under(KEYS.batches)) == BLOCK + 20
    assert world.under(KEYS.offers) == [f"{BLOCK + 7:012d}/d{BLOCK + 7}"]
    assert len([p for p in await world.paths("batches") if p.endswith(".json")]) == BLOCK + 20
    archived = await read_archive(world.storage)
    assert [a.decision for a in archived] == decided[:BLOCK]
    assert archived[3].offered == ["d3"] and archived[4].offered == []
    assert await log.decisions() == decided
    assert await log.decision(7) == decided[7]
    assert await manager.cleaner.clean() == 0


@pytest.mark.parametrize("needed_by", ["a claim", "an evaluation", "the recording of the step"])
async def test_steps_that_something_needs_are_not_archived(needed_by: str) -> None:
    world = World()
    manager, (_, log) = await world.manager(), await world.trainer()
    await many_steps(world, log, BLOCK + 5)
    await checkpoint(world, BLOCK + 5)
    if needed_by == "a claim":
        await draw(await world.member("rollout", "r"), version=BLOCK - 1)
    elif needed_by == "an evaluation":
        request = EvaluationRequest(version=BLOCK - 1, digest="d")
        world.server.transact(Transaction((), (Put(f"{KEYS.evaluations}{BLOCK - 1:09d}", request.dump()),)))
    else:
        await log.change_head(step=BLOCK - 1)
    await manager.cleaner.clean()
    assert await read_archive(world.storage) == [] and len(world.under(KEYS.batches)) == BLOCK + 5


async def test_a_manager_that_died_after_it_wrote_a_block_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    manager, (_, log) = await world.manager(), await world.trainer()
    decided = await many_steps(world, log, BLOCK)
    await log.close(batch(BLOCK), {BLOCK: "remainder"}, "done")
    closing = f"batches/closing-{BLOCK:09d}-000.json"
    await world.storage.delete(closing)
    await checkpoint(world, BLOCK)

    async def die(*_: Any) -> int:
        raise StoreError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(manager.cleaner, "_forget_before", die)
        with pytest.raises(StoreError):
            await manager.cleaner.clean()
    assert len(world.under(KEYS.batches)) == BLOCK
    kill(manager.member)
    await (await world.manager("relay-2")).cleaner.clean()
    assert world.under(KEYS.batches) == [] and await log.decisions() == decided
    assert world.under(KEYS.closings) == [f"{BLOCK:09d}-000"] and closing in await world.paths("batches")


async def test_an_old_closing_is_found_beside_its_batch() -> None:
    world = World()
    manager, (_, log) = await world.manager(), await world.trainer()
    await log.close(batch(0), {0: "remainder"}, "no prompts")
    await log.change_head(state="running")
    await many_steps(world, log, BLOCK)
    await checkpoint(world, BLOCK)
    await manager.cleaner.clean()
    assert world.under(KEYS.closings) == []
    assert [c.retired for c in await log.closings()] == [{0: "remainder"}]


def test_the_step_of_a_key() -> None:
    keys = [KEYS.batch(12), f"{KEYS.closings}000000012-001", f"{KEYS.offers_of(12)}d"]
    assert [step_of(k, KEYS) for k in keys] == [12, 12, 12]
