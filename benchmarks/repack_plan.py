"""What repack costs the manager, by the number of rollouts: the plan, and all that it does between two plans.

    python benchmarks/repack_plan.py
    python benchmarks/repack_plan.py --rollouts 1000 --tail 20 --rounds 30

All rollouts drain one version, with up to `--tail` unfinished trajectories each and room for `--limit`. CPU
milliseconds, medians of `--rounds`: reading all reports as they stand in etcd (each is read once, when it changes),
the plan, comparing all rollouts to find slow ones (each second); and their sum over an interval of five seconds in
which every rollout reports each second. `full`: the plan where no rollout has room for another's tail, so that each is
tried in vain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from laminar.buffer.keys import trajectory_name
from laminar.buffer.records import Load
from laminar.workers.managing.slowness import WINDOW_S, Window, slow
from laminar.workers.repack import Draining, plan

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


def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
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
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    print("rollouts   read   plan   full   slow   an interval   emptied   CPU ms")
    for rollouts in asked.rollouts:
        values = reports(rollouts, asked.tail, asked.limit)
        loads = {worker: Load.parse(value) for worker, value in values.items()}
        draining = [Draining.of(worker, load) for worker, load in loads.items()]
        crowded = {w: load.model_copy(update={"batch_limit": 1 + load.running}) for w, load in loads.items()}
        full = [Draining.of(worker, load) for worker, load in crowded.items()]
        seen = windows(loads)
        read = cpu_ms(lambda values=values: [Draining.of(w, Load.parse(v)) for w, v in values.items()], asked.rounds)
        made = cpu_ms(lambda draining=draining: plan(draining), asked.rounds)
        vain = cpu_ms(lambda full=full: plan(full), asked.rounds)
        found = cpu_ms(lambda seen=seen: slow(seen, set()), asked.rounds)
        emptied = len({h.source for h in plan(draining)})
        interval = INTERVAL_S * (read + found) + made
        print(f"{rollouts:8} {read:6.1f} {made:6.1f} {vain:6.1f} {found:6.1f} {interval:13.0f} {emptied:9}")


if __name__ == "__main__":
    main()
