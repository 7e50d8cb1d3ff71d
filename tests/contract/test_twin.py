"""The in-process twin against a real etcd: random histories must give equal results, revisions and watch events."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.buffer.coordination import Change, Compare, Coordination, Delete, Field, Get, KeyValue, Put, Transaction
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.errors import CoordinationError
from laminar.workers.supervisor.etcd_process import EtcdProcess

NAMES = st.sampled_from(["a", "a/b", "b", "ü"])
VALUES = st.sampled_from(["", "1", "2"])
LEASES = st.sampled_from([0, 0, 1, 2])
OPERATIONS = st.one_of(
    st.builds(Put, NAMES, VALUES, LEASES), st.builds(Delete, NAMES), st.builds(Get, NAMES)
)
# Revisions of compares are relative to the start of the history; -1 stands for "no such key".
COMPARES = st.one_of(
    st.builds(Compare, NAMES, st.just(Field.VALUE), VALUES),
    st.builds(Compare, NAMES, st.sampled_from([Field.CREATE, Field.MOD]), st.integers(-1, 6)),
)
BRANCH = st.lists(OPERATIONS, max_size=4).map(tuple)


@dataclass(frozen=True)
class Revoke:
    lease: int


@dataclass(frozen=True)
class List:
    page: int


STEPS = st.one_of(
    st.builds(Transaction, st.lists(COMPARES, max_size=2).map(tuple), BRANCH, BRANCH),
    st.builds(Put, NAMES, VALUES, LEASES),
    st.builds(Delete, NAMES),
    st.builds(Get, NAMES),
    st.builds(Revoke, st.sampled_from([1, 2])),
    st.builds(List, st.integers(1, 3)),
)


class Player:
    """Plays a history on one implementation, in terms relative to a root, a first revision and two leases."""

    def __init__(self, client: Coordination, root: str) -> None:
        self.client = client
        self.root = root
        self.base = 0
        self.leases = {0: 0}

    async def play(self, steps: list[Any]) -> list[Any]:
        for number in (1, 2):
            self.leases[number], _ = await self.client.grant(60)
        self.base = (await self.client.range(self.root)).revision
        watch = self.client.watch(self.root)
        results: list[Any] = []
        async with aclosing(watch) as events:  # type: ignore[type-var]
            await anext(events)
            for step in steps:
                try:
                    results.append(await self.step(step))
                except CoordinationError as error:
                    results.append(type(error))
            end = await self.client.put(self.root + "end", "")
            changes: list[Any] = []
            while not changes or changes[-1][2] < end - self.base:
                change = await asyncio.wait_for(anext(events), 5)
                assert isinstance(change, Change)
                changes.append((change.key.removeprefix(self.root), self.seen(change.kv), change.revision - self.base))
        results.append(sorted(changes, key=lambda c: (c[2], c[0])))
        for number in (1, 2):
            await self.client.revoke(self.leases[number])
        return results

    async def step(self, step: Any) -> Any:
        match step:
            case Transaction(compare=compares, success=success, failure=failure):
                result = await self.client.transact(
                    Transaction(
                        tuple(self.compare(c) for c in compares),
                        tuple(self.operation(o) for o in success),
                        tuple(self.operation(o) for o in failure),
                    )
                )
                gets = [self.seen(kv) for kv in result.gets]
                return result.succeeded, result.revision - self.base, gets
            case Put(key=key, value=value, lease=lease):
                put = await self.client.put(self.root + key, value, lease=self.leases[lease])
                return put - self.base
            case Delete(key=key):
                return await self.client.delete(self.root + key)
            case Get(key=key):
                return self.seen(await self.client.get(self.root + key))
            case Revoke(lease=lease):
                return await self.client.revoke(self.leases[lease])
            case List(page=page):
                snapshot = await self.client.range(self.root, page=page)
                return [self.seen(kv) for kv in snapshot.items], snapshot.revision - self.base

    def compare(self, compare: Compare) -> Compare:
        target = compare.target
        if isinstance(target, int):
            target = target + self.base if target >= 0 else 0
        return Compare(self.root + compare.key, compare.field, target)

    def operation(self, operation: Put | Delete | Get) -> Put | Delete | Get:
        key = self.root + operation.key
        if isinstance(operation, Put):
            return Put(key, operation.value, self.leases[operation.lease])
        return type(operation)(key)

    def seen(self, kv: KeyValue | None) -> Any:
        if kv is None:
            return None
        lease = next(n for n, given in self.leases.items() if given == kv.lease)
        key = kv.key.removeprefix(self.root)
        return key, kv.value, kv.create_revision - self.base, kv.mod_revision - self.base, lease


@pytest.fixture(scope="module")
def real(one_etcd: list[EtcdProcess]) -> Iterator[tuple[asyncio.Runner, EtcdCoordination]]:
    with asyncio.Runner() as runner:

        async def connect() -> EtcdCoordination:
            return EtcdCoordination([one_etcd[0].endpoint])

        client = runner.run(connect())
        yield runner, client
        runner.run(client.close())


ROOTS = itertools.count()


def compare_histories(real: tuple[asyncio.Runner, EtcdCoordination], steps: list[Any]) -> None:
    runner, client = real
    expected = runner.run(Player(client, f"/twin/{next(ROOTS)}/").play(steps))
    assert runner.run(Player(MemoryCoordination(MemoryEtcd()), "/twin/").play(steps)) == expected


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=10))
def test_random_histories_agree(real: tuple[asyncio.Runner, EtcdCoordination], steps: list[Any]) -> None:
    compare_histories(real, steps)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(steps=st.lists(STEPS, min_size=5, max_size=20))
def test_many_longer_random_histories_agree(real: tuple[asyncio.Runner, EtcdCoordination], steps: list[Any]) -> None:
    compare_histories(real, steps)
