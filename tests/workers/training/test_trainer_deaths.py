"""The trainer's write-ahead log: wherever a trainer dies, its successor trains the batches that were decided, once
each, and comes to the very bits of a run that nothing disturbed."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from laminar.buffer.keys import Keys
from laminar.buffer.schema import EXPERIENCE
from laminar.buffer.steps import DecidedBatch, StepLog
from laminar.buffer.table import MemoryTable
from laminar.errors import CorruptSegment, Fenced, LeaseLost, StoreError

STEPS = 5
STEP = 3
"""The step in which trainers die here: the checkpoint of version 2 is written, that of version 4 is due after it."""
MakeWorld = Callable[..., Awaitable[Any]]


UNDISTURBED = pytest.StashKey[dict[str, dict[int, str]]]()


class Killed(BaseException):
    """The process ended here: no handler runs."""


def die(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def at_step(life: Any, owner: Any, name: str, *, after: bool = False, only: Callable[..., bool] = lambda *a, **k: True):
    """Let the trainer die before (or after) a call of `owner.name`, once its learner has come to STEP."""
    real = getattr(owner, name)

    def reached() -> bool:
        return bool(life.trainer.learner.version >= STEP)

    if asyncio.iscoroutinefunction(real):

        async def call(*args: Any, **kwargs: Any) -> Any:
            now = reached() and only(*args, **kwargs)
            if now and not after:
                raise Killed
            result = await real(*args, **kwargs)
            return die() if now else result

        setattr(owner, name, call)
        return

    def blocking(*args: Any, **kwargs: Any) -> Any:
        now = reached() and only(*args, **kwargs)
        if now and not after:
            raise Killed
        result = real(*args, **kwargs)
        return die() if now else result

    setattr(owner, name, blocking)


def decides(*args: Any, **changes: Any) -> bool:
    return "decided" in changes


def marks(*args: Any, **changes: Any) -> bool:
    return "checkpoint" in changes


STAGES: dict[str, Callable[[Any], None]] = {
    "sampling: before the batch is written": lambda x: at_step(x, x.trainer.steps, "decide"),
    "sampling: the batch is written, not decided": lambda x: at_step(x, x.trainer.steps, "change_head", only=decides),
    "sampling: decided, the copy is not written": lambda x: at_step(x, x.trainer.steps, "copy_decision"),
    "training: before the step": lambda x: at_step(x, x.trainer.learner, "train"),
    "training: before the weights change": lambda x: at_step(x, x.trainer.learner, "_update"),
    "training: after the step": lambda x: at_step(x, x.trainer.learner, "train", after=True),
    "publishing: half of the weights are copied": lambda x: at_step(x, x.trainer.learner, "write_weights"),
    "publishing: copied, not sealed": lambda x: at_step(x, x.trainer.publisher, "announce"),
    "publishing: sealed, not announced": lambda x: at_step(x, x.trainer.ledger, "guarded_put"),
    "publishing: announced, not recorded": lambda x: at_step(x, x.trainer.steps, "record"),
    "publishing: recorded": lambda x: at_step(x, x.trainer.steps, "record", after=True),
    "checkpointing: before the state": lambda x: at_step(x, x.trainer.learner, "save"),
    "checkpointing: before the export": lambda x: at_step(x, x.trainer.learner, "export"),
    "checkpointing: written, the head does not say so": lambda x: at_step(
        x, x.trainer.steps, "change_head", only=marks
    ),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_death_changes_no_batch_and_no_bit(
    make_world: MakeWorld, undisturbed: dict[int, str], stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 31: killed with work under way: all groups are trained once. Case 36: kill during the checkpoint's save."""
    world = await make_world()
    life = await world.life()
    STAGES[stage](life)
    with pytest.raises(Killed):
        await life.trainer.run()
        await life.trainer._settle()
    await life.kill()
    decided = world.decisions()
    assert len(decided) in (STEP, STEP + 1)

    with caplog.at_level(logging.ERROR):
        await (await world.life()).trainer.run()
    assert "replay_drift" not in caplog.text
    assert world.head().state == "done" and world.head().step == STEPS
    assert world.decisions()[: len(decided)] == decided, "a step means for ever what was decided"
    assert await world.digests() == undisturbed and len(await world.digests()) == STEPS + 1
    await trained_once(world)


