"""A store that is full or away: the trainer waits for it, for a bounded time, and says so."""

from __future__ import annotations

import logging

import pytest

from laminar.buffer.keys import Keys
from laminar.buffer.manifest import Fingerprints, RunFile, write_run
from laminar.buffer.memory import MemoryCoordination, MemoryEtcd
from laminar.buffer.memory_files import MemoryStorage
from laminar.buffer.records import RunManifest
from laminar.buffer.storage import AlreadyExists, NotFound, Storage, StorageFull
from laminar.clock import SystemClock
from laminar.config import config_from
from laminar.errors import StoreError
from laminar.workers.context import open_run
from laminar.workers.patience import StoreAway, patient, patiently
from laminar.workers.supervisor.supervision import QUICK_S


class FastClock(SystemClock):
    """Each second of waiting takes none; `at` is what the waiter sees."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


class FullFor(FastClock):
    """A disk on which somebody frees space after so many seconds."""

    def __init__(self, storage: MemoryStorage, seconds: float) -> None:
        super().__init__()
        self.storage = storage
        self.seconds = seconds

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if self.at >= self.seconds:
            self.storage.capacity = None


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    storage.capacity = 4
    return storage


async def test_a_write_goes_on_when_there_is_space_again(
    storage: MemoryStorage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = FullFor(storage, 12.0)
    await patient(storage, clock).write("batches/0.arrow", b"a batch")
    assert await storage.read("batches/0.arrow") == b"a batch" and clock.at == 12.0
    told = [record.getMessage() for record in caplog.records if record.name == "laminar.workers.patience"]
    assert len(told) == 4, "at once, every five seconds, and its end"
    assert "tried again for 600 s more" in told[0] and "no space" in told[0]
    assert told[-1] == "write batches/0.arrow: done after 12.0 s"


async def test_the_wait_has_an_end(storage: MemoryStorage) -> None:
    clock = FastClock()
    with pytest.raises(StorageFull, match="no space"):
        await patient(storage, clock, wait_s=30.0).write("batches/0.arrow", b"a batch")
    assert 30.0 <= clock.at < 32.0


async def test_what_the_store_answers_is_not_waited_for(storage: MemoryStorage) -> None:
    clock = FastClock()
    waiting: Storage = patient(storage, clock)
    await waiting.write("a", b"1")
    with pytest.raises(AlreadyExists):
        await waiting.write("a", b"2")
    assert await waiting.read("a") == b"1" and waiting.url == storage.url and clock.at == 0


def away_for(storage: MemoryStorage, calls: int) -> None:
    """A file server, or an object store, that does not serve so many calls."""
    left = calls

    def fault(verb: str, path: str) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise StoreError(f"cannot {verb} {path}: the server is away")

    storage.fault = fault


async def test_network_storage_that_is_away_is_waited_for() -> None:
    storage, clock = MemoryStorage(), FastClock()
    await storage.write("batches/0.json", b"{}")
    waiting: Storage = patient(storage, clock)
    away_for(storage, 3)
    assert await waiting.read("batches/0.json") == b"{}" and clock.at == 3
    away_for(storage, 2)
    assert [f.path for f in await waiting.list("batches")] == ["batches/0.json"] and clock.at == 5
    with pytest.raises(NotFound):
        await waiting.read("batches/1.json")
    assert clock.at == 5


async def test_storage_that_stays_away_is_named_so() -> None:
    storage = MemoryStorage()
    away_for(storage, 1000)
    with pytest.raises(StoreAway, match=r"has not served for 30 s, .* the server is away"):
        await patient(storage, FastClock(), wait_s=30.0).read("batches/0.json")


async def test_a_lack_of_permission_is_not_waited_for() -> None:
    async def refused() -> None:
        raise StoreError("cannot read: Forbidden") from PermissionError("Forbidden")

    with pytest.raises(StoreError, match="Forbidden"):
        await patiently(FastClock(), "reading", refused)


async def test_a_worker_that_starts_waits_for_the_store() -> None:
    """Else a short outage would look like a worker that crashes again and again, which ends the run."""
    storage, clock, coordination = MemoryStorage(), FastClock(), MemoryCoordination(MemoryEtcd())
    with pytest.raises(StoreError, match="etcd knows no run"):
        await open_run(coordination, "run", clock, storage)
    prints = Fingerprints(model="", tokenizer="", template="", prompts="", held_out="")
    config = config_from({"run": {"name": "run"}, "model": {"path": "m"}}).model_dump(mode="json")
    file = RunFile(
        run="run", created_at_us=0, config=config, model_folder="m", prompts=1, held_out=0, fingerprints=prints
    )
    manifest = RunManifest(run="run", store="s", store_id=file.store_id, generation=1, format_version=1)
    await coordination.put(Keys("run").manifest, manifest.dump())
    with pytest.raises(StoreError, match="holds no run"):
        await open_run(coordination, "run", clock, storage)
    assert clock.at == 0, "which is an answer"
    await write_run(storage, file)
    away_for(storage, 20)
    assert (await open_run(coordination, "run", clock, storage)).file == file
    assert clock.at == 20
    away_for(storage, 1000)
    with pytest.raises(StoreAway):
        await open_run(coordination, "run", clock, storage)
    assert clock.at - 20 > QUICK_S
    await coordination.close()
