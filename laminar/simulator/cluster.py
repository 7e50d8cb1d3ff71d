"""One simulated run: the real workers on twins of all that is around them, restarted by a supervisor when they end.

SimulationLoop ── virtual time
  ├─ supervisor ── keeps rollouts, trainers, relays running; a relay keeps its committer
  │     └─ SimProcess: real worker code ──▶ ports ──▶ MemoryEtcd, MemoryStorage, MemoryTable, relay holdings
  ├─ weather (faults): kills, stops, cuts off, tears
  └─ oracle: sees every write of etcd; checks everything at the end
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa

from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, write_run
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.memory_files import MemoryStorage
from laminar.buffer.memory_table import MemoryTable
from laminar.buffer.prompts import PromptPool
from laminar.buffer.records import RunManifest, TrainerHead
from laminar.buffer.schema import FORMAT_VERSION, PROMPTS, TABLES
from laminar.buffer.storage import Storage
from laminar.config import Config, config_from
from laminar.errors import LaminarError
from laminar.simulator.engine import STOP_TOKEN, SimEngine
from laminar.simulator.environment import SimConversation, SimHost
from laminar.simulator.faults import Plan
from laminar.simulator.learner import SimLearner
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.ports import EtcdPort, StorageFaults, StoragePort, TablePort
from laminar.simulator.process import SimProcess
from laminar.simulator.relays import SimRelayAccess, SimWeights
from laminar.workers.committer import committer_main
from laminar.workers.committer_lives import exit_code
from laminar.workers.context import Run, joined, open_run
from laminar.workers.engines.base import EngineCapacity
from laminar.workers.machine import Machine
from laminar.workers.relay import relay_main
from laminar.workers.rollouts.equipment import Equipment
from laminar.workers.rollouts.rollout_lives import rollout_main
from laminar.workers.training.trainer_lives import trainer_main

RUN = "simulated"
HOST = "sim"
LEASE_S = 4.0
START_US = 1_780_000_000_000_000
PROMPT_ROWS, HELD_OUT_ROWS = 64, 3


@dataclass(frozen=True)
class SimClock:
    """The process's own clock for durations; UTC is the same for all."""

    loop: SimulationLoop

    def monotonic(self) -> float:
        return self.loop.time()

    def now_us(self) -> int:
        return START_US + int(self.loop.now * 1e6)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SilentSinks:
    """Metrics go to the store; there is nobody else to show them to."""

    def log(self, step: int, metrics: dict[str, float | None], *, at_us: int) -> None:
        pass


@dataclass
class Slot:
    """A process that the supervisor keeps running, or that its relay does. `life` counts its starts."""

    kind: str
    index: int
    process: SimProcess | None = None
    life: int = 0
    engine: SimEngine | None = None
    host: SimHost | None = None
    etcd: EtcdPort | None = None
    storage: StorageFaults | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.index}.{self.life}"


def model_len(plan: Plan) -> int:
    return 200 if plan.long_tails else 96


def run_config(plan: Plan) -> Config:
    return config_from(
        {
            # With long tails so many that something is left to draw for whoever hands over its own.
            "run": {
                "name": RUN, "store": "memory://twin", "max_steps": 12 if plan.long_tails else 5,
                "seed": plan.seed % 1000,
            },
            "model": {"path": "simulated", "dtype": "float32"},
            "prompts": {"source": "reverse", "size": PROMPT_ROWS},
            "reward": {"name": "exact"},
            "environment": {"max_turns": plan.max_turns},
            "sampling": {"samples_per_prompt": 2, "max_tokens": 150 if plan.long_tails else 48},
            "rollout": {
                "workers": plan.rollouts,
                "engine": "transformers",
                "max_running": 8,
                "max_model_len": model_len(plan),
                "flush_interval": 0.5,
                "fsync": plan.fsync,
                "on_version_lost": plan.on_version_lost,
                "update": plan.update,
                "repack_interval": plan.repack_interval,
            },
            "trainer": {
                "groups_per_step": 2,
                "checkpoint_every": 2,
                "max_error_share": 1.0,
                "max_ready_groups": plan.max_ready_groups,
                # So much ahead that a rollout has a tail of several when a version comes.
                **({"max_ahead_groups": 12} if plan.long_tails else {}),
                **({} if plan.max_staleness is None else {"max_staleness": plan.max_staleness}),
            },
            "evaluation": {"size": HELD_OUT_ROWS, "every": 2, "samples": 1},
            "coordination": {"lease_ttl": LEASE_S},
        },
        origin="the simulation",
    )


