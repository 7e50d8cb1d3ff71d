"""Runs one seed to its end and says what was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from laminar.simulator.cluster import LEASE_S, Cluster
from laminar.simulator.faults import Kind, Plan, draw_plan
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.oracle import Oracle
from laminar.simulator.weather import Weather
from laminar.workers.manager import CLEAN_INTERVAL_S

FAULT_WINDOW_S = 15.0
END_WITHIN_S = 400.0
"""Virtual seconds within which a run must have ended once nothing fails any more."""


@dataclass(frozen=True)
class Outcome:
    """`problems`: empty if all invariants held; `virtual_s`: how long the run took on its own clocks; `moved`,
    `interrupted`, `rested`: as the oracle counts them."""

    seed: int
    problems: list[str]
    injected: dict[str, int]
    virtual_s: float
    story: list[str] = field(repr=False)
    moved: int = 0
    interrupted: int = 0
    rested: int = 0


def simulate(seed: int, *, without: frozenset[Kind] = frozenset()) -> Outcome:
    """The run of a seed; equal seeds give equal outcomes."""
    plan = draw_plan(seed, window_s=FAULT_WINDOW_S, lease_s=LEASE_S, without=without)
    loop = SimulationLoop(random.Random(f"loop/{seed}"))
    with quiet():
        try:
            return loop.run_until_complete(_run(plan, loop))
        finally:
            bury(loop)


async def _run(plan: Plan, loop: SimulationLoop) -> Outcome:
    cluster = Cluster(plan, loop)
    oracle, weather = Oracle(cluster), Weather(cluster)
    await cluster.create()
    background = [asyncio.create_task(oracle.watch(), name="the oracle's watch"), *cluster.supervise()]
    blowing = asyncio.create_task(weather.blow())
    ended = await _until_done(cluster, weather, blowing)
    blowing.cancel()
    weather.calm()
    problems: list[str] = []
    if not ended:
        head = await cluster.state()
        problems.append(f"the run did not end within {END_WITHIN_S:.0f} s after the last fault; it stands at {head}")
        problems += oracle.problems + cluster.broken
    else:
        await _settle(cluster)
        problems += await oracle.judge()
    cluster.over = True
    for slot in cluster.slots:
        if slot.process is not None:
            slot.process.kill()
    for task in background:
        task.cancel()
    for task, result in zip(background, await asyncio.gather(*background, return_exceptions=True), strict=True):
        if isinstance(result, Exception):
            problems.append(f"{task.get_name()} ended with {result!r}")
    return Outcome(
        plan.seed, problems, weather.counted(), loop.now, cluster.story, oracle.moved, oracle.interrupted,
        oracle.rested,
    )  # fmt: skip


async def _until_done(cluster: Cluster, weather: Weather, blowing: asyncio.Task[None]) -> bool:
    """Whether the run ended in time. A run that ends before its last fault is fine."""
    deadline = FAULT_WINDOW_S + 3 * LEASE_S + END_WITHIN_S
    while cluster.loop.now < deadline:
        await asyncio.sleep(0.5)
        if blowing.done():
            blowing.result()
        if cluster.loop.now > FAULT_WINDOW_S + 3 * LEASE_S:
            weather.calm()
        head = await cluster.state()
        if head is not None and head.state != "running" and not cluster.living("trainer"):
            return True
    return False


async def _settle(cluster: Cluster) -> None:
    """What was registered gets committed. Then the relays begin anew: a manager cleans up as soon as it is elected,
    and within a minute again what it could not remove yet."""
    deadline = cluster.loop.now + 2 * CLEAN_INTERVAL_S + 10 * LEASE_S
    while cluster.loop.now < deadline:
        await asyncio.sleep(1.0)
        waiting = cluster.etcd.page(cluster.keys.incoming_root, "", 1, 0).items
        if not waiting and not cluster.living("rollout"):
            break
    for slot in cluster.living("relay"):
        assert slot.process is not None
        slot.process.kill()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Dead processes leave unfinished coroutines behind, which Python complains about when it collects them."""
    hook, level = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda _: None
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            gc.collect()  # while nobody complains
    finally:
        sys.unraisablehook = hook
        logging.disable(level)


def bury(loop: SimulationLoop) -> None:
    """Forget what the dead left unfinished."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()


def describe(outcome: Outcome, lines: int = 60) -> str:
    """A failing run as text: what is wrong, and the last lines of what happened."""
    told: list[Any] = outcome.story[-lines:]
    return "\n".join(
        [f"seed {outcome.seed}:", *(f"  {p}" for p in outcome.problems), "  story:", *(f"    {t}" for t in told)]
    )
