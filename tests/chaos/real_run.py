"""A real run of the tiny fixture in a folder of its own: `laminar run` with all its processes, and workers by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import lance
import psutil
from observer import Observer

REPOSITORY = Path(__file__).parents[2]
POLL_S = 0.02
NAME = "tiny"


class RealRun:
    """`laminar run` as a child of the test. `overrides` go to `--set`.

    `endpoints`: of an etcd that the test keeps; none: the run starts its own. `store`: where, if not under `root`.
    """

    def __init__(
        self, root: Path, *overrides: str, endpoints: Sequence[str] = (), store: Path | None = None
    ) -> None:
        self.root = root
        self.store = store or root / "store"
        self.endpoints = list(endpoints)
        self.overrides = [f'run.store="{self.store}"', "run.max_steps=12", "evaluation.size=0", *overrides]
        if endpoints:
            self.overrides.append(f"coordination.endpoints={self.endpoints}")
        self.process: subprocess.Popen[bytes] | None = None
        self.by_hand: list[Worker] = []
        self.output = root / "output.log"
        self._observer: Observer | None = None
        self._endpoint = ""

    # -- starting -----------------------------------------------------------------------------------------------

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

    def begin(self, step: int = 2, by_hand: Sequence[str] = (), python_path: Path | None = None) -> Observer:
        """Start, with further workers of the kinds `by_hand`, and wait until `step` steps are trained; what happens in
        etcd is seen from then on."""
        self.start(python_path)
        if not self.endpoints:
            self.until(lambda: _listens(self.run_endpoint()), "the run's etcd serves")
        seen = self.observe()
        self.until(lambda: bool(seen.workers("relay")), "the first worker has joined")
        for kind in by_hand:
            self.start_worker(kind)
        for worker in self.by_hand:
            self.joined(worker)
        self.until(lambda: seen.step() >= step, f"step {step}")
        return seen

    def observe(self) -> Observer:
        if self._observer is None:
            self._observer = Observer(self.endpoints or [self.run_endpoint()], NAME)
        return self._observer

    def start_worker(self, kind: str, *, prefix: Sequence[str] = (), endpoint: str = "") -> Worker:
        """`laminar worker KIND` as somebody would start it by hand: no supervisor knows of it."""
        etcd = endpoint or ",".join(self.endpoints) or self.run_endpoint()
        command = [*prefix, sys.executable, "-m", "laminar.cli", "worker", kind, "--etcd", etcd, "--run", NAME]
        worker = Worker(kind, command, self.root / f"{kind}-by-hand-{len(self.by_hand)}.log")
        self.by_hand.append(worker)
        return worker

    def joined(self, worker: Worker) -> str:
        """The id of a worker that was started by hand, once it has joined."""
        seen = self.observe()
        self.until(lambda: bool(seen.id_of(worker.kind, worker.pid)), f"{worker.kind} {worker.pid} has joined")
        return seen.id_of(worker.kind, worker.pid)

    # -- waiting ------------------------------------------------------------------------------------------------

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
        logs += [w.log for w in self.by_hand]
        return "\n".join(
            [self.text()[-3000:], *(f"== {p.name}\n{p.read_text(errors='replace')[-2500:]}" for p in logs)]
        )

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 180) -> float:
        """Seconds waited until `condition` held, while the run lives."""
        started = time.monotonic()
        while not condition():
            assert self.process is not None and self.process.poll() is None, (
                f"the run ended before {what}:\n{self.story()}"
            )
            assert time.monotonic() < started + timeout_s, (
                f"{what} did not happen within {timeout_s} s:\n{self.story()}"
            )
            time.sleep(POLL_S)
        return time.monotonic() - started

    def step(self) -> int:
        """The last step that the plain display has shown."""
        lines = [line for line in self.text().splitlines() if line.startswith("step ")]
        return int(lines[-1].split()[1].split("/")[0]) if lines else 0

    def worker_log(self, name: str) -> str:
        path = self.store / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- processes ----------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every process on this machine that belongs to this run's store, and their descendants."""
        found: dict[int, psutil.Process] = {}
        marks = (str(self.store), ",".join(self.endpoints) or self.run_endpoint())
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if self.endpoints and line and Path(line[0]).name == "etcd":
                continue  # the test's own
            if any(m and m in " ".join(line) for m in marks) and process.pid != os.getpid():
                try:
                    for one in [process, *process.children(recursive=True)]:
                        found[one.pid] = one
                except psutil.NoSuchProcess:
                    continue
        return [p for p in found.values() if _safely(lambda p: p.status() != psutil.STATUS_ZOMBIE, p)]

    def run_endpoint(self) -> str:
        mark = self.store / "etcd" / "endpoint"
        text = mark.read_text().strip() if mark.exists() else ""
        self._endpoint = text or self._endpoint
        return self._endpoint

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

    # -- judging ------------------------------------------------------------------------------------------------

    def audit(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "laminar.cli", "audit", str(self.store)],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def assert_sound(self) -> None:
        result = self.audit()
        assert result.returncode == 0, f"{result.stdout}{result.stderr}\n{self.story()}"
        assert "all invariants hold" in result.stdout

    def assert_exactly_once(self) -> None:
        """Seen with Lance alone, beside the audit: no trajectory has two rows, no row was trained on twice."""
        for table, columns in (("experience", ["group", "sample"]), ("steps", ["group", "sample"])):
            rows = lance.dataset(str(self.store / f"{table}.lance")).to_table(columns=columns)
            counts = Counter(zip(*(rows[c].to_pylist() for c in columns), strict=True))
            assert counts, f"{table} is empty"
            assert not (twice := [k for k, n in counts.items() if n > 1]), f"{table}: twice {twice[:5]}"

    def assert_ended_well(self, timeout_s: float = 240) -> None:
        """The run comes to its end by itself, with every worker; nothing is left, lost or doubled."""
        assert self.wait(timeout_s) == 0, self.story()
        assert " steps: " in self.text() and "done after" in self.text(), self.text()[-2000:]
        for worker in self.by_hand:
            if worker.kind == "relay" and worker.process.poll() is None:
                worker.process.terminate()  # relays serve and commit to the last, and stay until they are told
            worker.wait_gone()
        self.assert_nothing_left()
        self.assert_sound()
        self.assert_exactly_once()

    def assert_nothing_left(self, within_s: float = 15) -> None:
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {[p.cmdline() for p in left]}"
            time.sleep(0.2)

    def end(self) -> None:
        """Whatever became of the test: no process of it stays."""
        if self._observer is not None:
            self._observer.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for worker in self.by_hand:
            worker.kill()
        for process in self.processes():
            process.kill()


class Worker:
    """A worker that no supervisor watches."""

    def __init__(self, kind: str, command: Sequence[str], log: Path) -> None:
        self.kind = kind
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def wait_gone(self, timeout_s: float = 30) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.kind} {self.pid} stays after the run:\n{self.log.read_text(errors='replace')[-3000:]}"
            ) from None


class Stopped:
    """A process held by SIGSTOP for the time of the block."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> Stopped:
        os.kill(self.pid, signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.wake()

    def wake(self) -> None:
        if psutil.pid_exists(self.pid):
            os.kill(self.pid, signal.SIGCONT)


def _listens(endpoint: str) -> bool:
    """Not so for the address that a killed run has left behind."""
    host, _, port = endpoint.rpartition(":")
    if not port:
        return False
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _safely(check: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    try:
        return check(process)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
