"""What the manager spends an interval on a large cluster: the plan of repack, and all around it.

    python benchmarks/manager.py                  # 1,000 rollouts
    python benchmarks/manager.py --rollouts 200

Draining rollouts of two versions with tails of a log-normal number of tokens. Printed, in milliseconds (median and
largest of the rounds): parsing the reports that came since the last look, the plan, the slow ones; and what that is of
a core, with reports that change each second and a plan every five."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from laminar.buffer.records import Load
from laminar.workers.repack import Draining, plan
from laminar.workers.slowness import Window, slow

CAPACITY, LIMIT = 990_000, 64
INTERVAL_S = 5.0


def loads(count: int, seed: int, share: float) -> dict[str, Load]:
    """Reports; `share` of the rollouts drain."""
    source = random.Random(seed)
    result = {}
    for number in range(count):
        draining = source.random() < share
        running = source.randint(1, LIMIT - 1) if draining else source.randint(LIMIT, 256)
        tokens = [min(16_000, round(source.lognormvariate(8.0, 1.0))) for _ in range(running)]
        tail = {
            f"{number * 100 + i // 16:012d}-{i % 16:03d}": (n, source.randint(100, 4000)) for i, n in enumerate(tokens)
        }
        result[f"rollout-{number:05d}"] = Load(
            version=source.choice((7, 8)), running=running, waiting=0, kv_tokens=sum(tokens), kv_capacity=CAPACITY,
            decode_tokens_per_s=running * 80.0, draining=draining, batch_limit=LIMIT, step_s=0.009,
            prefill_tokens_per_s=32_000.0, tail=tail if draining else {},
        )  # fmt: skip
    return result


def timed(rounds: int, work: Callable[[int], object]) -> list[float]:
    result = []
    for number in range(rounds):
        began = time.perf_counter()
        work(number)
        result.append(1000 * (time.perf_counter() - began))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--draining", type=float, default=0.9, help="share of the rollouts that drain")
    asked = parser.parse_args()
    reports = [loads(asked.rollouts, seed, asked.draining) for seed in range(asked.rounds)]
    texts = [[load.dump() for load in some.values()] for some in reports]
    drains = [[Draining.of(w, load) for w, load in some.items() if load.draining] for some in reports]
    windows = {w: Window() for w in reports[0]}
    for second in range(31):
        for worker, load in reports[0].items():
            windows[worker].add(float(second), load)
    moves = [len(plan(some)) for some in drains]
    measured = {
        "parse the reports": timed(asked.rounds, lambda n: [Load.parse(text) for text in texts[n]]),
        "make the plan's view of them": timed(
            asked.rounds, lambda n: [Draining.of(w, load) for w, load in reports[n].items() if load.draining]
        ),
        "plan": timed(asked.rounds, lambda n: plan(drains[n])),
        "look for slow ones": timed(asked.rounds, lambda n: slow(windows, set())),
    }
    print(f"{asked.rollouts} rollouts, {statistics.fmean(moves):.0f} moves a plan")
    for name, times in measured.items():
        print(f"{name:30s} median {statistics.median(times):7.1f} ms   largest {max(times):7.1f} ms")
    middle = {name: statistics.median(times) for name, times in measured.items()}
    each_second = middle["parse the reports"] + middle["look for slow ones"]
    interval = INTERVAL_S * each_second + middle["make the plan's view of them"] + middle["plan"]
    print(f"an interval of {INTERVAL_S:.0f} s: {interval:.0f} ms, {interval / (10 * INTERVAL_S):.1f} % of a core")


if __name__ == "__main__":
    main()
