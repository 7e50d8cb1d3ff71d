"""Relay workers on the in-process etcd, over real sockets: chains are planned, versions arrive, masters change."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import random
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laminar.buffer.coordination import KeyValue
from laminar.buffer.keys import Keys
from laminar.buffer.ledger import Ledger
from laminar.buffer.manifest import Fingerprints, RunFile
from laminar.buffer.memory import Faults, MemoryCoordination, MemoryEtcd
from laminar.buffer.records import (
    ChainRecord,
    RelayHop,
    RelayLoad,
    RelayStall,
    RelayTrouble,
    RunManifest,
    WeightsHead,
    WorkerRecord,
)
from laminar.buffer.schema import FORMAT_VERSION
from laminar.buffer.session import Election
from laminar.buffer.storage import MemoryStorage
from laminar.clock import SystemClock
from laminar.config import Config, RelayConfig
from laminar.errors import ConfigError, StoreError
from laminar.relay.binding import make_private
from laminar.relay.follower import Follower
from laminar.relay.holdings import Holdings
from laminar.relay.hops import Measures
from laminar.relay.layout import Layout
from laminar.relay.pull import Repair
from laminar.relay.transport.base import VersionHeader, VersionName
from laminar.relay.writing import Invitation
from laminar.workers.chain import (
    MAX_HEARD,
    OFFER_S,
    ChainMember,
    address_within,
    listening,
    relay_transports,
    run_secret,
)
from laminar.workers.committer_lives import CommitterLives
from laminar.workers.context import Member, Run, joined
from laminar.workers.machine import Machine, this_machine
from laminar.workers.managing.chain_planning import elected, planned
from laminar.workers.mirror import Mirror
from laminar.workers.relay import relay_main, remove_stale, serve_weights, socket_folder, socket_path
from laminar.workers.training.publishing import Publisher
from laminar.workers.viewing.relay_status import ChainStatus, RelayView, read_chain, render_chain
from laminar.workers.weights import find_weights

KEYS = Keys("run")
LAYOUT = Layout.from_tensors({"w": ("uint8", (300_000,))})
PRINTS = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")


class IdleCommitter:
    """The committer's process of a run in which nothing is committed."""

    pid = 0

    async def start(self) -> None: ...

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(self, *, grace_s: float) -> None: ...

    def said(self) -> list[str]:
        return []


class FixedLearner:
    """The learner's side of a publish: bytes that only depend on the version."""

    layout = LAYOUT
    writers = 1

    def __init__(self) -> None:
        self.version = 0

    def stage(self) -> float:
        return 0.0

    def write_weights(self, target: memoryview, invitation: Invitation | None = None) -> int:
        target[:] = random.Random(self.version).randbytes(LAYOUT.total_bytes)
        return LAYOUT.total_bytes


class Cluster:
    """Relays that share an etcd; each counts as a host of its own, all of them on this one."""

    def __init__(self) -> None:
        self.server = MemoryEtcd()
        self.storage = MemoryStorage()
        self.config = Config.model_validate({"model": {"path": "m"}, "relay": {"chunk_mib": 1}})
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.coordination = MemoryCoordination(self.server)

    async def prepare(self) -> None:
        manifest = RunManifest(
            run="run", store="memory://", store_id="0" * 16, generation=1, format_version=FORMAT_VERSION
        )
        await self.coordination.put(KEYS.manifest, manifest.dump())

    def run(self) -> Run:
        machine = this_machine()
        machine = Machine("host", machine.pid, secrets.token_hex, machine.relay)
        coordination = MemoryCoordination(self.server, Faults(random.Random(len(self.tasks))))
        file = RunFile(
            run="run", store_id="0" * 16, created_at_us=0, config={}, model_folder="", prompts=1, held_out=0,
            fingerprints=PRINTS,
        )  # fmt: skip
        return Run(coordination, KEYS, self.storage, file, self.config, SystemClock(), machine)

    async def relay(self) -> str:
        """A new relay; its id."""
        before = set(await self.relays())
        run = self.run()
        work = relay_main(run, asyncio.Event(), serve_weights(run), IdleCommitter, relay_transports)
        task = asyncio.create_task(work)
        name = await self.until(lambda: self.new(before), "the relay joins")
        self.tasks[name] = task
        return str(name)

    async def new(self, before: set[str]) -> str | None:
        return next(iter(set(await self.relays()) - before), None)

    async def relays(self) -> list[str]:
        return [WorkerRecord.parse(kv.value).id for kv in (await self.coordination.range(KEYS.workers("relay"))).items]

    async def kill(self, relay: str) -> None:
        """Its connections end, and its lease with them."""
        task = self.tasks.pop(relay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 15.0) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                while not (result := await condition()):  # noqa: ASYNC110  the conditions are of many kinds
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s: {what}") from None
        return result

    async def status(self) -> ChainStatus:
        return await read_chain(self.coordination, KEYS)

    async def all_report(self, version: int) -> None:
        async def reported() -> bool:
            status = await self.status()
            return all(view.load and version in view.load.held for view in status.relays)

        await self.until(reported, f"all relays hold version {version}")

    async def chain_of(self, count: int) -> list[str]:
        async def there() -> list[str] | None:
            kv = await self.coordination.get(KEYS.chain)
            order = ChainRecord.parse(kv.value).order if kv else []
            return order if len(order) == count else None

        return list(await self.until(there, f"a chain of {count}"))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.prepare()
    yield cluster
    for name in list(cluster.tasks):
        await cluster.kill(name)


