"""`laminar simulate CLUSTER.toml` and `--fit RUN` as a user meets them: table, JSON, PNG, errors, a file that works."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from laminar.buffer.schema import EXPERIENCE, STEP_METRICS
from laminar.cli import app, main
from laminar.errors import StoreError
from laminar.simulator.scale import command
from laminar.simulator.scale.compare import run_policy
from laminar.simulator.scale.fit import Fit, fit, refuse_absurd, write_fit
from laminar.simulator.scale.job import Job
from laminar.simulator.scale.policies import POLICIES
from laminar.simulator.scale.settings import load_settings
from laminar.simulator.scale.split import fixed_split
from laminar.workers.viewing.inspect import open_store

MakeStore = Callable[..., Path]
ROOT = Path(__file__).parent.parent.parent
START_US = 1_780_000_000_000_000
SMALL = """
[cluster]
gpus = 8
[job]
groups_per_step = 8
samples_per_prompt = 4
steps = 2
warmup_steps = 1
[compare]
policies = ["synchronous", "laminar"]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAMINAR_DEBUG", raising=False)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def fails(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["laminar", "simulate", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_example_teaches_only_keys_that_exist() -> None:
    text = (ROOT / "examples" / "cluster.toml").read_text()
    assert load_settings(ROOT / "examples" / "cluster.toml", []).cluster.gpus == 64
    for key in re.findall(r"^# (\w+) = ", text, re.M):
        assert any(key in section.model_fields for section in _sections()), key


def _sections() -> list[Any]:
    from laminar.simulator.scale.settings import Settings

    return [field.annotation for field in Settings.model_fields.values()]


def test_a_table_and_a_picture(here: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "small.toml", "--set", "rollout.gpus=4"])
    assert result.exit_code == 0, result.output
    assert re.search(r"^laminar +4\+4 .*1\.00 x", result.output, re.M), result.output
    assert re.search(r"^synchronous +8 ", result.output, re.M)
    assert (here / "small.png").read_bytes().startswith(b"\x89PNG")


def test_recorded_lengths_that_are_cut_are_told(here: Path) -> None:
    (here / "long.jsonl").write_text('{"tokens": 100}\n{"tokens": 40000}\n{"tokens": 16384}\n')
    arguments = ["simulate", "small.toml", "--set", "lengths.trace=long.jsonl"]
    says = "lengths.trace: 1 of 3 lengths are above job.max_tokens = 16,384, up to 40,000, and are cut"
    text = " ".join(CliRunner().invoke(app, arguments).output.split())
    facts, table = text.split("staleness", 1)
    assert says in facts and says in table, text
    assert says in json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["untold"]
    kept = CliRunner().invoke(app, [*arguments, "--set", "job.max_tokens=40000"])
    assert kept.exit_code == 0 and "are cut" not in " ".join(kept.output.split())


def test_json_is_the_same_each_time(here: Path) -> None:
    first, second = (CliRunner().invoke(app, ["simulate", "small.toml", "--json", "-o", "x.png"]) for _ in range(2))
    assert first.exit_code == 0 and first.output == second.output
    values = json.loads(first.output)
    assert [o["policy"] for o in values["outcomes"]] == ["synchronous", "laminar"]
    assert values["settings"]["cluster"]["gpus"] == 8 and (here / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["small.toml", "--set", "cluster.gpuss=8"], "did you mean 'gpus'"),
        (["small.toml", "--set", "rollouts.gpus=4"], "unknown key 'rollouts'; did you mean 'rollout'?"),
        (["small.toml", "--set", "rollout.gpus=8"], "rollout.gpus = 8 leaves none of cluster.gpus = 8"),
        (["small.toml", "--set", "rollout.gpus=7"], "leaves 1 of 8 GPUs to the trainer"),
        (["small.toml", "--set", 'compare.policies=["verl"]'], "known are synchronous"),
        (["small.toml", "--set", "nonsense"], "section.key=value"),
        (["small.toml", "--set", "lengths.trace=absent.parquet"], "absent.parquet"),
        (["small.toml", "--real", "--set", 'compare.policies=["stream"]'], "cannot run the policy 'stream'"),
        (["small.toml", "--set", "job.steps=0"], "--set: job.steps = 0: must be at least 1; raise it"),
        (["small.toml", "--set", 'cluster.gpus="16"'], "--set: cluster.gpus = '16': a whole number is expected"),
        (["small.toml", "--set", "job.steps=true"], "--set: job.steps = True: a whole number is expected"),
        (["small.toml", "--set", 'costs.decode=[[1, "9", 0.1]]'], "a number is expected"),
        (["odd.toml", "--set", "cluster.gpus=4"], "odd.toml: cluster = 5: a section is expected; write [cluster]"),
        (["small.toml", "-o", "absent/x.png"], "the folder absent does not exist"),
        (["small.toml", "-o", "."], "is a folder"),
        (["small.toml", "-o", "/proc/x.png"], "nothing can be written in /proc"),
        (["small.toml", "--set", "costs.decode=[[1, 1, 1e-300]]"], "1e-09 to 100000 seconds"),
        (["small.toml", "--set", "rollout.repack_interval=1e-300"], "rollout.repack_interval = 1e-300"),
        (["small.toml", "--set", "environment.reward_s=1e308"], "environment.reward_s = 1e+308"),
        (["small.toml", "--set", "costs.prefill_tokens_per_s=1e-300"], "is below 1e-06: nothing would end"),
        (["small.toml", "--set", "job.groups_per_step=10000000000"], "at most 1000000 are simulated; lower one"),
        (["--fit", "nowhere", "-o", "absent/x.toml"], "the folder absent does not exist"),
        (["--fit", "nowhere", "-o", "small.toml"], "small.toml exists"),
        (["absent.toml"], "cannot read absent.toml"),
        (["--fit", "nowhere"], "no store at 'nowhere'"),
    ],
)
def test_nonsense_is_refused_with_the_numbers_and_2_before_anything_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    def runs(*_: object) -> None:
        raise AssertionError("nothing runs")

    monkeypatch.setattr(command, "run_policy", runs)
    monkeypatch.setattr(command, "run_real", runs)
    (here / "odd.toml").write_text("cluster = 5\n")
    assert fails(monkeypatch, *arguments) == 2
    assert says in capsys.readouterr().err


