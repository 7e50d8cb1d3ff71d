"""A chain of relays over loopback: who gets what from whom, and what becomes of it when relays die."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from typing import Any

import pytest

from laminar.errors import WeightsError
from laminar.relay import transfer
from laminar.relay.arena import Arena, ArenaState
from laminar.relay.follower import ChainView, Peer
from laminar.relay.memory import INCOMING
from laminar.relay.transport import tcp
from laminar.relay.transport.base import VersionName

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
Node = Any
CHUNKS = 48


async def of(chain: Chain, count: int, *, slow_s: float = 0.0) -> list[Node]:
    for i in range(count):
        await chain.add(f"r{i}")
    chain.nodes[0].slow_s = slow_s
    chain.plan(chain.nodes[0])
    return list(chain.nodes)


def pieces_of(node: Node) -> int:
    transfer = node.follower.receiving
    missing = transfer.pull.missing if transfer else None
    return 0 if missing is None else CHUNKS - len(missing)


async def half_way(chain: Chain, *nodes: Node) -> None:
    await chain.until(lambda: all(pieces_of(n) > CHUNKS // 4 for n in nodes), "a quarter of the broadcast")


def sound(chain: Chain, name: VersionName, source: bytes) -> None:
    assert all(node.bytes_of(name) == source for node in chain.nodes)


async def test_each_relay_gets_a_version_from_the_one_before(chain: Chain) -> None:
    nodes = await of(chain, 4)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    sound(chain, name, nodes[0].bytes_of(name))
    assert [node.follower.hops[-1].peers for node in nodes[1:]] == [("r0",), ("r1",), ("r2",)]


async def test_all_relays_make_room_for_the_first_version_at_once(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a large model that takes longer than its way: one after the other, each would wait for all before it."""
    nodes = await of(chain, 4)
    name = await nodes[0].publish(1)
    await chain.until(lambda: nodes[0].holdings.pool.count(ArenaState.FREE) == INCOMING, "the master has its arenas")
    others = threading.Barrier(3)
    create = Arena.create

    def together(capacity: int, *, reserve: float = 0.0) -> Arena:
        try:
            others.wait(60)
        except threading.BrokenBarrierError:
            raise WeightsError("the others did not make room meanwhile") from None
        return create(capacity, reserve=reserve)

    monkeypatch.setattr(Arena, "create", together)
    chain.announce(name)
    await chain.until_all_hold(name, 100.0)
    sound(chain, name, nodes[0].bytes_of(name))


async def test_who_makes_room_for_longer_than_its_peer_waits_asks_that_peer_again(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "IDLE_S", 0.2)
    monkeypatch.setattr(transfer, "FRESH_S", 0.1)
    nodes = await of(chain, 2)
    name = await nodes[0].publish(1)
    await chain.until(lambda: nodes[0].holdings.pool.count(ArenaState.FREE) == INCOMING, "the master has its arenas")
    closed = threading.Event()
    create = Arena.create

    def long(capacity: int, *, reserve: float = 0.0) -> Arena:
        closed.wait(60)
        return create(capacity, reserve=reserve)

    monkeypatch.setattr(Arena, "create", long)
    chain.announce(name)
    await chain.until(lambda: nodes[1].holdings.pool.creating == 1, "room is made", 60.0)
    await chain.until(lambda: len(nodes[0].transport._tasks) == 1, "only accepting is left, the peer has closed", 60.0)
    closed.set()
    await chain.until_all_hold(name, 60.0)
    (hop,) = nodes[1].follower.hops
    assert hop.peers == ("r0",) and not hop.repairs and not nodes[1].holdings.errors


async def test_a_version_flows_through_relays_that_do_not_have_all_of_it(chain: Chain) -> None:
    nodes = await of(chain, 4, slow_s=0.01)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await half_way(chain, nodes[3])
    assert not nodes[1].holdings.has(name), "the second passes on what it has"
    await chain.until_all_hold(name)


async def test_the_trainer_may_publish_at_any_relay(chain: Chain) -> None:
    nodes = await of(chain, 3)
    name = await nodes[2].publish(1)
    chain.plan(nodes[2])
    chain.announce(name)
    await chain.until_all_hold(name)
    assert nodes[0].follower.hops[-1].peers == ("r2",) and nodes[1].follower.hops[-1].peers == ("r0",)


