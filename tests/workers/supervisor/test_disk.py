"""A disk that fills, and an etcd that dies of it: on a real small file system, with the real etcd."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from privileges import memory_disk

from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.files import StorageFull
from laminar.errors import CoordinationError
from laminar.workers.supervisor import disk
from laminar.workers.supervisor.disk import watch_disk
from laminar.workers.supervisor.etcd_process import EtcdProcess
from laminar.workers.supervisor.etcd_restarts import restarted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with memory_disk(tmp_path / "disk", "170m") as folder:
        yield folder


def fill(folder: Path) -> Path:
    path = folder / "fill"
    with path.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return path
    return path


async def until(tell: list[str], words: str) -> str:
    async with asyncio.timeout(30):
        while not (found := [line for line in tell if words in line]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found[0]


async def killed_by_a_full_disk(etcd: EtcdProcess) -> None:
    client = EtcdCoordination([etcd.endpoint], timeout_s=0.5, retry_s=0.5)
    with pytest.raises(CoordinationError):
        for number in range(500):
            await client.put(f"/fill/{number}", "x" * 60_000)
    await client.close()
    async with asyncio.timeout(10):
        assert await etcd.ended() != 0


async def test_an_etcd_without_space_waits_for_it_and_loses_nothing(small_disk: Path) -> None:
    etcd, told = EtcdProcess(small_disk / "etcd"), list[str]()
    await etcd.start()
    try:
        client = EtcdCoordination([etcd.endpoint])
        await client.put("/kept", "value")
        filler = fill(small_disk)
        await killed_by_a_full_disk(etcd)
        waiting = asyncio.create_task(restarted(etcd, told.append, look_s=0.1))
        line = await until(told, "etcd cannot go on")
        assert f"disk is full at {small_disk / 'etcd'}: " in line and "bytes free; free space and run the same" in line
        assert "{" not in line, "no JSON of etcd's log"
        filler.unlink()
        await asyncio.wait_for(waiting, 30)
        kept = await client.get("/kept")
        await client.close()
        assert kept is not None and kept.value == "value" and told[-1] == "there is space again, and etcd serves"
    finally:
        await etcd.stop()


async def test_the_wait_for_space_has_an_end_with_its_message(small_disk: Path) -> None:
    etcd = EtcdProcess(small_disk / "etcd")
    await etcd.start()
    try:
        fill(small_disk)
        await killed_by_a_full_disk(etcd)
        with pytest.raises(StorageFull, match=r"disk is full at .*etcd: \d+ bytes free; free space and run the same"):
            await restarted(etcd, lambda _: None, wait_s=0.2, look_s=0.1)
    finally:
        await etcd.stop()


async def test_little_space_is_told_once_and_so_is_its_end(small_disk: Path) -> None:
    told: list[str] = []
    watching = asyncio.create_task(watch_disk(small_disk, told.append, low_bytes=32 << 20, look_s=0.02))
    await asyncio.sleep(0.1)
    assert told == []
    filler = fill(small_disk)
    assert "nothing is lost" in await until(told, f"disk is full at {small_disk}: 0 bytes free")
    filler.unlink()
    await until(told, f"there is space again at {small_disk}: 170 MiB free")
    assert len(told) == 2
    watching.cancel()


async def test_a_file_system_that_does_not_answer_is_told_once_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error"), 1 << 20])
    told: list[str] = []

    def free(folder: Path) -> int:
        answer = next(answers, 1 << 20)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(disk, "free_bytes", free)
    watching = asyncio.create_task(watch_disk(tmp_path, told.append, look_s=0.01))
    await until(told, "free space: what cannot be written waits")
    watching.cancel()
    assert [line for line in told if "does not say" in line] == [
        f"the file system at {tmp_path} does not say how much space it has (Stale file handle); asked again"
    ]
