"""What a relay holds: retention, refusals, and room for what comes in."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator

import pytest

from laminar.errors import ConfigError, WeightsError
from laminar.relay import arena as arenas_of
from laminar.relay.arena import Arena, ArenaState
from laminar.relay.holdings import Holdings
from laminar.relay.layout import Layout, version_digest
from laminar.relay.memory import INCOMING, Scope
from laminar.relay.protocol import VersionInfo
from laminar.relay.transport.base import PullRequest, VersionHeader, VersionName

LAYOUT = Layout.from_tensors({"w": ("uint8", (1000,)), "x": ("uint8", (10,))})


@pytest.fixture
async def holdings() -> AsyncIterator[Holdings]:
    holdings = Holdings(chunk_bytes=256, retain=2, spare=1)
    await holdings.start()
    yield holdings
    holdings.validate()
    await holdings.stop()


async def publish(holdings: Holdings, version: int, fill: int, *, replaces: str = "") -> VersionInfo:
    arena = await holdings.reserve(LAYOUT)
    assert arena is not None
    with arena.buffer(LAYOUT.total_bytes) as buffer:
        for spec in LAYOUT.tensors:
            buffer[spec.offset : spec.offset + spec.nbytes] = bytes([fill]) * spec.nbytes
    info = await holdings.seal(arena, LAYOUT, version, replaces=replaces)
    holdings.validate()
    return info


def held(holdings: Holdings) -> list[int]:
    return [h.info.version for h in holdings.versions()]


async def test_the_newest_are_kept_and_those_that_claims_refer_to(holdings: Holdings) -> None:
    for version in range(3):
        await publish(holdings, version, version)
    assert held(holdings) == [1, 2]
    holdings.retain_versions({1})
    for version in range(3, 6):
        await publish(holdings, version, version)
    assert held(holdings) == [1, 4, 5]
    holdings.retain_versions(())
    assert held(holdings) == [4, 5]


async def test_what_was_newest_a_moment_ago_stays_where_there_is_room(holdings: Holdings) -> None:
    holdings.retain_versions((), recent=range(10))
    for version in range(4):
        await publish(holdings, version, version)
    assert held(holdings) == [1, 2, 3]
    holdings.retain_versions({1}, recent=range(10))
    await publish(holdings, 4, 4)
    assert held(holdings) == [1, 3, 4], "what is known to be needed goes first"
    assert not holdings.errors, "nothing that is needed was let go"
    holdings.retain_versions(())
    assert held(holdings) == [3, 4]


async def test_more_claimed_versions_than_memory_has_room_for_are_named(holdings: Holdings) -> None:
    holdings.retain_versions(range(10))
    for version in range(5):
        await publish(holdings, version, version)
    assert held(holdings) == [2, 3, 4], "two arenas stay for what comes in"
    assert any("version 1 is claimed but let go" in error for error in holdings.errors)


PLENTY = Scope("this host", 100_000, 90_000, 0)
SIZE = LAYOUT.total_bytes


async def roomy(memory: list[Scope], monkeypatch: pytest.MonkeyPatch) -> Holdings:
    """Holdings on a host of so little memory that arenas of a kilobyte matter; the test looks at it for them."""
    monkeypatch.setattr("laminar.relay.memory.scopes", lambda: memory)
    monkeypatch.setattr("laminar.relay.supply.LOOK_S", 3600.0)
    holdings = Holdings(chunk_bytes=256, retain=2, spare=1, memory_share=0.5)
    await holdings.start()
    return holdings


async def look(holdings: Holdings, memory: list[Scope]) -> None:
    """Once no arena is being allocated."""
    while (growing := holdings.supply._growing) is not None:
        await asyncio.wait([growing])
    holdings.supply.fit(memory)


async def fill(holdings: Holdings, memory: list[Scope], versions: int) -> None:
    for version in range(versions):
        await publish(holdings, version, version)
        await look(holdings, memory)


async def test_claimed_versions_are_kept_while_memory_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [PLENTY]
    holdings = await roomy(memory, monkeypatch)
    holdings.retain_versions(range(20))
    await fill(holdings, memory, 20)
    assert held(holdings) == list(range(20)) and not holdings.errors
    holdings.retain_versions(())
    await look(holdings, memory)
    holdings.validate()
    assert held(holdings) == [18, 19], "and no longer than claims refer to them"
    assert len(holdings.pool.arenas) == 5, "what they filled is given back, but for the fewest a relay needs"
    await holdings.stop()


async def test_claimed_versions_go_when_others_want_the_memory_and_the_next_version_still_comes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = [PLENTY]
    holdings = await roomy(memory, monkeypatch)
    holdings.retain_versions(range(100))
    await fill(holdings, memory, 20)
    mapped = sum(arena.capacity for arena in holdings.pool.arenas)
    memory[0] = Scope("this host", 100_000, 5_000 - 4 * SIZE, mapped)
    await look(holdings, memory)
    holdings.validate()
    assert len(held(holdings)) == mapped // SIZE - 4 - 2 and held(holdings)[-1] == 19
    assert any("is claimed but let go: this relay has memory for" in error for error in holdings.errors)
    assert all("give it more memory, relay.memory_share = 0.5" in error for error in holdings.errors)
    memory[0] = Scope("this host", 100_000, 100, 99_000)
    await look(holdings, memory)
    monkeypatch.setattr(arenas_of, "available_bytes", lambda reserve=0.0: 0)
    assert held(holdings) == [17, 18, 19] and len(holdings.pool.arenas) == 5
    for version in range(20, 25):
        await publish(holdings, version, version)
    assert held(holdings) == [22, 23, 24]
    await holdings.stop()


async def test_memory_that_went_since_the_last_look_costs_a_claimed_version_and_not_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = [PLENTY]
    holdings = await roomy(memory, monkeypatch)
    holdings.retain_versions(range(100))
    await fill(holdings, memory, 6)
    monkeypatch.setattr(arenas_of, "available_bytes", lambda reserve=0.0: 0)
    for version in range(6, 12):
        await publish(holdings, version, version)
    assert held(holdings)[-1] == 11 and len(held(holdings)) <= 8
    assert any("no memory for another arena" in error for error in holdings.errors)
    assert any("is claimed but let go" in error and "no arena can be added" in error for error in holdings.errors)
    await holdings.stop()


async def test_what_comes_in_takes_the_place_of_what_goes_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = [PLENTY]
    holdings = await roomy(memory, monkeypatch)
    holdings.retain_versions(range(100))
    await fill(holdings, memory, 6)
    monkeypatch.setattr(arenas_of, "available_bytes", lambda reserve=0.0: 0)
    for arena in [a for a in holdings.pool.arenas if a.state is ArenaState.FREE]:
        arena.close()
        holdings.pool.arenas.remove(arena)
    await publish(holdings, 6, 6)
    assert held(holdings)[-1] == 6
    await holdings.stop()


async def test_without_a_share_of_memory_the_fewest_places_are_kept_and_the_setting_is_named(
    holdings: Holdings,
) -> None:
    holdings.retain_versions(range(10))
    for version in range(5):
        await publish(holdings, version, version)
    await look(holdings, [PLENTY])
    assert len(held(holdings)) == 3
    assert all("relay.memory_share is 0; raise it" in error for error in holdings.errors) and holdings.errors


async def test_the_same_bytes_again_are_welcome_and_others_are_not(holdings: Holdings) -> None:
    first = await publish(holdings, 7, 1)
    assert await publish(holdings, 7, 1) == first
    with pytest.raises(WeightsError, match="one digest for ever"):
        await publish(holdings, 7, 2)
    assert held(holdings) == [7] and holdings.get(7).info == first
    assert holdings.pool.count(ArenaState.INCOMING) == 0


async def test_an_older_version_can_be_offered_and_stays_until_the_next(holdings: Holdings) -> None:
    for version in (10, 11, 4):
        await publish(holdings, version, version)
    assert held(holdings) == [4, 10, 11] and holdings.newest is not None and holdings.newest.version == 11
    await publish(holdings, 12, 12)
    assert held(holdings) == [11, 12]


async def test_only_two_come_in_at_once(holdings: Holdings) -> None:
    arenas = [await holdings.reserve(LAYOUT) for _ in range(3)]
    assert arenas[0] is not None and arenas[1] is not None and arenas[2] is None
    holdings.release(arenas[0])
    again = await holdings.reserve(LAYOUT)
    assert again is not None
    for arena in (again, arenas[1]):
        holdings.release(arena)


async def test_bytes_left_by_an_earlier_layout_do_not_change_a_digest(holdings: Holdings) -> None:
    """Gaps between tensors are nobody's bytes: in a recycled arena they hold an older version's."""
    clean = await publish(holdings, 1, 1)
    dirt = Layout.from_tensors({"all": ("uint8", (LAYOUT.total_bytes,))})
    for _ in range(2):
        arenas = [await holdings.reserve(dirt) for _ in range(2)]
        for arena in arenas:
            assert arena is not None
            with arena.buffer(dirt.total_bytes) as buffer:
                buffer[:] = b"\xff" * dirt.total_bytes
            holdings.release(arena)
    assert (await publish(holdings, 1, 1)).digest == clean.digest


async def test_a_promised_digest_is_checked_before_anybody_can_open_the_version(holdings: Holdings) -> None:
    arena = await holdings.reserve(LAYOUT)
    assert arena is not None
    with pytest.raises(WeightsError, match="promised was 000"):
        await holdings.seal(arena, LAYOUT, 3, expected="0" * 64)
    assert held(holdings) == [] and holdings.pool.count(ArenaState.INCOMING) == 0


async def test_what_was_never_published_gives_way_to_other_bytes_of_its_version(holdings: Holdings) -> None:
    first = await publish(holdings, 3, 1)
    with pytest.raises(WeightsError, match="one digest for ever"):
        await publish(holdings, 3, 2, replaces="of nothing that is here")
    second = await publish(holdings, 3, 2, replaces=first.digest)
    assert second.digest != first.digest and held(holdings) == [3]
    assert holdings.get(3).info == second


async def test_a_seal_goes_on_when_its_caller_is_cancelled(holdings: Holdings) -> None:
    arena = await holdings.reserve(LAYOUT)
    assert arena is not None
    task = asyncio.create_task(holdings.seal(arena, LAYOUT, 3))
    await asyncio.sleep(0)
    task.cancel()
    assert (await holdings.wait(-1, 5)) is not None


async def test_a_seal_that_fails_in_an_unforeseen_way_gives_its_arena_back(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(arena: Arena, layout: Layout) -> list[bytes]:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(holdings, "_finish", no_memory)
        for version in range(3):
            with pytest.raises(MemoryError):
                await publish(holdings, version, 1)
    assert await publish(holdings, 3, 1)
    assert any("MemoryError" in error for error in holdings.errors)


class Making:
    """While it is entered, arenas are made only once `go` is set; with a `problem` they are not made at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.problem = ""
        create = Arena.create

        def waiting(capacity: int, *, reserve: float = 0.0) -> Arena:
            self.go.wait(60)
            if self.problem:
                raise WeightsError(self.problem)
            return create(capacity, reserve=reserve)

        monkeypatch.setattr(Arena, "create", waiting)


