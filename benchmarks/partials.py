"""What partial responses cost a core, and how soon they are back after a death: the second half of `buffer.py`.

The rollout's own parts (trajectory, flusher, partial log) take tokens at a fixed rate; only the engine is missing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laminar.buffer import claims
from laminar.buffer.claims import Held
from laminar.buffer.coordination import KeyValue
from laminar.buffer.keys import Keys
from laminar.buffer.partials import PartialLog, assemble, read_partials
from laminar.buffer.storage import LocalStorage, Storage
from laminar.clock import SystemClock
from laminar.workers.rollouts.outbox import Flusher
from laminar.workers.rollouts.trajectory import Trajectory

KEYS = Keys("benchmark")
PROMPT_TOKENS = 32
VOCABULARY = 50_000
FLUSH_S = 0.5
FLUSHED_TOKENS = 15
"""Tokens of a trajectory in a flush: half a second at 30 tokens a second."""


@dataclass(frozen=True)
class Share:
    """CPU seconds of this process, all its threads, over the seconds that it took; and what was written."""

    cpu_share: float
    tokens: int
    flushes: int
    log_bytes: int


def new_trajectory(sample: int, worker: str, at: int) -> Trajectory:
    claim = claims.drawn(worker, 0)
    held = Held(claim, KeyValue(KEYS.claim(0, sample), claim.dump(), 1, 1))
    t = Trajectory(held, worker, 0, "d00d", at)
    t.begin(list(range(PROMPT_TOKENS)), [{"role": "user", "content": "a question"}], "", at)
    return t


async def paced(take: Callable[[int], None], rate: float, seconds: float) -> float:
    """Call `take` once for each token that each trajectory is due, by the wall clock; the seconds that it took."""
    began = time.perf_counter()
    done = 0
    while (now := time.perf_counter() - began) < seconds:
        while done < int(now * rate):
            take(done)
            done += 1
        await asyncio.sleep(max(0.0, (done + 1) / rate - (time.perf_counter() - began)))
    return time.perf_counter() - began


async def stream_alone(trajectories: int, rate: float, seconds: float) -> Share:
    """The least that any rollout does with its tokens: it keeps them in memory."""
    lists: list[tuple[list[int], list[float]]] = [([], []) for _ in range(trajectories)]

    def take(n: int) -> None:
        for tokens, logprobs in lists:
            tokens.append(n)
            logprobs.append(-0.5)

    before = time.process_time()
    took = await paced(take, rate, seconds)
    return Share((time.process_time() - before) / took, sum(len(t) for t, _ in lists), 0, 0)


async def stream(folder: Path, name: str, trajectories: int, rate: float, seconds: float, *, sync: bool) -> Share:
    """The same tokens through trajectories and flusher to the log; read back afterwards, untimed."""
    clock = SystemClock()
    storage = LocalStorage(folder)
    live = [new_trajectory(sample, name, clock.now_us()) for sample in range(trajectories)]
    flusher = Flusher(PartialLog(storage, name, sync=sync), lambda: live, clock, interval_s=FLUSH_S, enabled=True)

    def take(n: int) -> None:
        at = clock.now_us()
        for t in live:
            t.policy_wrote([n], [-0.5], at)

    flushing = asyncio.create_task(flusher.run())
    before = time.process_time()
    took = await paced(take, rate, seconds)
    share = (time.process_time() - before) / took
    flushing.cancel()
    with suppress(asyncio.CancelledError):
        await flushing
    await flusher.flush()
    found = await read_partials(storage, name)
    for t in live:
        if assemble(found.rows[(*t.id, t.held.claim.term)]).token_ids != t.token_ids:
            raise RuntimeError(f"{t.name}: the log does not hold the {len(t.token_ids)} tokens that were streamed")
    return Share(share, sum(len(t.token_ids) for t in live), flusher.flushes, found.bytes)


async def write_log(storage: Storage, worker: str, trajectories: int, tokens: int, seed: int) -> None:
    """What a rollout that died leaves: every trajectory `tokens` long, in flushes of half a second each."""
    chance = random.Random(seed)
    partials = PartialLog(storage, worker, sync=False)
    live = [new_trajectory(sample, worker, 0) for sample in range(trajectories)]
    at = 0
    while len(live[0].token_ids) < tokens:
        count = min(FLUSHED_TOKENS, tokens - len(live[0].token_ids))
        at += 500_000
        for t in live:
            t.policy_wrote(chance.choices(range(VOCABULARY), k=count), [-chance.random() for _ in range(count)], at)
        await partials.append([row for t in live for row in t.take_pending()])
        if partials.due_for_rotation():
            await partials.rotate([row for t in live for row in t.all_rows(at)])
            await partials.discard_superseded()


async def recover(storage: Storage, worker: str, trajectories: int, tokens: int) -> tuple[float, float]:
    """Seconds to read and check the log, and seconds to assemble every trajectory from its rows."""
    began = time.perf_counter()
    found = await read_partials(storage, worker)
    read = time.perf_counter()
    partials = [assemble(rows) for rows in found.rows.values()]
    done = time.perf_counter()
    if found.damage or len(partials) != trajectories or any(len(p.token_ids) != tokens for p in partials):
        raise RuntimeError(f"{len(partials)} of {trajectories} trajectories came back; damage: {found.damage}")
    return read - began, done - read
