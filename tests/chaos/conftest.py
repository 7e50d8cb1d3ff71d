"""A real run of the tiny fixture in a folder of its own: `laminar run` with all its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]


class RealRun:
    """`laminar run` as a child of the test. `overrides` go to `--set`."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.root = root
        self.store = root / "store"
        self.overrides = [f'run.store="{self.store}"', "run.max_steps=12", "evaluation.size=0", *overrides]
        self.process: subprocess.Popen[bytes] | None = None
        self.output = root / "output.log"

    def start(self, python_path: Path | None = None) -> None:
        command = [sys.executable, "-m", "laminar.cli", "run", "examples/tiny.toml", "--plain"]
        for override in self.overrides:
            command += ["--set", override]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(python_path or "")},
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, timeout_s: float = 240) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.story()}") from None

    def story(self) -> str:
        """What the run and its workers wrote, for a failing test's report."""
        logs = sorted((self.store / "logs").glob("*.log")) if self.store.exists() else []
        return "\n".join(
            [self.text()[-3000:], *(f"== {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in logs)]
        )

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process is not None and self.process.poll() is None, (
                f"the run ended before {what}:\n{self.story()}"
            )
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s:\n{self.story()}"
            time.sleep(0.1)

    def step(self) -> int:
        """The last step that the plain display has shown."""
        lines = [line for line in self.text().splitlines() if line.startswith("step ")]
        return int(lines[-1].split()[1].split("/")[0]) if lines else 0

    def processes(self) -> list[psutil.Process]:
        """Every process on this machine that belongs to this run's store, and their descendants."""
        found: dict[int, psutil.Process] = {}
        marks = (str(self.store), self.run_endpoint())
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if any(m and m in line for m in marks) and process.pid != os.getpid():
                try:
                    for one in [process, *process.children(recursive=True)]:
                        found[one.pid] = one
                except psutil.NoSuchProcess:
                    continue
        return [p for p in found.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def run_endpoint(self) -> str:
        mark = self.store / "etcd" / "endpoint"
        text = mark.read_text().strip() if mark.exists() else ""
        if text:
            self._endpoint = text
        return getattr(self, "_endpoint", "")

    def victims(self, kind: str) -> list[psutil.Process]:
        """`trainer`, `rollout`, `relay`, `committer` or `etcd`."""

        def matches(process: psutil.Process) -> bool:
            line = process.cmdline()
            if kind == "etcd":
                return bool(line) and line[0].endswith("etcd")
            return "worker" in line and kind in line

        return [p for p in self.processes() if _safely(matches, p)]

    def kill(self, kind: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Signal one process of that kind; False if there was none at this moment."""
        for victim in self.victims(kind):
            try:
                victim.send_signal(number)
                return True
            except psutil.NoSuchProcess:
                continue
        return False

    def audit(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "laminar.cli", "audit", str(self.store)],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def assert_sound(self) -> None:
        result = self.audit()
        assert result.returncode == 0, f"{result.stdout}{result.stderr}\n{self.story()}"
        assert "all invariants hold" in result.stdout

    def assert_nothing_left(self, within_s: float = 15) -> None:
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {[p.cmdline() for p in left]}"
            time.sleep(0.2)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.processes():
            process.kill()


def _safely(check: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    try:
        return check(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@pytest.fixture
def real_run(tmp_path: Path) -> Iterator[Callable[..., RealRun]]:
    runs: list[RealRun] = []

    def make(*overrides: str) -> RealRun:
        runs.append(RealRun(tmp_path, *overrides))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20261129)
