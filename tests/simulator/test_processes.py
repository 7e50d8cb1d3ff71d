"""What the simulated machine promises: death without last words, pauses, clocks that differ, crashes at a call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from laminar.buffer.files import StorageFull
from laminar.buffer.memory_files import MemoryStorage
from laminar.errors import StoreError
from laminar.simulator.loop import SimulationLoop
from laminar.simulator.ports import StorageFaults, StoragePort
from laminar.simulator.process import CrashAt, SimProcess

Simulated = Callable[[Callable[[SimulationLoop], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def simulated() -> Simulated:
    """Runs a test on a loop of its own."""

    def run(test: Callable[[SimulationLoop], Coroutine[Any, Any, None]]) -> None:
        loop = SimulationLoop(random.Random(0))
        loop.run_until_complete(test(loop))
        loop.close()

    return run


def start(loop: SimulationLoop, main: Awaitable[int], **options: Any) -> SimProcess:
    process = SimProcess("rollout", "r", 1, loop, **options)
    process.start(main)  # type: ignore[arg-type]
    return process


def test_a_killed_process_does_nothing_more_not_even_its_finally(simulated: Simulated) -> None:
    said: list[str] = []

    async def main() -> int:
        try:
            await asyncio.sleep(10)
            said.append("woke up")
        finally:
            said.append("cleaned up")
        return 0

    async def test(loop: SimulationLoop) -> None:
        process = start(loop, main())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(100)
        assert process.ended.is_set() and process.result is None
        assert said == []
        kept.append(process)

    kept: list[SimProcess] = []
    simulated(test)


def test_a_stopped_process_goes_on_where_it_was_and_its_timers_have_run_out_meanwhile(simulated: Simulated) -> None:
    woke: list[float] = []

    async def main() -> int:
        for _ in range(3):
            await asyncio.sleep(1)
            woke.append(asyncio.get_running_loop().time())
        return 7

    async def test(loop: SimulationLoop) -> None:
        process = start(loop, main())
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(10)
        assert woke == [1.0]
        process.cont()
        await process.ended.wait()
        assert woke == [1.0, 11.5, 12.5] and process.result == 7

    simulated(test)


def test_clocks_run_at_their_own_rates(simulated: Simulated) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        before = loop.time()
        try:
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        except TimeoutError:
            assert loop.time() - before == pytest.approx(10)
        return 0

    async def test(loop: SimulationLoop) -> None:
        fast = start(loop, main(), rate=2.0)
        await fast.ended.wait()
        assert fast.result == 0
        assert loop.now == pytest.approx(5)

    simulated(test)


@pytest.mark.parametrize(("moment", "written"), [(CrashAt.BEFORE, 2), (CrashAt.AFTER, 3)])
def test_a_crash_at_a_call_comes_before_or_after_its_effect(
    simulated: Simulated, moment: CrashAt, written: int
) -> None:
    async def test(loop: SimulationLoop) -> None:
        disk = MemoryStorage()
        process = SimProcess("rollout", "r", 1, loop, crash=(3, moment))
        port = StoragePort(process, disk, StorageFaults(random.Random(0)))

        async def main() -> int:
            for i in range(5):
                await port.write(f"file-{i}", b"data")
            return 0

        process.start(main())
        await process.ended.wait()
        assert process.result is None and len(await disk.list("")) == written

    simulated(test)


def test_a_process_that_dies_in_an_append_leaves_a_part_of_it(simulated: Simulated) -> None:
    async def test(loop: SimulationLoop) -> None:
        disk = MemoryStorage()
        process = SimProcess("rollout", "r", 1, loop, crash=(2, CrashAt.AFTER))
        port = StoragePort(process, disk, StorageFaults(random.Random(0)))

        async def main() -> int:
            await port.append("log", b"whole", sync=False)
            await port.append("log", b"a second row", sync=False)
            return 0

        process.start(main())
        await process.ended.wait()
        data = await disk.read("log")
        assert data.startswith(b"whole") and 5 < len(data) < len(b"wholea second row")

    simulated(test)


def test_full_and_failing_disks_raise_what_storage_raises(simulated: Simulated) -> None:
    async def test(loop: SimulationLoop) -> None:
        faults = StorageFaults(random.Random(0))
        port = StoragePort(SimProcess("rollout", "r", 1, loop), MemoryStorage(), faults)
        faults.full = True
        with pytest.raises(StorageFull):
            await port.write("a", b"data")
        assert not await port.exists("a")
        faults.full, faults.failing = False, 1.0
        with pytest.raises(StoreError):
            await port.read("a")

    simulated(test)


def test_what_a_dead_process_was_asked_fails_for_the_asker(simulated: Simulated) -> None:
    async def test(loop: SimulationLoop) -> None:
        process = SimProcess("relay", "r", 1, loop)

        async def answer() -> int:
            await asyncio.sleep(5)
            return 1

        asked = process.ask(answer)
        await asyncio.sleep(1)
        process.kill()
        with pytest.raises(ConnectionResetError):
            await asked
        with pytest.raises(ConnectionRefusedError):
            process.ask(answer)

    simulated(test)


def test_waiting_for_nothing_is_an_error_not_a_hang(simulated: Simulated) -> None:
    async def test(loop: SimulationLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="waits for ever"):
        simulated(test)
