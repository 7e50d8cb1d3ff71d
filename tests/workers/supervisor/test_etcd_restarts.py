"""An etcd that dies again while it is started again. The real one, really killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from laminar.buffer.etcd import EtcdCoordination
from laminar.errors import CoordinationError
from laminar.workers.supervisor import supervision
from laminar.workers.supervisor.etcd_process import EtcdEnded, EtcdProcess
from laminar.workers.supervisor.etcd_restarts import restarted


async def kill_successors(etcd: EtcdProcess, count: int) -> None:
    """Each as soon as it exists."""
    last = etcd.pid
    while count:
        if etcd.pid != last and etcd.returncode is None:
            last = etcd.pid
            os.kill(last, signal.SIGKILL)
            count -= 1
        await asyncio.sleep(0.002)


async def test_an_etcd_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    etcd, told = EtcdProcess(tmp_path / "etcd"), list[str]()
    await etcd.start()
    client = EtcdCoordination([etcd.endpoint])
    try:
        await client.put("/kept", "value")
        os.kill(etcd.pid, signal.SIGKILL)
        await etcd.ended()
        async with asyncio.timeout(30):
            await asyncio.gather(restarted(etcd, told.append), kill_successors(etcd, 5))
        kept = await client.get("/kept")
        assert kept is not None and kept.value == "value"
        assert told == ["etcd was killed (signal 9) while it started; starting it again in 0.5 s"] * 5
    finally:
        await client.close()
        await etcd.stop()


async def test_one_that_is_killed_for_too_long_ends_the_wait(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    await etcd.start()
    os.kill(etcd.pid, signal.SIGKILL)
    await etcd.ended()
    killing = asyncio.create_task(kill_successors(etcd, 1000))
    with pytest.raises(EtcdEnded, match=r"exited with -9; the end of .*etcd\.log"):
        async with asyncio.timeout(30):
            await restarted(etcd, lambda _: None, wait_s=1.0)
    killing.cancel()


async def test_one_that_crashes_again_and_again_is_given_up_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_BACKOFF_S", 0.01)
    etcd, told = EtcdProcess(tmp_path / "etcd"), list[str]()
    await etcd.start()
    await etcd.stop()
    (tmp_path / "etcd" / "member" / "snap" / "db").write_bytes(b"not a database" * 1000)
    with pytest.raises(CoordinationError, match=r"exited with \d+; the end of (.|\n)*invalid database"):
        await restarted(etcd, told.append)
    assert len(told) == supervision.MAX_QUICK_CRASHES - 1
    assert all("ended with exit code" in line for line in told)
