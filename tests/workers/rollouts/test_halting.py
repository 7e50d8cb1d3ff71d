"""Stopping trajectories between two tokens, and having them go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from laminar.clock import SystemClock
from laminar.workers.rollouts.halting import Halting
from laminar.workers.rollouts.trajectory import Trajectory


@pytest.fixture(scope="module")
def event_loop_policy(virtual_time: asyncio.AbstractEventLoopPolicy) -> asyncio.AbstractEventLoopPolicy:
    return virtual_time


def trajectory(sample: int, request: str = "r") -> Trajectory:
    return cast(Trajectory, SimpleNamespace(id=(0, sample), name=f"0-{sample}", request=request, halting=False))


class Stage:
    """Each trajectory leaves the engine after so many seconds; one of none never does."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.started: list[tuple[int, int]] = []
        generation: Any = SimpleNamespace(halt=self.halt)
        self.halting = Halting(generation, SystemClock(), lambda t: self.started.append(t.id))

    async def halt(self, t: Trajectory) -> None:
        t.halting = True
        if (after := self.seconds.get(f"s{t.id[1]}")) is not None:
            asyncio.get_running_loop().call_later(after, self.leaves, t)

    def leaves(self, t: Trajectory) -> None:
        t.request = ""
        if t.halting:
            self.halting.parked(t)


async def test_those_that_stand_still_in_time_are_told_and_only_they_are_started_again() -> None:
    stage = Stage(s0=0.1, s1=0.5)
    all_three = [trajectory(n) for n in range(3)]
    began = asyncio.get_running_loop().time()
    assert [t.id for t in await stage.halting.stop(all_three, 2.0)] == [(0, 0), (0, 1)]
    assert 2.0 <= asyncio.get_running_loop().time() - began < 2.1
    stage.halting.go_on(all_three)
    assert stage.started == [(0, 0), (0, 1)] and not any(t.halting for t in all_three)
    stage.halting.go_on(all_three)
    assert len(stage.started) == 2, "nothing is started twice"


async def test_it_waits_no_longer_than_the_last_one_takes() -> None:
    stage = Stage(s0=0.1, s1=0.3)
    began = asyncio.get_running_loop().time()
    await stage.halting.stop([trajectory(0), trajectory(1)], 5.0)
    assert asyncio.get_running_loop().time() - began < 0.4


async def test_one_without_a_request_halts_at_its_next_turn_unless_it_need_not_any_more() -> None:
    """In its environment: nothing is waited for, and whatever comes back is generated later, by whoever has it then."""
    stage = Stage(s0=1.0)
    acting = trajectory(0, request="")
    assert await stage.halting.stop([acting], 5.0) == [] and acting.halting
    await asyncio.sleep(1.5)
    stage.halting.go_on([acting])
    assert stage.started == [(0, 0)]


async def test_what_was_given_away_is_not_started_again() -> None:
    stage = Stage(s0=0.0)
    given = trajectory(0)
    await stage.halting.stop([given], 1.0)
    stage.halting.forget(given)
    stage.halting.go_on([given])
    assert not stage.started
