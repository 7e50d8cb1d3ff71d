"""`laminar simulate --faults`: many seeds on all cores, each in a run of its own; what they found, counted.

parent ──"seeds 3, 7, 11, …"──▶ child processes ──one JSON line a seed──▶ parent
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from laminar.errors import ConfigError, LaminarError
from laminar.simulator.run import Outcome, describe, simulate

LINE_LIMIT = 16 << 20
SEED_LIMIT_S, LOOK_S = 300.0, 5.0
"""Real seconds within which a child must finish a seed, as far as this process itself is awake; how often it looks."""
SHOWN_FAILURES = 10


@dataclass
class Tally:
    """What a range of seeds came to. `faults` counts those injected by kind."""

    seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    moved: int = 0
    interrupted: int = 0
    rested: int = 0
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.faults.update(outcome.injected)
        self.virtual_s += outcome.virtual_s
        self.moved += outcome.moved
        self.interrupted += outcome.interrupted
        self.rested += outcome.rested
        if outcome.problems:
            self.failed.append(outcome)


def parse_seeds(text: str) -> range:
    """`A..B` (both included) or a single seed. Raises ConfigError."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last if dots else first) + 1)
    except ValueError:
        raise ConfigError(f"--seeds {text!r} is neither a number nor a range A..B") from None
    if not seeds or seeds.start < 0:
        raise ConfigError(f"--seeds {text!r} holds no seeds: A..B with 0 <= A <= B")
    return seeds


def run_here(seeds: range) -> None:
    """A child's work: one line of JSON a seed on stdout."""
    gc.freeze()  # what is loaded by now is never collected: each run's own leftovers are found quickly
    for seed in seeds:
        sys.stdout.write(json.dumps(asdict(simulate(seed))) + "\n")
        sys.stdout.flush()


async def run_seeds(seeds: range, jobs: int, seen: Callable[[Outcome], None]) -> None:
    """Run all, `jobs` at a time, telling `seen` of each. Raises LaminarError if a child dies or hangs."""
    jobs = min(jobs, len(seeds))
    shares = [range(seeds.start + i, seeds.stop, jobs) for i in range(jobs)]
    async with asyncio.TaskGroup() as group:
        for share in shares:
            group.create_task(_child(share, seen))


async def _child(seeds: range, seen: Callable[[Outcome], None]) -> None:
    command = [
        sys.executable, "-c",
        f"from laminar.simulator.seeds import run_here; run_here(range({seeds.start}, {seeds.stop}, {seeds.step}))",
    ]  # fmt: skip
    # The order of sets of strings is part of what a seed must fix.
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environ, limit=LINE_LIMIT
    )
    assert process.stdout is not None
    try:
        for seed in seeds:
            line = await _line(process.stdout)
            if line is None:
                raise LaminarError(f"seed {seed} did not end within {SEED_LIMIT_S:.0f} s: it loops for ever")
            if not line:
                raise LaminarError(f"the process that ran seed {seed} ended with {await process.wait()}")
            seen(Outcome(**json.loads(line)))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(stream: asyncio.StreamReader) -> bytes | None:
    """The next one; None if there is none in time. A machine that sleeps meanwhile costs one look."""
    reading = asyncio.ensure_future(stream.readline())
    for _ in range(round(SEED_LIMIT_S / LOOK_S)):
        if (await asyncio.wait([reading], timeout=LOOK_S))[0]:
            return reading.result()
    reading.cancel()
    return None


def run_faults(text: str, jobs: int, say: Callable[[str], None]) -> bool:
    """Blocking: run the seeds and tell what came of them; whether no invariant was broken."""
    seeds = parse_seeds(text)
    tally = Tally()
    started = last = time.monotonic()

    def seen(outcome: Outcome) -> None:
        nonlocal last
        tally.add(outcome)
        if outcome.problems and len(tally.failed) <= SHOWN_FAILURES:
            say(describe(outcome))
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            say(f"{tally.seeds} of {len(seeds)} seeds, {len(tally.failed)} with broken invariants")

    try:
        asyncio.run(run_seeds(seeds, jobs, seen))
    except* LaminarError as group:
        say(report(tally, time.monotonic() - started))
        raise group.exceptions[0] from None
    say(report(tally, time.monotonic() - started))
    return not tally.failed


def report(tally: Tally, real_s: float) -> str:
    total = sum(tally.faults.values())
    counted = ", ".join(f"{n} {kind}" for kind, n in tally.faults.most_common())
    lines = [
        f"{tally.seeds} seeds in {real_s:.0f} s ({3600 * tally.seeds / max(real_s, 1e-9):,.0f} an hour), "
        f"{tally.virtual_s / 3600:.1f} hours of virtual time",
        f"{total} faults: {counted or 'none'}",
        f"{tally.moved} trajectories handed over alive, {tally.interrupted} with weights changed under them, "
        f"{tally.rested} rollouts sent to rest",
    ]
    if tally.failed:
        names = ", ".join(str(o.seed) for o in sorted(tally.failed, key=lambda o: o.seed)[:20])
        lines.append(f"{len(tally.failed)} seeds broke an invariant: {names}; run one again with --seeds N")
    else:
        lines.append("no invariant was broken")
    return "\n".join(lines)
