"""What a run stands on gives way: etcd, its leader, the network to it, the disk, single bits."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import (
    LEASE_S,
    SHORT_LEASE,
    CutNetwork,
    Etcds,
    SmallDisk,
    ends_of,
    flip_bit,
    next_step,
    overcome,
    tear_end,
    zero_page,
)
from real_run import RealRun
from recording import Recorder

from laminar.buffer.keys import parse_trajectory
from laminar.buffer.partials import PartialRows, assemble, read_partials
from laminar.buffer.storage import open_storage

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
MakeRun = Callable[..., RealRun]
FULL_S = 4.0


@pytest.fixture
def etcds(tmp_path: Path) -> Iterator[Callable[..., Etcds]]:
    made: list[Etcds] = []

    def make(members: int = 1, also: str = "") -> Etcds:
        made.append(Etcds(tmp_path / "etcds", members, also))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


@pytest.fixture
def network() -> Iterator[CutNetwork]:
    one = CutNetwork()
    yield one
    one.close()


@pytest.mark.nightly
def test_the_leader_of_a_cluster_dies_and_comes_back(
    real_run: MakeRun, etcds: Callable[..., Etcds], recorder: Recorder
) -> None:
    cluster = etcds(members=3)
    run = real_run("run.max_steps=12", endpoints=cluster.endpoints)
    seen = run.begin()
    leader = cluster.leader()
    cluster.kill(leader)
    recorder.fault("etcd leader killed", next_step(run, seen))
    cluster.restart(leader)
    recorder.fault("etcd leader back", next_step(run, seen), faults=0)
    run.assert_ended_well()


@pytest.mark.nightly
def test_etcd_is_away_for_longer_than_every_lease(
    real_run: MakeRun, etcds: Callable[..., Etcds], recorder: Recorder
) -> None:
    """No worker may count its lease as held, and each of them joins again."""
    etcd = etcds()
    run = real_run(SHORT_LEASE, "run.max_steps=12", endpoints=etcd.endpoints)
    seen = run.begin()
    before = set(seen.workers("rollout"))
    etcd.kill(etcd.members[0])
    time.sleep(LEASE_S + 1)
    etcd.restart(etcd.members[0])
    recorder.fault("etcd away", next_step(run, seen), away_s=LEASE_S + 1)
    assert before.isdisjoint(seen.workers("rollout"))
    run.assert_ended_well()


@pytest.mark.nightly
def test_a_rollout_cut_off_from_etcd_loses_its_work_and_joins_again(
    real_run: MakeRun, etcds: Callable[..., Etcds], network: CutNetwork, recorder: Recorder
) -> None:
    """Its relay, its disk and its engine stay in reach: it could go on for long without noticing, and must not."""
    etcd = etcds(also=network.address)
    run = real_run(SHORT_LEASE, "run.max_steps=24", "rollout.max_running=64", endpoints=etcd.endpoints)
    seen = run.begin()
    port = etcd.members[0].client_port
    cut_off = run.start_worker("rollout", prefix=network.prefix, endpoint=f"{network.address}:{port}")
    victim = run.joined(cut_off)
    run.until(lambda: len(seen.claims_of(victim)) > 4, f"{victim} owns trajectories")
    recovered = overcome(seen, "rollout", victim)
    network.cut()
    recovery_s = run.until(recovered, f"the trajectories of {victim} are with others")
    mended = seen.revision
    network.mend()
    again_s = run.until(lambda: seen.id_of("rollout", cut_off.pid) not in ("", victim), "it has joined again")
    recorder.fault("rollout cut off from etcd", recovery_s, lease_s=LEASE_S, joined_again_s=round(again_s, 3))
    run.assert_ended_well()
    assert seen.written_by(victim, after=mended) == []


@pytest.mark.nightly
def test_a_full_disk_only_delays(
    real_run: MakeRun, etcds: Callable[..., Etcds], disk: SmallDisk, recorder: Recorder
) -> None:
    run = real_run("run.max_steps=12", store=disk.folder / "store", endpoints=etcds().endpoints)
    seen = run.begin()
    disk.fill()
    time.sleep(FULL_S)
    disk.free()
    recorder.fault("disk full", next_step(run, seen), full_s=FULL_S)
    run.assert_ended_well()


def test_damaged_logs_of_dead_rollouts_are_told_and_generated_again(
    real_run: MakeRun, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Three rollouts die at the same moment, each with another damage to its log: a torn end is normal, a flipped bit
    and a zeroed page are reported. Whoever adopts their trajectories goes on after the last good row."""
    long = ("sampling.max_tokens=24", "rollout.max_running=32", "rollout.flush_interval=0.1")
    run = real_run(SHORT_LEASE, "run.max_steps=24", *long)
    damages = (tear_end, flip_bit, zero_page)
    seen = run.begin(step=1, by_hand=["rollout"] * len(damages))

    def ids() -> list[str]:
        return [seen.id_of("rollout", worker.pid) for worker in run.by_hand]

    def signal_all(number: signal.Signals) -> None:
        for worker in run.by_hand:
            os.kill(worker.pid, number)

    def all_stand_writing() -> bool:
        if not all(d and _batches(run, d) > 8 and len(seen.claims_of(d)) > 4 for d in ids()):
            return False
        # While one is looked at, another may come to an end of all that it has.
        signal_all(signal.SIGSTOP)
        time.sleep(0.3)  # what they sent before they were stopped may still arrive, and be seen late
        if all(len(seen.claims_of(d)) > 4 for d in ids()):
            return True
        signal_all(signal.SIGCONT)
        return False

    run.until(all_stand_writing, "all of them own trajectories and have logs")
    dead = ids()
    signal_all(signal.SIGKILL)
    for worker in run.by_hand:
        worker.process.wait()
    killed = time.monotonic()
    claims, before = seen.claims(), [_rows(run, d) for d in dead]
    for worker, damage in zip(dead, damages, strict=True):
        damage(_newest_segment(run, worker))
    with caplog.at_level(logging.CRITICAL):
        after = [_rows(run, d) for d in dead]
    run.until(lambda: not any(seen.claims_of(d) for d in dead), "all their trajectories are with others")
    recorder.fault("rollout killed, log damaged", time.monotonic() - killed, faults=3, lease_s=LEASE_S)
    run.assert_ended_well()

    assert [len(rows.damage) for rows in after] == [0, 1, 1]
    for worker, whole, rest in zip(dead, before, after, strict=True):
        assert _count(rest) < _count(whole)
        told = [d for d in rest.damage if f"what it lost is generated again: {d}" in run.worker_log("rollout-0")]
        assert told == rest.damage, run.story()
        adopted = _adopted(run, worker)
        for name, claim in claims.items():
            if claim.owner == worker and claim.source.worker == worker and name in adopted:
                rows = rest.rows.get((*parse_trajectory(name), claim.source.term), [])
                assert adopted[name] == (len(assemble(rows).token_ids) if rows else 0), (worker, name)


