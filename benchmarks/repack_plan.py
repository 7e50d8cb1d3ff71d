"""What repack costs the manager, by the number of rollouts: the plan, and all that it does between two plans.

    python benchmarks/repack_plan.py
    python benchmarks/repack_plan.py --rollouts 1000 --tail 20 --rounds 30

All rollouts drain one version, with up to `--tail` unfinished trajectories each and room for `--limit`. CPU
milliseconds, medians of `--rounds`: reading all reports as they stand in etcd (each is read once, when it changes),
the plan, comparing all rollouts to find slow ones (each second); and their sum over an interval of five seconds in
which every rollout reports each second. `full`: the plan where no rollout has a slot for another's tail, `tight`: where
its KV cache has no room for it, so that each is tried in vain. `empty`: a rollout that rests, with `--resting`
unfinished trajectories, is emptied into all others, and `vain`: into caches as tight.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from laminar.buffer.keys import trajectory_name
from laminar.buffer.records import Load
from laminar.workers.draining import Draining, Unfinished
from laminar.workers.managing.slowness import WINDOW_S, Window, slow
from laminar.workers.repack import evacuate, plan

INTERVAL_S = 5


def reports(rollouts: int, tail: int, limit: int) -> dict[str, str]:
    source = random.Random(1)
    result = {}
    for n in range(rollouts):
        names = [trajectory_name(100 * n + i // 8, i % 8) for i in range(source.randint(1, tail))]
        tokens = {name: (source.randint(500, 8000), source.randint(100, 8000)) for name in names}
        load = Load(
            version=7, running=len(names), waiting=0, kv_tokens=sum(t for t, _ in tokens.values()),
            kv_capacity=16_000 * limit, decode_tokens_per_s=40.0 * len(names), draining=True, finished=1000,
            tokens=1_000_000, batch_limit=limit, step_s=0.02, prefill_tokens_per_s=8000.0, tail=tokens,
        )  # fmt: skip
        result[f"rollout-host{n}-1-abcdef"] = load.dump()
    return result


def resting(trajectories: int) -> Draining:
    """One of the same version that has so many."""
    tail = tuple(Unfinished(trajectory_name(10**6 + i // 8, i % 8), 500 + 20 * i, 2000) for i in range(trajectories))
    return Draining("slow", 7, sum(t.tokens for t in tail), 10**8, len(tail), tail)


def anew(rollouts: list[Draining]) -> list[Draining]:
    """The same, with nothing of them summed up yet: as they come from reports."""
    return [replace(r) for r in rollouts]


def cpu_ms(work: Callable[[list[Draining]], object], rollouts: list[Draining], rounds: int) -> float:
    """Of `work`, which gets `rollouts` anew each time."""
    times = []
    for _ in range(rounds):
        fresh = anew(rollouts)
        began = time.process_time()
        work(fresh)
        times.append(1000 * (time.process_time() - began))
    return statistics.median(times)


def windows(loads: dict[str, Load]) -> dict[str, Window]:
    """Half a minute of reports of each; one in a hundred is slow."""
    result = {}
    for n, (worker, load) in enumerate(loads.items()):
        window = result[worker] = Window()
        rate = 10 if n % 100 == 0 else 40
        for second in range(int(WINDOW_S) + 1):
            window.add(second, load.model_copy(update={"tokens": rate * second * load.running}))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--tail", type=int, default=20)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--resting", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print("rollouts   read   plan   full  tight  empty   vain   slow   an interval   emptied   CPU ms")
    slowest = resting(asked.resting)
    for rollouts in asked.rollouts:
        values = reports(rollouts, asked.tail, asked.limit)
        loads = {worker: Load.parse(value) for worker, value in values.items()}
        draining = [Draining.of(worker, load) for worker, load in loads.items()]
        full = [replace(r, batch_limit=1 + len(r.tail)) for r in draining]
        tight = [replace(r, kv_capacity=int(1.2 * r.used) + 10) for r in draining]
        seen = windows(loads)
        costs = [
            cpu_ms(work, some, asked.rounds)
            for work, some in (
                (lambda _, values=values: [Draining.of(w, Load.parse(v)) for w, v in values.items()], []),
                *((plan, some) for some in (draining, full, tight)),
                *((lambda others: evacuate([slowest], others), some) for some in (draining, tight)),
                (lambda _, seen=seen: slow(seen, set()), []),
            )
        ]
        emptied = len({h.source for h in plan(draining)})
        interval = INTERVAL_S * (costs[0] + costs[-1]) + costs[1]
        columns = " ".join(f"{cost:6.1f}" for cost in costs)
        print(f"{rollouts:8} {columns} {interval:13.0f} {emptied:9}")


if __name__ == "__main__":
    main()
