"""A rollout's membership on the in-process etcd, and a clock that does not make tests wait. Tests here import `world`
as a plain module beside them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import WorkerRecord
from laminar.buffer.session import Membership, Session
from laminar.clock import SystemClock

sys.path.insert(0, str(Path(__file__).parent))

KEYS = Keys("run")


class QuickClock(SystemClock):
    """Twenty times faster than it says."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@dataclass
class Rollout:
    """What of a rollout worker writes to etcd. `kill` ends its lease; the object stays, as a paused process would."""

    name: str
    server: MemoryEtcd
    coordination: MemoryCoordination
    faults: Faults
    session: Session
    ledger: Ledger
    keys: Keys = KEYS

    def kill(self) -> None:
        self.server.revoke(self.session.lease)


@pytest.fixture
def clock() -> QuickClock:
    return QuickClock()


@pytest.fixture
async def join() -> AsyncIterator[Callable[..., Awaitable[Rollout]]]:
    """`await join(server, name)`; lost replies cost 50 ms."""
    async with AsyncExitStack() as stack:

        async def join(server: MemoryEtcd, name: str) -> Rollout:
            faults = Faults(random.Random(name))
            coordination = MemoryCoordination(server, faults, timeout_s=0.05)
            session = await Session.open(coordination, 60)
            stack.push_async_callback(session.close)
            record = WorkerRecord(kind="rollout", id=name, host="h", pid=1, started_at_us=0)
            membership = await Membership.join(session, coordination, KEYS, record)
            return Rollout(name, server, coordination, faults, session, Ledger(coordination, KEYS, name, membership))

        yield join
