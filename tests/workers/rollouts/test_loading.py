"""How a rollout comes to other weights, and what becomes of work whose version nobody has any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from world import KEYS, World, draw, kill

from laminar.buffer import claims
from laminar.buffer.coordination import created_at
from laminar.buffer.ledger import all_claims
from laminar.buffer.records import Claim, WeightsHead
from laminar.errors import EngineError, WeightsError
from laminar.workers.engines.base import FolderWeights, WeightSource
from laminar.workers.mirror import Mirror
from laminar.workers.rollouts import loading
from laminar.workers.rollouts.loading import MAX_LOAD_FAILURES, Loader
from laminar.workers.rollouts.steering import View


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


class Engine:
    """Loads what it is given, unless it is told to refuse."""

    def __init__(self) -> None:
        self.version = -1
        self.refusing = 0

    async def load(self, source: WeightSource) -> None:
        if self.refusing:
            self.refusing -= 1
            raise WeightsError("the bytes are not those that were promised")
        self.version = source.version


class Stage:
    """A rollout of which there is only what a loader needs; `available` are the versions that can be had."""

    def __init__(self, world: World, member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.available = {5}
        self.engine = Engine()
        self.given_up: list[int] = []
        self.reports = 0
        self.room = 4
        self.meanwhile: Callable[[], Awaitable[Any]] | None = None
        """What happens while weights are looked for."""

        async def find(run: Any, relays: Any, version: int, digest: str = "") -> WeightSource | None:
            if self.meanwhile is not None:
                await self.meanwhile()
            return FolderWeights("", version, f"d{version}") if version in self.available else None

        async def write() -> None:
            self.reports += 1

        async def give_up(version: int) -> None:
            self.given_up.append(version)

        async def waiting() -> list[claims.Held]:
            held = (await all_claims(member.run.coordination, KEYS)).values()
            return [h for h in held if h.claim.owner == member.id]

        def view(waiting: list[claims.Held]) -> View:
            inbox = tuple(h.claim.version for h in waiting)
            return View(newest=5, loaded=self.engine.version, running=0, room=self.room, inbox=inbox)

        monkeypatch.setattr(loading, "find_weights", find)
        self.rollout = SimpleNamespace(
            run_info=member.run, member=member, config=world.config, clock=world.clock, ledger=member.ledger,
            engine=self.engine, digest="", switching=False, relays=SimpleNamespace(items={}),
            inbox=SimpleNamespace(items={}), waiting=waiting, reporter=SimpleNamespace(write=write),
            evaluator=SimpleNamespace(give_up=give_up), view=view,
            published=lambda: WeightsHead(version=5, digest="d5", layout_digest="", bytes=1, master=""),
        )  # fmt: skip
        self.loader = Loader(self.rollout)  # type: ignore[arg-type]


async def stage(monkeypatch: pytest.MonkeyPatch, **rollout: Any) -> Stage:
    world = World(rollout=rollout)
    return Stage(world, await world.member("rollout", "r-heir"), monkeypatch)


async def orphan_of(stage: Stage, version: int) -> Claim:
    """A trajectory begun under `version` by somebody who died, now in this rollout's hands."""
    dead = await stage.world.member("rollout", "r-dead")
    held = (await draw(dead, version=version))[0]
    kill(dead)
    manager = await stage.world.manager()
    me = stage.rollout.member
    claim = claims.reassigned(held.claim, me.id, "death")
    alive = created_at(KEYS.worker("rollout", me.id), me.membership.create_revision)
    assert await manager.ledger.hand_over(held, claim, alive)
    return claim


async def claim_now(stage: Stage) -> Claim:
    return (await stage.world.claims())[0, 0].claim


async def test_a_lost_version_goes_on_under_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_version_lost = "continue"`: what was written stays; the source is still to be read."""
    s = await stage(monkeypatch, on_version_lost="continue")
    before = await orphan_of(s, version=2)
    assert await s.loader.load(2)
    after = await claim_now(s)
    assert after == before.model_copy(update={"version": 5}) and after.source.worker == "r-dead"
    assert s.given_up == [2], "its evaluation is given up too"


async def test_a_lost_version_makes_the_trajectory_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_version_lost = "restart"`: nothing of the old version stays; it counts as no failed attempt."""
    s = await stage(monkeypatch, on_version_lost="restart")
    before = await orphan_of(s, version=2)
    assert await s.loader.load(2)
    after = await claim_now(s)
    assert (after.version, after.term, after.state) == (5, before.term + 1, "waiting")
    assert after.source.worker == "r-heir" and after.source.term == after.term, "a log without rows of it"
    assert after.attempts == 0 and "version 2 was lost" in after.last_error


async def test_without_the_newest_version_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may be replaying, and bring both back."""
    s = await stage(monkeypatch)
    before = await orphan_of(s, version=2)
    s.available = set()
    assert not await s.loader.load(2)
    assert await claim_now(s) == before
    s.available = {2, 5}
    assert await s.loader.load(2) and s.engine.version == 2


async def test_weights_that_do_not_load_are_tried_again_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: applying new weights raises: the reported version does not advance."""
    s = await stage(monkeypatch)
    s.engine.refusing = 2
    for version in (-1, -1, 5):
        assert await s.loader.load(5)
        assert s.engine.version == version
    s.engine.refusing = MAX_LOAD_FAILURES
    with pytest.raises(EngineError, match="could not be loaded 5 times"):
        for _ in range(MAX_LOAD_FAILURES):
            await s.loader.load(5)


@pytest.mark.parametrize("room", [4, 0])
async def test_what_comes_to_the_inbox_before_the_notice_keeps_the_old_version(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Else it would find its version gone, and the rollout drain at once again to load it back; also where all slots
    are held by what waits for a reward."""
    s = await stage(monkeypatch)
    s.room = room
    s.available = {3, 5}
    assert await s.loader.load(3) and s.reports == 0
    await orphan_of(s, version=3)
    assert not await s.loader.load(5)
    assert (s.engine.version, s.reports, s.rollout.switching) == (3, 1, False)
    s.rollout.inbox.items = {KEYS.inbox_item("r-heir", 0, 0): None}  # the watch has told: it is taken over
    assert not await s.loader.load(5)
    await s.rollout.member.run.coordination.delete(KEYS.claim(0, 0))
    assert await s.loader.load(5) and s.engine.version == 5


async def test_what_comes_while_the_weights_are_looked_for_keeps_the_old_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relay may look for two minutes; the watch has told of it by then, but steering decided without it."""
    s = await stage(monkeypatch)
    s.available = {3, 5}
    assert await s.loader.load(3)
    me = s.rollout.member

    async def handed_over() -> None:
        s.meanwhile = None
        await orphan_of(s, version=3)
        await asyncio.sleep(0.1)

    async with Mirror(me.run.coordination, KEYS.inbox(me.id)) as inbox:
        s.rollout.inbox, s.meanwhile = inbox, handed_over
        assert not await s.loader.load(5) and s.engine.version == 3
        assert len(inbox.items) == 1 and not s.rollout.switching


async def test_what_waits_for_another_version_does_not_keep_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    s = await stage(monkeypatch)
    s.available = {3, 5}
    assert await s.loader.load(3)
    await orphan_of(s, version=5)
    s.rollout.inbox.items = {KEYS.inbox_item("r-heir", 0, 0): None}
    assert await s.loader.load(5) and s.engine.version == 5