@pytest.mark.parametrize("victims", [(1,), (2,), (3,), (1, 2), (1, 3)], ids=str)
async def test_relays_that_die_within_a_broadcast_are_gone_round_at_once(
    chain: Chain, victims: tuple[int, ...]
) -> None:
    """No new epoch is needed: the broken connection says it."""
    nodes = await of(chain, 5, slow_s=0.01)
    name = await nodes[0].publish(1)
    source = nodes[0].bytes_of(name)
    chain.announce(name)
    await half_way(chain, *nodes[1:])
    kept = {node.name: pieces_of(node) for node in nodes}
    await chain.kill(*(nodes[i] for i in victims))
    await chain.until_all_hold(name)
    sound(chain, name, source)
    repairs = [repair for node in chain.nodes[1:] for repair in node.follower.hops[-1].repairs]
    assert all(repair.seconds < 1.0 for repair in repairs)
    assert bool(repairs) == (victims != (4,)) and all(kept[node.name] > 0 for node in chain.nodes[1:])


async def test_the_masters_death_before_anybody_has_all_leaves_what_came_and_the_next_master_sends_the_rest(
    chain: Chain,
) -> None:
    nodes = await of(chain, 3, slow_s=0.01)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await half_way(chain, nodes[2])
    await chain.kill(nodes[0])
    had = pieces_of(nodes[1])
    assert 0 < had < CHUNKS
    chain.plan()
    await asyncio.sleep(0.3)
    assert not nodes[1].holdings.has(name) and pieces_of(nodes[1]) >= had, "complete or absent, and nothing is lost"
    again = await chain.add("r0-restarted")
    assert await again.publish(1) == name, "the trainer offers the same bytes again"
    chain.plan(again)
    chain.announce(name)
    await chain.until_all_hold(name)
    sound(chain, name, again.bytes_of(name))
    assert nodes[1].follower.hops[-1].peers == ("r0", "r0-restarted")


async def test_the_masters_death_after_the_second_has_all_is_no_loss(chain: Chain) -> None:
    nodes = await of(chain, 3)
    nodes[1].slow_s = 0.01
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until(lambda: nodes[1].holdings.has(name), "the second has it")
    await chain.kill(nodes[0])
    await chain.until_all_hold(name)


async def test_a_frozen_relay_is_noticed_by_its_silence_and_only_by_the_one_after_it(chain: Chain) -> None:
    nodes = await of(chain, 4, slow_s=0.02)
    valve = await chain.valve(nodes[1])
    chain.plan()
    name = await nodes[0].publish(1)
    chain.announce(name)
    await half_way(chain, nodes[3])
    valve.shut()
    await chain.until_all_hold(name)
    assert nodes[2].follower.hops[-1].peers == ("r1", "r0")
    assert nodes[3].follower.hops[-1].peers == ("r2",), "the relay after it lived and said so"


async def test_damaged_bytes_are_not_passed_on_and_come_from_another(chain: Chain) -> None:
    nodes = await of(chain, 2)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    with nodes[1].holdings.get(1).arena.buffer(64) as buffer:
        buffer[7] ^= 1
    late = await chain.add("late")
    chain.plan()
    chain.announce(name)
    await chain.until_all_hold(name)
    assert late.bytes_of(name) == nodes[0].bytes_of(name)
    assert late.follower.hops[-1].peers == ("r1", "r0")
    assert any("chunk 0 of version 1" in error and "other bytes" in error for error in late.holdings.errors)


async def test_a_late_joiner_catches_up_from_its_neighbour(chain: Chain) -> None:
    nodes = await of(chain, 2)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    late = await chain.add("late")
    chain.plan()
    chain.announce(name)
    await chain.until_all_hold(name)
    assert late.follower.hops[-1].peers == ("r1",)


async def test_a_late_joiner_that_is_placed_before_the_one_it_gets_from_does_not_wait_for_it(chain: Chain) -> None:
    """Nobody died: one connection broke, and each of the two would wait for the other for ever."""
    first, last = await of(chain, 2, slow_s=0.02)
    name = await first.publish(1)
    chain.announce(name)
    await half_way(chain, last)
    late = await chain.add("late")
    chain.plan()
    chain.announce(name)
    await chain.until(lambda: pieces_of(late) > 0, "it gets from the last")
    chain.nodes[:] = [first, late, last]
    chain.plan()
    last.follower.receiving._peers["r0"].links[0]._channel._sock.shutdown(socket.SHUT_RDWR)
    await chain.until_all_hold(name, 4.0)
    assert "r1" not in late.follower.hops[-1].peers[1:]


