"""The runs of `repack.py` in virtual time: the real workers on the simulator's twins, without faults.

An engine's steps take what its curve says, to the microsecond, and a run of minutes is over in seconds: what repack
does to a run is seen apart from what a busy machine does to it. Training takes no time here.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa

from laminar.buffer.coordination import Change
from laminar.buffer.keys import Keys
from laminar.config import Config, config_from
from laminar.simulator.cluster import Cluster, Slot, run_config
from laminar.simulator.engine import STOP_TOKEN, SimEngine, logprob_of, token_at
from laminar.simulator.environment import SimConversation, SimHost
from laminar.simulator.faults import Plan
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.process import SimProcess
from laminar.simulator.run import bury, quiet
from laminar.workers.context import Run
from laminar.workers.engines.base import Chunk, EngineCapacity, EngineLoad
from laminar.workers.engines.pace import Pace
from laminar.workers.rollouts.equipment import Equipment
from laminar.workers.rollouts.rollout_lives import rollout_main

Take = Callable[[Change, Keys, float], None]
END_WITHIN_S = 7200.0


@dataclass
class Request:
    place: int
    left: int
    new: int
    """Tokens that the next step prefills."""
    chunks: asyncio.Queue[Chunk]
    aborted: bool = False


class CurvedEngine(SimEngine):
    """All requests take a step together, one token each. Lengths are log-normal, by the trajectory."""

    def __init__(self, asked: argparse.Namespace, seed: int, capacity: EngineCapacity, *arguments: Any) -> None:
        super().__init__(*arguments, capacity=capacity, step_s=(0.0, 0.0), mean_tokens=1.0)
        self.asked = asked
        self.seed = seed
        self._requests: dict[str, Request] = {}
        self._wake = asyncio.Event()
        self._pace = Pace(capacity.max_running)

    async def start(self) -> EngineCapacity:
        self._serving = asyncio.create_task(self._serve())
        return await super().start()

    async def _serve(self) -> None:
        a = self.asked
        while True:
            if not self._requests:
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = dict(list(self._requests.items())[: self.capacity.max_running])
            new = sum(r.new for r in batch.values())
            seconds = a.step_s * (1 + 0.5 * (len(batch) - 1) / max(1, a.knee - 1)) + new / a.prefill
            await asyncio.sleep(seconds)
            self._pace.step(len(batch), new, seconds)
            for id, request in batch.items():
                self._step(id, request)

    def _step(self, id: str, request: Request) -> None:
        request.new = 0
        if request.aborted:
            chunk = Chunk([], [], "abort")
        else:
            request.left -= 1
            ended = request.left <= 0
            token = STOP_TOKEN if ended else token_at(request.place)
            request.place += 1
            chunk = Chunk([token], [logprob_of(self._digest)], "stop" if ended else None)
        if chunk.finish_reason:
            del self._requests[id]
        request.chunks.put_nowait(chunk)

    async def generate(
        self, request_id: str, token_ids: Sequence[int], *, max_tokens: int, temperature: float,
        stop_token_ids: Sequence[int], seed: int | None = None,
    ) -> AsyncIterator[Chunk]:  # fmt: skip
        a = self.asked
        name = "-".join(request_id.split("-")[:2])
        drawn = random.Random(f"{self.seed}/{name}").lognormvariate(math.log(a.median), a.sigma)
        length = min(a.longest, max(1, round(drawn)))
        left = max(1, length - (a.longest - max_tokens))
        request = Request(len(token_ids), left, len(token_ids), asyncio.Queue())
        self._requests[request_id] = request
        self._wake.set()
        try:
            while True:
                chunk = await request.chunks.get()
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            self._requests.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].aborted = True

    def load_report(self) -> EngineLoad:
        requests, pace = self._requests.values(), self._pace
        running = min(len(requests), self.capacity.max_running)
        return EngineLoad(
            running, len(requests) - running, sum(r.place for r in requests), pace.batch_limit, pace.step_s,
            pace.prefill_tokens_per_s,
        )  # fmt: skip


def config_of(plan: Plan, settings: dict[str, Any]) -> Config:
    values = run_config(plan).model_dump(mode="json")
    for key, value in settings.items():
        section, name = key.split(".")
        values[section][name] = value
    values["coordination"]["lease_ttl"] = 10.0
    return config_from(values)


class CurvedCluster(Cluster):
    def __init__(self, plan: Plan, loop: SimulationLoop, config: Config, asked: argparse.Namespace) -> None:
        super().__init__(plan, loop, config)
        self.asked = asked

    async def _rollout(self, slot: Slot, process: SimProcess, run: Run, chance: random.Random) -> None:
        longest, running = self.config.rollout.max_model_len, self.config.rollout.max_running
        capacity = EngineCapacity(running, longest, kv_tokens=self.asked.kv or running * longest)
        engine = CurvedEngine(self.asked, self.plan.seed, capacity, process, self.switchboard, chance)
        host = SimHost(chance)
        slot.engine, slot.host = engine, host
        await engine.start()
        equipment = Equipment(
            engine=engine, capacity=capacity, host=cast(Any, host), conversation=cast(Any, SimConversation()),
            pool=self.pool, held_out=None, stop_token_ids=[STOP_TOKEN],
        )  # fmt: skip
        await rollout_main(run, equipment, slot.stop)


def run_virtual(settings: dict[str, Any], asked: argparse.Namespace, seed: int, take: Take) -> pa.Table:
    """The table of steps. `take` is told of each change in etcd, with its virtual second."""
    plan = Plan(
        seed=seed, rollouts=asked.rollouts, trainers=1, relays=1, max_turns=1, max_staleness=None,
        on_version_lost="continue", fsync=True, faults=(),
    )  # fmt: skip
    loop = SimulationLoop(random.Random(f"loop/{seed}"))
    with quiet():
        try:
            return loop.run_until_complete(_run(CurvedCluster(plan, loop, config_of(plan, settings), asked), take))
        finally:
            bury(loop)


async def _run(cluster: CurvedCluster, take: Take) -> pa.Table:
    async def follow() -> None:
        subscription = cluster.etcd.subscribe(cluster.keys.prefix, cluster.etcd.revision)
        while (batch := await subscription.next()) is not None:
            for change in batch:
                take(change, cluster.keys, cluster.loop.now)

    await cluster.create()
    working = [asyncio.create_task(follow()), *cluster.supervise()]
    while (head := await cluster.state()) is None or head.state == "running" or cluster.living("trainer"):
        await asyncio.sleep(0.5)
        if cluster.loop.now > END_WITHIN_S or cluster.broken:
            raise SystemExit("\n".join([f"at {cluster.loop.now:.0f} s: {head}", *cluster.broken, *cluster.story[-20:]]))
    while True:
        await asyncio.sleep(0.5)
        if not (cluster.etcd.page(cluster.keys.incoming_root, "", 1, 0).items or cluster.living("rollout")):
            break
    cluster.over = True
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    return await cluster.tables["steps"].read()
