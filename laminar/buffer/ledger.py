"""Carries out the claims' transactions for one worker: a thin shell around `claims.py`.

Each method survives a lost reply: it reads back what it wrote (every write carries a value that only this
worker can have written) before it tries again. `Fenced` means that this worker has been replaced: it must
drop everything it holds.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from laminar.buffer import claims
from laminar.buffer.claims import Held, TrajectoryId
from laminar.buffer.coordination import Compare, Coordination, Delete, KeyValue, Operation, Put, Transaction, all_reads
from laminar.buffer.keys import Keys
from laminar.buffer.records import Claim, Cursor, Incoming, Record, TrainerHead
from laminar.buffer.requests import retry
from laminar.buffer.session import transact_or_read_back
from laminar.errors import CoordinationUnavailable, Fenced

log = logging.getLogger(__name__)

READ_S = 15.0
"""Seconds for which reading claims is tried again while etcd is unavailable."""


class Actor(Protocol):
    """Somebody whose writes are guarded: a member (worker key) or a leader (leader key)."""

    def guard(self) -> Compare: ...


class Ledger:
    """`actor.guard()` goes into every transaction; `name` is unique to this worker's life (its boot id)."""

    def __init__(self, coordination: Coordination, keys: Keys, name: str, actor: Actor, seed: int = 0) -> None:
        self.coordination = coordination
        self.keys = keys
        self.name = name
        self.actor = actor
        self._count = itertools.count()
        self._random = random.Random(f"{name}/{seed}")

    def nonce(self) -> str:
        return f"{self.name}/{next(self._count)}"

    async def check_fence(self) -> None:
        """Raise Fenced if this actor's key is gone."""
        guard = self.actor.guard()
        kv = await self.coordination.get(guard.key)
        if kv is None or kv.create_revision != guard.target:
            raise Fenced(f"{self.name}: {guard.key} is no longer this worker's; it drops what it held")

    async def trainer_head(self) -> TrainerHead | None:
        kv = await self.coordination.get(self.keys.trainer)
        return TrainerHead.parse(kv.value) if kv else None

    async def cursor(self) -> int:
        kv = await self.coordination.get(self.keys.cursor)
        return Cursor.parse(kv.value).next if kv else 0

    async def draw(
        self, *, groups: Callable[[int], int], samples_per_prompt: int, version: int
    ) -> list[Held]:
        """Draw whole groups; `groups(cursor)` says how many are admitted. Empty when none, or when others were
        faster (the caller backs off and asks again)."""
        cursor = await self.coordination.get(self.keys.cursor)
        first = Cursor.parse(cursor.value).next if cursor else 0
        count = groups(first)
        if count <= 0:
            return []
        nonce = self.nonce()
        transaction = claims.draw_transaction(
            self.keys,
            self.actor.guard(),
            cursor,
            groups=count,
            samples_per_prompt=samples_per_prompt,
            owner=self.name,
            version=version,
            nonce=nonce,
        )

        async def committed() -> bool:
            kv = await self.coordination.get(self.keys.cursor)
            if kv is not None and Cursor.parse(kv.value).by == nonce:
                return True
            mine = await self.coordination.get(self.keys.claim(first, 0))
            return mine is not None and Claim.parse(mine.value).source.worker == self.name

        if not await transact_or_read_back(self.coordination, transaction, committed=committed):
            await self.check_fence()
            return []
        return await self._held([(g, s) for g in range(first, first + count) for s in range(samples_per_prompt)])

    async def _held(self, ids: Sequence[TrajectoryId]) -> list[Held]:
        """Those of the trajectories whose claim is still this worker's."""
        result: list[Held] = []
        for start in range(0, len(ids), claims.MAX_FINISH):
            part = ids[start : start + claims.MAX_FINISH]
            reading = all_reads([self.keys.claim(*i) for i in part])
            # Unlike a write, a read is safe to repeat: one lost reply must not end the worker that owns the claims.
            reads = await retry(
                partial(self.coordination.transact, reading), f"read of {len(part)} claims", READ_S, self._random
            )
            held = [Held.of(kv) for kv in reads.gets if kv is not None]
            result += [h for h in held if h.claim.owner == self.name]
        return result

    async def still_mine(self, held: Held) -> Held | None:
        """The claim as it stands, if it is still this worker's and of the same term."""
        return next((h for h in await self._held([held.id]) if h.claim.term == held.claim.term), None)

    async def update(self, held: Held, claim: Claim, *also: Operation) -> Held | None:
        """Write the claim's next state if it is still as `held` saw it; None if somebody else changed it."""
        transaction = claims.update_transaction(self.actor.guard(), held, claim, *also)
        value = claim.dump()

        async def committed() -> bool:
            kv = await self.coordination.get(held.kv.key)
            return kv is not None and kv.value == value and kv.mod_revision > held.kv.mod_revision

        if not await transact_or_read_back(self.coordination, transaction, committed=committed):
            await self.check_fence()
            return None
        kv = await self.coordination.get(held.kv.key)
        if kv is None:
            return None
        after = Held.of(kv)
        return after if after.claim.owner == claim.owner and after.claim.term == claim.term else None

    async def adopt(self, held: Held, *, version: int, progress: int) -> Held | None:
        """Become the source, after the old source's rows are durable in this worker's log."""
        claim = claims.adopted(held.claim, version=version, progress=progress)
        return await self.update(held, claim, Delete(self.keys.inbox_item(self.name, *held.id)))

    async def hand_over(self, held: Held, claim: Claim, *only_if: Compare) -> bool:
        transaction = claims.hand_over_transaction(self.keys, self.actor.guard(), held, claim, *only_if)
        value = claim.dump()

        async def committed() -> bool:
            kv = await self.coordination.get(held.kv.key)
            return kv is not None and kv.value == value

        return await transact_or_read_back(self.coordination, transaction, committed=committed)

    async def put_back(self, held: Held) -> bool:
        """Fill the inbox of a waiting claim's owner again; False if the claim went on or has its item."""
        transaction = claims.put_back_transaction(self.keys, self.actor.guard(), held)
        return (await self.coordination.transact(transaction)).succeeded

    async def finish(
        self, held: Sequence[Held], segment: str, incoming: Incoming
    ) -> list[Held]:
        """Register a durable segment and delete its claims. Returns [] when all are finished, else those that are
        still this worker's and unchanged: the caller writes a new segment with only their rows."""
        transaction = claims.finish_transaction(self.keys, self.actor.guard(), held, segment, incoming)

        async def committed() -> bool:
            return await self.coordination.get(self.keys.incoming(incoming.table, segment)) is not None

        try:
            if await transact_or_read_back(self.coordination, transaction, committed=committed):
                return []
        except CoordinationUnavailable as e:
            log.warning("segment %s may not be registered: %s", segment, e)
        if await committed():
            return []
        # All claims gone: our own finish (its reply lost, its segment already committed) or a later owner's. Either
        # way nothing is left to do. Some left: the transaction cannot have committed, since it deletes all.
        unchanged = {h.kv.key: h for h in await self._held([h.id for h in held])}
        await self.check_fence()
        return [h for h in held if (now := unchanged.get(h.kv.key)) and now.kv.mod_revision == h.kv.mod_revision]

    async def register(self, table: str, segment: str, incoming: Incoming, also: Transaction) -> bool:
        """Register a segment together with other guarded writes; the incoming record's value marks our commit."""
        key = self.keys.incoming(table, segment)
        transaction = Transaction(
            (self.actor.guard(), *also.compare), (Put(key, incoming.dump()), *also.success), also.failure
        )

        async def committed() -> bool:
            kv = await self.coordination.get(key)
            return kv is not None and kv.value == incoming.dump()

        return await transact_or_read_back(self.coordination, transaction, committed=committed)

    async def guarded_put(self, key: str, record: Record, expected: Compare) -> bool:
        """Write a record that only this actor writes; True if it stands."""
        value = record.dump()

        async def committed() -> bool:
            kv = await self.coordination.get(key)
            return kv is not None and kv.value == value

        transaction = Transaction((self.actor.guard(), expected), (Put(key, value),))
        return await transact_or_read_back(self.coordination, transaction, committed=committed)

    def jitter(self, seconds: float) -> float:
        return seconds * (0.5 + self._random.random())


async def all_claims(
    coordination: Coordination, keys: Keys, known: Mapping[str, Held] | None = None
) -> dict[str, Held]:
    """By key. `known`: as they were read before; those that have not changed are not parsed again, as there may be a
    hundred thousand."""
    before = known or {}
    return {kv.key: _held(kv, before.get(kv.key)) for kv in (await coordination.range(keys.claims)).items}


def _held(kv: KeyValue, before: Held | None) -> Held:
    return before if before is not None and before.kv.mod_revision == kv.mod_revision else Held.of(kv)
