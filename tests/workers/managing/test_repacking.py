"""The manager's repack on the in-process etcd, in virtual time: who gets a plan and when, and who rests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from world import KEYS, World, kill

from laminar.buffer.keys import trajectory_name
from laminar.buffer.records import Complete, Cursor, Load, Moves, Rest, TrainerHead, WeightsHead
from laminar.workers.context import Member
from laminar.workers.manager import Manager
from laminar.workers.managing import repacking
from laminar.workers.managing.repacking import FULL_S, PLAN_S, REST_S
from laminar.workers.managing.slowness import WINDOW_S
from laminar.workers.repack import Handing, evacuate, plan


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Fleet:
    """Rollouts that report what a test says, beside a manager whose repack runs."""

    def __init__(self, world: World, manager: Manager) -> None:
        self.world = world
        self.manager = manager
        self.members: dict[str, Member] = {}

    @classmethod
    async def assemble(cls, **rollout: Any) -> Fleet:
        world = World(rollout=rollout)
        return cls(world, await world.manager())

    async def report(self, name: str, *tokens: int, version: int = 3, **changes: Any) -> None:
        """`tokens`: of its tail, a group each."""
        if name not in self.members:
            self.members[name] = await self.world.member("rollout", name)
        group = 100 * len(name) + ord(name[-1])
        values = {
            "version": version, "running": len(tokens), "waiting": 0, "kv_tokens": sum(tokens), "kv_capacity": 100_000,
            "decode_tokens_per_s": 10.0 * len(tokens), "draining": True, "batch_limit": 16, "step_s": 0.02,
            "tail": {trajectory_name(group, i): (n, 1000) for i, n in enumerate(tokens)},
        }  # fmt: skip
        member = self.members[name]
        load = Load.model_validate(values | changes)
        await member.run.coordination.put(KEYS.load("rollout", name), load.dump(), lease=member.session.lease)

    async def publish(self, version: int) -> None:
        head = WeightsHead(version=version, digest="d", layout_digest="l", bytes=1, master="relay-1")
        await self.manager.run_info.coordination.put(KEYS.weights, head.dump())

    async def run(self, seconds: float) -> None:
        async def work() -> None:
            async with self.manager.rollouts, self.manager.loads:
                await self.manager.repacker.run()

        task = asyncio.create_task(work())
        await asyncio.sleep(seconds)
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def moves(self) -> dict[str, Moves]:
        found = self.world.server.page(KEYS.moves_root, "", 100, 0).items
        return {kv.key.rsplit("/", 1)[-1]: Moves.parse(kv.value) for kv in found}


async def test_draining_rollouts_get_plans_and_the_fullest_gets_the_tails() -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    for name, tokens in (("r-a", [500] * 4), ("r-b", [300] * 2), ("r-c", [100])):
        await fleet.report(name, *tokens)
    await fleet.report("r-new", 900, version=4, draining=False)
    await fleet.run(1.5)
    moves = fleet.moves()
    assert set(moves) == {"r-b", "r-c"}
    assert {m.target for plan in moves.values() for m in plan.items} == {"r-a"}
    assert len(moves["r-b"].items) == 2 and moves["r-b"].version == 3
    revision = fleet.world.server.get(KEYS.worker("rollout", "r-a"))
    assert revision and moves["r-c"].targets == {"r-a": revision.create_revision}


async def test_plans_are_made_beside_the_loop_that_renews_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    loop, beside = asyncio.get_running_loop(), False
    in_thread = loop.run_in_executor

    def thread(executor: Any, work: Any, *args: Any) -> Any:
        nonlocal beside
        beside = True
        try:
            return in_thread(executor, work, *args)
        finally:
            beside = False

    def planned(*given: Any) -> list[Handing]:
        assert beside, "a thousand long tails take half a second"
        return plan(*given)

    monkeypatch.setattr(loop, "run_in_executor", thread)
    monkeypatch.setattr(repacking, "plan", planned)
    await fleet.run(1.5)
    assert set(fleet.moves()) == {"r-b"}


async def test_a_plan_stands_once_and_dies_at_its_deadline() -> None:
    """Also that of a manager that is gone: its successor counts from when it first saw it."""
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(1.5)
    before = fleet.moves()
    kill(fleet.manager.member)
    fleet.manager = await fleet.world.manager("relay-2")
    await fleet.run(PLAN_S - 1)
    assert fleet.moves() == before, "no second plan while the first stands"
    await fleet.run(2.5)
    assert fleet.moves() != before


async def test_a_publish_is_followed_by_a_plan_without_waiting_for_the_interval() -> None:
    fleet = await Fleet.assemble(repack_interval=1000.0)
    await fleet.publish(3)
    running = asyncio.create_task(fleet.run(8.0))
    await asyncio.sleep(5.0)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await asyncio.sleep(1.0)
    assert not fleet.moves(), "they hold the newest version"
    await fleet.publish(4)
    await asyncio.sleep(1.3)
    assert set(fleet.moves()) == {"r-b"}
    await running


@pytest.mark.parametrize(
    "rollout", [{"repack_interval": 0.0}, {"update": "interrupt"}, {"partials": False}], ids=lambda r: next(iter(r))
)
async def test_nothing_is_planned_when_it_is_off_or_cannot_work(rollout: dict[str, Any]) -> None:
    fleet = await Fleet.assemble(**rollout)
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(12.0)
    assert not fleet.moves()


async def test_who_switches_or_rests_or_drains_for_no_newer_version_is_left_alone() -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300, switching=True)
    await fleet.report("r-c", 300, version=4)
    await fleet.report("r-d", 300, draining=False)
    await fleet.run(6.0)
    assert not fleet.moves()


async def test_a_slow_rollout_rests_its_trajectories_go_and_it_gets_another_chance() -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(3)

    async def report(seconds: float) -> None:
        for second in range(int(seconds)):
            for name, rate in (("r-a", 80.0), ("r-b", 82.0), ("r-c", 78.0), ("r-slow", 9.0)):
                resting = name == "r-slow" and fleet.world.server.get(KEYS.rest(name)) is not None
                load = {"tokens": round(rate * second), "draining": resting, "resting": resting}
                await fleet.report(name, *[100] * 8, **load, **({} if resting else {"tail": {}}))
            await asyncio.sleep(1.0)

    running = asyncio.create_task(fleet.run(WINDOW_S + REST_S + 20))
    await report(WINDOW_S + 6)
    kv = fleet.world.server.get(KEYS.rest("r-slow"))
    assert kv is not None and "1.1 tokens a second for each of 8" in Rest.parse(kv.value).reason
    assert sorted({m.target for m in fleet.moves()["r-slow"].items}) == ["r-a", "r-b", "r-c"]
    assert {c.id for c in fleet.manager._candidates({})} == {"r-a", "r-b", "r-c"}, "orphans do not go to it"
    await asyncio.sleep(REST_S)
    assert fleet.world.server.get(KEYS.rest("r-slow")) is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def resting_beside(fleet: Fleet, **others: dict[str, Any]) -> None:
    """`r-slow` rests with two trajectories, beside `others`, of which each reports what is said."""
    await fleet.publish(4)
    await fleet.report("r-slow", 500, 400, resting=True)
    for name, load in others.items():
        await fleet.report(f"r-{name}", **load)
    rest = Rest(reason="slow", until_us=0)
    await fleet.manager.run_info.coordination.put(KEYS.rest("r-slow"), rest.dump())


async def test_who_rests_draws_again_when_too_few_others_are_left() -> None:
    """Of two that rest the one that has rested longer, then the other: the last one would draw nothing for minutes."""
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    names = ["r-first", "r-second", *(f"r-{i}" for i in range(4))]
    for name in names:
        await fleet.report(name, version=4, draining=False)
    for name in names[:2]:
        rest = Rest(reason="slow", until_us=0)
        await fleet.manager.run_info.coordination.put(KEYS.rest(name), rest.dump())
    running = asyncio.create_task(fleet.run(20.0))
    resting = []
    for leaving in ([], ["r-0"], ["r-1", "r-2"], ["r-3", "r-first"]):
        for name in leaving:
            kill(fleet.members[name])
        await asyncio.sleep(2.0)
        resting.append({key.rsplit("/", 1)[-1] for key in fleet.world.under(KEYS.rests_root)})
    assert resting == [{"r-first", "r-second"}, {"r-second"}, {"r-second"}, set()]
    await running


async def test_where_nobody_has_room_a_resting_rollout_is_looked_at_again_some_seconds_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []

    def evacuated(*args: Any) -> list[Handing]:
        looks.append(asyncio.get_running_loop().time())
        return evacuate(*args)

    monkeypatch.setattr(repacking, "evacuate", evacuated)
    fleet = await Fleet.assemble()
    full = {"draining": False, "room": -9, "tail": {}, "running": 16}
    await resting_beside(fleet, a=full)
    running = asyncio.create_task(fleet.run(3 * FULL_S))
    await asyncio.sleep(FULL_S + 1.5)
    assert len(looks) == 2 and looks[1] - looks[0] >= FULL_S and not fleet.moves()
    await fleet.report("r-a", **full | {"room": 1})
    await asyncio.sleep(FULL_S)
    assert [m.target for m in fleet.moves()["r-slow"].items] == ["r-a", "r-a"]
    await running


async def test_nothing_goes_to_a_rollout_that_is_just_being_emptied_or_filled() -> None:
    """It would be moved on at once, or take the room that a plan counts on."""
    fleet = await Fleet.assemble()
    await resting_beside(fleet, new={"version": 4, "draining": False})
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    fleet.manager.repacker._published = 4
    async with fleet.manager.rollouts, fleet.manager.loads, fleet.manager.repacker.rests:
        repacker = fleet.manager.repacker
        await repacker._plan(0.0, loads := repacker._living_loads())
        assert set(fleet.moves()) == {"r-b"}
        await repacker._evacuate(0.0, loads)
        assert set(fleet.moves()) == {"r-b"}
        await fleet.report("r-c", 300)
        await repacker.loads.wait_for(lambda: len(repacker._living_loads()) == 5, 5.0)
        del repacker._left_alone["r-slow"]
        await repacker._evacuate(0.0, repacker._living_loads())
    assert {m.target for m in fleet.moves()["r-slow"].items} == {"r-c"}


async def test_plans_of_the_dead_are_cleaned_away() -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(1.5)
    assert fleet.moves()
    kill(fleet.members["r-b"])
    await fleet.manager.cleaner.clean()
    assert not fleet.moves()


async def test_who_had_part_in_a_plan_is_planned_for_again_as_soon_as_it_is_carried_out() -> None:
    """Most plans are carried out before the manager looks again; nobody is to wait for their deadline then."""
    fleet = await Fleet.assemble(repack_interval=1.0)
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    running = asyncio.create_task(fleet.run(12.0))
    await asyncio.sleep(0.1)
    coordination = fleet.manager.run_info.coordination
    assert await coordination.delete(KEYS.moves("r-b")), "carried out at once"
    await fleet.report("r-b", 0, version=4, draining=False, tail={})
    await fleet.report("r-c", 200)
    await asyncio.sleep(1.5)
    assert not fleet.moves(), "its target's report does not tell yet what came of it"
    await asyncio.sleep(4.0)
    assert set(fleet.moves()) == {"r-c"}
    await running


async def test_the_plan_of_an_earlier_manager_keeps_its_target_to_itself() -> None:
    """Else a new manager would fill it with what others have, beside what is on its way to it."""
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(1.5)
    assert set(fleet.moves()) == {"r-b"}
    kill(fleet.manager.member)
    fleet.manager = await fleet.world.manager("relay-2")
    await fleet.report("r-c", 200)
    await fleet.run(PLAN_S - 1)
    assert set(fleet.moves()) == {"r-b"}


async def test_a_plan_whose_target_has_just_gone_is_not_written() -> None:
    fleet = await Fleet.assemble()
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    repacker = fleet.manager.repacker
    async with fleet.manager.rollouts, fleet.manager.loads:
        loads = repacker._living_loads()
        del fleet.manager.rollouts.items[KEYS.worker("rollout", "r-a")]
        repacker._published = 4
        await repacker._plan(0.0, loads)
    assert not fleet.moves()


@pytest.mark.parametrize("left", [True, False])
async def test_nobody_is_emptied_for_whom_nothing_is_left_to_draw(left: bool) -> None:
    """At the end of a run: the others would only become slower."""
    fleet = await Fleet.assemble()
    decided = 0 if left else fleet.world.config.run.max_steps
    head = TrainerHead(step=decided, decided=decided, checkpoint=0, consumed_groups=0, state="running")
    await fleet.manager.run_info.coordination.put(KEYS.trainer, head.dump())
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(1.5)
    assert bool(fleet.moves()) is left


@pytest.mark.parametrize("steps_ready", [1, 2])
async def test_nobody_is_emptied_while_more_is_complete_than_the_next_batch(steps_ready: int) -> None:
    """Once the trainer has taken that, there is something to draw again."""
    fleet = await Fleet.assemble(repack_interval=1.0)
    coordination, size = fleet.manager.run_info.coordination, fleet.world.config.trainer.groups_per_step
    head = TrainerHead(step=0, decided=0, checkpoint=0, consumed_groups=0, state="running")
    await coordination.put(KEYS.trainer, head.dump())
    await coordination.put(KEYS.cursor, Cursor(next=2 * size, by="").dump())
    await coordination.put(KEYS.complete, Complete(groups=steps_ready * size).dump())
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    await fleet.run(1.5)
    assert bool(fleet.moves()) is (steps_ready == 1)


async def test_rollouts_that_draw_and_have_room_take_what_can_be_drawn_first() -> None:
    fleet = await Fleet.assemble()
    ahead, samples = fleet.world.config.max_ahead_groups, fleet.world.config.sampling.samples_per_prompt
    coordination = fleet.manager.run_info.coordination
    head = TrainerHead(step=0, decided=0, checkpoint=0, consumed_groups=0, state="running")
    await coordination.put(KEYS.trainer, head.dump())
    await coordination.put(KEYS.cursor, Cursor(next=ahead, by="").dump())
    await fleet.publish(4)
    await fleet.report("r-a", 500, 500)
    await fleet.report("r-b", 300)
    coming = fleet.world.config.trainer.groups_per_step * samples
    for number in range(-(-coming // 16)):  # their batch limit
        await fleet.report(f"r-{number}", version=4, draining=False)
    await fleet.run(1.5)
    assert not fleet.moves()
