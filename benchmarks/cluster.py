"""The simulated cluster beside the published figures: three models, five sizes each, the same costs everywhere.

    python benchmarks/cluster.py                          # all tables; some minutes on one core
    python benchmarks/cluster.py --models qwen2.5-7b --sizes 1,3,5
    python benchmarks/cluster.py --real                   # and 1,024 GPUs with the workers themselves

Printed: how much faster Laminar is than each baseline, by configuration and in the mean, beside the paper's means; the
staleness of what it trains on; what repack gives, with rollouts that take batch after batch as in the paper; what
drawing while newest and growth-aware plans add. Nothing is tuned: costs follow from published figures of model and
GPU, lengths from p99 = 10 x median = the limit, the split of the GPUs from the rule in
`laminar/simulator/scale/split.py`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from laminar.simulator.scale.compare import run_policy
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.real import run_real
from laminar.simulator.scale.settings import settings_from

SIZES = {
    "qwen2.5-7b": (16, 32, 64, 128, 256),
    "qwen2.5-32b": (32, 64, 128, 256, 512),
    "qwen2.5-72b": (64, 128, 256, 512, 1024),
}
PAPER = {"synchronous": 2.56, "one-step": 1.98, "stream": 1.93, "partial": 1.39}
PAPER_LARGEST = 3.34
STAGES = ("laminar-batch", "laminar-batch-blind", "laminar-batch-repack", "laminar-off", "laminar-blind", "laminar")

Case = tuple[str, int, str]
Result = dict[str, Any]


def job_of(model: str, gpus: int, overrides: dict[str, Any]) -> Job:
    sections: dict[str, Any] = {"cluster": {"gpus": gpus}, "model": {"name": model}}
    for section, values in overrides.items():
        sections[section] = {**sections.get(section, {}), **values}
    return Job.of(settings_from(sections))


def run_case(case: Case, overrides: dict[str, Any]) -> Result:
    model, gpus, policy = case
    began = time.perf_counter()
    outcome = run_policy(policy, job_of(model, gpus, overrides))
    values = outcome.as_json()
    del values["kv_over_time"]
    return values | {
        "model": model, "below_3": outcome.staleness_below(3), "real_s": time.perf_counter() - began,
        "plan_ms": max(outcome.plan_ms, default=0.0),
    }  # fmt: skip


def speed_ups(results: dict[Case, Result], models: dict[str, tuple[int, ...]]) -> None:
    print("\nhow many times as fast Laminar is, in trained tokens a second")
    print(f"{'model':13s}{'GPUs':>6s}{'split':>10s}" + "".join(f"{name:>13s}" for name in PAPER) + f"{'tokens/s':>13s}")
    ratios: dict[str, list[float]] = {name: [] for name in PAPER}
    largest: list[float] = []
    for model, sizes in models.items():
        for gpus in sizes:
            best = results[model, gpus, "laminar"]
            row = {name: best["tokens_per_s"] / results[model, gpus, name]["tokens_per_s"] for name in PAPER}
            for name, ratio in row.items():
                ratios[name].append(ratio)
            largest += list(row.values()) if gpus == max(sizes) else []
            split = f"{best['rollout_gpus']}+{best['trainer_gpus']}"
            print(
                f"{model:13s}{gpus:6d}{split:>10s}" + "".join(f"{row[name]:12.2f}x" for name in PAPER)
                + f"{best['tokens_per_s']:13,.0f}"
            )  # fmt: skip
    print("mean".ljust(29) + "".join(f"{statistics.fmean(ratios[name]):12.2f}x" for name in PAPER))
    print("the paper's".ljust(29) + "".join(f"{PAPER[name]:12.2f}x" for name in PAPER))
    print("off by".ljust(29) + "".join(f"{statistics.fmean(ratios[n]) / PAPER[n] - 1:+13.0%}" for n in PAPER))
    print("most".ljust(29) + "".join(f"{max(ratios[name]):12.2f}x" for name in PAPER))
    print(f"mean at the largest sizes, all baselines: {statistics.fmean(largest):.2f}x (the paper's {PAPER_LARGEST}x)")


def staleness(results: dict[Case, Result], models: dict[str, tuple[int, ...]]) -> None:
    print("\nstaleness of what Laminar trains on, and what its GPUs do")
    for model, sizes in models.items():
        for gpus in sizes:
            r = results[model, gpus, "laminar"]
            ages = " ".join(f"{age}:{n / sum(r['staleness'].values()):.1%}" for age, n in r["staleness"].items())
            print(
                f"{model:13s}{gpus:6d} mean {r['staleness_mean']:.2f} max {r['staleness_max']} < 3 {r['below_3']:.0%} "
                f"idle {r['rollout_idle']:.0%} + {r['trainer_idle']:.0%}  KV {r['kv_share']:.0%}  "
                f"{r['step_s']:.1f} s a step  plans <= {r['plan_ms']:.1f} ms  [{ages}]"
            )


def stages(results: dict[Case, Result], cases: list[tuple[str, int]], heading: str) -> None:
    print(f"\n{heading}")
    print(f"{'model':13s}{'GPUs':>6s} {'policy':22s}{'generated/s':>13s}{'trained/s':>12s}{'of paper':>10s}"
          f"{'KV use':>8s}{'staleness':>14s}{'moved':>8s}")  # fmt: skip
    for model, gpus in cases:
        base = results[model, gpus, "laminar-batch-blind"]
        for name in STAGES:
            r = results[model, gpus, name]
            print(
                f"{model:13s}{gpus:6d} {name:22s}{r['generated_per_s']:13,.0f}{r['tokens_per_s']:12,.0f}"
                f"{r['tokens_per_s'] / base['tokens_per_s']:9.2f}x{r['kv_share']:8.1%}"
                f"{r['staleness_mean']:7.2f} max {r['staleness_max']:2d}{r['moved']:8d}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--sizes", default="1,2,3,4,5", help="which of each model's five sizes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--set", default="{}", help='JSON, as in {"job": {"steps": 5}}: as in a cluster.toml')
    parser.add_argument("--out", type=Path, help="write all results as JSON")
    parser.add_argument("--stages", action="store_true", help="only what each improvement gives")
    parser.add_argument("--no-stages", action="store_true", help="without them")
    parser.add_argument("--real", action="store_true", help="72B on 1,024 GPUs with the workers themselves as well")
    asked = parser.parse_args()
    overrides = json.loads(asked.set)
    chosen = [int(place) - 1 for place in asked.sizes.split(",")]
    models = {name: tuple(SIZES[name][place] for place in chosen) for name in asked.models.split(",")}
    middle = [(name, sizes[len(sizes) // 2]) for name, sizes in models.items()]
    cases = [(m, g, p) for m, sizes in models.items() for g in sizes for p in ("laminar", *PAPER) if not asked.stages]
    cases += [(m, g, p) for m, g in middle for p in STAGES if (m, g, p) not in cases and not asked.no_stages]
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=context) as pool:
        results = {}
        for case, result in zip(cases, pool.map(run_case, cases, [overrides] * len(cases)), strict=True):
            results[case] = result
            print(f"{case}: {result['tokens_per_s']:,.0f} tokens/s", flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(list(results.values()), indent=1), encoding="utf-8")
    if not asked.stages:
        speed_ups(results, models)
        staleness(results, models)
    if not asked.no_stages:
        stages(results, middle, "what each part gives; the paper takes batch after batch and packs by present tokens")
    print(f"\n{len(cases)} simulations in {time.perf_counter() - began:.0f} s; the longest took "
          f"{max(r['real_s'] for r in results.values()):.0f} s")  # fmt: skip
    if asked.real:
        began = time.perf_counter()
        outcome = run_real("laminar", job_of("qwen2.5-72b", 1024, overrides))
        print(f"the workers themselves, 72B on 1,024 GPUs: {outcome.tokens_per_s:,.0f} tokens/s, staleness "
              f"{outcome.staleness_mean:.2f}, in {time.perf_counter() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
