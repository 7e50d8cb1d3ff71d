"""Deliberate bugs of the protocol, switched on from outside: a simulation that does not notice them proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from laminar.buffer import claims, steps
from laminar.buffer.coordination import Transaction
from laminar.buffer.memory_table import MemoryTable
from laminar.buffer.session import Leadership, Session, transact_or_read_back
from laminar.simulator.engine import SimEngine
from laminar.workers.rollout import Rollout
from laminar.workers.rollouts import outbox
from laminar.workers.rollouts.halting import Halting
from laminar.workers.rollouts.loading import Loader
from laminar.workers.rollouts.trajectory import Trajectory


@contextlib.contextmanager
def fence_not_compared() -> Iterator[None]:
    """A finish compares neither that its worker is still a member nor that the claims are still its own."""
    real = claims.finish_transaction

    def unfenced(*args: Any) -> Transaction:
        return replace(real(*args), compare=())

    with patch.object(claims, "finish_transaction", unfenced):
        yield


@contextlib.contextmanager
def commit_not_idempotent() -> Iterator[None]:
    """A committer does not look whether an announced commit was made already."""

    async def find(self: MemoryTable, key: str, *, within: int = 100) -> int | None:
        return None

    with patch.object(MemoryTable, "find", find):
        yield


@contextlib.contextmanager
def claim_deleted_before_durable() -> Iterator[None]:
    """Claims are deleted while their finished rows are still on their way to the disk."""
    real = outbox.write_incoming

    async def late(storage: Any, worker: str, segment: str, rows: Any) -> Any:
        incoming: list[Any] = []

        class Recorded:
            async def write(self, path: str, data: bytes, **options: Any) -> None:
                async def soon() -> None:
                    await asyncio.sleep(0.3)
                    await storage.write(path, data, **options)

                incoming.append(asyncio.create_task(soon()))

            def __getattr__(self, name: str) -> Any:
                return getattr(storage, name)

        return await real(Recorded(), worker, segment, rows)  # type: ignore[arg-type]

    with patch.object(outbox, "write_incoming", late):
        yield


@contextlib.contextmanager
def batch_decided_twice() -> Iterator[None]:
    """A decision compares neither who leads nor whether the step has a batch, and nobody notices a lost lease: a
    stalled trainer that wakes up beside its successor decides as well."""
    real: Callable[..., Any] = transact_or_read_back

    async def unguarded(coordination: Any, transaction: Transaction, **options: Any) -> Any:
        return await real(coordination, replace(transaction, compare=()), **options)

    with (
        patch.object(steps, "transact_or_read_back", unguarded),
        patch.object(Session, "alive", property(lambda self: True)),
        patch.object(Session, "_lose", lambda self, reason: None),
        patch.object(Leadership, "_lose", lambda self, reason: None),
    ):
        yield


@contextlib.contextmanager
def stale_version_reported() -> Iterator[None]:
    """The engine reports a version whose load failed."""
    real = SimEngine.load

    async def load(self: SimEngine, source: Any) -> None:
        if self.version >= 0 and self.source.random() < 0.5:
            self._version = source.version
            return
        await real(self, source)

    with patch.object(SimEngine, "load", load):
        yield


@contextlib.contextmanager
def hand_over_without_claim() -> Iterator[None]:
    """A change of owner does not compare the claim: it overwrites whatever became of the trajectory meanwhile. Seldom
    seen among all faults, so it has a test of its own in `test_repack_runs.py`."""
    real = claims.hand_over_transaction

    def blind(keys: Any, guard: Any, held: Any, claim: Any, *only_if: Any) -> Transaction:
        whole = real(keys, guard, held, claim, *only_if)
        return replace(whole, compare=tuple(c for c in whole.compare if c.key != held.kv.key))

    with patch.object(claims, "hand_over_transaction", blind):
        yield


@contextlib.contextmanager
def source_goes_on() -> Iterator[None]:
    """Whoever has handed a trajectory over begins it again: source and target both go on."""
    real = Rollout.gave

    def gave(self: Rollout, trajectory: Trajectory) -> None:
        real(self, trajectory)
        trajectory.halting = False
        self._start(trajectory)

    with patch.object(Rollout, "gave", gave):
        yield


@contextlib.contextmanager
def source_does_not_stop() -> Iterator[None]:
    """Trajectories are handed over while the engine still generates them."""

    async def stop(self: Halting, trajectories: Any, within_s: float) -> list[Trajectory]:
        return list(trajectories)

    with patch.object(Halting, "stop", stop):
        yield


@contextlib.contextmanager
def swap_not_told() -> Iterator[None]:
    """What goes on under new weights is still said to be written by the old ones."""
    real = Loader.swap

    async def swap(self: Loader, version: int) -> bool:
        before = [(t, t.version, t.digest) for t in self.rollout.live.values()]
        got_on = await real(self, version)
        for t, old, digest in before:
            t.version, t.digest = old, digest
        return got_on

    with patch.object(Loader, "swap", swap):
        yield


MUTATIONS = {
    m.__name__: m
    for m in (
        fence_not_compared,
        commit_not_idempotent,
        claim_deleted_before_durable,
        batch_decided_twice,
        stale_version_reported,
        source_goes_on,
        source_does_not_stop,
        swap_not_told,
    )
}
