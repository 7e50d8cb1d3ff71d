"""Who is alive and who leads, mostly on the in-process etcd in virtual time, where a minute takes a millisecond."""

from __future__ import annotations

import asyncio
import os
import random
import selectors
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from laminar.buffer.coordination import Put, Transaction, absent, unchanged
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.keys import Keys
from laminar.buffer.memory import Fault, Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import LeaderRecord, WorkerRecord
from laminar.buffer.session import Election, Leadership, Membership, Session, transact_or_read_back
from laminar.errors import CoordinationError, CoordinationUnavailable, LeaseLost
from laminar.workers.supervisor.etcd_process import EtcdProcess

KEYS = Keys("test")
LEADER = KEYS.leader("manager")
TTL = 10.0


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting for the next timer, moves the clock to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing is scheduled any more: a deadlock")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(work, 100_000))


def now() -> float:
    return asyncio.get_running_loop().time()


def client(server: MemoryEtcd, seed: int = 0, **odds: Any) -> tuple[MemoryCoordination, Faults]:
    faults = Faults(random.Random(seed), **odds)
    return MemoryCoordination(server, faults), faults


def worker_record(worker: str = "rollout-a-1-00") -> WorkerRecord:
    return WorkerRecord(kind="rollout", id=worker, host="a", pid=1, started_at_us=0)


