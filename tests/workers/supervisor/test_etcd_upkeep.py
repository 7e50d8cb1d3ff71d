"""The embedded etcd is kept within its space, on a real one with a tiny quota."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from laminar.buffer.etcd import EtcdCoordination
from laminar.clock import SystemClock
from laminar.errors import CoordinationUnavailable
from laminar.workers.supervisor import etcd_upkeep
from laminar.workers.supervisor.etcd_process import EtcdProcess
from laminar.workers.supervisor.etcd_upkeep import AGAIN_S, SMALL_BYTES, Need, Upkeep, need

MIB = 1 << 20


@pytest.mark.parametrize(
    ("db_size", "in_use", "full", "wanted"),
    [
        (50 * MIB, 1 * MIB, False, Need.NOTHING),
        (SMALL_BYTES + 1, 40 * MIB, False, Need.NOTHING),
        (SMALL_BYTES + 1, 10 * MIB, False, Need.DEFRAGMENT),
        (900 * MIB, 890 * MIB, False, Need.COMPACT),
        (900 * MIB, 1 * MIB, False, Need.COMPACT),
        (1000 * MIB, 1 * MIB, True, Need.RECOVER),
        (1 * MIB, 1 * MIB, True, Need.RECOVER),
    ],
)
def test_what_an_etcd_of_a_gigabyte_needs(db_size: int, in_use: int, full: bool, wanted: Need) -> None:
    assert need(db_size=db_size, in_use=in_use, quota=1000 * MIB, full=full) is wanted


async def test_an_exhausted_quota_is_told_and_freed_while_writers_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 kB on one key, a hundred times, fill a quota of 4 MiB five times over: no writer sees an error."""
    monkeypatch.setattr(etcd_upkeep, "LOOK_S", 0.3)
    etcd = EtcdProcess(tmp_path / "etcd", flags=("--quota-backend-bytes", str(4 * MIB)))
    assert etcd.quota_bytes == 4 * MIB and EtcdProcess(tmp_path / "other").quota_bytes == 2048 * MIB
    await etcd.start()
    writer, keeper = (EtcdCoordination([etcd.endpoint], timeout_s=10, retry_s=60) for _ in range(2))
    told: list[str] = []
    open_again = asyncio.Event()

    def tell(message: str) -> None:
        told.append(message)
        (open_again.set if "takes writes again" in message else open_again.clear)()

    # Space is not freed ahead of time, so that the alarm is met.
    monkeypatch.setattr(etcd_upkeep, "NEARLY_FULL", 10.0)
    upkeep = asyncio.create_task(Upkeep(keeper, etcd.quota_bytes, SystemClock(), tell).run())
    try:
        for n in range(100):
            await writer.put("k", f"{n:04d}" * 50_000)
        kv = await writer.get("k")
        assert kv is not None and kv.value.startswith("0099")
        await asyncio.wait_for(open_again.wait(), 60)  # the last write may be through before this is said
    finally:
        upkeep.cancel()
        await asyncio.gather(upkeep, return_exceptions=True)
        await writer.close()
        await keeper.close()
        await etcd.stop()
    assert told[0].startswith("etcd's space quota of 4194304 bytes is exhausted (its file has ")
    assert told[1].startswith("etcd takes writes again: its file has ")


async def test_a_quota_that_is_nearly_reached_is_freed_before_it_is(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd", flags=("--quota-backend-bytes", str(16 * MIB)))
    await etcd.start()
    client = EtcdCoordination([etcd.endpoint])
    upkeep = Upkeep(client, etcd.quota_bytes, SystemClock(), pytest.fail)
    try:
        assert await upkeep.look() is Need.NOTHING
        while int((await client.status())["db_size"]) < 0.85 * etcd.quota_bytes:
            await client.put("k", "x" * 100_000)  # small: what etcd says of its size is late on a busy machine
        assert await upkeep.look() is Need.COMPACT
        assert int((await client.status())["db_size"]) < 4 * MIB
    finally:
        await client.close()
        await etcd.stop()


class Scripted:
    """An etcd whose content alone nearly fills its quota."""

    def __init__(self) -> None:
        self.compactions = 0
        self.away = False

    async def status(self) -> dict[str, str | int]:
        if self.away:
            raise CoordinationUnavailable("no answer")
        return {"db_size": 900, "in_use": 890, "revision": 5}

    async def full_members(self) -> list[int]:
        return []

    async def compact(self, revision: int) -> None:
        self.compactions += 1

    async def defragment(self) -> None:
        pass


async def test_an_etcd_that_is_full_of_content_is_said_and_not_compacted_all_the_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd, clock, now = Scripted(), SystemClock(), 1000.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    upkeep = Upkeep(etcd, 1000, clock, pytest.fail)
    for _ in range(5):
        await upkeep.look()
    assert etcd.compactions == 1
    assert "content alone has 900 of its quota of 1000 bytes" in caplog.text
    now += AGAIN_S
    assert await upkeep.look() is Need.COMPACT


async def test_an_etcd_that_is_away_is_looked_after_when_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_upkeep, "LOOK_S", 0.01)
    caplog.set_level(logging.WARNING)
    etcd = Scripted()
    etcd.away = True
    running = asyncio.create_task(Upkeep(etcd, 1000, SystemClock(), pytest.fail).run())
    await asyncio.sleep(0.05)
    assert etcd.compactions == 0 and "could not be looked after" in caplog.text
    etcd.away = False
    await asyncio.sleep(0.05)
    assert etcd.compactions == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