@pytest.fixture
async def publisher(cluster: Cluster) -> AsyncIterator[Publisher]:
    run = cluster.run()
    async with joined(run, "trainer") as member, Mirror(run.coordination, KEYS.workers("relay")) as relays:
        publisher = Publisher(run, await leading(run, member), relays)
        keeping = asyncio.create_task(publisher.keeper.run())
        yield publisher
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def leading(run: Run, member: Member) -> Ledger:
    leadership = await Election(run.coordination, member.session, KEYS.leader("trainer"), member.id).campaign()
    return Ledger(run.coordination, KEYS, member.id, leadership)


async def publish(publisher: Publisher, learner: FixedLearner, version: int) -> None:
    learner.version = version
    staged = await publisher.stage(learner)  # type: ignore[arg-type]
    assert staged is not None
    await publisher.announce(staged)


async def test_a_published_version_reaches_all_relays_and_masters_change(
    cluster: Cluster, publisher: Publisher
) -> None:
    first = await cluster.relay()
    second = await cluster.relay()
    assert await cluster.chain_of(2) == [first, second]
    learner = FixedLearner()
    await publish(publisher, learner, 0)
    await cluster.all_report(0)
    head = await publisher.published()
    assert head is not None and head.master == second, "the newest relay of this host is the trainer's"
    status = await cluster.status()
    assert [view.record.id for view in status.relays] == [second, first], "shown in the order of the newest version"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_chain(status))
    shown = console.export_text()
    assert "2 relays, chain epoch 2" in shown and "(master)" in shown

    third = await cluster.relay()
    await cluster.all_report(0)
    await cluster.kill(second)
    await cluster.chain_of(2)

    async def moved() -> bool:
        head = await publisher.published()
        return head is not None and head.master in (first, third)

    await cluster.until(moved, "another master")
    await publish(publisher, learner, 1)
    await cluster.all_report(1)
    spread = await publisher.spread()
    assert 0 < spread["broadcast_s"] < 15 and spread["hop_bytes_s"] > 0  # type: ignore[operator]


async def test_bytes_that_only_a_dead_relay_held_are_offered_again_by_the_trainer(
    cluster: Cluster, publisher: Publisher
) -> None:
    first = await cluster.relay()
    learner = FixedLearner()
    await publish(publisher, learner, 3)
    published = await publisher.published()
    await cluster.kill(first)
    second = await cluster.relay()
    await cluster.all_report(3)
    head = await publisher.published()
    assert published is not None and head == published.model_copy(update={"master": second})
    assert publisher.keeper.offered == 1


async def test_an_older_version_of_another_host_is_fetched_for_whoever_needs_it(
    cluster: Cluster, publisher: Publisher
) -> None:
    await cluster.relay()
    learner = FixedLearner()
    await publish(publisher, learner, 1)
    await cluster.all_report(1)
    await publish(publisher, learner, 2)
    late = await cluster.relay()
    await cluster.all_report(2)
    relays = (await cluster.coordination.range(KEYS.workers("relay"))).items
    source = await find_weights(cluster.run(), relays, 1)
    record = next(WorkerRecord.parse(kv.value) for kv in relays if WorkerRecord.parse(kv.value).id == late)
    assert source is not None and source.version == 1
    assert getattr(source, "socket", "") == record.endpoint.removeprefix("unix:")
    assert await find_weights(cluster.run(), relays, 0) is None


