"""The parts of the RDMA transport that need no device: choice of port and address, limits, and what a peer may say."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections.abc import Iterator

import pytest

from laminar.errors import ConfigError, WeightsError
from laminar.relay.transport import selection, verbs_device, verbs_talk
from laminar.relay.transport.base import FabricFailed, LinkBroken
from laminar.relay.transport.selection import open_transports
from laminar.relay.transport.verbs_device import ETHERNET, REGION, Gid, NoRdma, Port, check_locked_memory, select
from laminar.relay.transport.verbs_queue import QueueEnd, Target
from laminar.relay.transport.verbs_words import decode_queue, encode_queue

LINK_LOCAL = Gid(0, "fe80:0000:0000:0000:2890:adff:fee5:2f3e", 2)
OLD_IPV4 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a01:0005", 1)
IPV4 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a01:0005", 2)
OTHER_IPV4 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a02:0005", 2)
CONTROL = {"secret": b"s" * 32, "run": "demo", "relay": "r0"}


def port(device: str, *gids: Gid) -> Port:
    return Port(device, 1, ETHERNET, 3, 1 << 30, 0, gids)


def test_the_address_that_reaches_furthest_is_taken_and_the_newer_roce() -> None:
    assert select([port("a", LINK_LOCAL, OLD_IPV4, IPV4)])[1] == IPV4
    assert select([port("a", LINK_LOCAL, OLD_IPV4)])[1] == LINK_LOCAL


def test_the_port_with_the_relays_own_address_is_taken() -> None:
    ports = [port("a", LINK_LOCAL, OTHER_IPV4), port("b", LINK_LOCAL, OLD_IPV4, IPV4)]
    assert select(ports, address="10.1.0.5") == (ports[1], IPV4)
    assert select(ports, address="0.0.0.0") == (ports[0], OTHER_IPV4), "else the first"


@pytest.mark.parametrize("wanted", ["b", "b:1"])
def test_a_named_device_is_taken(wanted: str) -> None:
    ports = [port("a", IPV4), port("b", LINK_LOCAL)]
    assert select(ports, wanted=wanted, address="10.1.0.5") == (ports[1], LINK_LOCAL)


def test_a_device_that_is_named_but_not_there_is_an_error() -> None:
    with pytest.raises(NoRdma, match="names c"):
        select([port("a", IPV4)], wanted="c")
    with pytest.raises(NoRdma, match="no address yet"):
        select([port("a")])


@pytest.fixture
def small_limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, before[1]))
    yield 8 << 20
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_the_limit_of_locked_memory_is_named_with_its_remedy(small_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may lock all, which hides the limit."""
    monkeypatch.setattr(verbs_device, "_may_lock_all", lambda: False)
    check_locked_memory(small_limit)
    with pytest.raises(FabricFailed, match=rf"limit of locked memory is {small_limit}.*ulimit -l unlimited"):
        check_locked_memory(1, registered=small_limit)


def test_without_rdma_weights_travel_by_tcp_unless_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here() -> list[Port]:
        raise NoRdma("there is no RDMA device")

    monkeypatch.setattr(selection, "active_ports", none_here)
    offered = open_transports("auto", bind="0.0.0.0", **CONTROL)  # type: ignore[arg-type]
    assert [transport.name for transport in offered] == ["tcp"]
    with pytest.raises(ConfigError, match=r"relay.transport.*no RDMA device"):
        open_transports("verbs", bind="0.0.0.0", **CONTROL)  # type: ignore[arg-type]


def test_this_machines_devices_are_found_or_their_absence_is_told() -> None:
    try:
        assert verbs_device.active_ports()
    except NoRdma as e:
        assert any(word in str(e) for word in ("pyverbs", "device", "port"))


END = QueueEnd(0x11, 0xABCDEF, "fe80:0000:0000:0000:0000:0000:0000:0001", 0, 5, ETHERNET)


def test_an_askers_end_and_memory_come_back_as_they_were_sent() -> None:
    target = Target(1 << 46, REGION + 5, (7, 8))
    assert decode_queue(encode_queue(END, target), REGION + 5) == (END, target)


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 4}, {"keys": []}, {"keys": [1, 2, 3]}, {"keys": [-1, 2]}, {"address": (1 << 64) - 2}, {"address": -1},
        {"gid": "not an address"}, {"gid": "x" * 100}, {"gid": None}, {"number": 1 << 24}, {"mtu": 0}, {"mtu": 6},
        {"sequence": 1.5}, {"lid": 1 << 16}, {"link_layer": True},
    ],
    ids=str,
)  # fmt: skip
def test_nonsense_of_an_asker_is_refused(change: dict[str, object]) -> None:
    message = json.loads(encode_queue(END, Target(1 << 46, REGION + 5, (7, 8)))) | change
    with pytest.raises(WeightsError):
        decode_queue(json.dumps(message).encode(), REGION + 5)


def test_random_bytes_of_an_asker_are_refused() -> None:
    generator = random.Random(9)
    good = encode_queue(END, Target(1 << 46, 5, (7,)))
    for _ in range(2000):
        damaged = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        try:
            decode_queue(bytes(damaged), 5)
        except WeightsError:
            continue


async def test_after_the_peers_last_word_what_is_missing_is_waited_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs_talk, "LAST_WORDS_S", 0.2)

    async def said() -> None:
        await asyncio.sleep(0.01)

    assert (
        await verbs_talk.guarded(asyncio.create_task(said()), asyncio.sleep(0.05, "late"), "the peer is done") == "late"
    )
    async with asyncio.timeout(5.0):
        with pytest.raises(LinkBroken, match="the peer is done within"):
            await verbs_talk.guarded(asyncio.create_task(said()), asyncio.Event().wait(), "the peer is done")