async def test_a_version_under_way_is_finished_before_a_newer_one_is_begun(chain: Chain) -> None:
    """A link slower than the trainer would else never complete a version."""
    nodes = await of(chain, 3, slow_s=0.01)
    first = await nodes[0].publish(1)
    chain.announce(first)
    await half_way(chain, nodes[2])
    for version in (2, 3):
        newest = await nodes[0].publish(version)
        chain.announce(newest)
    await chain.until_all_hold(newest)
    for node in nodes[1:]:
        assert [hop.name.version for hop in node.follower.hops] == [1, 3], "and those between are skipped"


async def test_a_relay_without_a_free_arena_skips_the_version_and_those_after_it_do_not_wait(chain: Chain) -> None:
    nodes = await of(chain, 3)
    arenas = [await nodes[1].holdings.reserve(content_layout()) for _ in range(2)]
    name = await nodes[0].publish(1)
    chain.announce(name)
    await chain.until(lambda: nodes[2].holdings.has(name), "the third has it")
    assert nodes[2].follower.hops[-1].peers == ("r0",) and not nodes[1].holdings.has(name)
    for arena in arenas:
        nodes[1].holdings.release(arena)
    await chain.until_all_hold(name)


def content_layout() -> Any:
    from laminar.relay.layout import Layout

    return Layout.from_tensors({"w": ("uint8", (1000,))})


async def test_an_older_version_is_fetched_from_whoever_holds_it(chain: Chain) -> None:
    nodes = await of(chain, 3)
    old = await nodes[2].publish(1)
    newest = await nodes[0].publish(5)
    chain.announce(newest)
    await chain.until_all_hold(newest)
    await nodes[1].follower.fetch(old, 5.0)
    assert nodes[1].bytes_of(old) == nodes[2].bytes_of(old)
    assert nodes[1].holdings.newest.version == 5
    with pytest.raises(WeightsError, match=r"version 3 \(000.* could not be fetched"):
        await nodes[1].follower.fetch(VersionName(3, "0" * 64), 0.3)


async def test_readers_of_one_host_that_want_the_same_older_version_share_its_way(chain: Chain) -> None:
    first, second = await of(chain, 2)
    old, newest = await first.publish(1), await first.publish(5)
    chain.announce(newest)
    await chain.until_all_hold(newest)
    first.slow_s = 0.005
    fetch = second.follower.fetch
    with pytest.raises(WeightsError, match="could not be fetched"):
        await asyncio.gather(fetch(old, 0.05), *(waiting := [asyncio.create_task(fetch(old, 10.0)) for _ in range(2)]))
    await asyncio.gather(*waiting)
    assert [hop.name for hop in second.follower.hops] == [newest, old], "though the time of the first to ask was short"


async def test_a_fetch_whose_time_ends_while_its_link_closes_has_what_came(chain: Chain) -> None:
    """And leaves neither an arena nor a pin behind."""
    first, second = await of(chain, 2)
    old, newest = await first.publish(1), await first.publish(5)
    chain.announce(newest)
    await chain.until_all_hold(newest)
    transfers: list[Any] = []
    connect, run = second.transport.connect, second.follower._run

    async def slow_to_close(*args: Any, **options: Any) -> Any:
        link = await connect(*args, **options)
        close = link.close

        async def closing() -> None:
            asyncio.get_running_loop().call_soon(fetching.cancel)
            await asyncio.sleep(0.1)
            await close()

        link.close = closing
        return link

    async def remembered(transfer: Any) -> Any:
        transfers.append(transfer)
        return await run(transfer)

    second.transport.connect, second.follower._run = slow_to_close, remembered
    fetching = asyncio.create_task(second.follower.fetch(old, 5.0))
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert second.holdings.has(old) and not transfers[0]._leaving
    second.holdings.validate()
    assert all(arena.pins == 0 for arena in second.holdings.pool.arenas)


async def test_a_version_that_is_coming_as_the_newest_is_waited_for(chain: Chain) -> None:
    nodes = await of(chain, 2, slow_s=0.005)
    name = await nodes[0].publish(1)
    chain.announce(name)
    await half_way(chain, nodes[1])
    await nodes[1].follower.fetch(name, 10.0)
    assert len(nodes[1].follower.hops) == 1