class HandClock(SystemClock):
    """Moved by the test."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
async def follows(cluster: Cluster) -> AsyncIterator[ChainMember]:
    """The part of a relay that follows etcd, beside an empty relay."""
    run = dataclasses.replace(cluster.run(), clock=HandClock())
    holdings = Holdings(chunk_bytes=1 << 20, retain=2)
    async with joined(cluster.run(), "relay") as member:
        yield ChainMember(run, member, holdings, Follower(holdings, {}, "r0", "host"), CommitterLives())
    await holdings.stop()


async def test_crashes_of_its_committer_are_in_what_a_relay_reports(follows: ChainMember) -> None:
    assert follows.load().committer is None
    follows.committers.ended(1, 0, ["KeyError: 'seq'"])
    told = RelayLoad.parse(follows.load().dump()).committer
    assert told is not None and (told.crashes, told.how) == (1, "ended with exit code 1: KeyError: 'seq'")


async def test_bits_that_drifted_are_kept_until_their_offer_is_seen(follows: ChainMember) -> None:
    """They are sealed first and offered then; what was never published is let go of."""
    holdings, clock = follows.holdings, follows.clock
    assert isinstance(clock, HandClock)
    arena = await holdings.reserve(LAYOUT)
    assert arena is not None
    info = await holdings.seal(arena, LAYOUT, 4)
    head = WeightsHead(version=4, digest="d", layout_digest="", bytes=1, master="")
    follows._published(head)
    clock.now += 0.9 * OFFER_S
    follows._published(head)
    assert holdings.newest == info
    follows.offers.items[f"{KEYS.offers_of(4)}{info.digest}"] = KeyValue("", "{}", 1, 1)
    clock.now += OFFER_S
    follows._published(head)
    assert holdings.newest == info
    follows.offers.items.clear()
    for _ in range(2):
        follows._published(head)
        clock.now += OFFER_S
    assert holdings.newest is None


async def test_a_relay_serves_under_its_settings(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("laminar.workers.relay.socket_folder", lambda: tmp_path)
    relay = {"chunk_mib": 1, "retain": 3, "memory_share": 0.4}
    cluster.config = Config.model_validate({"model": {"path": "m"}, "relay": relay})
    served = serve_weights(cluster.run())
    assert (served.holdings.retain, served.holdings.supply.share, served.holdings.chunk_bytes) == (3, 0.4, 1 << 20)


async def test_a_relay_forgets_when_it_heard_of_old_versions(follows: ChainMember) -> None:
    """The master has no hop of its own, after which it would."""
    for version in range(3 * MAX_HEARD):
        follows._hear(version)
    assert sorted(follows._heard) == list(range(2 * MAX_HEARD, 3 * MAX_HEARD))


async def test_strangers_do_not_hide_what_went_wrong(follows: ChainMember) -> None:
    holdings = follows.holdings
    holdings.record_error("version 3 is damaged")
    for i in range(100):
        holdings.record_refusal(f"refused 10.0.0.66:{i}: it did not prove the secret")
    load = follows.load()
    assert (load.errors, load.refusals) == (["version 3 is damaged"], 100)
    head = WeightsHead(version=9, digest="d", layout_digest="", bytes=1, master="")
    lines = shown(0, head, load)
    assert any(line.endswith(": version 3 is damaged") for line in lines)
    assert any("100 connections refused, the last one: refused 10.0.0.66:99: it did not" in line for line in lines)


async def test_a_relay_reports_since_when_and_why_a_version_does_not_come(follows: ChainMember) -> None:
    clock, hindrances = follows.clock, follows.follower.hindrances
    assert isinstance(clock, HandClock)
    assert follows.load().stall is None
    hindrances.wants(4, 0.0)
    hindrances.failed("r1", "Connection refused", 10.0, reached=False)
    clock.now, before = 60.0, clock.now_us()
    load = follows.load()
    after = clock.now_us()
    (trouble,) = load.troubles
    assert (trouble.relay, trouble.reason, trouble.since) == ("r1", "Connection refused", trouble.at)
    assert load.stall is not None and (load.stall.version, load.stall.reason) == (4, "r1: Connection refused")
    assert load.stall.waits == "it is asked for again soon" and load.stall.at == trouble.at
    assert before - 60.1e6 <= load.stall.since <= after - 59.9e6 and before - 50.1e6 <= trouble.at <= after - 49.9e6
    hindrances.progress(4, 60.0)
    hindrances.reached("r1", 60.0)
    assert follows.load() == follows.load().model_copy(update={"stall": None, "troubles": []})


async def test_however_often_a_transfer_was_repaired_its_report_stays_short(follows: ChainMember) -> None:
    """A link that comes and goes for hours repairs one transfer thousands of times; etcd's values are bounded."""
    repairs = tuple(Repair(f"r{i}", f"r{i + 1}", "closed the connection", 0.25) for i in range(5000))
    measures = Measures(peers=[f"r{i}" for i in range(5001)])
    header = VersionHeader(VersionName(8, "d" * 64), LAYOUT, 1 << 20, (bytes(32),))
    follows.follower.hops.append(measures.hop(header, repairs, 60.0))
    last = follows.load().hop
    assert last is not None and last.repaired == 5000
    assert last.repairs == [f"r{i} -> r{i + 1} in 0.250 s (closed the connection)" for i in range(4996, 5000)]
    assert last.peers == ["r4996", "r4997", "r4998", "r4999", "r5000"]
    load = follows.load()
    shown_lines = shown(0, None, load, load.model_copy(update={"hop": hop(8)}))
    assert sum("4996 repairs of version 8 before these:" in line for line in shown_lines) == 1


