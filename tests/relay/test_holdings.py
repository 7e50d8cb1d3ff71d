"""What a relay holds: retention, refusals, and room for what comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.errors import ConfigError, WeightsError
from laminar.relay.arena import ArenaState
from laminar.relay.holdings import Holdings, kept
from laminar.relay.layout import Layout
from laminar.relay.protocol import VersionInfo

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


async def test_more_claimed_versions_than_memory_has_room_for_are_named(holdings: Holdings) -> None:
    holdings.retain_versions(range(10))
    for version in range(5):
        await publish(holdings, version, version)
    assert held(holdings) == [2, 3, 4], "two arenas stay for what comes in"
    assert any("version 1 is claimed but let go" in error for error in holdings.errors)


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


@given(st.sets(st.integers(0, 20)), st.integers(1, 4), st.sets(st.integers(0, 20)), st.integers(4, 8))
def test_retention_keeps_the_newest_always_and_never_more_than_fit(
    versions: set[int], newest: int, wanted: set[int], room: int
) -> None:
    first = min(versions, default=None)
    keep = kept(versions, newest=newest, wanted=wanted, first=first, room=room)
    top = set(sorted(versions)[-newest:])
    assert top <= keep <= versions and len(keep) <= room
    assert keep <= top | wanted | {first}
    left_out = (versions & wanted) - keep
    assert not left_out or len(keep) == room