class Cluster:
    """Everything that one run consists of. `calm()` ends all faults that last."""

    def __init__(self, plan: Plan, loop: SimulationLoop, config: Config | None = None) -> None:
        """`config`: another one than the plan's."""
        self.plan = plan
        self.loop = loop
        self.source = random.Random(f"cluster/{plan.seed}")
        self.config = config or run_config(plan)
        self.keys = Keys(RUN, 1)
        self.clock = SimClock(loop)
        self.etcd = MemoryEtcd()
        self.disk = MemoryStorage(self.clock)
        self.tables = {name: MemoryTable(schema, self.clock) for name, schema in TABLES.items()}
        self.unanswered: dict[MemoryTable, int] = {}
        self.switchboard: dict[str, SimWeights] = {}
        self.relays: list[SimWeights] = []
        self.outside = MemoryCoordination(self.etcd, Faults(random.Random(f"outside/{plan.seed}")))
        self.slots = [
            *(Slot("relay", i) for i in range(plan.relays)),
            *(Slot("committer", i) for i in range(plan.relays)),
            *(Slot("rollout", i) for i in range(plan.rollouts)),
            *(Slot("trainer", i) for i in range(plan.trainers)),
        ]
        self.processes: list[SimProcess] = []
        """All that ever lived: what the dead left unfinished is kept, or it would be unwound."""
        self.over = False
        self.story: list[str] = []
        """What happened, a line each: equal seeds tell equal stories."""
        self.broken: list[str] = []
        """Processes that ended with what no caller is meant to see."""
        self.states: dict[int, set[str]] = {}
        """The weights that any trainer ever had at each version."""
        self.pool, self.held_out = PromptPool(_prompts(PROMPT_ROWS)), PromptPool(_prompts(HELD_OUT_ROWS))

    def say(self, text: str) -> None:
        self.story.append(f"{self.loop.now:9.3f} {text}")

    async def create(self) -> None:
        """Write what `laminar run` writes before it starts workers."""
        prints = Fingerprints(model="m", tokenizer="t", template="c", prompts=self.pool.fingerprint, held_out="")
        file = RunFile(
            run=RUN, store_id="5107ed", created_at_us=START_US, config=self.config.model_dump(mode="json"),
            model_folder="simulated", prompts=len(self.pool), held_out=HELD_OUT_ROWS, fingerprints=prints,
        )  # fmt: skip
        await write_run(self.disk, file)
        manifest = RunManifest(
            run=RUN, store=self.disk.url, store_id=file.store_id, generation=1, format_version=FORMAT_VERSION
        )
        await self.outside.put(Keys(RUN).manifest, manifest.dump())

    def supervise(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._keep(slot)) for slot in self.slots if slot.kind != "committer"]

    async def state(self) -> TrainerHead | None:
        kv = self.etcd.get(self.keys.trainer)
        return TrainerHead.parse(kv.value) if kv else None

    def living(self, kind: str) -> list[Slot]:
        return [s for s in self.slots if s.kind == kind and s.process is not None and not s.process.dead]

    # -- processes ----------------------------------------------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Start the slot's process again whenever it ends, until the run is over."""
        while not self.over:
            process = self.spawn(slot)
            await process.ended.wait()
            self.say(f"{process.name} ended: {_outcome(process)}")
            if process.result == 0 and slot.kind != "relay" and not slot.stop.is_set():
                return
            await asyncio.sleep(self.source.uniform(0.2, 1.5))

    def spawn(self, slot: Slot) -> SimProcess:
        slot.life += 1
        seed = f"{slot.name}/{self.plan.seed}"
        process = SimProcess(
            slot.kind, slot.name, 100 + len(self.processes), self.loop, rate=random.Random(seed).uniform(0.98, 1.02)
        )
        # Those of the former life are no target for a fault any more.
        slot.process, slot.engine, slot.host = process, None, None
        self.processes.append(process)
        slot.stop = asyncio.Event()
        chance = random.Random(f"chance/{seed}")
        slot.etcd = EtcdPort(process, self.etcd, Faults(random.Random(f"net/{seed}"), delay_s=(0.0005, 0.01)))
        slot.storage = StorageFaults(random.Random(f"disk/{seed}"))
        self.say(f"{slot.name} starts as pid {process.pid}")
        process.start(self._main(slot, process, chance))
        return process

    async def _main(self, slot: Slot, process: SimProcess, chance: random.Random) -> int:
        assert slot.etcd is not None and slot.storage is not None
        await asyncio.sleep(chance.uniform(0.05, 0.3))
        machine = Machine(
            HOST,
            process.pid,
            lambda n: f"{chance.getrandbits(8 * n):0{2 * n}x}",
            lambda path, run: cast(Any, SimRelayAccess(process, path, self.switchboard)),
        )
        storage = cast(Storage, StoragePort(process, self.disk, slot.storage))
        try:
            run = await open_run(slot.etcd, RUN, self.clock, storage, machine)
            await self._work(slot, process, run, chance)
        except LaminarError as e:
            self.say(f"{slot.name}: {type(e).__name__}: {str(e)[:160]}")
            return exit_code(e) if slot.kind == "committer" else 1
        except Exception as e:
            self.broken.append(f"{self.loop.now:.3f} {slot.name} ended with {e!r}")
            raise
        return 0

    def _work(self, slot: Slot, process: SimProcess, run: Run, chance: random.Random) -> Coroutine[Any, Any, None]:
        match slot.kind:
            case "relay":
                return self._relay(slot, process, run)
            case "committer":
                return self._committer(slot, process, run)
            case "rollout":
                return self._rollout(slot, process, run, chance)
            case _:
                return self._trainer(slot, process, run)

    async def _relay(self, slot: Slot, process: SimProcess, run: Run) -> None:
        committer = next(s for s in self.slots if s.kind == "committer" and s.index == slot.index)
        weights = SimWeights(process, RUN, self.config.relay.retain, self.switchboard)
        self.relays.append(weights)
        await relay_main(run, slot.stop, weights, lambda: SimChild(self, committer, process))

    async def _committer(self, slot: Slot, process: SimProcess, run: Run) -> None:
        faults = slot.storage
        assert faults is not None

        def table(storage: Storage, name: str) -> Any:
            return TablePort(process, self.tables[name], faults, self.unanswered)

        async with joined(run, "committer") as member:
            await committer_main(run, member, table)

    async def _rollout(self, slot: Slot, process: SimProcess, run: Run, chance: random.Random) -> None:
        longest = model_len(self.plan)
        capacity = EngineCapacity(max_running=8, max_model_len=longest, kv_tokens=8 * longest)
        engine = SimEngine(
            process, self.switchboard, chance, capacity=capacity,
            step_s=(0.02, 0.2), mean_tokens=chance.choice((4.0, 12.0, 30.0)), long=0.2 if self.plan.long_tails else 0.0,
        )  # fmt: skip
        host = SimHost(chance)
        slot.engine, slot.host = engine, host
        await engine.start()
        equipment = Equipment(
            engine=engine,
            capacity=capacity,
            host=cast(Any, host),
            conversation=cast(Any, SimConversation()),
            pool=self.pool,
            held_out=self.held_out,
            stop_token_ids=[STOP_TOKEN],
        )
        await rollout_main(run, equipment, slot.stop)

    async def _trainer(self, slot: Slot, process: SimProcess, run: Run) -> None:
        assert slot.storage is not None
        names = ("experience", "step_metrics")
        tables = {n: TablePort(process, self.tables[n], slot.storage, self.unanswered) for n in names}
        async with joined(run, "trainer") as member:
            await trainer_main(run, member, lambda: SimLearner(self.states), tables, cast(Any, SilentSinks()))