def hop(version: int) -> RelayHop:
    return RelayHop(
        version=version, peers=["relay-h0-1-aaaaaa"], bytes=4_000_000, received=2_000_000, seconds=0.5, lag_s=0.75,
        piece_bytes=1 << 20,
    )  # fmt: skip


def shown(now_us: int, head: WeightsHead | None, *loads: RelayLoad) -> list[str]:
    records = [
        WorkerRecord(kind="relay", id=f"relay-h{i}-1-{c * 6}", host=f"h{i}", pid=1, started_at_us=0)
        for i, c in enumerate("abcdef"[: len(loads)])
    ]
    views = tuple(RelayView(record, load) for record, load in zip(records, loads, strict=True))
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(render_chain(ChainStatus("run", 3, head, views, now_us)))
    return console.export_text().splitlines()


def test_the_master_shows_no_hop_old_values_name_their_version_and_what_is_stuck_says_why() -> None:
    head = WeightsHead(version=9, digest="d", layout_digest="", bytes=1, master="relay-h0-1-aaaaaa")
    now = 1_000_000_000
    stall = RelayStall(
        version=9, since=now - 62_000_000, waits="nobody gives it", reason="x: refused", at=now - 3_000_000
    )
    trouble = RelayTrouble(
        relay="relay-h0-1-aaaaaa", reason="refused", since=now - 60_000_000, at=now - 3_000_000
    )
    lines = shown(
        now, head,
        RelayLoad(epoch=3, held={9: "d"}, hop=hop(8)),
        RelayLoad(epoch=3, held={9: "d"}, hop=hop(9)),
        RelayLoad(epoch=3, held={8: "c"}, hop=hop(8), stall=stall, troubles=[trouble]),
    )  # fmt: skip
    master, second, third = lines[3:6]
    assert "(master)" in master and "0.75" not in master and " 8 " not in master and master.count("–") == 5
    assert " 8 " in second and "0.75" in second and "(of" not in second
    assert "0.75 (of 8)" in third
    assert any(
        "version 9 does not come, nothing did for 1:02: nobody gives it; last error 0:03 ago: x: refused" in line
        for line in lines[6:]
    )
    assert any("fails for 1:00, last 0:03 ago: refused" in line for line in lines[6:])


async def test_a_broadcast_that_is_stuck_does_not_show_how_fast_the_one_before_it_was(
    cluster: Cluster, publisher: Publisher
) -> None:
    async def report(relay: str, load: RelayLoad) -> None:
        await cluster.coordination.put(KEYS.load("relay", relay), load.dump())

    assert await publisher.spread() == {}
    await report("a", RelayLoad(epoch=1, held={8: "c"}))
    await report("b", RelayLoad(epoch=1, held={8: "c"}, hop=hop(8)))
    assert (await publisher.spread())["broadcast_s"] == 0.75
    stall = RelayStall(version=9, since=SystemClock().now_us() - 100_000_000, waits="nobody gives it")
    await report("b", RelayLoad(epoch=1, held={8: "c"}, hop=hop(8), stall=stall))
    assert 100 <= (await publisher.spread())["broadcast_s"] < 1000  # type: ignore[operator]
    await report("b", RelayLoad(epoch=1, held={}, stall=stall))
    assert 100 <= (await publisher.spread())["broadcast_s"] < 1000  # type: ignore[operator]


