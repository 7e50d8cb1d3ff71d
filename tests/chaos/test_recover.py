"""Etcd's data are lost, or come back from an old copy: `laminar recover` rebuilds them, and the run goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]
MakeRun = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]


def recover(run: Any, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "laminar.cli", "recover", str(run.store), *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def recovered(run: Any) -> str:
    result = recover(run)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def kill_all(run: Any) -> None:
    """A machine that loses power."""
    run.run_endpoint()
    run.process.kill()
    run.wait(10)
    run.assert_nothing_left()


def files(store: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(store.rglob("*")) if p.is_file()}


def published_once(store: Path) -> None:
    rows = lance.dataset(str(store / "step_metrics.lance")).to_table(columns=["version", "digest"]).to_pylist()
    versions = sorted(row["version"] for row in rows)
    assert versions == list(range(len(versions))), versions


def test_a_run_whose_etcd_is_lost_goes_on_from_its_store(real_run: MakeRun) -> None:
    """Case 31, with the disk of etcd gone as well: everything drawn is trained or retired once."""
    run = real_run("run.max_steps=8", "trainer.checkpoint_every=2", "evaluation.size=4", "evaluation.every=4")
    run.start()
    run.until(lambda: run.step() >= 4, "step 4")
    kill_all(run)
    shutil.rmtree(run.store / "etcd")
    before = files(run.store)

    audit = run.audit()
    assert audit.returncode == 1 and f"laminar recover {run.store}" in audit.stderr.replace("\n", " ")
    run.start()
    assert run.wait(60) == 2 and f"laminar recover {run.store}" in run.text().replace("\n", " "), run.story()
    shutil.rmtree(run.store / "etcd", ignore_errors=True)

    before = files(run.store)
    dry = recover(run, "--dry-run")
    assert dry.returncode == 0 and "dry run: nothing was written" in dry.stdout, dry.stdout + dry.stderr
    assert files(run.store) == before

    said = recovered(run)
    assert "generation 2" in said and "it knows nothing of the run" in said and "in flight" in said, said
    again = recover(run)
    assert again.returncode == 2 and "nothing is to be recovered" in again.stderr
    run.assert_sound()
    run.start()
    run.assert_ended_well()
    published_once(run.store)


@pytest.mark.nightly
def test_an_etcd_that_comes_back_from_an_old_copy_is_refused_and_rebuilt(real_run: MakeRun) -> None:
    run = real_run("run.max_steps=8")
    run.start()
    run.until(lambda: run.step() >= 2, "step 2")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.story()
    copy = run.root / "copy"
    shutil.copytree(run.store / "etcd" / "data", copy)
    run.output.unlink()
    run.start()
    run.until(lambda: run.step() >= 5, "step 5")
    kill_all(run)
    shutil.rmtree(run.store / "etcd" / "data")
    shutil.copytree(copy, run.store / "etcd" / "data")

    audit = run.audit()
    assert audit.returncode == 1 and "rebuild etcd with `laminar recover`" in audit.stdout, audit.stdout
    run.output.unlink()
    run.start()
    assert run.wait(60) == 2 and "etcd is older than its store" in run.text(), run.story()

    said = recovered(run)
    assert "the table experience holds" in said, said
    assert json.loads((run.store / "run.json").read_text())["generation"] == 2
    run.assert_sound()
    run.start()
    run.assert_ended_well()
    published_once(run.store)


@pytest.mark.nightly
def test_a_run_at_work_is_fenced_out_and_goes_on_in_the_new_generation(real_run: MakeRun) -> None:
    run = real_run("run.max_steps=8")
    run.start()
    run.until(lambda: run.step() >= 2, "step 2")
    refused = recover(run)
    assert refused.returncode == 2 and "is at work" in refused.stderr and "--force" in refused.stderr
    forced = recover(run, "--force")
    assert forced.returncode == 0 and "generation 2" in forced.stdout, forced.stdout + forced.stderr
    run.assert_ended_well()
    published_once(run.store)
