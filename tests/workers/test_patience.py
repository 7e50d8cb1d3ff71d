"""A full disk: the trainer's writes wait for space, for a bounded time, and say so."""

from __future__ import annotations

import logging

import pytest

from laminar.buffer.memory_files import MemoryStorage
from laminar.buffer.storage import AlreadyExists, Storage, StorageFull
from laminar.clock import SystemClock
from laminar.errors import StoreError
from laminar.workers.patience import patient, patiently


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
    assert told[-1] == "batches/0.arrow is written after 12.0 s"


async def test_the_wait_has_an_end(storage: MemoryStorage) -> None:
    clock = FastClock()
    with pytest.raises(StorageFull, match="no space"):
        await patient(storage, clock, wait_s=30.0).write("batches/0.arrow", b"a batch")
    assert 30.0 <= clock.at < 32.0


async def test_only_a_full_disk_is_waited_for(storage: MemoryStorage) -> None:
    clock = FastClock()
    waiting: Storage = patient(storage, clock)
    await waiting.write("a", b"1")
    with pytest.raises(AlreadyExists):
        await waiting.write("a", b"2")
    assert await waiting.read("a") == b"1" and waiting.url == storage.url and clock.at == 0


async def test_other_refusals_are_waited_for_where_that_is_asked(storage: MemoryStorage) -> None:
    """The last checkpoint of a run, on network storage that is away."""
    tries: list[int] = []

    async def write() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise StoreError("the server is away")
        return "written"

    assert await patiently(FastClock(), "the last checkpoint", write, on=StoreError) == "written"
