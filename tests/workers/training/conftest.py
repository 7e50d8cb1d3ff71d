"""A run's trainer with everything real but etcd and the committed table, which are the twins: a torch learner on a
small random model, a relay on a socket, the store in a folder. No rollout: the experience is there before the start."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, write_run
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import BatchDecision, Cursor, Incoming, TrainerHead, WorkerRecord
from laminar.buffer.schema import EXPERIENCE, TABLES
from laminar.buffer.segments import read_segment
from laminar.buffer.session import Election, Membership, Session
from laminar.buffer.storage import LocalStorage
from laminar.buffer.table import MemoryTable
from laminar.clock import SystemClock
from laminar.config import Config, LoggingConfig, config_from
from laminar.errors import Fenced
from laminar.relay.server import RelayServer
from laminar.workers.context import Member, Run
from laminar.workers.metrics import MetricSinks

KEYS = Keys("run", 1)
STEPS, GROUPS_A_STEP, SAMPLES = 5, 2, 2
GROUPS = STEPS * GROUPS_A_STEP + 1
VOCABULARY, PROMPT = 60, [7, 8, 9]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from laminar.workers.learning.tiny import make_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def config_of(model_folder: Path, **trainer: Any) -> Config:
    return config_from(
        {
            "run": {"name": "run", "max_steps": STEPS},
            "model": {"path": str(model_folder), "dtype": "float32"},
            "sampling": {"samples_per_prompt": SAMPLES, "max_tokens": 8},
            "trainer": {
                "groups_per_step": GROUPS_A_STEP, "learning_rate": 1e-3, "threads": 1, "checkpoint_every": 2, **trainer,
            },
        }
    )  # fmt: skip


def trajectory(group: int, sample: int, *, version: int = 0, commit_seq: int) -> dict[str, Any]:
    chance = random.Random(f"{group}-{sample}")
    length = chance.randint(2, 8)
    return {name: None for name in EXPERIENCE.names} | {
        "group": group, "sample": sample, "prompt_index": group, "epoch": 0, "prompt_ids": PROMPT,
        "token_ids": [chance.randrange(5, VOCABULARY) for _ in range(length)], "policy_mask": [True] * length,
        "logprobs": [-chance.uniform(2, 5) for _ in range(length)], "span_start": [0], "span_version": [version],
        "span_worker": ["r"], "span_digest": [""], "version": version, "turns": 1, "finish_reason": "stop",
        "status": "ok", "reward": float(sample), "reward_parts": "{}", "text": "", "metadata": "{}", "attempts": 0,
        "commit_seq": commit_seq,
    }  # fmt: skip


@dataclass
class Life:
    """One life of a trainer. `kill` takes its lease and cuts it off from etcd: nothing of it takes effect any more."""

    trainer: Any
    server: MemoryEtcd
    session: Session
    faults: Faults
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self.task = asyncio.current_task()
        await self.trainer.run()

    async def kill(self) -> None:
        self.faults.partition()
        self.server.revoke(self.session.lease)
        if self.trainer.after_step is not None:
            self.trainer.after_step.cancel()
            await asyncio.gather(self.trainer.after_step, return_exceptions=True)


@dataclass
class World:
    root: Path
    model_folder: Path
    sockets: Path
    server: MemoryEtcd = field(default_factory=MemoryEtcd)
    experience: MemoryTable = field(default_factory=lambda: MemoryTable(EXPERIENCE))
    lives: list[Life] = field(default_factory=list)
    relay: RelayServer | None = None

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.root / "store")

    async def begin(self, **trainer: Any) -> None:
        """The store, a relay, and all experience that there will ever be."""
        config = config_of(self.model_folder, **trainer)
        await write_run(self.storage, self._file(config))
        self.relay = RelayServer(self.sockets / "relay.sock", run="run", chunk_bytes=config.relay.chunk_mib << 20)
        await self.relay.start()
        coordination = MemoryCoordination(self.server)
        record = WorkerRecord(
            kind="relay", id="relay-1", host=socket.gethostname(), pid=1, started_at_us=0,
            endpoint=f"unix:{self.relay.socket_path}",
        )  # fmt: skip
        await coordination.put(KEYS.worker("relay", "relay-1"), record.dump())
        await coordination.put(KEYS.cursor, Cursor(next=GROUPS, by="test").dump())
        await self.commit([(g, s) for g in range(GROUPS) for s in range(SAMPLES)])

    def _file(self, config: Config) -> RunFile:
        from laminar.workers.models import fingerprint

        model = fingerprint(self.model_folder)
        prints = Fingerprints(
            model=model.model, tokenizer=model.tokenizer, template=model.template, prompts="", held_out=""
        )
        return RunFile(
            run="run", store_id="0123456789abcdef", created_at_us=0, config=config.model_dump(mode="json"),
            model_folder=str(self.model_folder), prompts=GROUPS, held_out=0, fingerprints=prints,
        )  # fmt: skip

    async def commit(self, ids: list[tuple[int, int]], *, version: int = 0) -> None:
        first = await self.experience.count()
        rows = [trajectory(g, s, version=version, commit_seq=first + i) for i, (g, s) in enumerate(ids)]
        target = await self.experience.version() + 1
        await self.experience.commit(pa.Table.from_pylist(rows, schema=EXPERIENCE), target=target, key=f"c{target}")

    async def life(self, **trainer: Any) -> Life:
        """The next life of a trainer, once it leads; its config may differ."""
        from laminar.workers.learning import create_learner
        from laminar.workers.trainer import Trainer

        name = f"trainer-{len(self.lives)}"
        config = config_of(self.model_folder, **trainer)
        faults = Faults(random.Random(name))
        coordination = MemoryCoordination(self.server, faults, timeout_s=0.2, retry_s=0.5)
        session = await Session.open(coordination, 60)
        record = WorkerRecord(kind="trainer", id=name, host="h", pid=1, started_at_us=0)
        membership = await Membership.join(session, coordination, KEYS, record)
        run = Run(coordination, KEYS, self.storage, self._file(config), config, SystemClock())
        member = Member(run, name, session, membership, ledger=None)  # type: ignore[arg-type]
        leadership = await Election(coordination, session, KEYS.leader("trainer"), name).campaign()
        learner = await asyncio.to_thread(create_learner, config, self.model_folder)
        sinks = MetricSinks(str(self.root), LoggingConfig(tensorboard=False))
        tables = {"experience": self.experience, "step_metrics": MemoryTable(TABLES["step_metrics"])}
        life = Life(
            Trainer(run, member, leadership, learner, tables, sinks), self.server, session, faults
        )
        self.lives.append(life)
        return life

    async def end(self) -> None:
        for life in self.lives:
            life.faults.heal()
            await life.session.close()
        if self.relay is not None:
            await self.relay.stop()
        shutil.rmtree(self.sockets)

    def head(self) -> TrainerHead:
        kv = self.server.get(KEYS.trainer)
        assert kv is not None
        return TrainerHead.parse(kv.value)

    def decisions(self) -> list[BatchDecision]:
        return [BatchDecision.parse(kv.value) for kv in self.server.page(KEYS.batches, "", 1000, 0).items]

    async def rows(self, table: str) -> list[dict[str, Any]]:
        """What the trainers registered for the committer, which is not there."""
        found: list[dict[str, Any]] = []
        for kv in self.server.page(f"{KEYS.incoming_root}{table}/", "", 1000, 0).items:
            data = await self.storage.read(Incoming.parse(kv.value).path)
            for batch in read_segment(data, TABLES[table], complete=True).batches:
                found += batch.to_pylist()
        return found

    async def digests(self) -> dict[int, str]:
        """Of each recorded version."""
        return {row["version"]: row["digest"] for row in await self.rows("step_metrics")}


@pytest.fixture
async def make_world(tmp_path: Path, model_folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await make_world(**trainer)`: a run that is about to start, with these values in its config."""
    worlds: list[World] = []

    async def make(**trainer: Any) -> World:
        # A socket's path is limited to 107 bytes, tests' folders are not.
        sockets = Path(tempfile.mkdtemp(prefix="laminar-"))
        worlds.append(World(tmp_path / f"world-{len(worlds)}", model_folder, sockets))
        await worlds[-1].begin(**trainer)
        return worlds[-1]

    yield make
    for world in worlds:
        await world.end()


