"""Running the parts of a worker side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first ends, then cancel the others and wait for them. Raises what ended it; if some ended at
    the same moment, a normal end counts before an error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [error for task in tasks if task in done and (error := task.exception()) is not None]
        if len(errors) == len(done):
            raise errors[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
