"""What a rollout finds in its inbox, and what it clears out of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from world import KEYS, World, draw

from laminar.buffer import claims
from laminar.buffer.coordination import created_at
from laminar.workers.context import Member
from laminar.workers.mirror import Mirror
from laminar.workers.rollout import Rollout


class Meanwhile:
    """etcd as a rollout sees it; `then` happens once, right after an answer to `get`."""

    def __init__(self, inner: Any, then: Callable[[], Awaitable[object]]) -> None:
        self.inner, self.then = inner, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def get(self, key: str) -> Any:
        answer = await self.inner.get(key)
        then, self.then = self.then, _nothing
        await then()
        return answer


async def _nothing() -> None:
    pass


async def give(world: World, giver: Member, taker: Member) -> None:
    """The one trajectory of the world changes hands."""
    held = (await world.claims())[0, 0]
    claim = claims.reassigned(held.claim, taker.id, "move")
    lives = created_at(KEYS.worker("rollout", taker.id), taker.membership.create_revision)
    assert await giver.ledger.hand_over(held, claim, lives)


async def inbox_of(world: World, rollout: Member, then: Callable[[], Awaitable[object]]) -> list[str]:
    """What `waiting` names, once the mirror shows what is there now."""
    coordination = rollout.run.coordination
    async with Mirror(coordination, KEYS.inbox(rollout.id)) as inbox:
        seen = SimpleNamespace(
            inbox=inbox, member=rollout, live={},
            run_info=SimpleNamespace(keys=KEYS, coordination=Meanwhile(coordination, then)),
        )  # fmt: skip
        return [held.claim.owner for held in await Rollout.waiting(seen)]  # type: ignore[arg-type]


async def test_what_went_to_another_is_cleared_out() -> None:
    world = World()
    mine, other = [await world.member("rollout", name) for name in ("r-1", "r-2")]
    await draw(other)
    await give(world, other, mine)
    assert await inbox_of(world, mine, _nothing) == ["r-1"]
    await give(world, mine, other)
    assert await inbox_of(world, mine, _nothing) == []
    assert not world.under(KEYS.inbox("r-1"))


async def test_what_comes_back_at_that_very_moment_stays() -> None:
    world = World()
    mine, other = [await world.member("rollout", name) for name in ("r-1", "r-2")]
    await draw(other)
    await give(world, other, mine)
    await give(world, mine, other)
    assert await inbox_of(world, mine, lambda: give(world, other, mine)) == []
    assert world.under(KEYS.inbox("r-1")), "else nobody would ever take it up"
    assert await inbox_of(world, mine, _nothing) == ["r-1"]
