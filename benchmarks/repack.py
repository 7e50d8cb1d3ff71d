"""What repack gains and costs: the same run with it on and off by turns, several rollouts with long-tailed lengths.

    python benchmarks/repack.py                       # two runs of each kind, an hour in all; a quarter of two cores
    python benchmarks/repack.py --rounds 1 --together     # both kinds at once, in half the time
    python benchmarks/repack.py --rounds 3 --sigma 0.5 --steps 20
    python benchmarks/repack.py --engine vllm --longest 84 --median 12 --kv 0   # the model has 128 positions
    python benchmarks/repack.py --virtual --rounds 8 # the same workers in virtual time: seconds a run, nothing is late

Everything is real (`laminar run`: etcd, relay, trainer, rollout processes of the tiny model on the reference engine or
on vLLM), but for the time that a decode step takes and where a trajectory ends: `long_tails/sitecustomize.py`
stretches each step to a latency curve of its own by sleeping, so that several engines on two cores do not take from
each other, and draws lengths from a log-normal distribution. The share of steps that took longer than their curve is
printed, and should be near nothing. A step takes so long that the longest trajectory takes a hundred seconds: what
does not shrink with the model (a report a second, a plan's rest, a hand-over) is to a real tail of minutes as it is
here. The cache holds a little more than a full batch fills on the average. With `--virtual` the same workers run on the
simulator's twins (`repack_virtual.py`), on the same curve and with lengths of the same distribution.

Printed for each run, between the publishes of version 2 and of the last one, so that neither start nor end count:
tokens a second of all rollouts, seconds a step, mean KV use, the share of time for which rollouts drain. For the whole
run: seconds from a publish until a rollout holds that version or a newer one, staleness of what was trained on,
trajectories moved, seconds from a hand-over until the new owner goes on, tokens prefilled again. Then the medians and
their ratios on / off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from repack_virtual import run_virtual

from laminar.buffer.coordination import Change, Coordination
from laminar.buffer.etcd_access import EtcdAccess
from laminar.buffer.keys import Keys
from laminar.buffer.records import Claim, Load, WeightsHead

HERE = Path(__file__).resolve().parent
NAME = "repack"
START_S = 120.0


@dataclass
class Seen:
    """What etcd told while a run worked; times are monotonic seconds."""

    published: dict[int, float] = field(default_factory=dict)
    held: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """By rollout: when it first reported which version."""
    kv: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    draining: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    tokens: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    last: dict[str, Load] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    handed: dict[str, float] = field(default_factory=dict)
    moves: list[float] = field(default_factory=list)
    """Seconds from each hand-over until its new owner goes on."""

    def take(self, change: Change, keys: Keys, now: float) -> None:
        if change.key.startswith(keys.claims):
            self._take_claim(change, now)
        if change.kv is None:
            return
        if change.key == keys.weights:
            self.published.setdefault(WeightsHead.parse(change.kv.value).version, now)
        elif change.key.startswith(keys.load("rollout", "")):
            load, rollout = Load.parse(change.kv.value), change.key.rsplit("/", 1)[-1]
            self.last[rollout] = load
            self.kv.setdefault(rollout, []).append((now, load.kv_tokens / load.kv_capacity))
            self.draining.setdefault(rollout, []).append((now, float(load.draining)))
            self.tokens.setdefault(rollout, []).append((now, float(load.tokens)))
            held = self.held.setdefault(rollout, [])
            if not held or held[-1][1] != load.version:
                held.append((now, load.version))

    def _take_claim(self, change: Change, now: float) -> None:
        before = self.claims.pop(change.key, None)
        if change.kv is None:
            self.handed.pop(change.key, None)
            return
        after = self.claims[change.key] = Claim.parse(change.kv.value)
        if before and before.owner and after.owner not in ("", before.owner) and before.deaths == after.deaths:
            self.handed[change.key] = now
        elif after.state == "generating" and change.key in self.handed:
            self.moves.append(now - self.handed.pop(change.key))

    def switches(self) -> list[float]:
        """Seconds from each publish (but the first, at which engines start) to each rollout that came to it."""
        result = []
        for version, at in self.published.items():
            for held in self.held.values():
                reached = [t for t, v in held if v >= version]
                if version and reached and held[0][0] < at:
                    result.append(max(0.0, reached[0] - at))
        return result

    @property
    def window(self) -> tuple[float, float]:
        """From the publish of version 2 to the last one."""
        times = sorted(self.published.values())
        return times[2 if len(times) > 3 else 0], times[-1]

    def mean(self, figures: dict[str, list[tuple[float, float]]]) -> float:
        """Of `kv` or `draining`: over time and rollouts."""
        first, last = self.window
        total = 0.0
        for points in figures.values():
            for (at, share), (until, _) in itertools.pairwise(points):
                total += share * max(0.0, min(until, last) - max(at, first))
        return total / max(1e-9, (last - first) * len(figures))

    def tokens_per_s(self) -> float:
        """Generated by all, between two reports by straight interpolation."""
        first, last = self.window
        made = 0.0
        for points in self.tokens.values():
            for (at, before), (until, after) in itertools.pairwise(points):
                inside = max(0.0, min(until, last) - max(at, first))
                made += (after - before) * inside / max(1e-9, until - at)
        return made / max(1e-9, last - first)

    def step_s(self) -> float:
        first, last = self.window
        return (last - first) / max(1, sum(first < at <= last for at in self.published.values()))


@dataclass(frozen=True)
class Result:
    tokens_per_s: float
    step_s: float
    kv_share: float
    draining: float
    switch_s: float
    switch_p90_s: float
    staleness: float
    staleness_max: float
    moved: int
    move_s: float
    refilled: int
    late_steps: float | None
    """None where no rollout took so many steps that it told of them."""


async def observe(coordination: Coordination, keys: Keys, seen: Seen) -> None:
    async for event in coordination.watch(keys.prefix):
        if isinstance(event, Change):
            seen.take(event, keys, time.monotonic())
        else:
            for kv in event.snapshot.items:
                seen.take(Change(kv.key, kv, kv.mod_revision), keys, time.monotonic())


def appeared(path: Path) -> str:
    """The text of a file, as soon as it is there."""
    deadline = time.monotonic() + START_S
    while not path.exists() or not path.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.1)
    return path.read_text().strip()


def settings_of(interval: float, asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "run.max_steps": asked.steps, "rollout.workers": asked.rollouts, "rollout.max_running": asked.running,
        "rollout.max_model_len": asked.longest + 40, "rollout.repack_interval": interval,
        "sampling.max_tokens": asked.longest, "sampling.samples_per_prompt": 4,
        "trainer.groups_per_step": asked.groups, "trainer.max_ahead_groups": asked.ahead, "trainer.threads": 1,
        "trainer.checkpoint_every": 1000, "evaluation.size": 0,
    }  # fmt: skip


async def one_run(kind: str, interval: float, asked: argparse.Namespace) -> Result:
    """`kind`: "on" or "off"."""
    with tempfile.TemporaryDirectory(prefix="repack-benchmark-") as folder:
        return await _run(Path(folder), f"{NAME}-{kind}", interval, asked)


async def _run(root: Path, name: str, interval: float, asked: argparse.Namespace) -> Result:
    store, log = root / "store", root / "output.log"
    settings = {"run.name": name, "run.store": store, "rollout.engine": asked.engine, **settings_of(interval, asked)}
    command = [sys.executable, "-m", "laminar.cli", "run", str(HERE.parent / "examples" / "tiny.toml"), "--plain"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value, default=str)}"]
    curve = {
        "STEP_S": asked.step_s, "KNEE": asked.knee, "PREFILL": asked.prefill, "MEDIAN": asked.median,
        "SIGMA": asked.sigma, "KV": asked.kv,
    }  # fmt: skip
    environ = {f"LONG_TAILS_{name}": str(value) for name, value in curve.items()}
    path = os.pathsep.join([str(HERE / "long_tails"), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output,
            env={**os.environ, **environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )  # fmt: skip
    seen = Seen()
    try:
        endpoint = await asyncio.to_thread(appeared, store / "etcd" / "endpoint")
        coordination = EtcdAccess((endpoint,)).connect()
        observing = asyncio.create_task(observe(coordination, Keys(name), seen))
        ended = await process.wait()
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        await coordination.close()
    except TimeoutError:
        text = log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"the run did not start in {START_S:.0f} s:\n{text}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if ended:
        raise SystemExit(f"the run ended with {ended}:\n{log.read_text(errors='replace')[-2000:]}")
    steps = lance.dataset(str(store / "steps.lance")).to_table(columns=["staleness"])
    told = re.findall(
        r"long tails: (\d+) of (\d+) steps",
        "\n".join(p.read_text(errors="replace") for p in (store / "logs").glob("rollout*.log")),
    )
    return result_of(steps, seen, max((int(late) / int(of) for late, of in told), default=None))


def result_of(steps: pa.Table, seen: Seen, late_steps: float | None) -> Result:
    staleness = steps["staleness"].to_pylist()
    switches = sorted(seen.switches())
    return Result(
        tokens_per_s=seen.tokens_per_s(),
        step_s=seen.step_s(),
        kv_share=seen.mean(seen.kv),
        draining=seen.mean(seen.draining),
        switch_s=statistics.fmean(switches),
        switch_p90_s=switches[int(0.9 * (len(switches) - 1))],
        staleness=statistics.fmean(staleness),
        staleness_max=max(staleness),
        moved=sum(load.moved_out for load in seen.last.values()),
        move_s=statistics.median(seen.moves or [0.0]),
        refilled=sum(load.refilled_tokens for load in seen.last.values()),
        late_steps=late_steps,
    )


def line(name: str, r: Result) -> str:
    late = "-" if r.late_steps is None else f"{r.late_steps:.1%}"
    return (
        f"{name:<7}{r.tokens_per_s:7.0f} tokens/s   {r.step_s:5.1f} s a step   KV {r.kv_share:6.1%}   "
        f"draining {r.draining:4.0%}   to the newest version {r.switch_s:5.2f} s (p90 {r.switch_p90_s:5.2f})   "
        f"staleness {r.staleness:4.2f} (max {r.staleness_max:.0f})   moved {r.moved:4.0f} in {r.move_s:.2f} s each, "
        f"{r.refilled:6.0f} tokens prefilled again   late steps {late}"
    )


def middle(results: list[Result]) -> Result:
    values = {name: [v for r in results if (v := getattr(r, name)) is not None] for name in vars(results[0])}
    return Result(**{name: statistics.median(some) if some else None for name, some in values.items()})


def virtual(interval: float, asked: argparse.Namespace, seed: int) -> Result:
    seen = Seen()
    steps = run_virtual(settings_of(interval, asked), asked, seed, seen.take)
    return result_of(steps, seen, 0.0)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--running", type=int, default=16, help="trajectories that a rollout generates at once")
    parser.add_argument("--groups", type=int, default=36, help="groups of a step, of 4 samples each")
    parser.add_argument("--ahead", type=int, default=108, help="groups drawn and not consumed at most")
    parser.add_argument("--median", type=float, default=40.0, help="of the lengths, in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--step-s", type=float, default=0.25, help="seconds of a decode step of one trajectory")
    parser.add_argument("--knee", type=int, default=16, help="the batch at which it takes half as long again")
    parser.add_argument("--kv", type=int, default=1700, help="tokens that a KV cache holds; 0: as the engine has it")
    parser.add_argument("--prefill", type=float, default=10_000.0, help="tokens prefilled a second")
    parser.add_argument("--together", action="store_true", help="the two runs of a round at the same time")
    parser.add_argument("--virtual", action="store_true", help="in virtual time, on the simulator's twins")
    parser.add_argument("--interval", type=float, default=1.0, help="rollout.repack_interval of the runs with repack")
    asked = parser.parse_args()
    results: dict[str, list[Result]] = {"on": [], "off": []}
    turns = asyncio.Semaphore(2 if asked.together and not asked.virtual else 1)

    async def measure(name: str, interval: float, number: int) -> None:
        async with turns:
            if asked.virtual:
                result = await asyncio.to_thread(virtual, interval, asked, number)
            else:
                result = await one_run(name, interval, asked)
        results[name].append(result)
        print(line(f"{name} {number}", result), flush=True)

    for number in range(asked.rounds):
        await asyncio.gather(measure("on", asked.interval, number), measure("off", 0.0, number))
    on, off = middle(results["on"]), middle(results["off"])
    print(line("on", on))
    print(line("off", off))
    print(
        f"on / off: tokens/s {on.tokens_per_s / off.tokens_per_s:.2f}, seconds a step {on.step_s / off.step_s:.2f}, "
        f"time to the newest version {on.switch_s / off.switch_s:.2f}, "
        f"staleness {on.staleness / max(off.staleness, 1e-9):.2f}, "
        f"KV use {100 * (on.kv_share - off.kv_share):+.1f} points"
    )


if __name__ == "__main__":
    asyncio.run(main())