@pytest.fixture
async def undisturbed(make_world: MakeWorld, request: pytest.FixtureRequest) -> dict[int, str]:
    """Digests of all versions of a run that nothing disturbs."""
    known: dict[str, dict[int, str]] = request.config.stash.setdefault(UNDISTURBED, {})
    if "digests" not in known:
        world = await make_world()
        await (await world.life()).trainer.run()
        known["digests"] = await world.digests()
    return known["digests"]


async def trained_once(world: Any) -> None:
    groups = Counter(g for d in world.decisions() for g in d.trained)
    assert groups == Counter(range(2 * STEPS))
    trajectories = Counter((r["group"], r["sample"]) for r in await world.rows("steps"))
    assert trajectories == Counter((g, s) for g in range(2 * STEPS) for s in range(2))


async def ends_on_a_damaged_batch(make_world: MakeWorld, record: Callable[..., Awaitable[None]]) -> list[str]:
    """A trainer that has replayed a step, whose recording goes as `record` says, and then finds the next batch damaged,
    with an experience that cannot give it again. What the loop says of tasks that nobody awaited."""
    world = await make_world(checkpoint_every=100)
    life = await world.life(checkpoint_every=100)
    STAGES["training: before the step"](life)
    with pytest.raises(Killed):
        await life.trainer.run()
    await life.kill()
    (world.root / "store" / world.decisions()[1].file).write_bytes(b"damaged")
    world.experience = MemoryTable(EXPERIENCE)
    life = await world.life(checkpoint_every=100)
    life.trainer.steps.record = record
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    with pytest.raises(CorruptSegment, match="the experience gives other bytes"):
        await life.trainer.run()
    assert [task for task in asyncio.all_tasks() if "Trainer." in repr(task.get_coro())] == []
    del life.trainer
    gc.collect()
    await asyncio.sleep(0)
    return told


async def test_a_trainer_that_ends_on_a_damaged_batch_ends_what_its_last_step_left_to_do(make_world: MakeWorld) -> None:
    async def never(*args: Any) -> None:
        await asyncio.Event().wait()

    assert await ends_on_a_damaged_batch(make_world, never) == []


