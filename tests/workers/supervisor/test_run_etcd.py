"""Which etcd is a run's own: the address that a killed `laminar run` has left behind may be another one's by now."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from laminar.buffer.coordination import KeyValue
from laminar.buffer.etcd import EtcdCoordination
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.manifest import RunFile, read_run
from laminar.buffer.records import RunManifest
from laminar.buffer.storage import LocalStorage
from laminar.errors import ConfigError
from laminar.workers.supervisor import run_etcd
from laminar.workers.supervisor.etcd_process import EtcdProcess
from laminar.workers.supervisor.exclusion import only_here
from laminar.workers.supervisor.recovering import run_recover
from laminar.workers.supervisor.run_etcd import etcd_of

NAME = "my-run"
KEYS = Keys(NAME)


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[EtcdProcess]:
    """Somebody else's etcd."""
    etcd = EtcdProcess(tmp_path / "other" / "data")
    await etcd.start()
    yield etcd
    await etcd.stop()


@pytest.fixture
async def root(make_store: Callable[..., Path], other: EtcdProcess) -> Path:
    """A run whose `laminar run` was killed, and whose etcd's port is the other one's by now."""
    folder = make_store(NAME)
    (folder / "etcd").mkdir()
    (folder / "etcd" / "endpoint").write_text(other.endpoint)
    return folder


async def keys_of(access: EtcdAccess) -> tuple[KeyValue, ...]:
    client = EtcdCoordination(list(access.endpoints))
    try:
        return (await client.range("/")).items
    finally:
        await client.close()


async def tell(access: EtcdAccess, file: RunFile) -> None:
    record = RunManifest(run=NAME, store="elsewhere", store_id=file.store_id, generation=1, format_version=1)
    client = EtcdCoordination(list(access.endpoints))
    await client.put(KEYS.manifest, record.dump())
    await client.close()


async def test_a_recovery_writes_nothing_to_an_etcd_that_has_taken_the_port(
    root: Path, other: EtcdProcess, caplog: pytest.LogCaptureFixture
) -> None:
    said = await asyncio.to_thread(run_recover, str(root), {}, [], force=False, dry_run=False)
    assert await keys_of(EtcdAccess((other.endpoint,))) == ()
    assert "generation 2" in said and (root / "etcd" / "data").exists()
    assert "the etcd there knows nothing of this run; it is left alone" in caplog.text
    with pytest.raises(ConfigError, match="nothing is to be recovered"):
        await asyncio.to_thread(run_recover, str(root), {}, [], force=False, dry_run=False)


@pytest.mark.parametrize("of_this_store", [True, False])
async def test_an_etcd_is_the_runs_own_by_the_run_and_store_that_it_knows(
    root: Path, other: EtcdProcess, of_this_store: bool, caplog: pytest.LogCaptureFixture
) -> None:
    storage = LocalStorage(root)
    file = await read_run(storage)
    there = EtcdAccess((other.endpoint,))
    await tell(there, file if of_this_store else file.model_copy(update={"store_id": "another"}))
    async with etcd_of(storage, file, [], create=False) as access:
        assert access == (there if of_this_store else None)
    assert ("has a run of this name with its store at elsewhere (id another" in caplog.text) is not of_this_store
    async with etcd_of(storage, file, [other.endpoint], create=False) as access:
        assert access == there, "one that is named is judged by who asked for it"


async def test_what_speaks_no_etcd_is_not_waited_for_beyond_its_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_etcd, "REACH_ETCD_S", 0.5)
    storage = LocalStorage(root)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (root / "etcd" / "endpoint").write_text(f"127.0.0.1:{taken.getsockname()[1]}")
        async with etcd_of(storage, await read_run(storage), [], create=False) as access:
            assert access is None
    assert "gives no answer of an etcd (waited" in caplog.text


async def test_while_the_run_is_at_work_it_is_said_by_whom_it_is_used(root: Path) -> None:
    """Its etcd may just be starting: that nothing is known there is no reason to begin another on the same data."""
    storage = LocalStorage(root)
    with only_here(root / "etcd", NAME), pytest.raises(ConfigError, match="is in use by pid"):
        async with etcd_of(storage, await read_run(storage), [], create=True):
            pass