def test_what_to_simulate_must_be_said_once(here: Path) -> None:
    for arguments in ([], ["small.toml", "--faults"], ["small.toml", "--fit", "run"]):
        assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--fit", "my-run", "--set", "job.stepz=3"], "--set"),
        (["--fit", "my-run", "--real"], "--real"),
        (["--fit", "my-run", "--seeds", "zzz"], "--seeds"),
        (["small.toml", "--seeds", "zzz"], "--seeds"),
        (["small.toml", "--jobs", "2"], "--jobs"),
        (["small.toml", "--force"], "--force"),
        (["--faults", "--json"], "--json"),
        (["--faults", "-o", "x.png"], "--output"),
    ],
)
def test_options_that_do_nothing_together_are_refused(here: Path, arguments: list[str], option: str) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == 2 and f"{option} does nothing with" in result.output, result.output


# -- a recorded run ---------------------------------------------------------------------------------------------


def record(
    root: Path, *, steps: int = 4, train_s: float = 2.0, retired: dict[str, int] | None = None, stopped_s: float = 0.0,
    at_once: int = 4, samples: int = 4,
) -> None:  # fmt: skip
    """Two rollouts, each of which decodes its trajectories four at a time, 0.01 s a token; steps of 16 trajectories,
    in groups of `samples`, of which `retired` counts those not trained, by reason. After 3 s the run stood still for
    `stopped_s`."""
    import lance

    source = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    free = {f"rollout-{i}": [0.0] * at_once for i in range(2)}

    def at_us(seconds: float) -> int:
        return START_US + int(1e6 * (seconds if seconds < 3 else seconds + stopped_s))

    for number in range(16 * steps):
        worker = f"rollout-{number % 2}"
        slot = free[worker].index(min(free[worker]))
        tokens, began = int(np.clip(source.lognormal(4, 0.8), 4, 1000)), free[worker][slot]
        free[worker][slot] = began + 0.01 * tokens
        row = dict.fromkeys(EXPERIENCE.names) | {
            "group": number // samples, "sample": number % samples, "prompt_ids": [1] * 10, "token_ids": [3] * tokens,
            "policy_mask": [True] * tokens, "span_worker": [worker], "turns": 1, "status": "ok", "reward": 1.0,
            "started_at": at_us(began), "finished_at": at_us(free[worker][slot]),
            "commit_seq": number,
        }  # fmt: skip
        rows.append(row)
    lance.write_dataset(pa.Table.from_pylist(rows, schema=EXPERIENCE), str(root / "experience.lance"))
    mean = float(np.mean([len(row["token_ids"]) for row in rows]))
    groups = {"no_signal": 0, "error": 0} | (retired or {})
    recorded = {
        f"groups_{kind}": float(n) for kind, n in (groups | {"trained": 16 // samples - sum(groups.values())}).items()
    }
    recorded |= {"train_s": train_s, "response_length_mean": mean, "publish_copy_s": 0.0}
    metrics = [
        {"step": step, "version": step + 1, "digest": "d", "at": START_US, "commit_seq": step,
         "metrics": json.dumps(recorded)}
        for step in range(steps)
    ]  # fmt: skip
    lance.write_dataset(pa.Table.from_pylist(metrics, schema=STEP_METRICS), str(root / "step_metrics.lance"))


def make_recorded(
    make_store: MakeStore, groups_per_step: int, *, trainer: dict[str, Any] | None = None, samples: int = 4,
    **options: Any,
) -> Path:  # fmt: skip
    root = make_store("my-run", tables=False)
    manifest = json.loads((root / "run.json").read_text())
    manifest["config"] |= {
        "trainer": {"groups_per_step": groups_per_step} | (trainer or {}), "sampling": {"samples_per_prompt": samples},
        "rollout": {"max_running": 4},
    }  # fmt: skip
    (root / "run.json").write_text(json.dumps(manifest))
    record(root, samples=samples, **options)
    return root


@pytest.fixture
def recorded(make_store: MakeStore, here: Path) -> Path:
    return make_recorded(make_store, 4)


def test_a_fit_finds_the_rates_that_were_recorded(recorded: Path) -> None:
    found = fit(open_store(str(recorded)))
    assert found.workers == 2 and found.prompt_tokens == 10 and len(found.lengths) == 64
    assert found.rollout_rate == pytest.approx(4 / 0.01, rel=0.25), "four at a time, but at the end"
    full = max(found.decode)
    assert full[0] == pytest.approx(4, abs=0.3) and full[2] == pytest.approx(0.01, rel=0.01)
    mean = sum(found.lengths) / len(found.lengths)
    assert found.rollouts == pytest.approx(16 * mean / (2.0 * found.rollout_rate), rel=0.01)
    assert found.train_rate == found.consume_rate == pytest.approx(16 * (mean + 10) / 2.0, rel=0.01)


@pytest.mark.parametrize(("at_once", "stopped_s"), [(4, 8 * 3600.0), (4, 60.0), (1, 8 * 3600.0)])
def test_a_stop_is_no_time_of_generation(make_store: MakeStore, here: Path, at_once: int, stopped_s: float) -> None:
    """Trajectories in flight at Ctrl-C keep their start and end after the resume: eight hours of nothing asked for
    thousands of rollouts."""
    found = fit(open_store(str(make_recorded(make_store, 4, at_once=at_once))))
    shutil.rmtree(here / "runs", ignore_errors=True)
    resumed = fit(open_store(str(make_recorded(make_store, 4, at_once=at_once, stopped_s=stopped_s))))
    assert found.stopped_s == 0 and "stood still" not in found.says()
    assert resumed.stopped_s == pytest.approx(stopped_s, abs=3) and "in which the run stood still" in resumed.says()
    assert resumed.rollouts == pytest.approx(found.rollouts, rel=0.05)
    for (batch, _, seconds), (_, _, before) in zip(resumed.decode, found.decode, strict=True):
        assert seconds == pytest.approx(before, rel=0.05), batch


def test_a_run_that_takes_turns_is_simulated_in_turns_and_no_number_is_said_to_balance_it(
    make_store: MakeStore, here: Path
) -> None:
    make_recorded(make_store, 4, trainer={"max_staleness": 0}, train_s=0.5)
    result = CliRunner().invoke(app, ["simulate", "--fit", "my-run", "-o", "fitted.toml"])
    assert "take turns (trainer.max_staleness = 0), so no number of rollouts balances them" in result.output
    settings = load_settings(here / "fitted.toml", [])
    assert settings.job.max_staleness == 0 and settings.rollout.gpus == 2, "as many as it had"
    assert run_policy("laminar", Job.of(settings)).staleness_max == 0


def test_a_bound_of_staleness_goes_into_the_file(make_store: MakeStore, here: Path) -> None:
    make_recorded(make_store, 4, trainer={"max_staleness": 2})
    result = CliRunner().invoke(app, ["simulate", "--fit", "my-run", "-o", "fitted.toml"])
    assert "where both work at once, within trainer.max_staleness = 2" in result.output
    assert load_settings(here / "fitted.toml", []).job.max_staleness == 2


def test_an_answer_out_of_all_proportion_is_refused_and_not_written(
    make_store: MakeStore, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recorded(make_store, 4, train_s=1e-6)
    assert fails(monkeypatch, "--fit", "my-run", "-o", "fitted.toml") != 0
    assert "more than the 16 trajectories that a step takes" in capsys.readouterr().err
    assert not list(here.glob("fitted*"))


def test_groups_that_were_retired_are_consumed_and_not_trained(make_store: MakeStore, here: Path) -> None:
    """Steps of 2 groups, to which another without signal and a failed one come: 4 are generated, 1 is computed."""
    found = fit(open_store(str(make_recorded(make_store, 2, retired={"no_signal": 2, "error": 1}))))
    mean = sum(found.lengths) / len(found.lengths)
    assert found.step_tokens == pytest.approx(16 * mean, rel=0.01)
    assert found.rollouts == pytest.approx(16 * mean / (2.0 * found.rollout_rate), rel=0.01)
    assert found.train_rate == pytest.approx(4 * (mean + 10) / 2.0, rel=0.01)
    assert found.consume_rate == pytest.approx(16 * (mean + 10) / 2.0, rel=0.01)


def test_a_fit_says_what_balances_and_writes_a_file_that_can_be_simulated(recorded: Path, here: Path) -> None:
    result = CliRunner().invoke(app, ["simulate", "--fit", "my-run", "-o", "fitted.toml"])
    assert result.exit_code == 0, result.output
    assert re.search(r"balance: \d\.\d\d rollouts for one trainer, so \d", result.output)
    job = load_settings(here / "fitted.toml", []).job
    assert (job.groups_per_step, job.samples_per_prompt, job.prompt_tokens) == (4, 4, 10)
    again = CliRunner().invoke(app, ["simulate", "--fit", "my-run", "-o", "fitted.toml"])
    assert again.exit_code != 0
    simulated = CliRunner().invoke(app, ["simulate", "fitted.toml", "--json", "--set", "job.steps=2"])
    assert simulated.exit_code == 0, simulated.output
    outcomes = {o["policy"]: o for o in json.loads(simulated.output)["outcomes"]}
    # Training alone takes 2 s; so few trajectories have tails, for which it waits.
    assert 1.9 < outcomes["laminar"]["step_s"] < 6


fits = st.builds(
    Fit,
    run=st.just("my-run"), lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
    prompt_tokens=st.integers(1, 10_000), turns=st.integers(1, 5000), workers=st.integers(1, 64),
    rollout_rate=st.floats(1e-3, 1e6), train_rate=st.floats(1e-3, 1e9), consume_rate=st.floats(1e-3, 1e9),
    step_s=st.floats(1e-3, 1e5), step_tokens=st.floats(1, 1e9),
    decode=st.lists(st.tuples(st.floats(1, 1024), st.floats(0, 1e9), st.floats(1e-9, 1e5)), min_size=1, max_size=5),
    groups_per_step=st.integers(1, 2000), samples_per_prompt=st.integers(1, 120),
    max_ahead_groups=st.integers(2000, 9000), max_ready_groups=st.integers(2000, 9000),
    max_staleness=st.none() | st.integers(0, 9),
    max_running=st.integers(120, 4096), stopped_s=st.just(0.0),
)  # fmt: skip


@hypothesis.settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=fits, name=st.sampled_from(["fitted.toml", "mein Läufer 🏃.toml", 'a"b.toml']))
def test_whatever_a_fit_writes_is_taken_by_the_simulation(here: Path, found: Fit, name: str) -> None:
    try:
        refuse_absurd(found)
    except StoreError:
        return
    write_fit(found, here / name, force=True)
    job = Job.of(load_settings(here / name, []))
    assert job.samples == found.samples_per_prompt and job.turns == found.turns
    for policy in POLICIES.values():
        split = fixed_split(job, policy)
        assert split is not None and split.rollouts >= 1


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 1, "trainer": {"advantage": "reinforce++"}},
        {"at_once": 1},
        {"steps": 1},
        {"trainer": {"max_staleness": 0}},
        {"trainer": {"max_ahead_groups": 4}},
        {"train_s": 0.3},
        {"stopped_s": 3600.0},
    ],
    ids=str,
)
def test_a_fitted_file_can_be_simulated_under_all_policies(
    make_store: MakeStore, here: Path, options: dict[str, Any]
) -> None:
    make_recorded(make_store, 4, **options)
    fitted = CliRunner().invoke(app, ["simulate", "--fit", "my-run", "-o", "fitted.toml"])
    assert fitted.exit_code == 0, fitted.output
    job = Job.of(load_settings(here / "fitted.toml", ["job.steps=2", "job.warmup_steps=1"]))
    for name in POLICIES:
        assert run_policy(name, job).tokens_per_s > 0, name


def test_a_run_that_has_recorded_too_little_is_told_so(make_store: MakeStore, here: Path) -> None:
    with pytest.raises(StoreError, match="no committed row yet"):
        fit(open_store(str(make_store("new", tables=False))))
    with pytest.raises(StoreError, match="train_s"):
        fit(open_store(str(make_store("old"))))