class TestSession:
    def test_a_lease_is_kept_as_long_as_the_session_is_open(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            session = await Session.open(coordination, TTL)
            await coordination.put("k", "v", lease=session.lease)
            await asyncio.sleep(1000)
            session.require()
            assert session.alive and server.get("k")
            await session.close()
            assert server.get("k") is None, "closing revokes"
            assert not session.alive and session.reason == "closed"

        run(story())

    @pytest.mark.parametrize("phase", [0.0, 1.0, 3.0, 3.4, 6.5, 9.9])
    def test_a_worker_that_is_cut_off_gives_up_before_its_keys_vanish(self, phase: float) -> None:
        async def story() -> None:
            server, lost = MemoryEtcd(), []
            coordination, faults = client(server)
            session = await Session.open(coordination, TTL, on_lost=lost.append)
            await coordination.put("k", "v", lease=session.lease)
            await asyncio.sleep(phase)
            faults.partition()
            async with asyncio.timeout(TTL):
                await session.lost.wait()
            assert server.get("k"), "nobody else may have been able to take over yet"
            assert lost == [session.reason] and "not refreshed for 9.0 s of its 10 s" in session.reason
            with pytest.raises(LeaseLost, match="no answer"):
                session.require()
            await asyncio.sleep(1.5)
            assert server.get("k") is None
            faults.heal()
            await asyncio.sleep(30)
            assert not session.alive and len(lost) == 1, "a session never comes back"
            await session.close()

        run(story())

    def test_short_outages_and_restarts_of_etcd_are_survived(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, faults = client(server)
            session = await Session.open(coordination, TTL)
            for _ in range(20):
                await asyncio.sleep(7)
                faults.partition()
                await asyncio.sleep(4)
                faults.heal()
                await asyncio.sleep(7)
                server.stop()
                await asyncio.sleep(4)
                server.start()
            assert session.alive
            await session.close()

        run(story())

    def test_a_lease_that_etcd_has_dropped_is_noticed_at_the_next_refresh(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            session = await Session.open(coordination, TTL)
            server.revoke(session.lease)
            async with asyncio.timeout(TTL / 3 + 0.1):
                await session.lost.wait()
            assert "expired or was revoked" in session.reason
            await session.close()

        run(story())

    def test_a_paused_process_knows_at_once_when_it_wakes(self) -> None:
        """The clock alone decides: no task needs to have run since (case 19: something blocked the process)."""

        async def story() -> None:
            server, lost = MemoryEtcd(), []
            coordination, _ = client(server)
            session = await Session.open(coordination, TTL, on_lost=lost.append)
            await asyncio.sleep(2)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.clock.now += 9
            assert not session.alive
            with pytest.raises(LeaseLost, match="not refreshed for 11"):
                session.require()
            await asyncio.sleep(20)
            assert not session.alive and len(lost) == 1
            await session.close()

        run(story())

    def test_slow_replies_count_from_when_the_request_was_sent(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, faults = client(server, delay_s=(0.6, 0.6))
            session = await Session.open(coordination, 2.0)
            await coordination.put("k", "v", lease=session.lease)
            faults.partition()
            while session.alive:
                assert server.get("k")
                await asyncio.sleep(0.01)
            await session.close()

        run(story())

    def test_a_grant_that_took_long_does_not_begin_as_lost(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, faults = client(server)
            faults.script("grant", *[Fault.DROP_REPLY] * 5)
            session = await Session.open(coordination, TTL)
            assert now() > TTL and session.alive
            await asyncio.sleep(50)
            session.require()
            await session.close()

        run(story())

    def test_closing_while_etcd_is_away_ends_in_bounded_time(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            session = await Session.open(coordination, TTL)
            server.stop()
            began = now()
            await session.close()
            assert now() - began <= 20

        run(story())

    async def test_a_frozen_etcd_costs_the_session_in_time(self, tmp_path: Path) -> None:
        """On a real etcd, stopped by a signal: it accepts what is sent and never answers."""
        etcd = EtcdProcess(tmp_path / "etcd")
        await etcd.start()
        coordination = EtcdCoordination([etcd.endpoint], timeout_s=1.0, retry_s=1.0)
        session = await Session.open(coordination, 2.0)
        await asyncio.sleep(1)
        assert session.alive
        os.kill(etcd.pid, signal.SIGSTOP)
        try:
            began = now()
            async with asyncio.timeout(5):
                await session.lost.wait()
            assert now() - began < 2.0
            assert not session.alive and "not refreshed" in session.reason
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
        again = await Session.open(coordination, 2.0)
        assert again.alive and again.lease != session.lease
        await asyncio.gather(session.close(), again.close())
        await coordination.close()
        await etcd.stop()


class TestTransactOrReadBack:
    """A counter that must grow by exactly one, whatever happens to requests and replies."""

    @staticmethod
    def increment(coordination: MemoryCoordination, seen: Any, value: str, deadline_s: float = 15.0) -> Any:
        async def committed() -> bool:
            kv = await coordination.get("counter")
            return kv is not None and kv.value == value

        guard = unchanged(seen) if seen else absent("counter")
        transaction = Transaction((guard,), (Put("counter", value),))
        return transact_or_read_back(coordination, transaction, committed=committed, deadline_s=deadline_s)

    @pytest.mark.parametrize(
        "faults",
        [
            [],
            [Fault.DROP_REPLY],
            [Fault.FAIL_BEFORE, Fault.FAIL_BEFORE],
            [Fault.LATE],
            [Fault.FAIL_BEFORE, Fault.LATE, Fault.DROP_REPLY],
        ],
    )
    def test_a_write_takes_effect_once_and_is_reported_as_done(self, faults: list[Fault]) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, network = client(server)
            network.script("transact", *faults)
            assert await self.increment(coordination, None, "mine") is True
            await asyncio.sleep(5)
            kv = server.get("counter")
            assert kv and kv.value == "mine" and kv.mod_revision == kv.create_revision

        run(story())

    def test_a_reply_that_is_lost_while_the_read_back_fails_too(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, network = client(server)
            network.script("transact", Fault.DROP_REPLY)
            network.script("get", *[Fault.FAIL_BEFORE] * 4)
            assert await self.increment(coordination, None, "mine") is True

        run(story())

    def test_a_lost_race_is_reported_as_such(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, network = client(server)
            await coordination.put("counter", "theirs")
            assert await self.increment(coordination, None, "mine") is False
            network.script("transact", Fault.FAIL_BEFORE)
            assert await self.increment(coordination, None, "mine") is False
            assert server.get("counter").value == "theirs"  # type: ignore[union-attr]

        run(story())

    def test_it_gives_up_at_its_deadline_and_says_that_the_outcome_is_unknown(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            server.stop()
            began = now()
            with pytest.raises(CoordinationUnavailable, match=r"no known outcome after 5 s and \d+ attempts"):
                await self.increment(coordination, None, "mine", deadline_s=5)
            assert now() - began < 8

        run(story())


class TestMembership:
    def test_a_worker_key_lives_with_the_lease_and_guards_its_writes(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            session = await Session.open(coordination, TTL)
            member = await Membership.join(session, coordination, KEYS, worker_record())
            kv = server.get(member.key)
            assert kv and kv.lease == session.lease and WorkerRecord.parse(kv.value) == worker_record()
            assert member.key == "/laminar/test/g1/workers/rollout/rollout-a-1-00"
            assert (await coordination.transact(Transaction((member.guard(),), (Put("x", "1"),)))).succeeded
            await session.close()
            assert not (await coordination.transact(Transaction((member.guard(),), (Put("x", "2"),)))).succeeded

        run(story())

    def test_a_lost_reply_does_not_make_a_stranger_of_us(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            coordination, faults = client(server)
            session = await Session.open(coordination, TTL)
            faults.script("transact", Fault.DROP_REPLY, Fault.LATE)
            member = await Membership.join(session, coordination, KEYS, worker_record())
            assert server.get(member.key).create_revision == member.create_revision  # type: ignore[union-attr]
            await session.close()

        run(story())

    def test_an_id_belongs_to_one_life_of_one_worker(self) -> None:
        """A restarted worker under its old id must not pass for the former one."""

        async def story() -> None:
            server = MemoryEtcd()
            coordination, _ = client(server)
            first, second = await Session.open(coordination, TTL), await Session.open(coordination, TTL)
            old = await Membership.join(first, coordination, KEYS, worker_record())
            with pytest.raises(CoordinationError, match=r"is taken by .*rollout-a-1-00"):
                await Membership.join(second, coordination, KEYS, worker_record())
            await first.close()
            new = await Membership.join(second, coordination, KEYS, worker_record())
            assert old.guard() != new.guard()
            await second.close()
            with pytest.raises(LeaseLost):
                await Membership.join(second, coordination, KEYS, worker_record("other"))

        run(story())


class TestElection:
    @staticmethod
    async def candidate(server: MemoryEtcd, name: str) -> tuple[Session, Election, Faults]:
        coordination, faults = client(server, seed=len(name))
        session = await Session.open(coordination, TTL)
        return session, Election(coordination, session, LEADER, name), faults

    def test_one_leads_and_the_next_takes_over_when_it_resigns(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            a, election_a, _ = await self.candidate(server, "a")
            b, election_b, _ = await self.candidate(server, "b")
            first = await election_a.campaign()
            assert first.held and LeaderRecord.parse(server.get(LEADER).value).worker == "a"  # type: ignore[union-attr]
            standby = asyncio.create_task(election_b.campaign())
            await asyncio.sleep(100)
            assert not standby.done()
            await first.resign()
            second = await asyncio.wait_for(standby, 1)
            assert second.held and not first.held and first.lost.is_set()
            assert first.guard() != second.guard()
            await a.close()
            await b.close()
            await second.lost.wait()

        run(story())

    @pytest.mark.parametrize("end", ["partition", "close", "revoke"])
    def test_a_leader_that_ends_is_followed_after_it_has_stepped_back(self, end: str) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            a, election_a, faults = await self.candidate(server, "a")
            b, election_b, _ = await self.candidate(server, "b")
            first = await election_a.campaign()
            standby = asyncio.create_task(election_b.campaign())
            await asyncio.sleep(3)
            if end == "partition":
                faults.partition()
            elif end == "close":
                await a.close()
            else:
                server.revoke(a.lease)
            second = await asyncio.wait_for(standby, TTL + 1)
            await asyncio.sleep(0.1)
            assert second.held and not first.held
            await first.lost.wait()
            await b.close()

        run(story())

    def test_a_leader_whose_key_is_deleted_by_an_operator_steps_back(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            session, election, _ = await self.candidate(server, "a")
            leadership = await election.campaign()
            await client(server)[0].delete(LEADER)
            await asyncio.wait_for(leadership.lost.wait(), 1)
            assert session.alive and not leadership.held and "was deleted" in leadership.reason
            again = await election.campaign()
            assert again.held and again.guard() != leadership.guard()
            await again.resign()
            assert server.get(LEADER) is None
            await session.close()

        run(story())

    @pytest.mark.parametrize("fault", [Fault.DROP_REPLY, Fault.LATE, Fault.FAIL_BEFORE])
    def test_a_candidate_recognises_its_own_victory(self, fault: Fault) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            session, election, faults = await self.candidate(server, "a")
            faults.script("transact", fault)
            leadership = await asyncio.wait_for(election.campaign(), 5)
            await asyncio.sleep(5)
            assert leadership.held
            assert server.get(LEADER).create_revision == leadership.create_revision  # type: ignore[union-attr]
            await session.close()

        run(story())

    def test_a_resignation_survives_a_lost_reply_and_spares_the_successor(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            _, election_a, faults = await self.candidate(server, "a")
            _, election_b, _ = await self.candidate(server, "bb")
            first = await election_a.campaign()
            standby = asyncio.create_task(election_b.campaign())
            await asyncio.sleep(1)
            faults.script("transact", Fault.DROP_REPLY)
            await first.resign()
            second = await standby
            assert second.held and server.get(LEADER)

        run(story())

    def test_a_longer_key_with_the_same_beginning_is_another_election(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            session, election, _ = await self.candidate(server, "a")
            await client(server)[0].put(LEADER + "-2", LeaderRecord(worker="x").dump())
            leadership = await asyncio.wait_for(election.campaign(), 1)
            await client(server)[0].delete(LEADER + "-2")
            await asyncio.sleep(1)
            assert leadership.held
            await session.close()

        run(story())

    def test_a_candidate_whose_lease_ends_stops_waiting(self) -> None:
        async def story() -> None:
            server = MemoryEtcd()
            _, election_a, _ = await self.candidate(server, "a")
            b, election_b, _ = await self.candidate(server, "b")
            await election_a.campaign()
            standby = asyncio.create_task(election_b.campaign())
            await asyncio.sleep(1)
            server.revoke(b.lease)
            with pytest.raises(LeaseLost, match="revoked"):
                await asyncio.wait_for(standby, TTL)

        run(story())

    @pytest.mark.parametrize("seed", range(12))
    def test_never_two_leaders_in_a_faulty_network(self, seed: int) -> None:
        """Five candidates for ten minutes of lost, late and refused requests, partitions and restarts of etcd: at
        no instant do two hold the leadership, and somebody leads most of the time."""
        held, samples = run(contested_election(seed))
        assert max(held) <= 1
        assert sum(held) > 0.5 * samples

    def test_a_contested_election_is_the_same_each_time(self) -> None:
        """The twin adds no chance of its own: a failure in simulation can be repeated."""
        assert run(contested_election(3)) == run(contested_election(3))


async def contested_election(seed: int) -> tuple[list[int], int]:
    """Leaders held, sampled every 50 ms."""
    server, chance = MemoryEtcd(), random.Random(seed)
    networks: list[Faults] = []
    terms: dict[int, Leadership] = {}

    async def candidate(number: int) -> None:
        odds: dict[str, Any] = {"fail_before": 0.05, "drop_reply": 0.05, "late": 0.05, "delay_s": (0.0, 0.2)}
        coordination, faults = client(server, seed=1000 * seed + number, **odds)
        networks.append(faults)
        for life in range(10_000):
            try:
                session = await Session.open(coordination, TTL)
                try:
                    terms[number] = await Election(coordination, session, LEADER, f"{number}-{life}").campaign()
                    await asyncio.wait_for(terms[number].lost.wait(), chance.uniform(5, 60))
                except TimeoutError:
                    await terms[number].resign()
                finally:
                    await session.close()
            except (CoordinationUnavailable, LeaseLost):
                await asyncio.sleep(1)

    async def trouble() -> None:
        while True:
            await asyncio.sleep(chance.uniform(1, 20))
            faults = chance.choice(networks)
            faults.partition()
            await asyncio.sleep(chance.uniform(1, 25))
            faults.heal()
            if chance.random() < 0.2:
                server.restart()

    tasks = [asyncio.create_task(candidate(n)) for n in range(5)] + [asyncio.create_task(trouble())]
    held: list[int] = []
    for _ in range(12_000):
        await asyncio.sleep(0.05)
        held.append(sum(t.held for t in terms.values()))
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return held, len(held)