def _newest_segment(run: RealRun, worker: str) -> Path:
    return max((run.store / "partials" / worker).glob("*.arrows"))


def _batches(run: RealRun, worker: str) -> int:
    folder = run.store / "partials" / worker
    return len(ends_of(_newest_segment(run, worker))) if folder.is_dir() and any(folder.iterdir()) else 0


def _rows(run: RealRun, worker: str) -> PartialRows:
    return asyncio.run(read_partials(open_storage(str(run.store)), worker))


def _count(rows: PartialRows) -> int:
    return sum(len(each) for each in rows.rows.values())


def _adopted(run: RealRun, source: str) -> dict[str, int]:
    """Tokens with which each trajectory was taken over from `source`, as the new owner logged it."""
    pattern = rf"adopted trajectory (\S+) from {re.escape(source)} with (\d+) tokens"
    return {name: int(tokens) for name, tokens in re.findall(pattern, run.worker_log("rollout-0"))}


@pytest.mark.nightly
def test_a_death_is_noticed_within_a_lease_and_by_the_supervisor_at_once(
    real_run: MakeRun, recorder: Recorder
) -> None:
    """Until reassignment: within the lease time and two seconds for a worker that nobody watches; times are recorded,
    and judged with the slack that a busy machine needs."""
    run = real_run(SHORT_LEASE, "run.max_steps=24", "rollout.max_running=64")
    seen = run.begin(by_hand=["rollout"])
    by_hand = run.by_hand[0]
    victim = run.joined(by_hand)
    run.until(lambda: len(seen.claims_of(victim)) > 4, f"{victim} owns trajectories")
    by_hand.process.kill()
    recovery_s = run.until(overcome(seen, "rollout", victim), f"the trajectories of {victim} are with others")
    recorder.fault("rollout killed, nobody watches", recovery_s, lease_s=LEASE_S, bound_s=LEASE_S + 2)
    assert recovery_s < 3 * (LEASE_S + 2)
    by_hand = run.start_worker("rollout")  # somebody must be there to take over
    run.joined(by_hand)
    watched = next(w for w in seen.workers("rollout") if seen.workers("rollout")[w].pid != by_hand.pid)
    run.until(lambda: len(seen.claims_of(watched)) > 4, f"{watched} owns trajectories")
    os.kill(seen.workers("rollout")[watched].pid, signal.SIGKILL)
    recovery_s = run.until(overcome(seen, "rollout", watched), f"the trajectories of {watched} are with others")
    recorder.fault("rollout killed, supervised", recovery_s, lease_s=LEASE_S)
    run.assert_ended_well()


