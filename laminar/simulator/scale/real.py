"""The workers themselves on a cluster in virtual time: rollouts, trainer, relay, manager and committer as they are,
with engines, learner and rewards that take the time of the cost models (`real_engine.py`).

Slower than the model of `flowing.py` by what the protocol costs: claims, logs, segments, commits, watches of each.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

from laminar.buffer.records import Load, WeightsHead
from laminar.config import Config, config_from
from laminar.errors import ConfigError, LaminarError
from laminar.simulator.cluster import RUN, Cluster, SilentSinks, Slot
from laminar.simulator.faults import Plan
from laminar.simulator.ports import TablePort
from laminar.simulator.process import SimProcess
from laminar.simulator.run import bury, quiet
from laminar.simulator.scale.compare import split_of
from laminar.simulator.scale.flowing import SAMPLE_S
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.meters import Meter, Outcome
from laminar.simulator.scale.policies import POLICIES, Pipeline, Repack
from laminar.simulator.scale.real_engine import (
    LAST,
    STOP,
    CostConversation,
    CostEngine,
    CostHost,
    CostLearner,
    CostLoop,
    Grain,
)
from laminar.workers.context import Run, joined
from laminar.workers.rollouts.equipment import Equipment
from laminar.workers.rollouts.rollout_lives import rollout_main
from laminar.workers.training.trainer_lives import trainer_main

LOOK_S = 0.1
"""How often it is looked for a new version."""
STALLED_S = 36_000.0
"""Virtual seconds without a new version after which nothing is waited for any more."""
LEASE_S = 60.0
NEVER = 1_000_000


def runs_real(name: str) -> bool:
    """Whether the workers can do what this policy says: they draw whenever they may."""
    policy = POLICIES[name]
    flowing = policy.pipeline is Pipeline.FLOWING and not policy.together
    return flowing and policy.continuous and policy.repack is not Repack.BLIND


def real_config(name: str, job: Job) -> Config:
    """The run's config that stands for the policy, in simulated tokens."""
    s, grain, policy = job.settings, Grain.of(job), POLICIES[name]
    ahead = s.max_ahead_groups // s.job.groups_per_step + 1
    return config_from(
        {
            "run": {
                "name": RUN,
                "store": "memory://twin",
                "seed": s.job.seed,
                # Drawing goes on as in the middle of a longer job.
                "max_steps": s.job.steps + s.job.warmup_steps + ahead,
            },
            "model": {"path": "simulated", "dtype": "float32"},
            "prompts": {"source": "reverse"},
            "reward": {"name": "exact"},
            "environment": {"max_turns": s.environment.turns},
            "sampling": {"samples_per_prompt": s.job.samples_per_prompt, "max_tokens": grain.most},
            "rollout": {
                "engine": "transformers",
                "max_running": s.rollout.max_running,
                "max_model_len": grain.model_len,
                "flush_interval": 60.0,
                "update": "interrupt" if policy.interrupt else "drain",
                "repack_interval": 0.0 if policy.repack is Repack.OFF else s.rollout.repack_interval,
            },
            "trainer": {
                "groups_per_step": s.job.groups_per_step,
                "max_ahead_groups": s.max_ahead_groups,
                "max_ready_groups": s.max_ready_groups if policy.ready else s.max_ahead_groups,
                "checkpoint_every": NEVER,
                **({} if s.job.samples_per_prompt > 1 else {"advantage": "reinforce++"}),
                **({} if s.job.max_staleness is None else {"max_staleness": s.job.max_staleness}),
            },
            "evaluation": {"size": 0},
            "coordination": {"lease_ttl": LEASE_S},
        },
        origin="the simulation",
    )


