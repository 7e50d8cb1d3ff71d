"""What `laminar simulate CLUSTER.toml` and `laminar simulate --fit RUN` do. Blocking."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from laminar.simulator.scale import report
from laminar.simulator.scale.compare import run_policy
from laminar.simulator.scale.fit import check_fit_output, fit, write_fit
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.picture import check_output, draw
from laminar.simulator.scale.policies import POLICIES
from laminar.simulator.scale.real import check_real, run_real, says_real
from laminar.simulator.scale.settings import load_settings
from laminar.simulator.scale.split import fixed_split
from laminar.workers.viewing.inspect import open_store

Say = Callable[[RenderableType], None]


def run_cluster(path: Path, overrides: list[str], output: Path | None, *, as_json: bool, real: bool, say: Say) -> None:
    """Run the policies of a file, say what came out, and draw it. `real`: with the workers themselves in place of the
    last policy's model. Raises ConfigError."""
    # What cannot be is told before anything runs.
    picture = output or Path(f"{path.stem}.png")
    check_output(picture)
    settings = load_settings(path, overrides)
    job = Job.of(settings)
    names = settings.compare.policies
    for name in names:
        fixed_split(job, POLICIES[name])
    if real:
        check_real(names[-1], job)
    if not as_json:
        say(Text(report.facts(job) + "\n"))
    outcomes = []
    for name in names:
        began = time.perf_counter()
        outcome = run_real(name, job) if real and name == names[-1] else run_policy(name, job)
        outcomes.append(outcome)
        if not as_json:
            plans = f", {max(outcome.plan_ms):.1f} ms a plan at most" if outcome.plan_ms else ""
            if real and name == names[-1]:
                say(Text(f"{name}: {says_real(job)}", style="dim"))
            say(Text(f"{name}: simulated in {time.perf_counter() - began:.1f} s{plans}", style="dim"))
    if as_json:
        say(Text(json.dumps(report.as_json(job, outcomes), indent=1)))
    else:
        say(Text())
        say(report.table(job, outcomes))
    title = f"{path.stem}: {settings.model.name}, {settings.cluster.gpus} GPUs"
    drawn = draw(outcomes, title, picture)
    if not as_json:
        say(Text(str(drawn)))


def run_fit(target: str, output: Path | None, *, as_json: bool, force: bool, say: Say) -> None:
    """Read a run, say what balances, and write a cluster.toml. Raises ConfigError, StoreError."""
    if output is not None:
        check_fit_output(output, force=force)
    store = open_store(target)
    found = fit(store)
    written = write_fit(found, output or Path(f"{found.run}-cluster.toml"), force=force)
    if as_json:
        values = {
            "run": found.run, "rollouts": found.rollouts, "rollout_rate": found.rollout_rate,
            "train_rate": found.train_rate, "step_s": found.step_s, "written": [str(p) for p in written],
        }  # fmt: skip
        say(Text(json.dumps(values, indent=1)))
        return
    say(Text(found.says()))
    for file in written:
        say(Text(str(file)))
    say(Text(f"next: laminar simulate {written[0]}"))