def test_sockets_of_relays_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.workers.relay.socket_folder", lambda: tmp_path)
    dead, living, young, others = (socket_path(run) for run in ("run", "run", "run", "other"))
    sockets = {path: socket.socket(socket.AF_UNIX) for path in (dead, living, young, others)}
    for path, sock in sockets.items():
        sock.bind(str(path))
        if path == living:
            sock.listen()
        if path != young:
            os.utime(path, (0, 0))
    remove_stale("run")
    assert sorted(tmp_path.iterdir()) == sorted([living, young, others])
    for sock in sockets.values():
        sock.close()


def test_a_folder_that_another_user_made_first_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither chmod nor another name helps: only its owner may do the one, and the other is the user's number."""
    other = os.getuid() + 1
    (tmp_path / f"laminar-{other}").mkdir(mode=0o700)
    monkeypatch.setattr("os.getuid", lambda: other)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"belongs to user .* export XDG_RUNTIME_DIR=") as refused:
        make_private(socket_folder())
    assert "chmod" not in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "mine"))
    make_private(socket_folder())
    assert socket_folder().parent == tmp_path / "mine" and stat.S_IMODE(socket_folder().stat().st_mode) == 0o700


async def test_the_secret_is_made_once_and_shown_nowhere(cluster: Cluster) -> None:
    first, second = cluster.run(), cluster.run()
    secret = await run_secret(first.coordination, KEYS, first.machine)
    assert await run_secret(second.coordination, KEYS, second.machine) == secret and len(secret) == 64
    await cluster.relay()

    async def reported() -> bool:
        return all(view.load is not None for view in (await cluster.status()).relays)

    await cluster.until(reported, "a report")
    values = {kv.key: kv.value for kv in (await cluster.coordination.range(KEYS.root)).items}
    assert [key for key, value in values.items() if secret.decode() in value] == [KEYS.secret]
    await cluster.coordination.put(KEYS.secret, "short")
    with pytest.raises(StoreError, match="no usable secret"):
        await run_secret(first.coordination, KEYS, first.machine)


def record(relay: str, host: str, rack: str = "") -> KeyValue:
    worker = WorkerRecord(kind="relay", id=relay, host=host, pid=1, started_at_us=0, rack=rack)
    return KeyValue(KEYS.worker("relay", relay), worker.dump(), 1, 1)


def test_a_new_epoch_is_planned_only_when_relays_come_or_go() -> None:
    first = planned([record("a", "h1", "r1"), record("b", "h2", "r2")], None)
    assert first == ChainRecord(epoch=1, order=["a", "b"])
    assert planned([record("b", "h2", "r2"), record("a", "h1", "r1")], first) is None
    assert planned([record("b", "h2"), record("c", "h3")], first) == ChainRecord(epoch=2, order=["b", "c"])
    racked = planned([record("a", "h1", "r1"), record("b", "h2", "r2"), record("c", "h3", "r1")], first)
    assert racked is not None and racked.order == ["a", "c", "b"]
    assert planned([], None) == ChainRecord(epoch=1, order=[])


def test_the_next_master_is_the_first_that_holds_the_published_bytes() -> None:
    head = WeightsHead(version=7, digest="d", layout_digest="", bytes=1, master="gone")
    chain = ChainRecord(epoch=3, order=["a", "b", "c"])

    def load(relay: str, held: dict[int, str]) -> KeyValue:
        return KeyValue(KEYS.load("relay", relay), RelayLoad(epoch=3, held=held).dump(), 1, 1)

    assert elected(head, chain, [load("a", {6: "c"}), load("b", {7: "other"}), load("c", {6: "c", 7: "d"})]) == "c"
    assert elected(head, chain, [load("a", {6: "c"})]) is None


def test_where_a_relay_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening(RelayConfig(), "node1") == ("127.0.0.1", "")
    assert listening(RelayConfig(bind="0.0.0.0"), "node1") == ("0.0.0.0", "node1")
    assert listening(RelayConfig(bind="127.0.0.0/8"), "node1") == ("127.0.0.1", "")
    monkeypatch.setenv("LAMINAR_RELAY_BIND", "10.0.0.7")
    monkeypatch.setenv("LAMINAR_RELAY_ADVERTISE", "node1-fast")
    assert listening(RelayConfig(bind="0.0.0.0"), "node1") == ("10.0.0.7", "node1-fast")
    with pytest.raises(ConfigError, match="neither an address nor a network"):
        address_within("10.0.0.0/99")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.0/24"):
        address_within("203.0.113.0/24")
