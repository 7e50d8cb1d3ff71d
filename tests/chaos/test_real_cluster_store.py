"""A real run as on a cluster: its store in an S3 service, its etcd behind TLS and a password; and a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from secure_etcd import SecureEtcd, ask_for_users, make_certificates

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]
SECRETS = ("open sesame", "s3cr3t-of-s3")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[SecureEtcd]:
    make_certificates(tmp_path)
    member = SecureEtcd(tmp_path / "secure" / "data", tmp_path)

    async def start() -> None:
        await member.start()
        await ask_for_users(member, SECRETS[0], "/laminar/")

    asyncio.run(start())
    yield member
    asyncio.run(member.stop())


def laminar(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "laminar.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def until(condition: Any, what: str, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.1)


def rollouts(endpoint: str) -> list[psutil.Process]:
    lines = ((p, p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
    return [p for p, line in lines if "rollout" in line and "--run" in line and endpoint in " ".join(line)]


@pytest.mark.nightly
def test_a_rollout_is_killed_and_nothing_is_lost(
    tmp_path: Path, s3_service: Any, etcd: SecureEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 63, too: neither etcd's password nor the key of the store is found under the store, in a log or in the
    arguments of a process."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    monkeypatch.setenv("LAMINAR_ETCD_PASSWORD", SECRETS[0])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = f"{s3_service.bucket()}/runs/tiny"
    settings = {
        "run.store": store,
        "run.max_steps": "8",
        "evaluation.size": "0",
        "rollout.workers": "2",
        "rollout.flush_interval": "0",
        "storage.endpoint_url": s3_service.endpoint,
        "storage.region": "us-east-1",
        "coordination.endpoints": f'["https://{etcd.endpoint}"]',
        "coordination.ca": str(tmp_path / "ca.pem"),
        "coordination.user": "laminar",
    }
    command = [sys.executable, "-m", "laminar.cli", "run", str(REPOSITORY / "examples" / "tiny.toml"), "--plain"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    output = tmp_path / "output.log"
    with output.open("wb") as sink:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=sink, stderr=sink)
    try:
        until(lambda: "step 3/8" in output.read_text() or run.poll() is not None, "step 3")
        arguments = [" ".join(p.cmdline()) for p in rollouts(etcd.endpoint)]
        assert arguments and run.poll() is None, output.read_text()
        os.kill(rollouts(etcd.endpoint)[0].pid, signal.SIGKILL)
        assert run.wait(240) == 0, output.read_text()
    finally:
        run.kill()
        run.wait()
    audited = laminar(tmp_path, "audit", "tiny")
    assert audited.returncode == 0 and "all invariants hold" in audited.stdout, audited.stdout + audited.stderr
    status = laminar(tmp_path, "status", "tiny").stdout
    assert "step 8/8" in status and store in status, status
    counted = laminar(tmp_path, "experience", "sql", "tiny", "select count(*) > 0 as some from experience")
    assert "True" in counted.stdout, counted.stdout + counted.stderr
    assert laminar(tmp_path, "experience", "show", "tiny", "0", "0").returncode == 0

    written = [f.read_bytes() for f in (tmp_path / "runs").rglob("*") if f.is_file()] + [output.read_bytes()]
    written += asyncio.run(everything(store, s3_service.options))
    assert not [s for s in SECRETS if any(s.encode() in data for data in written) or s in "".join(arguments)]


async def everything(store: str, options: dict[str, str]) -> list[bytes]:
    from laminar.buffer.storage import open_storage

    storage = open_storage(store, options)
    return [await storage.read(f.path) for f in await storage.list("")]
