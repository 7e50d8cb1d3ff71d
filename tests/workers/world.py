"""Workers on one in-process etcd and one store, for tests in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from laminar.buffer.claims import Held
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger, all_claims
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import Load, WorkerRecord
from laminar.buffer.session import Election, Membership, Session
from laminar.buffer.steps import StepLog
from laminar.buffer.storage import MemoryStorage
from laminar.clock import SystemClock
from laminar.config import Config
from laminar.workers.context import Member, Run
from laminar.workers.manager import Manager

KEYS = Keys("run")
FINGERPRINTS = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")


class World:
    """Workers on one etcd and one store; the clock of the files moves with the loop's."""

    def __init__(self, **config: Any) -> None:
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.config = Config.model_validate({"model": {"path": "m"}, **config})
        self.clock = Clock()

    async def member(self, kind: str, name: str) -> Member:
        coordination = MemoryCoordination(self.server, Faults(random.Random(name)))
        session = await Session.open(coordination, 10)
        record = WorkerRecord(kind=kind, id=name, host="h", pid=1, started_at_us=0)
        membership = await Membership.join(session, coordination, KEYS, record)
        file = RunFile(
            run="run", created_at_us=0, config={}, model_folder="", prompts=10, held_out=0, fingerprints=FINGERPRINTS
        )
        run = Run(coordination, KEYS, self.storage, file, self.config, self.clock)
        return Member(run, name, session, membership, Ledger(coordination, KEYS, name, membership))

    async def manager(self, name: str = "relay-1") -> Manager:
        member = await self.member("relay", name)
        leadership = await Election(member.run.coordination, member.session, KEYS.leader("manager"), name).campaign()
        return Manager(member.run, member, leadership)

    async def trainer(self, name: str = "trainer-1") -> tuple[Member, StepLog]:
        member = await self.member("trainer", name)
        leadership = await Election(member.run.coordination, member.session, KEYS.leader("trainer"), name).campaign()
        ledger = Ledger(member.run.coordination, KEYS, name, leadership)
        return member, StepLog(member.run.coordination, KEYS, ledger, self.storage)

    async def report(self, rollout: Member, version: int, *, switching: bool = False) -> None:
        load = Load(
            version=version, running=0, waiting=0, kv_tokens=0, kv_capacity=1, decode_tokens_per_s=0, draining=False,
            switching=switching,
        )  # fmt: skip
        await rollout.run.coordination.put(KEYS.load("rollout", rollout.id), load.dump(), lease=rollout.session.lease)

    async def claims(self) -> dict[tuple[int, int], Held]:
        return {h.id: h for h in (await all_claims(MemoryCoordination(self.server), KEYS)).values()}

    async def paths(self, prefix: str = "") -> list[str]:
        return [f.path for f in await self.storage.list(prefix)]

    def under(self, prefix: str) -> list[str]:
        return [kv.key[len(prefix) :] for kv in self.server.page(prefix, "", 5000, 0).items]


class Clock(SystemClock):
    """The wall clock of a loop in virtual time."""

    def now_us(self) -> int:
        return 1_780_000_000_000_000 + int(asyncio.get_running_loop().time() * 1e6)


async def draw(rollout: Member, groups: int = 1, version: int = 0) -> list[Held]:
    return await rollout.ledger.draw(groups=lambda cursor: groups, samples_per_prompt=2, version=version)


def kill(member: Member) -> None:
    member.session.coordination.server.revoke(member.session.lease)  # type: ignore[attr-defined]
