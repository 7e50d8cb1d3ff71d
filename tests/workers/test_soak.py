"""Cases 60 and 65, in small: hundreds of tiny steps through the real store and a real etcd leave nothing behind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from laminar.buffer import archive, steps
from laminar.workers.managing import cleaning

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
COMPACT_EVERY, BLOCK = 15, 20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with everything that happens now and then happening more often."""
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    for name in ("CLEAN_EVERY", "SAMPLE_EVERY", "EVALUATE_EVERY"):
        monkeypatch.setattr(module, name, 10)
    monkeypatch.setattr(module, "ROLLOUT_DIES_EVERY", 35)
    monkeypatch.setattr(module, "TRAINER_DIES_EVERY", 70)
    monkeypatch.setattr(module, "COMMITTER_DIES_EVERY", 25)
    for user in (archive, steps, cleaning):
        monkeypatch.setattr(user, "BLOCK", BLOCK)
    return module


@pytest.mark.slow
async def test_what_a_run_leaves_is_bounded_by_its_content(soak: ModuleType, tmp_path: Path) -> None:
    samples, problems = await soak.soak(tmp_path, 300, show_every=100, compact_every=COMPACT_EVERY)
    assert problems == [], "the audit passes"
    later = samples[len(samples) // 3 :]
    # Each table keeps 20 versions beside those since its last compaction; each version has some three files.
    assert max(s["Lance versions"] for s in later) <= 4 * (20 + COMPACT_EVERY)
    assert max(s["files"] for s in later) <= 4 * 3 * (20 + COMPACT_EVERY) + 100
    # A block, those after the oldest of two checkpoints, and some for members, heads and what is in flight.
    assert max(s["etcd keys"] for s in later) <= 2 * BLOCK + 2 * soak.CHECKPOINT_EVERY + 20
    assert max(s["other bytes (MB)"] for s in later) < 4
    store = tmp_path / "store"
    assert len(list((store / "batches").glob("*.arrow"))) <= soak.KEEP_CHECKPOINTS * soak.CHECKPOINT_EVERY
    assert len(list((store / "partials").iterdir())) == 2, "of the two that live"
    assert not [p for p in (store / "incoming").rglob("*") if p.is_file() and "late" in p.name]
    assert len(list((store / "batches").glob("*.jsonl"))) >= 10


def test_the_verdict_tells_a_slope_from_a_saw(soak: ModuleType) -> None:
    saw = [{"step": n, "files": 100 + n % 7, "rows (MB)": n} for n in range(100)]
    assert soak.verdicts(saw)["files"].startswith("flat")
    assert soak.verdicts(saw)["rows (MB)"].startswith("kept by design")
    teeth = [{"step": n, "files": 70 + 45 * (n % 10)} for n in range(200)]
    assert soak.verdicts(teeth)["files"] == "flat (+0.0% over the second half)"
    rising = [{"step": n, "files": 70 + 45 * (n % 10) + n} for n in range(200)]
    assert soak.verdicts(rising)["files"].startswith("GROWING")
    slope = [{"step": n, "files": 100 + n} for n in range(100)]
    assert soak.verdicts(slope)["files"].startswith("GROWING")
    assert soak.verdicts([{"step": n, "files": 0} for n in range(4)])["files"].startswith("flat")
