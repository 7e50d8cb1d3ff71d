"""The quick-start from start to a taught model: Laminar beside TRL's GRPOTrainer, and each of Laminar's savings alone.

    python benchmarks/end_to_end.py --seeds 1000,50000,90000 --stop-at 0.6 --out end_to_end.jsonl
    python benchmarks/end_to_end.py --ablate --max-steps 15 --out ablation.jsonl
    python benchmarks/end_to_end.py --report end_to_end.jsonl        # only print what was measured before

Both sides get the same model folder, the same prompts in the same order, reward, batch, lengths and optimizer
settings, and all cores of the machine; runs follow each other, nothing runs at once. Printed apart from each other:

time to reward  seconds from the first step's start (Laminar: the first draw; TRL: before its first generation) to the
                end of the step at which the mean reward of the last five steps reaches the threshold. Set-up and the
                loading of models come before and are left out. Checkpoints that fall in between count.
seconds a step  median of the distances between the ends of successive steps (the first: from the start)
steps           optimizer steps to the threshold: what is learned a step, without the speed
memory          peak of all processes together, loading included: see `processes.Memory`

Every run is one line of JSON in `--out`, written when it ends; the last line of a (system, variant, seed) counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import processes

from laminar.buffer.prompts import locate
from laminar.config import load_config_with
from laminar.workers.environments.single_turn import prompt_messages
from laminar.workers.environments.sources import load_prompts
from laminar.workers.learning.schedule import learning_rate
from laminar.workers.models import resolve_model
from laminar.workers.pools import prompt_of
from laminar.workers.viewing.inspect import StoreView

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "examples" / "quickstart.toml"
TRL_VENV = HERE.parent / ".venv-trl"
TRL_PACKAGES = ("trl==1.16", "reasoning-gym==0.1.25")
WINDOW = 5


@dataclass
class Run:
    """One measured run. Times in seconds since the first step's start; `ends` and `rewards` have one entry a step."""

    system: str
    variant: str
    seed: int
    settings: list[str]
    ends: list[float]
    rewards: list[float]
    setup_s: float
    wall_s: float
    peak_pss_mib: float
    peak_rss_bound_mib: float
    stopped_early: bool
    cpus: int
    load_before: float
    versions: dict[str, str]

    @property
    def durations(self) -> list[float]:
        return [b - a for a, b in zip([0.0, *self.ends], self.ends, strict=False)]

    @property
    def step_s(self) -> float:
        return statistics.median(self.durations)

    def steps_to(self, threshold: float) -> int | None:
        """Steps until the mean reward of the last five has reached `threshold`."""
        for n in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[n - WINDOW : n]) >= threshold:
                return n
        return None

    def seconds_to(self, threshold: float) -> float | None:
        n = self.steps_to(threshold)
        return None if n is None else self.ends[n - 1]


# -- Laminar --------------------------------------------------------------------------------------------------------


def variants() -> dict[str, list[str]]:
    """Each difference to a plain trainer, taken away from the default one at a time.

    The quick-start takes turns: with a staleness of 0 a step's groups are only drawn once the weights of the step
    before are published. "overlapping" generates the next step's groups while the trainer works, on the same cores.
    """
    return {
        "default": [],
        "prompts not shared": ["trainer.share_prompts=false"],
        "no-signal computed": ["trainer.skip_no_signal=false"],
        "float32": ["model.dtype=float32"],
        "overlapping": ["trainer.max_staleness=1"],
        "transformers engine": ["rollout.engine=transformers"],
    }


