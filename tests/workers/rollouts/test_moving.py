"""A rollout's part of a move: what it hands over, what is refused and goes on here, and that each has one owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from world import KEYS, World, draw, kill

from laminar.buffer import claims
from laminar.buffer.coordination import created_at
from laminar.buffer.keys import trajectory_name
from laminar.buffer.memory import Fault
from laminar.buffer.records import Claim, Load, Move, Moves
from laminar.errors import Fenced
from laminar.workers.context import Member
from laminar.workers.rollouts.halting import Halting
from laminar.workers.rollouts.moving import LOOK_S, STOP_S, Mover
from laminar.workers.rollouts.trajectory import Trajectory

FIRST, SECOND = trajectory_name(0, 0), trajectory_name(0, 1)


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Stage:
    """A rollout of which there is only what a mover needs, with a group of two that generates, beside a target."""

    def __init__(self, world: World, source: Member, target: Member) -> None:
        self.world, self.source, self.target = world, source, target
        self.stubborn: set[str] = set()
        self.restarted: list[str] = []
        self.before_durable: Callable[[], Awaitable[object]] | None = None
        self.live: dict[tuple[int, int], Trajectory] = {}
        self.halting = Halting(SimpleNamespace(halt=self.halt), world.clock, self.start)  # type: ignore[arg-type]
        self.rollout = SimpleNamespace(
            run_info=source.run, member=source, config=world.config, clock=world.clock, ledger=source.ledger,
            engine=SimpleNamespace(version=3), live=self.live, tasks=self.live, halting=self.halting, stopping=False,
            flusher=SimpleNamespace(durable=self.durable), gave=self.gave,
        )  # fmt: skip
        self.mover = Mover(self.rollout)  # type: ignore[arg-type]

    async def halt(self, t: Trajectory) -> None:
        t.halting = True
        if t.name not in self.stubborn:
            t.request = ""
            self.halting.parked(t)

    def start(self, t: Trajectory) -> None:
        self.restarted.append(t.name)

    async def durable(self) -> None:
        if self.before_durable is not None:
            await self.before_durable()

    def gave(self, t: Trajectory) -> None:
        self.halting.forget(t)
        self.mover.handed(t)
        self.live.pop(t.id)

    async def report(self, **changes: Any) -> None:
        values = {
            "version": 3, "running": 1, "waiting": 0, "kv_tokens": 500, "kv_capacity": 1000, "decode_tokens_per_s": 1.0,
            "draining": True,
        }  # fmt: skip
        load = Load.model_validate(values | changes)
        await self.target.run.coordination.put(
            KEYS.load("rollout", self.target.id), load.dump(), lease=self.target.session.lease
        )

    async def plan(self, seconds: float = 10.0, created: int = 0) -> None:
        revision = created or self.target.membership.create_revision
        record = Moves(
            plan="m/0", version=3, deadline_us=0, seconds=seconds, targets={self.target.id: revision},
            items=[Move(trajectory=name, target=self.target.id) for name in (FIRST, SECOND)],
        )  # fmt: skip
        await self.source.run.coordination.put(KEYS.moves(self.source.id), record.dump())

    async def run(self, seconds: float = 5.0) -> None:
        task = asyncio.create_task(self.mover.run())
        await asyncio.sleep(seconds)
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def claims(self) -> dict[str, Claim]:
        return {trajectory_name(*id): held.claim for id, held in (await self.world.claims()).items()}

    def plan_stands(self) -> bool:
        return self.world.server.get(KEYS.moves(self.source.id)) is not None


@pytest.fixture
async def stage() -> Stage:
    world = World()
    source, target = [await world.member("rollout", name) for name in ("r-src", "r-dst")]
    stage = Stage(world, source, target)
    for held in await draw(source, version=3):
        t = Trajectory(held=held, worker="r-src", version=3, digest="d3", started_at=1)
        t.begin([7] * 90, [], "", at=1)
        t.policy_wrote([1] * 10, [-0.5] * 10, at=2)
        t.request = f"request of {t.name}"
        stage.live[t.id] = t
    await stage.report()
    return stage


async def assert_all_go_on_here(stage: Stage, before: dict[str, Claim]) -> None:
    assert await stage.claims() == before and not stage.world.under(KEYS.inbox("r-dst"))
    assert sorted(stage.restarted) == [FIRST, SECOND] and len(stage.live) == 2
    assert not any(t.halting for t in stage.live.values())
    assert stage.mover.moved_out == 0 and not list(stage.mover.unread)


async def test_a_plan_is_carried_out_and_its_key_deleted(stage: Stage) -> None:
    await stage.plan()
    await stage.run()
    for claim in (await stage.claims()).values():
        assert (claim.owner, claim.term, claim.state, claim.deaths) == ("r-dst", 2, "waiting", 0)
        assert (claim.source.worker, claim.source.term) == ("r-src", 1), "its rows are still to be read here"
    assert stage.world.under(KEYS.inbox("r-dst")) == [FIRST, SECOND]
    assert not stage.live and not stage.restarted and not stage.plan_stands()
    assert stage.mover.moved_out == 2


async def test_rows_are_kept_until_the_new_owner_has_read_them(stage: Stage) -> None:
    await stage.plan()
    await stage.run()
    for name, held in [(trajectory_name(*i), h) for i, h in (await stage.world.claims()).items()]:
        assert {t.name for t in stage.mover.unread} >= {name}
        await stage.target.ledger.adopt(held, version=3, progress=10)
        await stage.run(LOOK_S + 1)
        assert name not in {t.name for t in stage.mover.unread}


async def switches(stage: Stage) -> None:
    await stage.report(switching=True)


async def holds_another_version(stage: Stage) -> None:
    await stage.report(version=4)


async def is_full(stage: Stage) -> None:
    await stage.report(kv_tokens=950)


async def has_no_slot(stage: Stage) -> None:
    """All are held by trajectories that wait for their rewards: its engine is empty."""
    await stage.report(room=0, running=0, kv_tokens=0)


async def dies(stage: Stage) -> None:
    kill(stage.target)


async def dies_and_its_report_stays(stage: Stage) -> None:
    kill(stage.target)
    load = Load(version=3, running=0, waiting=0, kv_tokens=0, kv_capacity=1000, decode_tokens_per_s=0, draining=True)
    await stage.source.run.coordination.put(KEYS.load("rollout", "r-dst"), load.dump())


async def plan_is_deleted(stage: Stage) -> None:
    await stage.source.run.coordination.delete(KEYS.moves("r-src"))


@pytest.mark.parametrize(
    "event",
    [switches, holds_another_version, is_full, has_no_slot, dies, dies_and_its_report_stays, plan_is_deleted],
)
async def test_what_is_refused_goes_on_where_it_runs(
    stage: Stage, event: Callable[[Stage], Awaitable[object]]
) -> None:
    """Whatever happened since the plan was made, to the last moment before the transaction."""
    before = await stage.claims()
    stage.before_durable = lambda: event(stage)
    await stage.plan()
    await stage.run()
    await assert_all_go_on_here(stage, before)
    assert not stage.plan_stands()


async def test_a_target_of_that_name_in_another_life_is_another(stage: Stage) -> None:
    before = await stage.claims()
    await stage.plan(created=1)
    await stage.run()
    await assert_all_go_on_here(stage, before)


async def test_what_fits_is_handed_over_and_the_rest_goes_on(stage: Stage) -> None:
    await stage.report(kv_tokens=800)
    await stage.plan()
    await stage.run()
    assert sorted(c.owner for c in (await stage.claims()).values()) == ["r-dst", "r-src"]
    assert len(stage.restarted) == len(stage.live) == 1


async def test_no_more_are_handed_over_than_there_are_slots(stage: Stage) -> None:
    await stage.report(room=1)
    await stage.plan()
    await stage.run()
    assert sorted(c.owner for c in (await stage.claims()).values()) == ["r-dst", "r-src"]
    assert len(stage.restarted) == len(stage.live) == 1


async def test_a_new_report_knows_of_what_was_handed_over_before(stage: Stage) -> None:
    """It counts its inbox, so that a slot is not taken off twice."""
    await stage.report(room=2)
    real = stage.source.ledger.hand_over

    async def hand_over(*args: Any) -> bool:
        done = await real(*args)
        await stage.report(room=1)
        return done

    stage.source.ledger.hand_over = hand_over  # type: ignore[method-assign]
    await stage.plan()
    await stage.run()
    assert {c.owner for c in (await stage.claims()).values()} == {"r-dst"}


async def test_a_target_that_reports_meanwhile_is_asked_again(stage: Stage) -> None:
    real, reports = stage.source.ledger.hand_over, 2

    async def hand_over(*arguments: Any) -> bool:
        nonlocal reports
        if reports:
            reports -= 1
            await stage.report(running=reports)
        return await real(*arguments)

    stage.rollout.ledger = SimpleNamespace(
        hand_over=hand_over, still_mine=stage.source.ledger.still_mine, check_fence=stage.source.ledger.check_fence
    )
    await stage.plan()
    await stage.run()
    assert {c.owner for c in (await stage.claims()).values()} == {"r-dst"}


async def test_one_that_does_not_stop_in_time_is_left_out(stage: Stage) -> None:
    stage.stubborn = {FIRST}
    await stage.plan()
    await stage.run(STOP_S + 2)
    owners = {name: claim.owner for name, claim in (await stage.claims()).items()}
    assert owners == {FIRST: "r-src", SECOND: "r-dst"}
    assert [t.name for t in stage.live.values() if not t.halting] == [FIRST] and not stage.restarted


async def test_nothing_moves_that_could_not_be_made_durable_while_the_plan_held(stage: Stage) -> None:
    before = await stage.claims()
    stage.before_durable = asyncio.Event().wait
    await stage.plan(seconds=2.0)
    await stage.run(4.0)
    await assert_all_go_on_here(stage, before)


async def test_a_hand_over_whose_reply_is_lost_is_one_hand_over(stage: Stage) -> None:
    stage.source.run.coordination.faults.script("transact", Fault.DROP_REPLY)  # type: ignore[attr-defined]
    await stage.plan()
    await stage.run(12.0)
    assert {(c.owner, c.term) for c in (await stage.claims()).values()} == {("r-dst", 2)}
    assert not stage.live


async def owned_by(stage: Stage) -> dict[str, str]:
    return {name: claim.owner for name, claim in (await stage.claims()).items()}


async def test_a_claim_that_went_to_another_stays_with_him(stage: Stage) -> None:
    """However that came about: a hand-over compares the claim."""
    manager, heir = await stage.world.manager(), await stage.world.member("rollout", "r-heir")

    async def take() -> None:
        alive = created_at(KEYS.worker("rollout", heir.id), heir.membership.create_revision)
        held = (await stage.world.claims())[0, 0]
        assert await manager.ledger.hand_over(held, claims.reassigned(held.claim, heir.id, "death"), alive)

    stage.before_durable = take
    await stage.plan()
    await stage.run()
    assert await owned_by(stage) == {FIRST: "r-heir", SECOND: "r-dst"}
    assert not stage.live and not stage.restarted, "it is dropped here"


async def test_a_source_that_was_taken_for_dead_gives_nothing_away(stage: Stage) -> None:
    """Its lease ended while it stopped and flushed."""

    async def lose() -> None:
        kill(stage.source)

    stage.before_durable = lose
    await stage.plan()
    working = asyncio.create_task(stage.mover.run())
    with pytest.raises(Fenced):
        await asyncio.wait_for(working, 30.0)
    assert await owned_by(stage) == {FIRST: "r-src", SECOND: "r-src"}


async def test_a_rollout_that_leaves_moves_nothing_any_more(stage: Stage) -> None:
    """Whatever it has goes to the manager, in `leave`; it must not begin again here."""
    before = await stage.claims()

    async def leave() -> None:
        stage.rollout.stopping = True

    stage.before_durable = leave
    await stage.plan()
    await stage.run()
    assert await stage.claims() == before and not stage.restarted
