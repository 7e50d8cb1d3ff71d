"""A full disk, or a store that is away, under the trainer: it waits with the step in its hands; at the end of its
patience it ends the run, once, with a message that says what to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from laminar.buffer.storage import LocalStorage, StorageFull
from laminar.buffer.table import MemoryTable
from laminar.errors import StoreError
from laminar.workers import patience
from laminar.workers.patience import StoreAway
from laminar.workers.training.trainer_lives import run_or_fail

MakeWorld = Callable[..., Awaitable[Any]]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By the beginning of a path: how many more writes meet a full disk."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.01)
    left: dict[str, int] = {}
    real = LocalStorage.write

    async def write(self: LocalStorage, path: str, data: bytes, *, overwrite: bool = False) -> None:
        for prefix, times in left.items():
            if path.startswith(prefix) and times > 0:
                left[prefix] = times - 1
                raise StorageFull(f"disk is full: no space for {len(data)} bytes")
        await real(self, path, data, overwrite=overwrite)

    monkeypatch.setattr(LocalStorage, "write", write)
    return left


async def test_each_kind_of_write_waits_and_nothing_is_lost(make_world: MakeWorld, full: dict[str, int]) -> None:
    """The batch, the copy of its decision, the rows of the step, the closing."""
    undisturbed = await make_world()
    await (await undisturbed.life()).trainer.run()
    world = await make_world()
    full.update({"batches/": 7, "incoming/steps/": 3, "incoming/step_metrics/": 4, "incoming/copies/": 5})
    await run_or_fail((await world.life()).trainer)
    assert set(full.values()) == {0} and world.head().state == "done" and len(world.decisions()) == 5
    assert await world.digests() == await undisturbed.digests()


async def test_at_the_end_of_its_patience_the_run_has_failed_with_what_to_do(
    make_world: MakeWorld, full: dict[str, int]
) -> None:
    world = await make_world()
    life = await world.life()
    full["incoming/steps/"] = 10_000
    life.trainer.steps.storage._wait_s = 0.05
    with pytest.raises(StorageFull):
        await run_or_fail(life.trainer)
    head = world.head()
    assert head.state == "failed"
    assert head.reason.startswith(f"disk is full at {world.root / 'store'}: ")
    assert head.reason.endswith(" bytes free; free space and run the same command again")


async def test_a_store_that_does_not_serve_for_a_while_ends_no_trainer(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of read, of files and of the table; the committer and the rollouts wait through the same outage."""
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.01)
    world = await make_world()
    life = await world.life()
    reads: list[tuple[type, str]] = [
        (LocalStorage, "read"), (LocalStorage, "list"), (MemoryTable, "read"), (MemoryTable, "scan_since")
    ]  # fmt: skip
    left = dict.fromkeys(reads, 3)

    def failing(owner: type, name: str) -> Callable[..., Awaitable[Any]]:
        real = getattr(owner, name)

        async def call(*args: Any, **options: Any) -> Any:
            if left[owner, name]:
                left[owner, name] -= 1
                raise StoreError(f"cannot {name}: 503")
            return await real(*args, **options)

        return call

    with monkeypatch.context() as away:
        for owner, name in left:
            away.setattr(owner, name, failing(owner, name))
        await run_or_fail(life.trainer)
    assert set(left.values()) == {0} and world.head().state == "done" and len(await world.digests()) == 6


async def test_a_store_that_stays_away_ends_the_run_once(make_world: MakeWorld) -> None:
    """Else trainer after trainer would wait for it, in a run that looks alive."""
    world = await make_world()
    life = await world.life()

    async def away(*args: Any) -> Any:
        raise StoreError("cannot read the table: 503")

    life.trainer.intake.experience._wait_s = 0.05
    life.trainer.intake.experience._inner = SimpleNamespace(scan_since=away)
    with pytest.raises(StoreAway):
        await run_or_fail(life.trainer)
    assert world.head().state == "failed"
    assert world.head().reason.endswith(": cannot read the table: 503; run the same command again once it serves")
