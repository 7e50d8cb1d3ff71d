"""Real runs under real faults. Helpers: `real_run.py` (a run), `observer.py` (its etcd), `recording.py` (what a fault
cost), `faults.py` (full disks, cut networks, damaged files, clusters)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_run import RealRun
from recording import Recorder


@pytest.fixture
def real_run(tmp_path: Path) -> Iterator[Callable[..., RealRun]]:
    runs: list[RealRun] = []

    def make(*overrides: str, **more: Any) -> RealRun:
        runs.append(RealRun(tmp_path, *overrides, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20261129)


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Recorder:
    return Recorder(request.node.nodeid)
