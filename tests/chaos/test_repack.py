"""A real run with a long tail: rollouts that drain give their trajectories to each other, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lance
import pytest
from real_run import REPOSITORY, RealRun

from laminar.buffer.coordination import Change
from laminar.buffer.records import Claim

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]
PATHS = Path(os.pathsep.join([str(REPOSITORY / "benchmarks" / "long_tails"), str(REPOSITORY)]))
CURVE = {"STEP_S": "0.03", "KNEE": "16", "PREFILL": "20000", "MEDIAN": "12", "SIGMA": "1.2"}


def test_tails_move_in_a_real_run(
    real_run: Callable[..., RealRun], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lengths from a log-normal distribution, steps stretched to a curve of their own (`benchmarks/long_tails`)."""
    for name, value in CURVE.items():
        monkeypatch.setenv(f"LONG_TAILS_{name}", value)
    run = real_run(
        "run.max_steps=6", "rollout.workers=2", "rollout.max_running=16", "rollout.max_model_len=256",
        "rollout.repack_interval=1.0", "sampling.max_tokens=200", "sampling.samples_per_prompt=4",
        "trainer.groups_per_step=4", "trainer.max_ahead_groups=16", "trainer.threads=1",
    )  # fmt: skip
    run.start(python_path=PATHS)
    run.until(lambda: bool(run.run_endpoint()), "the run's etcd is there")
    seen = run.observe()
    claims: dict[str, Claim] = {}
    moved: list[str] = []

    def watch(change: Change) -> None:
        if not change.key.startswith(seen.keys.claims):
            return
        before = claims.pop(change.key, None)
        if change.kv is not None:
            after = claims[change.key] = Claim.parse(change.kv.value)
            if before and before.owner and after.owner not in ("", before.owner) and after.deaths == before.deaths:
                moved.append(change.key.rsplit("/", 1)[-1])

    seen.hooks.append(watch)
    run.assert_ended_well()
    assert moved, f"nothing moved:\n{run.story()}"
    rows = lance.dataset(str(run.store / "experience.lance")).to_table(columns=["group", "sample", "span_worker"])
    writers = {f"{r['group']:012d}-{r['sample']:03d}": len(set(r["span_worker"])) for r in rows.to_pylist()}
    assert any(writers[name] > 1 for name in moved), "somebody went on with what another had written"
