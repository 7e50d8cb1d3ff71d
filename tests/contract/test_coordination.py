"""What Laminar relies on of etcd, run against the in-process twin, a real etcd, and a cluster of three."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from laminar.buffer.coordination import (
    MAX_REQUEST_BYTES,
    MAX_TXN_OPERATIONS,
    Change,
    Compare,
    Coordination,
    Delete,
    Field,
    Get,
    Listing,
    Put,
    Transaction,
    WatchEvent,
    absent,
    all_reads,
    created_at,
    unchanged,
)
from laminar.errors import CoordinationError, CoordinationUnavailable, LeaseLost


class Recorder:
    """Follows a watch: `events` as they came, `state` as a cache built from them."""

    def __init__(self, client: Coordination, prefix: str) -> None:
        self.events: list[WatchEvent] = []
        self.state: dict[str, str] = {}
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow(client, prefix))

    @property
    def changes(self) -> list[Change]:
        return [e for e in self.events if isinstance(e, Change)]

    @property
    def listings(self) -> list[Listing]:
        return [e for e in self.events if isinstance(e, Listing)]

    async def until(self, condition: Any, deadline_s: float = 20.0) -> None:
        async with asyncio.timeout(deadline_s):
            while not condition():
                if self._task.done():
                    self._task.result()
                    raise AssertionError("the watch ended")
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.5)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self, client: Coordination, prefix: str) -> None:
        async with aclosing(client.watch(prefix)) as events:  # type: ignore[type-var]
            async for event in events:
                self.events.append(event)
                if isinstance(event, Listing):
                    self.state = {kv.key: kv.value for kv in event.snapshot.items}
                elif event.kv is None:
                    self.state.pop(event.key, None)
                else:
                    self.state[event.key] = event.kv.value
                self._news.set()


@contextlib.asynccontextmanager
async def watching(client: Coordination, prefix: str) -> AsyncIterator[Recorder]:
    recorder = Recorder(client, prefix)
    try:
        await recorder.until(lambda: recorder.listings)
        yield recorder
    finally:
        await recorder.close()


class TestKeys:
    async def test_a_missing_key_reads_as_none(self, backend: Any) -> None:
        assert await backend.client.get(backend.root + "nothing") is None

    async def test_a_put_moves_mod_revision_and_keeps_create_revision(self, backend: Any) -> None:
        key = backend.root + "k"
        first = await backend.client.put(key, "1")
        second = await backend.client.put(key, "zwei ✓")
        kv = await backend.client.get(key)
        assert second == first + 1
        assert (kv.value, kv.create_revision, kv.mod_revision, kv.lease) == ("zwei ✓", first, second, 0)

    async def test_a_key_created_again_has_a_new_create_revision(self, backend: Any) -> None:
        key = backend.root + "k"
        first = await backend.client.put(key, "1")
        assert await backend.client.delete(key)
        assert not await backend.client.delete(key)
        again = await backend.client.put(key, "1")
        kv = await backend.client.get(key)
        assert (kv.create_revision, again) == (again, first + 2)

    async def test_an_empty_key_is_refused(self, backend: Any) -> None:
        for call in (backend.client.get(""), backend.client.put("", "x"), backend.client.delete("")):
            with pytest.raises(CoordinationError, match="empty"):
                await call


class TestRange:
    async def test_a_prefix_is_listed_sorted_and_without_its_neighbours(self, backend: Any) -> None:
        root = backend.root
        names = ["b", "a", "a/x", "ä", "c"]
        for name in names:
            await backend.client.put(f"{root}in/{name}", name)
        await backend.client.put(f"{root}in", "before")
        last = await backend.client.put(f"{root}in0", "after")
        snapshot = await backend.client.range(f"{root}in/", page=2)
        assert [kv.value for kv in snapshot.items] == sorted(names)
        assert snapshot.revision == last

    async def test_pages_are_of_one_revision(self, backend: Any) -> None:
        """Two keys at either end of the prefix always change together, so a listing must show them equal."""
        root, client = backend.root, backend.client
        for i in range(20):
            await client.put(f"{root}{i:02d}", "0")
        done = asyncio.Event()

        async def writer() -> None:
            count = 0
            while not done.is_set():
                count += 1
                await client.transact(Transaction((), (Put(f"{root}00", str(count)), Put(f"{root}19", str(count)))))

        task = asyncio.create_task(writer())
        try:
            for _ in range(10):
                items = (await client.range(root, page=3)).items
                assert len(items) == 20
                assert items[0].value == items[-1].value
        finally:
            done.set()
            await task


class TestTransactions:
    async def test_the_branch_is_chosen_by_all_compares(self, backend: Any) -> None:
        a, b = backend.root + "a", backend.root + "b"
        made = await backend.client.transact(Transaction((absent(a), absent(b)), (Put(a, "1"),), (Put(b, "no"),)))
        assert made.succeeded
        refused = await backend.client.transact(Transaction((absent(b), absent(a)), (Put(b, "1"),), (Get(a), Get(b))))
        assert not refused.succeeded
        assert [kv and kv.value for kv in refused.gets] == ["1", None]
        assert refused.revision == made.revision, "a transaction that changes nothing has no revision of its own"

    async def test_each_kind_of_compare(self, backend: Any) -> None:
        key = backend.root + "k"
        created = await backend.client.put(key, "1")
        await backend.client.put(key, "2")
        kv = await backend.client.get(key)
        values = [Compare(key, Field.VALUE, "1"), Compare(backend.root + "none", Field.VALUE, "")]
        holds = [created_at(key, created), unchanged(kv), Compare(key, Field.VALUE, "2")]
        fails = [absent(key), created_at(key, created + 1), *values]
        for compare in holds:
            assert (await backend.client.transact(Transaction((compare,), ()))).succeeded, compare
        for compare in fails:
            assert not (await backend.client.transact(Transaction((compare,), ()))).succeeded, compare

    async def test_all_writes_have_one_revision_and_reads_see_those_before_them(self, backend: Any) -> None:
        a, b = backend.root + "a", backend.root + "b"
        await backend.client.put(a, "old")
        result = await backend.client.transact(
            Transaction((), (Get(a), Put(a, "new"), Get(a), Put(b, "new"), Get(b), Delete(backend.root + "none")))
        )
        assert [kv.value for kv in result.gets] == ["old", "new", "new"]
        both = await backend.client.range(backend.root)
        assert {kv.mod_revision for kv in both.items} == {result.revision} == {both.revision}

    async def test_a_lost_race_has_one_winner(self, backend: Any) -> None:
        key = backend.root + "k"
        results = await asyncio.gather(
            *(backend.client.transact(Transaction((absent(key),), (Put(key, str(i)),))) for i in range(20))
        )
        assert sum(r.succeeded for r in results) == 1

    async def test_the_limits_of_a_transaction(self, backend: Any) -> None:
        """128 operations and 1.5 MiB go through, what is beyond is refused here, with numbers and a remedy."""
        root, client = backend.root, backend.client
        keys = [f"{root}{i:03d}" for i in range(MAX_TXN_OPERATIONS + 1)]
        full = Transaction(tuple(absent(k) for k in keys[:-1]), tuple(Put(k, "") for k in keys[:-1]))
        assert (await client.transact(full)).succeeded
        for too_many in (
            Transaction(tuple(absent(k) for k in keys), ()),
            all_reads(keys),
            Transaction((absent(keys[0]),), (), tuple(Get(k) for k in keys)),
        ):
            with pytest.raises(CoordinationError, match=r"129 .* 128 at most; split"):
                await client.transact(too_many)
        large = "x" * (MAX_REQUEST_BYTES - len(keys[0]) - 32)
        await client.put(keys[0], large)
        with pytest.raises(CoordinationError, match=f"{MAX_REQUEST_BYTES + 1} bytes, etcd takes {MAX_REQUEST_BYTES}"):
            await client.put(keys[0], large + "x")
        with pytest.raises(CoordinationError, match=f"bytes, etcd takes {MAX_REQUEST_BYTES}"):
            await client.transact(Transaction((absent(keys[0]),), (Put(keys[0], large),)))

    async def test_one_key_is_written_once(self, backend: Any) -> None:
        key = backend.root + "k"
        for twice in ((Put(key, "1"), Put(key, "2")), (Put(key, "1"), Delete(key)), (Delete(key), Put(key, "1"))):
            with pytest.raises(CoordinationError, match="one write of a key"):
                await backend.client.transact(Transaction((), twice))
        await backend.client.transact(Transaction((), (Delete(key), Delete(key))))
        await backend.client.transact(Transaction((absent(key),), (Put(key, "1"),), (Put(key, "2"),)))
        with pytest.raises(CoordinationError, match="empty transaction"):
            await backend.client.transact(Transaction((), ()))


class TestLeases:
    async def test_the_keys_of_a_lease_vanish_together_when_it_expires(self, backend: Any) -> None:
        lease, ttl = await backend.client.grant(1)
        assert ttl >= 1
        for name in "abc":
            await backend.client.put(backend.root + name, name, lease=lease)
        async with watching(backend.client, backend.root) as seen:
            assert seen.listings[0].snapshot.items[0].lease == lease
            await seen.until(lambda: len(seen.changes) == 3)
            assert all(c.kv is None for c in seen.changes)
            assert len({c.revision for c in seen.changes}) == 1
        assert await backend.client.keep_alive(lease) == 0
        with pytest.raises(LeaseLost, match=r"lease.* not found"):
            await backend.client.put(backend.root + "a", "late", lease=lease)
        put = Put(backend.root + "a", "late", lease)
        with pytest.raises(LeaseLost):
            await backend.client.transact(Transaction((), (put,)))

    async def test_a_lease_that_is_kept_alive_stays(self, backend: Any) -> None:
        lease, ttl = await backend.client.grant(2)
        await backend.client.put(backend.root + "k", "v", lease=lease)
        for _ in range(7):
            await asyncio.sleep(0.5)
            assert await backend.client.keep_alive(lease) == ttl
        assert await backend.client.get(backend.root + "k")
        await backend.client.revoke(lease)

    async def test_a_lease_outlives_the_leader(self, backend: Any) -> None:
        """The leader is killed while the lease is kept alive: the next one gives every lease its full time again."""
        lease, ttl = await backend.client.grant(5)
        await backend.client.put(backend.root + "k", "v", lease=lease)
        killing = asyncio.create_task(backend.kill_leader())
        answered = 0
        async with asyncio.timeout(30):
            while not killing.done() or answered < 5:
                with contextlib.suppress(CoordinationUnavailable):
                    assert await backend.client.keep_alive(lease) == ttl
                    answered += killing.done()
                await asyncio.sleep(0.2)
        await killing
        assert await backend.client.get(backend.root + "k")
        await backend.client.revoke(lease)
        assert await backend.client.get(backend.root + "k") is None

    async def test_revoking_deletes_the_keys_at_one_revision_and_may_be_repeated(self, backend: Any) -> None:
        lease, _ = await backend.client.grant(10)
        await backend.client.put(backend.root + "a", "", lease=lease)
        await backend.client.put(backend.root + "b", "", lease=lease)
        last = await backend.client.put(backend.root + "b", "no longer of the lease")
        await backend.client.revoke(lease)
        snapshot = await backend.client.range(backend.root)
        assert [kv.key for kv in snapshot.items] == [backend.root + "b"]
        assert snapshot.revision == last + 1
        await backend.client.revoke(lease)

    async def test_fractions_of_seconds_are_rounded_up(self, backend: Any) -> None:
        lease, ttl = await backend.client.grant(6.2)
        assert ttl == 7
        await backend.client.revoke(lease)


class TestWatch:
    async def test_a_listing_then_each_change_once_in_order(self, backend: Any) -> None:
        root, client = backend.root, backend.client
        await client.put(root + "old", "0")
        async with watching(client, root) as seen:
            assert [kv.key for kv in seen.listings[0].snapshot.items] == [root + "old"]
            await client.put(root + "a", "1")
            await client.put("/elsewhere", "not watched")
            both = await client.transact(Transaction((), (Put(root + "b", "2"), Delete(root + "old"))))
            await client.put(root + "a", "3")
            await seen.until(lambda: len(seen.changes) == 4)
        told = [(c.key.removeprefix(root), c.kv and c.kv.value) for c in seen.changes]
        assert told[0] == ("a", "1")
        assert sorted(told[1:3], key=str) == [("b", "2"), ("old", None)]
        assert told[3] == ("a", "3")
        assert [c.revision for c in seen.changes[1:3]] == [both.revision] * 2
        assert seen.state == {root + "a": "3", root + "b": "2"}

    async def test_nothing_is_lost_or_doubled_over_restarts_and_kills(self, backend: Any) -> None:
        root, client, count = backend.root, backend.client, 90
        async with watching(client, root) as seen:

            async def write() -> None:
                for i in range(count):
                    # Each number once, whatever the retries: a put that is repeated would be a second change.
                    await put_once(client, f"{root}{i:04d}", str(i))
                    await asyncio.sleep(0.03)

            writing = asyncio.create_task(write())
            await asyncio.sleep(0.4)
            await backend.restart()
            await backend.kill_leader()
            await asyncio.wait_for(writing, 60)
            await seen.until(lambda: len(seen.state) == count)
            await asyncio.sleep(0.2)
        assert [c.kv and c.kv.value for c in seen.changes] == [str(i) for i in range(count)]
        assert len(seen.listings) == 1, "a restart is not a gap"

    async def test_changes_during_a_partition_are_delivered_after_it(self, backend: Any) -> None:
        root = backend.root
        async with watching(backend.cut_client, root) as seen:
            await backend.cut()
            for i in range(50):
                await backend.client.put(f"{root}{i % 5}", str(i))
            await asyncio.sleep(0.5)
            assert not seen.changes
            await backend.mend()
            await seen.until(lambda: len(seen.changes) == 50)
            assert [c.kv and c.kv.value for c in seen.changes] == [str(i) for i in range(50)]
            assert len(seen.listings) == 1

    async def test_a_gap_by_compaction_is_answered_with_a_new_listing(self, backend: Any) -> None:
        root = backend.root
        async with watching(backend.cut_client, root) as seen:
            await backend.client.put(root + "a", "1")
            await seen.until(lambda: seen.changes)
            await backend.cut()
            await backend.client.put(root + "b", "2")
            await backend.client.delete(root + "a")
            await backend.compact(await backend.client.put(root + "b", "3"))
            await backend.mend()
            await seen.until(lambda: len(seen.listings) == 2)
            assert seen.state == {root + "b": "3"}
            await backend.client.put(root + "c", "4")
            await seen.until(lambda: root + "c" in seen.state)
            assert [c.kv and c.kv.value for c in seen.changes] == ["1", "4"]

    async def test_a_deletion_at_the_very_revision_of_a_compaction_is_not_missed(self, backend: Any) -> None:
        """etcd forgets such a deletion and, asked for changes from that revision on, does not say so."""
        root = backend.root
        await backend.client.put(root + "a", "1")
        async with watching(backend.cut_client, root) as seen:
            await backend.cut()
            await backend.client.delete(root + "a")
            await backend.compact((await backend.client.range(root)).revision)
            await backend.mend()
            await seen.until(lambda: not seen.state)

    async def test_two_watches_are_independent(self, backend: Any) -> None:
        root, client = backend.root, backend.client
        async with watching(client, root + "a/") as first, watching(client, root) as second:
            await client.put(root + "a/x", "1")
            await client.put(root + "b/x", "2")
            await second.until(lambda: len(second.changes) == 2)
            await first.until(lambda: len(first.changes) == 1)
            await first.close()
            await client.put(root + "a/y", "3")
            await second.until(lambda: len(second.changes) == 3)


class TestUnavailability:
    async def test_calls_fail_within_their_deadlines_while_cut_off_and_work_again_after(self, backend: Any) -> None:
        key, client = backend.root + "k", backend.cut_client
        await client.put(key, "1")
        await backend.cut()
        started = asyncio.get_running_loop().time()
        with pytest.raises(CoordinationUnavailable, match=r"get of .* attempts, limit 3 s.*etcd runs"):
            await client.get(key)
        assert asyncio.get_running_loop().time() - started < 8
        with pytest.raises(CoordinationUnavailable):
            await client.transact(Transaction((), (Put(key, "2"),)))
        with pytest.raises(CoordinationUnavailable):
            await client.keep_alive(1)
        await backend.mend()
        assert (await client.get(key)).value == "1"

    async def test_a_read_waits_for_a_short_outage(self, backend: Any) -> None:
        await backend.cut_client.put(backend.root + "k", "1")
        await backend.cut()
        reading = asyncio.create_task(backend.cut_client.get(backend.root + "k"))
        await asyncio.sleep(0.4)
        await backend.mend()
        assert (await reading).value == "1"

    async def test_a_closed_client_says_so(self, backend: Any) -> None:
        recorder = Recorder(backend.cut_client, backend.root)
        await recorder.until(lambda: recorder.listings)
        await backend.cut_client.close()
        with pytest.raises(CoordinationError, match="has been closed"):
            await backend.cut_client.get(backend.root)
        with pytest.raises(CoordinationError, match="has been closed"):
            await recorder.until(lambda: False, 5)


async def put_once(client: Coordination, key: str, value: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(CoordinationUnavailable):
                await client.transact(Transaction((absent(key),), (Put(key, value),)))
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_cluster_serves_through_the_death_of_each_member(three_etcds: Any) -> None:
    """Whichever member dies, the leader or not: writes go on, and a watch misses and doubles nothing."""
    from laminar.buffer.etcd import EtcdCoordination

    root, client = "/deaths/", EtcdCoordination([p.endpoint for p in three_etcds])
    async with watching(client, root) as seen:
        count = 0
        for process in three_etcds:
            await process.stop()
            for _ in range(20):
                await put_once(client, f"{root}{count:04d}", str(count))
                count += 1
            await process.start()
        await seen.until(lambda: len(seen.state) == count)
        assert [c.kv and c.kv.value for c in seen.changes] == [str(i) for i in range(count)]
    await client.close()


@pytest.mark.slow
async def test_a_cluster_serves_while_any_one_member_is_frozen(three_etcds: Any) -> None:
    """A frozen member keeps its connections open and answers nothing: only pings find it out."""
    from laminar.buffer.etcd import EtcdCoordination

    root, client = "/frozen/", EtcdCoordination([p.endpoint for p in three_etcds])
    async with watching(client, root) as seen:
        for number, process in enumerate(three_etcds):
            os.kill(process.pid, signal.SIGSTOP)
            try:
                await put_once(client, f"{root}{number}", str(number))
                await seen.until(lambda: len(seen.changes) > number, 20)  # noqa: B023
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(1)
        assert [c.kv and c.kv.value for c in seen.changes] == ["0", "1", "2"]
    await client.close()