async def test_a_version_offered_with_other_bits_will_do(chain: Chain) -> None:
    """A replay drifted and the published bits are nowhere any more."""
    nodes = await of(chain, 2)
    lost = VersionName(4, "0" * 64)
    offered = await nodes[0].publish(4)
    chain.announce(lost)
    await asyncio.sleep(0.1)
    assert not nodes[1].holdings.has(offered)
    chain.announce(lost, offered)
    await chain.until(lambda: nodes[1].holdings.has(offered), "the offered bits came")


async def test_a_relay_that_listens_for_its_own_host_only_is_named(chain: Chain) -> None:
    (node,) = await of(chain, 1)
    far = Peer("elsewhere", {"tcp": "127.0.0.1:7000"})
    node.follower.see(ChainView(9, ("far", "r0"), {"far": far}, "far"))
    node.follower.published([VersionName(1, "0" * 64)])
    await chain.until(lambda: bool(node.holdings.errors), "an error")
    assert "relay far on elsewhere listens for its own host only" in node.holdings.errors[-1]


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_dies_whenever_the_rest_has_the_right_bytes(chain: Chain, seed: int) -> None:
    """Random deaths, joins and publishes; the trainer's relay lives."""
    rng = random.Random(seed)
    nodes = await of(chain, 5, slow_s=0.003)
    for version in range(1, 5):
        name = await nodes[0].publish(version)
        source = nodes[0].bytes_of(name)
        chain.announce(name)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(rng.uniform(0, 0.1))
            others = [node for node in chain.nodes if node is not nodes[0]]
            if rng.random() < 0.6 and len(others) > 1:
                await chain.kill(*rng.sample(others, rng.choice([1, 1, 2]) if len(others) > 2 else 1))
            else:
                await chain.add(f"j{version}-{rng.randrange(1000)}")
                rng.shuffle(chain.nodes)
            if rng.random() < 0.7:
                chain.plan()
                chain.announce(name)
        chain.plan()
        chain.announce(name)
        await chain.until_all_hold(name)
        sound(chain, name, source)


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_a_neighbour_that_cannot_be_reached_is_shown_while_a_pull_fails_and_told_once(
    chain: Chain, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("laminar.relay.hindrance.STALLED_S", 0.5)
    nodes = await of(chain, 2)
    right = chain.endpoints["r0"]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if how == "silent":
            nobody.listen()
        chain.endpoints["r0"] = f"127.0.0.1:{nobody.getsockname()[1]}"
        chain.plan(nodes[0])
        name = await nodes[0].publish(1)
        chain.announce(name)
        hindrances = nodes[1].follower.hindrances

        def stalled() -> bool:
            stall = hindrances.stall(asyncio.get_running_loop().time())
            return stall is not None and stall.reason.startswith("r0: ")

        await chain.until(stalled, "a stall with a reason")
        await chain.until(lambda: any(t.at > t.since for t in hindrances.troubles()), "a second try")
    (trouble,) = hindrances.troubles()
    assert trouble.relay == "r0" and not trouble.reached
    assert nodes[1].follower.waits_for() in ("nobody gives it", "those in the chain are asked in turn, 1 in all")
    assert len(told(caplog, "relay r0 cannot be reached")) == 1
    chain.endpoints["r0"] = right
    chain.plan(nodes[0])
    await chain.until_all_hold(name)
    assert hindrances.troubles() == [] and len(told(caplog, "relay r0 is reached again, after")) == 1
    await chain.until(lambda: hindrances.stall(float("inf")) is None, "nothing is wanted any more")


async def test_a_version_that_nobody_gives_names_who_refused(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.relay.hindrance.STALLED_S", 0.1)
    nodes = await of(chain, 2)
    await nodes[0].publish(5)
    chain.plan(nodes[0])
    chain.announce(VersionName(4, "d" * 64))
    hindrances = nodes[1].follower.hindrances
    await chain.until(lambda: bool(hindrances.troubles()), "a refusal")
    (trouble,) = hindrances.troubles()
    assert trouble.reached and "is not here" in trouble.reason
    await chain.until(lambda: hindrances.stall(asyncio.get_running_loop().time()) is not None, "a stall")


async def test_a_relay_alone_in_the_chain_says_that_there_is_nobody_to_ask(chain: Chain) -> None:
    nodes = await of(chain, 1)
    chain.announce(VersionName(4, "d" * 64))
    await chain.until(lambda: nodes[0].follower.receiving is not None, "a pull")
    assert nodes[0].follower.waits_for() == "no relay is in the chain that it could be asked of"