def header_of(version: int) -> VersionHeader:
    sums = (bytes(32),) * -(-LAYOUT.total_bytes // 256)
    return VersionHeader(VersionName(version, version_digest(LAYOUT, sums)), LAYOUT, 256, sums)


async def test_who_reads_along_learns_what_comes_before_there_is_room_for_it(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    making, header = Making(monkeypatch), header_of(1)
    beginning = asyncio.create_task(holdings.begin(header))
    await asyncio.sleep(0)
    stays, goes = [await holdings.find(PullRequest((header.name,))) for _ in range(2)]
    assert stays.header == header
    with pytest.raises(WeightsError, match="coming already"):
        await holdings.begin(header)
    waiting = asyncio.create_task(stays.allocated())
    await asyncio.sleep(0)
    assert not waiting.done()
    holdings.validate()
    goes.close()
    making.go.set()
    arriving = await beginning
    assert arriving is not None
    await waiting
    assert stays.arena is arriving.arena and arriving.arena.pins == 1, "who stays keeps the memory"
    holdings.abort(arriving, "enough")
    assert arriving.arena.state is ArenaState.DRAINING
    stays.close()
    holdings.pool.reclaim()
    assert arriving.arena.state is ArenaState.FREE


@pytest.mark.parametrize("how", ["no memory", "cancelled", "stops"])
async def test_who_reads_along_is_told_if_there_will_be_no_room(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    making, header = Making(monkeypatch), header_of(1)
    beginning = asyncio.create_task(holdings.begin(header))
    await asyncio.sleep(0)
    source = await holdings.find(PullRequest((header.name,)))
    if how == "cancelled":
        beginning.cancel()
    elif how == "stops":
        holdings.abort(holdings._arriving[header.name], "this relay stops")
    else:
        making.problem = "no memory for it"
    making.go.set()
    (result,) = await asyncio.gather(beginning, return_exceptions=True)
    assert result is None or isinstance(result, WeightsError | asyncio.CancelledError)
    with pytest.raises(WeightsError, match="is not coming any more"):
        await source.allocated()
    source.close()
    making.problem = ""
    holdings.validate()
    assert holdings.pool.count(ArenaState.INCOMING) == 0 and await holdings.begin(header) is not None


async def test_waiting_ends_with_a_newer_version_or_at_its_deadline(holdings: Holdings) -> None:
    assert await holdings.wait(-1, 0.01) is None
    waiting = asyncio.create_task(holdings.wait(4, 5))
    await publish(holdings, 4, 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    await publish(holdings, 6, 1)
    info = await waiting
    assert info is not None and info.version == 6


async def test_a_larger_model_gets_larger_arenas(holdings: Holdings) -> None:
    await publish(holdings, 1, 1)
    large = Layout.from_tensors({"w": ("uint8", (1 << 20,))})
    arena = await holdings.reserve(large)
    assert arena is not None and arena.capacity == large.total_bytes
    holdings.release(arena)


async def test_arenas_that_were_outgrown_are_freed_in_a_thread_before_another_is_made(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(holdings, 1, 1)
    async with asyncio.timeout(20):
        while holdings.pool.count(ArenaState.FREE) < INCOMING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    told: list[str] = []
    close, create = Arena.close, Arena.create

    def noting_close(arena: Arena) -> None:
        assert threading.current_thread() is not threading.main_thread()
        told.append("closed")
        close(arena)

    def noting_create(capacity: int, *, reserve: float = 0.0) -> Arena:
        told.append("created")
        return create(capacity, reserve=reserve)

    monkeypatch.setattr(Arena, "close", noting_close)
    monkeypatch.setattr(Arena, "create", noting_create)
    arena = await holdings.reserve(Layout.from_tensors({"w": ("uint8", (1 << 20,))}))
    assert arena is not None and told[: INCOMING + 1] == [*["closed"] * INCOMING, "created"]
    holdings.release(arena)
    monkeypatch.undo()


async def test_a_layout_beyond_memory_makes_the_relay_busy_and_says_why(holdings: Holdings) -> None:
    assert await holdings.reserve(Layout.from_tensors({"w": ("uint8", (1 << 45,))})) is None
    assert any("no memory for another arena" in error for error in holdings.errors)


async def test_weights_that_cannot_fit_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="the relay needs"):
        await Holdings(chunk_bytes=256, retain=2, weights_bytes=1 << 45).start()


async def test_known_weights_are_touched_before_the_first_publish() -> None:
    holdings = Holdings(chunk_bytes=256, retain=2, weights_bytes=4096)
    await holdings.start()
    arenas = [await holdings.reserve(LAYOUT) for _ in range(2)]
    assert [arena.capacity for arena in arenas if arena is not None] == [4096, 4096]
    for arena in arenas:
        assert arena is not None
        holdings.release(arena)
    await holdings.stop()



async def test_without_a_thread_or_a_descriptor_for_an_arena_the_relay_is_busy_and_says_why_once(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    def no_descriptor(*args: object) -> int:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with monkeypatch.context() as patch:
        patch.setattr("laminar.relay.supply.Arena.create", no_thread)
        for _ in range(3):
            assert await holdings.reserve(LAYOUT) is None and "more threads" in holdings.supply.problem
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", no_descriptor)
        for _ in range(3):
            assert await holdings.reserve(LAYOUT) is None and "fs.file-max" in holdings.supply.problem
    assert len(holdings.errors) == 2
    await publish(holdings, 1, 1)
    assert holdings.supply.problem == ""


async def test_memory_that_could_not_be_looked_at_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors /proc/meminfo cannot be read: places stay as they are until it can."""
    looks: list[bool] = []

    def scopes() -> list[Scope]:
        looks.append(len(looks) >= 3)
        if not looks[-1]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return [PLENTY]

    monkeypatch.setattr("laminar.relay.memory.scopes", scopes)
    monkeypatch.setattr(arenas_of, "available_bytes", lambda reserve=0.0: 1 << 30)
    monkeypatch.setattr("laminar.relay.supply.LOOK_S", 0.01)
    holdings = Holdings(chunk_bytes=256, retain=2, spare=1, memory_share=0.5)
    await holdings.start()
    await publish(holdings, 1, 1)
    async with asyncio.timeout(10.0):
        while not any(looks):  # noqa: ASYNC110  it is a thread that looks
            await asyncio.sleep(0.01)
    assert "memory cannot be looked at" in holdings.errors[0]
    assert len(holdings.errors) <= 2, "once, and once more since an arena was allocated meanwhile"
    await holdings.stop()