def run_laminar(options: argparse.Namespace, seed: int, variant: str, changes: Sequence[str]) -> Run:
    work = Path(tempfile.mkdtemp(prefix="laminar-benchmark-", dir=options.work))
    store = work / "store"
    settings = [*options.set, *changes, f"prompts.seed={seed}", "evaluation.size=0"]
    settings += [f"run.max_steps={options.max_steps}"]
    placed = [*settings, f"run.name=benchmark-{secrets.token_hex(4)}", f"run.store={store}"]
    command = [sys.executable, "-m", "laminar.cli", "run", str(options.config), "--plain"]
    for setting in placed:
        command += ["--set", setting]
    load, started = os.getloadavg()[0], time.time()

    def enough() -> bool:
        return options.stop_at is not None and reached([r for _, _, r in laminar_steps(store)], options.stop_at)

    ended = processes.run(
        command, log=work / "run.log", enough=enough, limit_s=options.limit, env=processes.clean_environment()
    )
    if ended.returncode != 0 and not ended.stopped:
        raise RuntimeError(f"laminar ended with {ended.returncode}; see {work / 'run.log'}:\n{tail(work / 'run.log')}")
    began = first_draw(store)
    steps = laminar_steps(store)
    result = record(
        "laminar", variant, seed, settings, began, [(at, r) for _, at, r in steps], started, ended, load,
        {name: version(name) for name in ("laminar", "torch", "transformers")},
    )  # fmt: skip
    shutil.rmtree(work)
    return result


def laminar_steps(store: Path) -> list[tuple[int, float, float]]:
    """Of each committed step: its number, when it was recorded (s since 1970), the mean reward of all it consumed."""
    if not (store / "step_metrics.lance" / "_versions").is_dir():
        return []
    with StoreView.open(str(store)).connect() as connection:
        rows = connection.execute(
            'select step, epoch("at"), metrics from step_metrics where step >= 0 order by step'
        ).fetchall()
    return [(step, at, json.loads(metrics)["reward_mean"]) for step, at, metrics in rows]


def first_draw(store: Path) -> float:
    with StoreView.open(str(store)).connect() as connection:
        (began,) = connection.execute("select min(epoch(started_at)) from experience").fetchone()
    return float(began)


def reached(rewards: Sequence[float], threshold: float) -> bool:
    return len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= threshold


# -- TRL ------------------------------------------------------------------------------------------------------------


def trl_python() -> Path:
    """The interpreter of TRL's environment; made on first use, with the torch and transformers that Laminar uses."""
    python = TRL_VENV / "bin" / "python"
    if python.exists() and subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0:
        return python
    print(f"installing {TRL_PACKAGES[0]} into {TRL_VENV.name}; this takes minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(TRL_VENV)], check=True)
    same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL_PACKAGES, *same], check=True)
    return python


