"""Faults count when they strike: what hit a dead process, or waited for a call that never came, was none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from laminar.buffer.incoming import COPIED, copy_path
from laminar.simulator.cluster import LEASE_S, Cluster, Slot
from laminar.simulator.faults import Fault, Kind, draw_plan
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.run import bury, quiet
from laminar.simulator.weather import Weather

Test = Callable[[Cluster, Weather], Coroutine[Any, Any, None]]


def in_weather(test: Test, *faults: Fault) -> None:
    """Beside a cluster whose supervisor has not started anything yet."""
    plan = replace(draw_plan(1, window_s=15.0, lease_s=LEASE_S), faults=faults)
    loop = SimulationLoop(random.Random(0))
    with quiet():
        try:
            cluster = Cluster(plan, loop)
            loop.run_until_complete(test(cluster, Weather(cluster)))
        finally:
            bury(loop)


def fault(kind: Kind, *, calls: int = 1, after: bool = False) -> Fault:
    return Fault(at=0.0, kind=kind, target="rollout", choice=0.0, duration=1.0, calls=calls, after=after)


def rollout_of(cluster: Cluster) -> Slot:
    return next(slot for slot in cluster.slots if slot.kind == "rollout")


async def equipped(cluster: Cluster) -> Slot:
    slot = rollout_of(cluster)
    cluster.spawn(slot)
    await asyncio.sleep(0.5)
    assert slot.engine is not None
    return slot


@pytest.mark.parametrize("kind", [Kind.ENGINE_BREAKS, Kind.REWARD_HANGS, Kind.REWARD_RAISES])
def test_the_engine_and_rewards_of_a_former_life_are_no_target(kind: Kind) -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        await cluster.create()
        slot = await equipped(cluster)
        assert await weather.inject(fault(kind))
        assert slot.process is not None
        slot.process.kill()
        assert not await weather.inject(fault(kind))
        cluster.spawn(slot)
        assert not await weather.inject(fault(kind)), "it is alive, and has no engine yet"
        await equipped(cluster)
        assert await weather.inject(fault(kind))

    in_weather(test)


@pytest.mark.parametrize("kind", [Kind.CRASH_AT_CALL, Kind.STOP_AT_CALL])
@pytest.mark.parametrize("after", [False, True])
def test_a_fault_at_a_call_counts_when_the_call_is_made(kind: Kind, after: bool) -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        process = cluster.spawn(rollout_of(cluster))
        await weather.blow()
        assert weather.counted() == {}

        async def nothing() -> None:
            pass

        calls = [asyncio.create_task(process.gate(nothing)) for _ in range(3)]
        await asyncio.wait(calls, timeout=0.01)
        assert weather.counted() == {kind.value: 1}
        assert process.dead == (kind is Kind.CRASH_AT_CALL) and process.stopped == (kind is Kind.STOP_AT_CALL)

    in_weather(test, fault(kind, calls=2, after=after))


@pytest.mark.parametrize("kind", [Kind.REPLY_OF_COMMIT, Kind.COMMIT_FAILS])
def test_a_commit_that_nobody_makes_does_not_fail(kind: Kind) -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        await weather.blow()
        assert weather.counted() == {}
        table = cluster.tables[min(cluster.tables)]
        with pytest.raises(Exception, match="commit"):
            await table.commit(table.schema.empty_table(), target=1, key="k")
        assert weather.counted() == {kind.value: 1}

    in_weather(test, fault(kind), fault(kind))


def test_a_commit_that_lands_late_counts_when_it_is_asked_for() -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        await weather.blow()
        assert weather.counted() == {}
        table = cluster.tables[min(cluster.tables)]
        assert await table.commit(table.schema.empty_table(), target=1, key="k") == 1
        assert weather.counted() == {Kind.COMMIT_LATE.value: 1} and cluster.loop.now >= 1.0

    in_weather(test, fault(Kind.COMMIT_LATE))


def test_what_is_down_already_or_compacted_already_is_not_hit_again() -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        await cluster.create()
        for kind in (Kind.COMPACTION, Kind.ETCD_RESTART):
            assert await weather.inject(fault(kind)) and not await weather.inject(fault(kind))
        assert not await weather.inject(fault(Kind.LEASE)), "nobody has one"

    in_weather(test)


def test_a_bit_flips_in_one_of_the_two_files_of_what_a_step_leaves_and_counts_then() -> None:
    flips = [replace(fault(Kind.BIT_FLIP, after=True), choice=n / 100) for n in range(20)]
    hit: set[str] = set()

    async def test(cluster: Cluster, weather: Weather) -> None:
        await weather.blow()
        assert weather.counted() == {}
        for n in range(40):
            for table in ("steps", "step_metrics", "experience"):
                first = f"incoming/{table}/t-{n:03d}.arrow"
                files = [first, copy_path(first)] if table != "experience" else [first]
                for path in files:
                    await cluster.disk.write(path, b"as written")
                damaged = [path for path in files if await cluster.disk.read(path) != b"as written"]
                assert len(damaged) <= 1
                hit.update(path.rsplit("/", 1)[0] for path in damaged)
        assert weather.counted() == {Kind.BIT_FLIP.value: len(flips)}

    in_weather(test, *flips)
    assert hit == {f"{folder}/{table}" for folder in ("incoming", "incoming/copies") for table in COPIED}


def test_a_bit_that_was_to_flip_stays_once_the_weather_is_calm() -> None:
    async def test(cluster: Cluster, weather: Weather) -> None:
        await weather.blow()
        weather.calm()
        for n in range(20):
            await cluster.disk.write(f"incoming/steps/t-{n}.arrow", b"as written")
            assert await cluster.disk.read(f"incoming/steps/t-{n}.arrow") == b"as written"

    in_weather(test, fault(Kind.BIT_FLIP, after=True))