class SimChild:
    """A relay's committer process: it dies with its relay, as PDEATHSIG has it."""

    def __init__(self, cluster: Cluster, slot: Slot, parent: SimProcess) -> None:
        self.cluster = cluster
        self.slot = slot
        self.parent = parent
        self.process: SimProcess | None = None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    async def start(self) -> None:
        # Spawned from outside the relay's context, or its callbacks would count as the relay's.
        self.process = self.cluster.loop.outside(lambda: self.cluster.spawn(self.slot))
        self.parent.on_death.append(self.process.kill)

    async def wait(self) -> int:
        assert self.process is not None
        await self.process.ended.wait()
        self.cluster.say(f"{self.process.name} ended: {_outcome(self.process)}")
        if self.process.result is None:
            return -signal.SIGKILL
        return self.process.result if isinstance(self.process.result, int) else 1

    async def stop(self, *, grace_s: float) -> None:
        if self.process is not None:
            self.process.kill()

    def said(self) -> list[str]:
        return []


def _outcome(process: SimProcess) -> str:
    return "killed" if process.result is None else repr(process.result)


def _prompts(count: int) -> pa.Table:
    rows = [
        {"prompt_index": i, "prompt": f"prompt {i}", "answer": "", "environment": "", "metadata": "{}", "source": "sim"}
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)