async def test_what_its_last_step_left_to_do_and_failed_is_said(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()

    async def fails(*args: Any) -> None:
        failed.set()
        raise StoreError("the disk is gone")

    real = StepLog.read

    async def read(log: StepLog, step: int, *args: Any) -> DecidedBatch:
        if step == 1 and log.ledger.name == "trainer-1":
            await failed.wait()
        return await real(log, step, *args)

    monkeypatch.setattr(StepLog, "read", read)
    assert await ends_on_a_damaged_batch(make_world, fails) == []
    assert "the last step was not recorded either: the disk is gone" in caplog.text


async def test_two_deaths_in_a_row_change_nothing(make_world: MakeWorld, undisturbed: dict[int, str]) -> None:
    """The second dies while it trains the first one's batches again."""
    world = await make_world(checkpoint_every=100)
    for stage in ("training: after the step", "publishing: sealed, not announced"):
        life = await world.life(checkpoint_every=100)
        STAGES[stage](life)
        with pytest.raises(Killed):
            await life.trainer.run()
            await life.trainer._settle()
        await life.kill()
    await (await world.life(checkpoint_every=100)).trainer.run()
    assert await world.digests() == undisturbed
    await trained_once(world)


async def test_a_version_that_was_sealed_and_not_announced_is_published_with_other_bits(make_world: MakeWorld) -> None:
    """Without deterministic kernels a replay gives other bits than those that the dead trainer left in the relay."""
    world = await make_world()
    life = await world.life()
    STAGES["publishing: sealed, not announced"](life)
    with pytest.raises(Killed):
        await life.trainer.run()
        await life.trainer._settle()
    await life.kill()
    left = world.relay.holdings.newest

    second = await world.life()
    drifting(second, left.version)
    await second.trainer.run()
    digests = await world.digests()
    assert digests[left.version] not in ("", left.digest)
    assert all(digests.values()) and world.head().state == "done"


async def test_a_version_whose_step_was_recorded_unpublished_is_told_once_a_replay_publishes_it(
    make_world: MakeWorld,
) -> None:
    """No relay took the last version of the first life; the second trains it again and publishes it, then goes on: its
    digest is in no record of a step, and is the newest no more."""
    world = await make_world(checkpoint_every=100)
    life = await world.life(checkpoint_every=100)
    stage = life.trainer.publisher.stage

    async def full(learner: Any, *rest: Any) -> Any:
        return None if learner.version == STEP else await stage(learner, *rest)

    life.trainer.publisher.stage = full
    at_step(life, life.trainer.steps, "record", after=True)
    with pytest.raises(Killed):
        await life.trainer.run()
    await life.kill()
    await (await world.life(checkpoint_every=100)).trainer.run()
    assert (await world.digests())[STEP] == ""
    assert len(world.server.page(Keys("run", 1).offers_of(STEP), "", 10, 0).items) == 1


async def test_drift_of_a_version_that_others_have_followed_is_noticed(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions 1 to 3 are published and recorded; the next life trains them again, the first of them, which no relay
    has any more, to other bits."""
    world = await make_world(checkpoint_every=100)
    life = await world.life(checkpoint_every=100)
    at_step(life, life.trainer.steps, "decide")
    with pytest.raises(Killed):
        await life.trainer.run()
    await life.kill()

    if any(held.name.version == 1 for held in world.relay.holdings.versions()):  # it may have given way to others
        world.relay.holdings.discard(1)
    second = await world.life(checkpoint_every=100)
    drifting(second, 1)
    with caplog.at_level(logging.ERROR):
        await second.trainer.run()
    assert "replay_drift: version 1 came out as" in caplog.text


def drifting(life: Any, version: int) -> None:
    """The learner comes to other bits of `version` than before."""
    real = life.trainer.learner.train

    def train(*args: Any) -> Any:
        result = real(*args)
        if life.trainer.learner.version == version:
            with torch.no_grad():
                next(iter(life.trainer.learner.parameters.masters.values())).mul_(1.5)
        return result

    life.trainer.learner.train = train


# -- other settings ---------------------------------------------------------------------------------------------


async def test_old_steps_are_trained_again_under_the_settings_of_their_time(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 37: resume with a changed learning rate: allowed; it counts from the resume on, not for what is replayed."""
    later = {"learning_rate": 1e-5, "clip_high": 0.1, "betas": [0.8, 0.9], "kl_coefficient": 0.1}
    without_replay = await make_world(checkpoint_every=1)
    life = await without_replay.life(checkpoint_every=1)
    at_step(life, life.trainer.steps, "decide")
    with pytest.raises(Killed):
        await life.trainer.run()
    await life.kill()
    await (await without_replay.life(checkpoint_every=1, **later)).trainer.run()

    world = await make_world(checkpoint_every=100)
    life = await world.life(checkpoint_every=100)
    at_step(life, life.trainer.steps, "decide")
    with pytest.raises(Killed):
        await life.trainer.run()
    await life.kill()
    with caplog.at_level(logging.ERROR):
        await (await world.life(checkpoint_every=100, **later)).trainer.run()
    assert "replay_drift" not in caplog.text
    rates = [d.settings["trainer.learning_rate"] for d in world.decisions()]
    assert rates == [1e-3] * STEP + [1e-5] * (STEPS - STEP)
    assert await world.digests() == await without_replay.digests(), "one replayed all, the other nothing"
    metrics = {r["step"]: json.loads(r["metrics"]) for r in await world.rows("step_metrics")}
    assert [metrics[s]["learning_rate"] for s in range(STEPS)] == rates


# -- a standby --------------------------------------------------------------------------------------------------


async def test_a_standby_takes_over_and_the_stalled_one_can_do_nothing(
    make_world: MakeWorld, undisturbed: dict[int, str]
) -> None:
    """The first stops in the middle of a step, as a paused machine does; its lease ends; the second trains on; then the
    first wakes up, with a trained step in its hands."""
    world = await make_world()
    first = await world.life()
    loop, stalled, wake = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    real = first.trainer.learner.train

    def train(*args: Any) -> Any:
        result = real(*args)
        if first.trainer.learner.version == STEP + 1:
            loop.call_soon_threadsafe(stalled.set)
            asyncio.run_coroutine_threadsafe(wake.wait(), loop).result(60)
        return result

    first.trainer.learner.train = train
    running = asyncio.create_task(first.trainer.run())
    standby = asyncio.create_task(world.life())
    await asyncio.wait_for(stalled.wait(), 30)
    assert not standby.done(), "there is one leader at a time"

    world.server.revoke(first.session.lease)
    second = await asyncio.wait_for(standby, 30)
    await second.trainer.run()
    revision, digests = world.server.revision, await world.digests()
    wake.set()
    with pytest.raises((Fenced, LeaseLost)):
        await running
    assert world.server.revision == revision, "nothing of it took effect"
    assert [d.decided_by for d in world.decisions()] == ["trainer-0"] * (STEP + 1) + ["trainer-1"]
    assert digests == undisturbed
    await trained_once(world)


@pytest.mark.parametrize("what", ["decide", "publish", "record"])
async def test_who_has_lost_the_lease_without_knowing_it_is_refused(make_world: MakeWorld, what: str) -> None:
    """Before its own clock says so: etcd compares the leader's key in every transaction."""
    world = await make_world()
    life = await world.life()
    owner, name = {
        "decide": (life.trainer.steps, "decide"),
        "publish": (life.trainer.publisher, "announce"),
        "record": (life.trainer.steps, "record"),
    }[what]
    real = getattr(owner, name)
    revision = 0

    async def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal revision
        if not revision:
            world.server.revoke(life.session.lease)
            revision = world.server.revision
        return await real(*args, **kwargs)

    setattr(owner, name, call)
    with pytest.raises((Fenced, LeaseLost)):
        await life.trainer.run()
    assert world.server.revision == revision


# -- the engine against the trainer -----------------------------------------------------------------------------


async def test_fresh_trajectories_are_compared_while_a_stale_batch_trains(make_world: MakeWorld) -> None:
    """All experience is of version 0; only the first step's batch is fresh, and step 5 is the next that looks."""
    world = await make_world(learning_rate=1e-4)
    life = await world.life(learning_rate=1e-4)
    real = life.trainer.learner.train

    def slowly(batch: Any, fresh: Any = None) -> Any:
        if fresh is not None and life.trainer.learner.version == 1:
            for _ in range(500):
                if fresh():
                    break
                time.sleep(0.01)
        return real(batch, fresh)

    life.trainer.learner.train = slowly
    decide = life.trainer.steps.decide

    async def decide_and_roll_out(step: int, *args: Any) -> Any:
        if step == 1:
            life.trainer.compared = -5  # the first step found its own batch fresh
            await world.commit([(11, s) for s in range(2)], version=1)
        return await decide(step, *args)

    life.trainer.steps.decide = decide_and_roll_out
    await life.trainer.run()
    metrics = {r["step"]: json.loads(r["metrics"]) for r in await world.rows("step_metrics")}
    found = [(metrics[s]["kl_engine_trainer_trajectories"], metrics[s]["kl_engine_trainer"]) for s in range(STEPS)]
    assert found[0][0] == 4 and found[0][1] > 0, "the batch itself is fresh"
    assert found[1][0] == 2 and found[1][1] > 0, "two trajectories of version 1 beside a batch of version 0"
    assert found[2:] == [(0, None)] * 3, "it is compared every fifth step"
