"""The protocol's twin for tests: workers and leaders on one in-process etcd."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import WorkerRecord
from laminar.buffer.session import Election, Membership, Session


@dataclass
class Actor:
    """One life of a worker or leader, with a network of its own."""

    name: str
    server: MemoryEtcd
    coordination: MemoryCoordination
    faults: Faults
    session: Session
    ledger: Ledger
    alive: bool = True

    def kill(self) -> None:
        """Its lease ends at once; the object stays, as a process that was only paused would."""
        self.alive = False
        self.server.revoke(self.session.lease)


async def _start(server: MemoryEtcd, keys: Keys, name: str, role: str) -> Actor:
    faults = Faults(random.Random(name))
    coordination = MemoryCoordination(server, faults)
    session = await Session.open(coordination, 10)
    actor: Any
    if role:
        actor = await Election(coordination, session, keys.leader(role), name).campaign()
    else:
        record = WorkerRecord(kind="rollout", id=name, host="h", pid=1, started_at_us=0)
        actor = await Membership.join(session, coordination, keys, record)
    return Actor(name, server, coordination, faults, session, Ledger(coordination, keys, name, actor))


@pytest.fixture
def start() -> Callable[..., Awaitable[Actor]]:
    """`await start(server, keys, name, role="")`: a rollout, or the leader of `role` once it is elected."""

    async def start(server: MemoryEtcd, keys: Keys, name: str, role: str = "") -> Actor:
        return await _start(server, keys, name, role)

    return start
