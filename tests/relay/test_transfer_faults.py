"""What this host lacks, or what nobody foresaw, within a transfer: it is told, and the version comes once it can."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from laminar.errors import ConfigError
from laminar.relay.pull import Pull
from laminar.relay.receiving import Checks
from laminar.relay.transport.base import LinkBroken, VersionHeader
from laminar.relay.transport.tcp import SocketLink, TcpTransport

Chain = Any
"""`conftest.Chain`, which pytest loads by its path."""
Node = Any
NO_THREAD = RuntimeError("can't start new thread")
NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Failing:
    """`real`, but its first `times` calls raise `error`."""

    def __init__(self, real: Callable[..., Any], error: BaseException, times: int = 2) -> None:
        self.real, self.error, self.times = real, error, times
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return self.real(*args, **options)

    def method(self) -> Callable[..., Any]:
        """To be put in a class."""
        return lambda *args, **options: self(*args, **options)


async def two(chain: Chain) -> tuple[Node, Node]:
    nodes = [await chain.add(f"r{i}") for i in range(2)]
    chain.plan(nodes[0])
    return nodes[0], nodes[1]


async def test_without_descriptors_a_version_waits_is_told_once_and_comes_when_there_are_some(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.relay.hindrance.STALLED_S", 0.1)
    master, relay = await two(chain)
    name = await master.publish(1)
    create = Failing(os.memfd_create, NO_DESCRIPTOR, times=1 << 30)
    monkeypatch.setattr(os, "memfd_create", create)
    chain.announce(name)

    def stalled() -> bool:
        stall = relay.follower.hindrances.stall(asyncio.get_running_loop().time())
        return stall is not None and "Too many open files; let this process open more files" in stall.reason

    await chain.until(stalled, "a stall with its reason")
    await chain.until(lambda: create.calls > 6, "further tries")
    assert len(relay.holdings.errors) == 1 and "cannot allocate an arena" in relay.holdings.errors[0]
    create.times = 0
    await chain.until_all_hold(name)
    assert relay.bytes_of(name) == master.bytes_of(name)


@pytest.mark.parametrize("error", [NO_DESCRIPTOR, NO_THREAD, ConfigError("no meminfo"), KeyError("odd")], ids=repr)
async def test_whatever_a_reservation_fails_for_is_told_and_it_is_tried_again(chain: Chain, error: Exception) -> None:
    master, relay = await two(chain)
    relay.holdings.begin = Failing(relay.holdings.begin, error)
    name = await master.publish(1)
    chain.announce(name)
    await chain.until(lambda: bool(relay.holdings.errors), "an error")
    await chain.until_all_hold(name)
    assert [repr(error) in told for told in relay.holdings.errors] == [True], "once for its kind"


@pytest.mark.parametrize(
    ("owner", "method"),
    [(VersionHeader, "check"), (Checks, "check"), (SocketLink, "find"), (Pull, "answered"), (Pull, "arrived")],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
@pytest.mark.parametrize("error", [NO_DESCRIPTOR, NO_THREAD], ids=["descriptors", "threads"])
async def test_whatever_a_peers_task_fails_for_is_told_and_the_peer_is_asked_again(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception
) -> None:
    failing = Failing(getattr(owner, method), error)
    monkeypatch.setattr(owner, method, failing.method())
    master, relay = await two(chain)
    name = await master.publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    assert relay.bytes_of(name) == master.bytes_of(name) and failing.calls > failing.times
    assert any(repr(error) in told for told in relay.holdings.errors)
    assert len(relay.holdings.errors) <= 3, "once for its kind, and where bytes were coming with their version"


async def test_a_fault_while_time_passes_ends_the_pull_and_the_next_one_brings_the_version(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, relay = await two(chain)
    relay.transport.connect = Failing(relay.transport.connect, LinkBroken("not yet"), times=1)
    monkeypatch.setattr(Pull, "tick", Failing(Pull.tick, KeyError("odd"), times=1).method())
    name = await master.publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    assert any("a pull was given up: KeyError('odd')" in told for told in relay.holdings.errors)


async def test_a_connection_that_cannot_be_closed_is_told_and_keeps_nothing_from_coming(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, relay = await two(chain)
    close = SocketLink.close

    async def odd(link: SocketLink) -> None:
        await close(link)
        raise NO_DESCRIPTOR

    monkeypatch.setattr(SocketLink, "close", odd)
    for version in (1, 2):
        name = await master.publish(version)
        chain.announce(name)
        await chain.until_all_hold(name)
    assert any("a connection was not closed" in told and "Too many" in told for told in relay.holdings.errors)


async def test_a_check_that_fails_oddly_after_its_peer_was_left_is_told(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, relay = await two(chain)
    began, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def check(checks: Checks, left: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10.0)
        raise NO_DESCRIPTOR

    monkeypatch.setattr(Checks, "check", check)
    name = await master.publish(1)
    chain.announce(name)
    await began.wait()
    relay.follower.receiving.abandon("another version was published")
    go_on.set()
    await chain.until(lambda: any("was not checked" in told for told in relay.holdings.errors), "the error")
    monkeypatch.undo()
    await chain.until_all_hold(name)


async def test_a_transport_that_raises_anything_does_not_stop_a_pull(chain: Chain) -> None:
    """Seeking has no patience of its own: who is tried must answer or fail."""
    master, relay = await two(chain)
    assert isinstance(relay.transport, TcpTransport)
    relay.transport.connect = Failing(relay.transport.connect, ValueError("odd"))
    name = await master.publish(1)
    chain.announce(name)
    await chain.until_all_hold(name)
    assert any("relay r0 was left: ValueError('odd')" in told for told in relay.holdings.errors)