@pytest.fixture(scope="session")
def trained_store(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The store of a run that is done: checkpoints of versions 2, 4 and 5. Its learning rate was 1e-3 up to step 2 and
    2e-4 from then on: a resume changed it."""
    import lance

    root = tmp_path_factory.mktemp("trained")

    async def train() -> None:
        world = World(root, model_folder, Path(tempfile.mkdtemp(prefix="laminar-")))
        await world.begin(keep_checkpoints=9)
        try:
            life = await world.life(keep_checkpoints=9)
            decide = life.trainer.steps.decide

            async def stop_before_step_2(step: int, *args: Any) -> Any:
                if step == 2:
                    await life.kill()
                    raise Fenced("stopped here")
                return await decide(step, *args)

            life.trainer.steps.decide = stop_before_step_2
            with pytest.raises(Fenced):
                await life.trainer.run()
            await (await world.life(keep_checkpoints=9, learning_rate=2e-4)).trainer.run()
            for table in ("step_metrics", "steps"):
                rows = pa.Table.from_pylist(await world.rows(table), schema=TABLES[table])
                lance.write_dataset(rows, str(root / "store" / f"{table}.lance"))
            lance.write_dataset(await world.experience.read(), str(root / "store" / "experience.lance"))
        finally:
            await world.end()

    asyncio.run(train())
    return root / "store"
