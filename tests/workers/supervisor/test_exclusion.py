"""Two `laminar run` of one run exclude each other; what a killed one left excludes nobody."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.buffer.coordination import Change
from laminar.buffer.keys import Keys
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.records import SupervisorRecord
from laminar.clock import SystemClock
from laminar.errors import ConfigError
from laminar.workers.supervisor.exclusion import is_gone, only_here, only_supervisor, this_process

KEYS = Keys("a-run")


def hold_elsewhere(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until it is killed."""
    script = (
        "import sys, time; from pathlib import Path; from laminar.workers.supervisor.exclusion import only_here\n"
        "with only_here(Path(sys.argv[1]), 'a-run'): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def a_dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_second_one_here_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    """The file stays behind after kill -9; the lock does not."""
    other = hold_elsewhere(tmp_path)
    with pytest.raises(ConfigError, match=rf"'a-run' is in use by pid {other.pid} on "), only_here(tmp_path, "a-run"):
        pass
    other.kill()
    other.wait()
    with only_here(tmp_path, "a-run") as locked:
        assert locked
    with only_here(tmp_path, "a-run") as locked:
        assert locked, "and may be taken again by the same process"


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 64: ENOLCK."""

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with only_here(tmp_path, "a-run") as locked:
        assert not locked


async def test_a_second_one_through_etcd_is_refused_by_host_and_pid() -> None:
    server = MemoryEtcd()
    first, second = MemoryCoordination(server), MemoryCoordination(server)
    elsewhere = this_process(SystemClock()).model_copy(update={"host": "node7", "pid": 4711, "place": "another boot"})
    await first.put(KEYS.supervisor, elsewhere.dump())
    with pytest.raises(ConfigError, match=r"on host node7 \(pid 4711\).*ends by itself within 10 s"):
        async with only_supervisor(second, KEYS, SystemClock(), 10.0):
            pass
    await first.delete(KEYS.supervisor)
    async with only_supervisor(second, KEYS, SystemClock(), 10.0):
        assert await first.get(KEYS.supervisor) is not None
    assert await first.get(KEYS.supervisor) is None, "free at once after its end"


async def test_what_a_killed_one_left_in_etcd_is_taken_over_at_once() -> None:
    coordination = MemoryCoordination(MemoryEtcd())
    record = this_process(SystemClock())
    await coordination.put(KEYS.supervisor, record.model_copy(update={"pid": a_dead_pid()}).dump())
    async with only_supervisor(coordination, KEYS, SystemClock(), 10.0):
        kv = await coordination.get(KEYS.supervisor)
        assert kv is not None and SupervisorRecord.parse(kv.value).pid == record.pid


def test_a_pid_that_is_used_again_is_not_the_holder() -> None:
    me = this_process(SystemClock())
    assert not is_gone(me)
    assert is_gone(me.model_copy(update={"began": "1"}))
    assert not is_gone(me.model_copy(update={"began": "1", "place": "another boot"})), "nobody can tell from here"


async def test_the_hold_is_claimed_again_after_the_lease_was_lost() -> None:
    server = MemoryEtcd()
    coordination = MemoryCoordination(server)
    async with only_supervisor(coordination, KEYS, SystemClock(), 0.5) as supervision:
        keeping = asyncio.create_task(supervision.keep())
        before = supervision.session
        assert before is not None
        server.revoke(before.lease)
        async with asyncio.timeout(5):
            async for event in coordination.watch(KEYS.supervisor):
                if isinstance(event, Change) and event.kv is not None:
                    break
        assert supervision.session is not before and supervision.session.alive
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
