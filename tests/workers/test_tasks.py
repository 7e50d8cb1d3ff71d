"""The parts of a worker run side by side until one ends."""

from __future__ import annotations

import asyncio

import pytest

from laminar.workers.tasks import until_first


async def test_the_first_end_cancels_the_others_and_waits_for_them() -> None:
    ended: list[str] = []

    async def other() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("other")

    await until_first(asyncio.sleep(0.01), other())
    assert ended == ["other"]


async def test_an_error_is_raised_and_a_normal_end_counts_before_it() -> None:
    async def fail() -> None:
        raise ValueError("boom")

    async def end() -> None:
        return None

    with pytest.raises(ValueError, match="boom"):
        await until_first(fail(), asyncio.Event().wait())
    await until_first(fail(), end())


async def test_cancelling_the_whole_cancels_the_parts() -> None:
    cancelled = asyncio.Event()

    async def part() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    whole = asyncio.create_task(until_first(part()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    assert cancelled.is_set()
