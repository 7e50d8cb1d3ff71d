"""Retries of requests to etcd."""

from __future__ import annotations

import asyncio
import random

import pytest

from laminar.buffer.requests import retry
from laminar.errors import CoordinationUnavailable


class Longest(random.Random):
    """Makes each wait of a back-off the longest that it may be."""

    def random(self) -> float:
        return 1.0


async def test_an_outage_that_ends_before_the_limit_is_seen_to_have_ended() -> None:
    """A wait that would pass the limit is cut short, it does not end the call with half of its time unused."""
    started = asyncio.get_running_loop().time()

    async def call() -> str:
        if asyncio.get_running_loop().time() < started + 0.45:
            raise CoordinationUnavailable("down")
        return "up"

    assert await retry(call, "get of k", 0.5, Longest()) == "up"


async def test_the_last_attempt_begins_at_the_limit_and_its_error_is_told() -> None:
    attempts = 0

    async def call() -> str:
        nonlocal attempts
        attempts += 1
        raise CoordinationUnavailable(f"refused {attempts}")

    told = r"get of k: no answer .* 4 attempts, limit 0\.5 s; last: refused 4"
    with pytest.raises(CoordinationUnavailable, match=told):
        await retry(call, "get of k", 0.5, Longest())
