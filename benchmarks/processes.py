"""A command and all that it starts, with the memory that they take together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GRACE_S = 120.0
"""How long a stopped command may take to leave, before all of its processes are killed."""
SAMPLING_SHARE = 0.01
"""Share of the time that is spent in sampling at most: the kernel walks over all pages of a process to tell its shares
(0.1 s for 6 GB), and what is measured must not slow what is timed."""


@dataclass
class Memory:
    """Peaks of a process tree, in MiB.

    `pss`: highest sum, at one moment, of the processes' proportional shares (shared pages count once in all); what
    comes and goes between two samples is missed. `rss_bound`: sum of each process's own peak, as the kernel keeps it;
    shared pages count once a process, and peaks that fell at different times add up: the truth is not above it.
    """

    pss: float = 0.0
    own_peaks: dict[tuple[int, float], float] = field(default_factory=dict)

    @property
    def rss_bound(self) -> float:
        return sum(self.own_peaks.values())

    def sample(self, processes: Sequence[psutil.Process]) -> None:
        total = 0.0
        for process in processes:
            try:
                total += _kilobytes(f"/proc/{process.pid}/smaps_rollup", "Pss:") / 1024
                self.own_peaks[process.pid, process.create_time()] = (
                    _kilobytes(f"/proc/{process.pid}/status", "VmHWM:") / 1024
                )
            except (OSError, psutil.NoSuchProcess):
                continue  # it ended while it was looked at
        self.pss = max(self.pss, total)


def _kilobytes(path: str, name: str) -> float:
    with open(path, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith(name):
                return float(line.split()[1])
    return 0.0  # a zombie has no memory


class Tree:
    """A process and its descendants, found again even when the one between them and the root has ended."""

    def __init__(self, pid: int) -> None:
        self._seen = {psutil.Process(pid)}

    def alive(self) -> list[psutil.Process]:
        for process in list(self._seen):
            try:
                self._seen.update(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
        self._seen = {p for p in self._seen if p.is_running()}
        return list(self._seen)


@dataclass(frozen=True)
class Ended:
    returncode: int
    stopped: bool
    """Whether `enough` ended it."""
    memory: Memory
    wall_s: float


def run(
    command: Sequence[str],
    *,
    log: Path,
    enough: Callable[[], bool],
    limit_s: float,
    interval_s: float = 1.0,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run `command` until it ends, or interrupt it (SIGINT) once `enough()` or after `limit_s`.

    Output goes to `log`. `enough` is asked, and memory sampled, every `interval_s`; less often where a sample is dear
    (see SAMPLING_SHARE). Leaves no process behind, not even when it is ended by SIGTERM itself (SystemExit). Raises
    TimeoutError past `limit_s`. For the main thread.
    """
    began = time.monotonic()
    memory = Memory()
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    tree = Tree(child.pid)
    done = threading.Event()

    def watch() -> None:
        pause = interval_s
        while not done.wait(pause):
            before = time.monotonic()
            memory.sample(tree.alive())
            pause = max(interval_s, (time.monotonic() - before) / SAMPLING_SHARE)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    stopped = False
    handler = signal.signal(signal.SIGTERM, _leave)
    try:
        while child.poll() is None and not stopped:
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"{command[0]} … took more than {limit_s:.0f} s; see {log}")
            try:
                child.wait(interval_s)
            except subprocess.TimeoutExpired:
                stopped = enough()
    finally:
        done.set()
        watching.join()
        _end(child, tree.alive())
        signal.signal(signal.SIGTERM, handler)
    return Ended(child.returncode, stopped, memory, time.monotonic() - began)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _end(child: subprocess.Popen[bytes], processes: Sequence[psutil.Process]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    _, left = psutil.wait_procs([p for p in processes if p.pid != child.pid], timeout=5)
    for process in left:
        process.kill()


def clean_environment() -> dict[str, str]:
    """The environment without settings of threads, which would bind one side of a comparison more than the other."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LAMINAR_DEBUG")
    return {k: v for k, v in os.environ.items() if k not in names}