class RealCluster(Cluster):
    """The cluster of the fault simulation, without faults, with the job's costs."""

    def __init__(self, name: str, job: Job, loop: CostLoop) -> None:
        self.job = job
        self.split = split_of(name, job)
        plan = Plan(
            seed=job.settings.job.seed, rollouts=self.split.rollouts, trainers=1, relays=1,
            max_turns=job.settings.environment.turns, max_staleness=None, on_version_lost="continue", fsync=False,
            faults=(),
        )  # fmt: skip
        super().__init__(plan, loop, real_config(name, job))
        self.cost_loop = loop
        self.grain = Grain.of(job)
        self.engines = [job.engine() for _ in range(self.split.rollouts)]
        self.published_at: dict[int, float] = {}
        self.trained: dict[int, tuple[list[int], Counter[int], float]] = {}
        self.meter = Meter(name, job, self.split, self.engines)

    async def _rollout(self, slot: Slot, process: SimProcess, run: Run, chance: random.Random) -> None:
        machine = max(1, self.job.settings.cluster.gpus_per_machine // self.job.costs.tensor_parallel)
        engine = CostEngine(
            process, self.switchboard, self.grain, self.engines[slot.index], self.published_at,
            relay=1 + slot.index // machine,
        )  # fmt: skip
        equipment = Equipment(
            engine=engine,
            capacity=await engine.start(),
            host=cast(Any, CostHost(self.job)),
            conversation=cast(Any, CostConversation(self.grain)),
            pool=self.pool,
            held_out=None,
            stop_token_ids=[STOP, LAST],
        )
        await rollout_main(run, equipment, slot.stop)

    async def _trainer(self, slot: Slot, process: SimProcess, run: Run) -> None:
        assert slot.storage is not None
        names = ("experience", "step_metrics")
        tables = {n: TablePort(process, self.tables[n], slot.storage, self.unanswered) for n in names}

        def learner() -> CostLearner:
            return CostLearner(self.states, self.job, self.split.trainer_gpus, self.cost_loop, self.trained)

        async with joined(run, "trainer") as member:
            await trainer_main(run, member, learner, tables, cast(Any, SilentSinks()))

    def moved(self) -> int:
        prefix = self.keys.load("rollout", "")
        loads = self.etcd.page(prefix, "", NEVER, 0).items
        return sum(Load.parse(kv.value).moved_out for kv in loads)

    def newest(self) -> int:
        kv = self.etcd.get(self.keys.weights)
        return WeightsHead.parse(kv.value).version if kv else -1


def says_real(job: Job) -> str:
    """What is simplified where the workers themselves run."""
    grain = Grain.of(job).grain
    tokens = "each token is one" if grain == 1 else f"one simulated token stands for {grain} tokens"
    return f"the workers themselves, with a modelled engine, training and time; {tokens}"


def check_real(name: str, job: Job) -> None:
    """Raises ConfigError where the workers have no such policy, or refuse the config that stands for it."""
    if not runs_real(name):
        known = ", ".join(n for n in POLICIES if runs_real(n))
        raise ConfigError(f"the workers cannot run the policy {name!r}; last in compare.policies may be: {known}")
    real_config(name, job)


def run_real(name: str, job: Job) -> Outcome:
    """Equal settings give equal outcomes. Raises ConfigError as `check_real`."""
    check_real(name, job)
    loop = CostLoop(random.Random(f"real/{job.settings.job.seed}"))
    with quiet():
        try:
            return loop.run_until_complete(_run(RealCluster(name, job, loop)))
        finally:
            bury(loop)


async def _run(cluster: RealCluster) -> Outcome:
    await cluster.create()
    background = cluster.supervise()
    loop, meter = cluster.loop, cluster.meter
    sampled = looked = loop.now
    while not meter.complete:
        await asyncio.sleep(LOOK_S)
        for engine in cluster.engines:
            engine.advance(loop.now)
        if loop.now >= sampled + SAMPLE_S:
            sampled = loop.now
            meter.sample(sampled)
        newest = cluster.newest()
        for version in range(len(cluster.published_at), newest + 1):
            cluster.published_at[version] = looked = loop.now
            if version:
                groups, ages, train_s = cluster.trained[version - 1]
                meter.trained(loop.now, groups, ages, train_s + cluster.job.costs.weights.publish_s)
        if cluster.broken or loop.faults:
            raise LaminarError(f"the simulated workers broke: {(cluster.broken + loop.faults)[0]}")
        if loop.now > looked + STALLED_S:
            raise LaminarError(f"no version for {STALLED_S:.0f} s after version {newest}; at {loop.now:.0f} s")
    moved = cluster.moved()
    cluster.over = True
    for slot in cluster.slots:
        if slot.process is not None:
            slot.process.kill()
    for task in background:
        task.cancel()
    await asyncio.gather(*background, return_exceptions=True)
    return meter.outcome(moved)