def trl_task(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Laminar's prompts, in the order in which Laminar draws them, and its settings, in TRL's words."""
    config, _ = load_config_with(options.config, [*options.set, f"prompts.seed={seed}", "evaluation.size=0"])
    rows = load_prompts(config.prompts, config.evaluation).train
    prompts = []
    for group in range(config.trainer.groups_per_step * options.max_steps):
        _, _, index = locate(group, len(rows), config.run.seed)
        prompt = prompt_of({**rows[index], "prompt_index": index})
        prompts.append({"messages": prompt_messages(prompt), "options": {}, **prompt.metadata})
    t, s = config.trainer, config.sampling
    return {
        "model": str(resolve_model(config.model.path)),
        "prompts": prompts,
        "groups_per_step": t.groups_per_step,
        "samples_per_prompt": s.samples_per_prompt,
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "learning_rates": [learning_rate(t, step) for step in range(options.max_steps)],
        "betas": t.betas,
        "weight_decay": t.weight_decay,
        "max_grad_norm": t.max_grad_norm,
        "clip_low": t.clip_low,
        "clip_high": t.clip_high,
        "max_steps": options.max_steps,
        "stop_at": options.stop_at,
        "precision": options.trl_precision,
        "seed": config.run.seed,
    }


def run_trl(options: argparse.Namespace, seed: int) -> Run:
    python = trl_python()
    work = Path(tempfile.mkdtemp(prefix="trl-benchmark-", dir=options.work))
    task, events, log = work / "task.json", work / "events.jsonl", work / "run.log"
    task.write_text(json.dumps(trl_task(options, seed)), encoding="utf-8")
    load, started = os.getloadavg()[0], time.time()
    ended = processes.run(
        [str(python), str(HERE / "trl_baseline.py"), str(task), str(events)],
        log=log,
        enough=lambda: False,
        limit_s=options.limit,
        env=processes.clean_environment(),
    )
    if ended.returncode != 0:
        raise RuntimeError(f"TRL ended with {ended.returncode}; see {log}:\n{tail(log)}")
    lines = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    steps = [(e["at"], e["reward"]) for e in lines if e["event"] == "step"]
    asked = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    versions = json.loads(subprocess.check_output([python, "-c", asked, "trl", "torch", "transformers"]))
    settings = [*options.set, f"precision={options.trl_precision}", f"max_steps={options.max_steps}"]
    variant = "default" if options.trl_precision == "autocast" else options.trl_precision
    result = record("trl", variant, seed, settings, lines[0]["at"], steps, started, ended, load, versions)
    shutil.rmtree(work)
    return result


# -- records --------------------------------------------------------------------------------------------------------


def record(
    system: str, variant: str, seed: int, settings: list[str], began: float, steps: Sequence[tuple[float, float]],
    started: float, ended: processes.Ended, load: float, versions: dict[str, str],
) -> Run:  # fmt: skip
    return Run(
        system=system,
        variant=variant,
        seed=seed,
        settings=settings,
        ends=[round(at - began, 3) for at, _ in steps],
        rewards=[reward for _, reward in steps],
        setup_s=round(began - started, 3),
        wall_s=round(ended.wall_s, 3),
        peak_pss_mib=round(ended.memory.pss, 1),
        peak_rss_bound_mib=round(ended.memory.rss_bound, 1),
        stopped_early=ended.stopped,
        cpus=os.cpu_count() or 0,
        load_before=round(load, 2),
        versions=versions,
    )


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def append(path: Path, run: Run) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read_runs(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


# -- printing -------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def report_comparison(runs: Sequence[Run], threshold: float) -> None:
    """One table a quantity: a row a seed, then the medians: of each system's figures, and of the ratios of the seeds,
    since a seed's order of the prompts is the same for both. `–`: the threshold was not reached."""
    systems = sorted({(r.system, r.variant) for r in runs}, key=lambda s: (s[0] != "laminar", s))
    newest = {(r.system, r.variant, r.seed): r for r in runs}
    quantities: list[tuple[str, int, Callable[[Run], float | None]]] = [
        (f"time to a five-step mean reward of {threshold}, s (set-up left out)", 1, lambda r: r.seconds_to(threshold)),
        ("seconds a step, median", 2, lambda r: r.step_s),
        (f"steps to {threshold}", 0, lambda r: r.steps_to(threshold)),
        ("peak memory, MiB (sum of proportional shares)", 0, lambda r: r.peak_pss_mib),
        ("peak memory, MiB (upper bound: sum of each process's own peak)", 0, lambda r: r.peak_rss_bound_mib),
        ("set-up before the first step, s (not in the above)", 1, lambda r: r.setup_s),
        ("steps measured", 0, lambda r: len(r.ends)),
    ]
    names = [s if v == "default" else f"{s} {v}" for s, v in systems]
    for title, digits, of in quantities:
        heads = [*names, *(f"{n} / {names[0]}" for n in names[1:])]
        print(f"\n{title}\n{'seed':>8}" + "".join(f"{n:>18}" for n in heads))
        columns: list[list[float | None]] = [[] for _ in systems]
        for seed in sorted({r.seed for r in runs}):
            found = [newest.get((*s, seed)) for s in systems]
            values = [None if r is None else of(r) for r in found]
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            print_row(str(seed), values, ratios_of(values), digits)
        # A median over the seeds that reached it alone would flatter who reached it seldom.
        by_seed = [ratios_of(values) for values in zip(*columns, strict=True)]
        print_row("median", [median(c) for c in columns], [median(c) for c in zip(*by_seed, strict=True)], digits)


def median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def ratios_of(values: Sequence[float | None]) -> list[float | None]:
    """Each against the first."""
    return [v / values[0] if v is not None and values[0] else None for v in values[1:]]


def print_row(name: str, values: Sequence[float | None], ratios: Sequence[float | None], digits: int) -> None:
    cells = [*(number(v, digits) for v in values), *(number(r, 2) for r in ratios)]
    print(f"{name:>8}" + "".join(f"{cell:>18}" for cell in cells))


def report_ablation(runs: Sequence[Run]) -> None:
    """Seconds a step of each variant: the median over its runs of the median (and of the mean) over their steps.
    `–`: the file has no run of the default to compare with."""
    print(f"\n{'variant':22}{'runs':>5}{'s a step':>10}{'/ default':>10}{'mean':>10}{'/ default':>10}{'peak MiB':>10}")
    base: tuple[float, float] | None = None
    for name in dict.fromkeys(["default", *(r.variant for r in runs)]):
        mine = [r for r in runs if r.variant == name and r.system == "laminar"]
        if not mine:
            continue
        middle = statistics.median(r.step_s for r in mine)
        mean = statistics.median(r.ends[-1] / len(r.ends) for r in mine)
        if name == "default":
            base = (middle, mean)
        beside = [number(middle / base[0], 2), number(mean / base[1], 2)] if base else ["–", "–"]
        peak = statistics.median(r.peak_pss_mib for r in mine)
        print(f"{name:22}{len(mine):5}{middle:10.2f}{beside[0]:>10}{mean:10.2f}{beside[1]:>10}{peak:10.0f}")


# -- the command ----------------------------------------------------------------------------------------------------


def main() -> None:
    options = arguments()
    if options.report is not None:
        runs = read_runs(options.report)
        report_ablation(runs) if options.ablate else report_comparison(runs, options.threshold)
        return
    load_config_with(options.config, options.set)  # a mistake shows now, not after the first side's runs
    plan: list[tuple[str, Callable[[], Run]]] = []
    if options.ablate:
        chosen = {k: v for k, v in variants().items() if options.variants is None or k in options.variants}
        for _ in range(options.repeats):
            # In another order each time, so that a machine that slows down does not always slow the same ones.
            for name, changes in random.sample(list(chosen.items()), len(chosen)):
                plan.append((name, lambda n=name, c=changes: run_laminar(options, options.seeds[0], n, c)))  # type: ignore[misc]
    else:
        for seed in options.seeds:
            if options.only != "trl":
                plan.append((f"laminar, seed {seed}", lambda s=seed: run_laminar(options, s, "default", [])))  # type: ignore[misc]
            if options.only != "laminar":
                plan.append((f"trl, seed {seed}", lambda s=seed: run_trl(options, s)))  # type: ignore[misc]
    for title, measure in plan:
        run = measure()
        append(options.out, run)
        print(
            f"{title}: {len(run.ends)} steps, {run.step_s:.2f} s a step, reward {run.rewards[0]:.2f} -> "
            f"{statistics.fmean(run.rewards[-WINDOW:]):.2f}, {run.peak_pss_mib:.0f} MiB",
            flush=True,
        )
    runs = read_runs(options.out)
    report_ablation(runs) if options.ablate else report_comparison(runs, options.threshold)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=lambda t: [int(s) for s in t.split(",")], default=[1000, 50000, 90000])
    parser.add_argument("--only", choices=("laminar", "trl"))
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--stop-at", type=float, help="end a run once the mean reward of five steps reaches this")
    parser.add_argument("--threshold", type=float, default=0.6, help="the reward of the tables (--stop-at's, if given)")
    parser.add_argument("--trl-precision", choices=("autocast", "bfloat16"), default="autocast")
    parser.add_argument("--ablate", action="store_true", help="Laminar alone, without each of its savings; first seed")
    parser.add_argument("--variants", type=lambda t: t.split(","), help="with --ablate: only these")
    parser.add_argument("--repeats", type=int, default=1, help="with --ablate: runs of each variant")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for all runs")
    parser.add_argument("--out", type=Path, help="default: end_to_end.jsonl, or ablation.jsonl")
    parser.add_argument("--report", type=Path, metavar="OUT", help="run nothing, print this file's tables")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where stores are made")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that one run may take")
    options = parser.parse_args()
    options.out = options.out or Path("ablation.jsonl" if options.ablate else "end_to_end.jsonl")
    options.threshold = options.stop_at if options.stop_at is not None else options.threshold
    if options.max_steps < 1:
        parser.error("--max-steps is at least 1")
    return options


if __name__ == "__main__":
    main()
