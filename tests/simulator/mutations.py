"""Deliberate bugs of the protocol, switched on from outside: a simulation that does not notice them proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from laminar.buffer import claims, commits, steps
from laminar.buffer.coordination import Transaction
from laminar.buffer.memory_table import MemoryTable
from laminar.buffer.partials import Partial
from laminar.buffer.records import Incoming, WeightsHead
from laminar.buffer.session import Leadership, Session, transact_or_read_back
from laminar.simulator.engine import SimEngine
from laminar.simulator.learner import SimLearner
from laminar.simulator.oracle import Oracle
from laminar.workers.managing.cleaning import Cleaner
from laminar.workers.rollout import Rollout
from laminar.workers.rollouts import outbox
from laminar.workers.rollouts.generation import Generation
from laminar.workers.rollouts.halting import Halting
from laminar.workers.rollouts.loading import Loader
from laminar.workers.rollouts.trajectory import Trajectory
from laminar.workers.training.publishing import Publisher


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


@contextlib.contextmanager
def generated_past_its_end() -> Iterator[None]:
    """Whoever adopts a trajectory generates on, though its turn has ended."""
    real = Trajectory.restore

    def restore(self: Trajectory, partial: Partial) -> None:
        real(self, partial)
        if self.turn_state == "acting":
            self.turn_state, self.finish_reason = "generating", None

    def known_end(self: Generation, t: Trajectory) -> str | None:
        return "length" if self.budget(t) <= 0 else None

    with patch.object(Trajectory, "restore", restore), patch.object(Generation, "_known_end", known_end):
        yield


@contextlib.contextmanager
def fragment_taken_for_finished() -> Iterator[None]:
    """Whoever adopts a trajectory takes what is there for the whole of its turn."""
    real = Trajectory.restore

    def restore(self: Trajectory, partial: Partial) -> None:
        real(self, partial)
        if self.policy_mask[-1:] == [True] and self.turn_state == "generating":
            self.turn_state, self.finish_reason = "acting", "stop"

    with patch.object(Trajectory, "restore", restore):
        yield


@contextlib.contextmanager
def fragment_taken_for_too_long() -> Iterator[None]:
    """As `fragment_taken_for_finished`, and said to be as long as it may."""
    real = Trajectory.restore

    def restore(self: Trajectory, partial: Partial) -> None:
        real(self, partial)
        if self.policy_mask[-1:] == [True] and self.turn_state == "generating":
            self.turn_state, self.finish_reason = "acting", "length"

    with patch.object(Trajectory, "restore", restore):
        yield


@contextlib.contextmanager
def reply_given_twice() -> Iterator[None]:
    """An environment's reply comes into the sequence twice."""
    real = Trajectory.environment_replied

    def replied(self: Trajectory, token_ids: Any, *rest: Any) -> None:
        real(self, [*token_ids, *token_ids], *rest)

    with patch.object(Trajectory, "environment_replied", replied):
        yield


@contextlib.contextmanager
def older_version_told() -> Iterator[None]:
    """Spans name the right weights, under the number of the version before."""
    real = Trajectory.policy_wrote

    def wrote(self: Trajectory, token_ids: Any, logprobs: Any, at: int) -> None:
        real(self, token_ids, logprobs, at)
        if self.spans and self.spans[-1].version == self.version > 0:
            self.spans[-1] = replace(self.spans[-1], version=self.version - 1)

    with patch.object(Trajectory, "policy_wrote", wrote):
        yield


@contextlib.contextmanager
def nothing_cleaned() -> Iterator[None]:
    """The manager never removes anything."""

    async def clean(self: Cleaner) -> int:
        return 0

    with patch.object(Cleaner, "clean", clean):
        yield


@contextlib.contextmanager
def keys_of_the_dead_stay() -> Iterator[None]:
    """The manager removes files only."""

    async def of_the_dead(self: Cleaner, *_: Any) -> int:
        return 0

    with patch.object(Cleaner, "_of_the_dead", of_the_dead):
        yield


@contextlib.contextmanager
def cleaner_breaks() -> Iterator[None]:
    """The manager's process ends once of an error that nobody foresaw."""
    real, broken = Cleaner.clean, list[Cleaner]()

    async def clean(self: Cleaner) -> int:
        if not broken:
            broken.append(self)
            raise KeyError("a fault of the cleaner")
        return await real(self)

    with patch.object(Cleaner, "clean", clean):
        yield


@contextlib.contextmanager
def checkpoint_of_other_weights() -> Iterator[None]:
    """What is restored is not what was saved: a replay trains other weights than the first time."""
    real = SimLearner.load

    def load(self: SimLearner, folder: Any) -> None:
        real(self, folder)
        self._weights = self._weights[::-1]

    with patch.object(SimLearner, "load", load):
        yield


@contextlib.contextmanager
def old_version_published() -> Iterator[None]:
    """Whoever offers a version again names the one before as the newest."""

    async def record(self: Publisher, head: WeightsHead) -> None:
        older = head.model_copy(update={"version": head.version - 1})
        await self.ledger.guarded_put(self.keys.weights, older, self.ledger.actor.guard())

    with patch.object(Publisher, "_record_offer", record):
        yield


@contextlib.contextmanager
def oracle_breaks() -> Iterator[None]:
    """The oracle itself ends with the first change that it sees."""

    def see(self: Oracle, change: Any) -> None:
        raise KeyError("a fault of the oracle")

    with patch.object(Oracle, "_see", see):
        yield


@contextlib.contextmanager
def oracle_sleeps() -> Iterator[None]:
    """The oracle itself misses all that comes after a while."""
    real = Oracle.watch

    async def watch(self: Oracle) -> None:
        watching = asyncio.create_task(real(self))
        await asyncio.sleep(5.0)
        watching.cancel()
        await asyncio.Event().wait()

    with patch.object(Oracle, "watch", watch):
        yield


@contextlib.contextmanager
def copies_not_read() -> Iterator[None]:
    """A committer takes what a step left for lost when the first of its two files is damaged."""
    real = commits.read_incoming

    async def first_only(storage: Any, incoming: Incoming, schema: Any) -> Any:
        return await real(storage, incoming.model_copy(update={"copied_to": ""}), schema)

    with patch.object(commits, "read_incoming", first_only):
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
SOME_SEEDS_BEFORE = {"commit_not_idempotent": 10, "fence_not_compared": 48, "batch_decided_twice": 107}
"""Where the search for a seed that notices it begins, if not at 0: seeds 11, 51 and 110 notice these three, and those
before take two minutes."""

CHECKS: dict[Callable[[], Any], tuple[str, int]] = {
    generated_past_its_end: ("an end inside a turn", 45),
    fragment_taken_for_finished: ("finished by 'stop' in the midst of a turn", 0),
    fragment_taken_for_too_long: ("finished by 'length' in the midst of a turn", 0),
    reply_given_twice: ("not reply 1", 5),
    older_version_told: ("which it never was", 0),
    nothing_cleaned: ("left over: partials/", 0),
    keys_of_the_dead_stay: ("left over: /laminar/", 23),
    cleaner_breaks: ("ended with KeyError('a fault of the cleaner')", 0),
    checkpoint_of_other_weights: ("was trained to 2 different weights", 19),
    old_version_published: ("was published after", 0),
    oracle_breaks: ("the oracle's watch ended with KeyError", 0),
    copies_not_read: ("has no row of", 10),
    oracle_sleeps: ("the oracle saw etcd's changes up to", 0),
}
"""Bugs that one check each is there for, with what it says of them and a seed from which on it soon does."""
