"""When to start a worker again, and when to give up: a pure policy, and the processes it applies to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from laminar.buffer.coordination import Coordination
from laminar.buffer.keys import Keys
from laminar.buffer.records import WorkerRecord
from laminar.errors import LaminarError
from laminar.workers.supervisor.children import Child
from laminar.workers.supervisor.last_error import last_error, lines_since

log = logging.getLogger(__name__)

QUICK_S = 20.0
"""A worker that ends with an error within this time of its start crashed quickly."""
MAX_QUICK_CRASHES = 4
MAX_FRUITLESS = 8
"""Crashes in a row between which a worker brought nothing about, however long it lived."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
LOG_TAIL = 12
STOPPED_AT_START_S = 2.0


KILLED = (-9, -15)
"""Exit codes of a process that somebody killed: no crash of its own."""


def how_ended(code: int) -> str:
    return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"


@dataclass
class RestartPolicy:
    """Counts quick crashes in a row, which a life longer than QUICK_S forgives; and those between which what the
    worker is for (`fruits`, such as the steps of a trainer) did not grow, which nothing else forgives: a trainer that
    crashes at the same trajectory after each hour of loading would else do so for ever."""

    quick_crashes: int = 0
    fruitless: int = 0
    fruits: int | None = None
    restarts: int = 0

    def ended(self, lived_s: float, *, killed: bool, fruits: int | None = None) -> float | None:
        """Seconds to wait before the next start; None to give up. A kill from outside is no crash of the worker's.
        `fruits`: what there is by now; None where nobody counts it."""
        self.restarts += 1
        if fruits != self.fruits:
            self.fruitless, self.fruits = 0, fruits
        if killed:
            self.quick_crashes = 0
            return FIRST_BACKOFF_S
        self.quick_crashes = self.quick_crashes + 1 if lived_s < QUICK_S else 0
        self.fruitless += fruits is not None
        if self.quick_crashes >= MAX_QUICK_CRASHES or self.fruitless >= MAX_FRUITLESS:
            return None
        doublings = max(self.quick_crashes, self.fruitless - 1)
        return float(min(FIRST_BACKOFF_S * 2**doublings, MAX_BACKOFF_S))

    def given_up(self) -> str:
        """Why."""
        if self.quick_crashes >= MAX_QUICK_CRASHES:
            return f"crashed {self.quick_crashes} times within {QUICK_S:.0f} s of its start"
        return f"crashed {self.fruitless} times after step {self.fruits}, without finishing another"


async def sign_off(coordination: Coordination, keys: Keys, *, host: str, pid: int) -> None:
    """Revoke the leases of a process of this host that has ended: whatever it led and owned is free at once, instead
    of when they expire. Raises CoordinationError if etcd cannot be told."""
    for kv in (await coordination.range(keys.workers_root)).items:
        record = WorkerRecord.parse(kv.value)
        if record.pid == pid and record.host == host:
            await coordination.revoke(kv.lease)


async def _at_once() -> None:
    """What `may_start` is where nothing needs to be waited for."""


def uncounted() -> int | None:
    """What `fruits` is where nobody counts them."""
    return None


class GaveUp(LaminarError):
    """A worker crashed again and again: its last error is in the message."""


@dataclass
class Supervised:
    """A worker process that is started again when it dies. `on_end(pid)` is told of each death at once; `is_over()`
    says whether a worker that ended with 0 did so because the run is over: somebody may also have sent it SIGTERM.
    `may_start()` returns when it makes sense to start one, `excused()` says whether a crash just now is not its own
    fault: without etcd every worker ends with an error. `fruits()` counts what it is for: a trainer's steps."""

    kind: str
    name: str
    command: list[str]
    log_file: Path
    on_end: Callable[[int], None]
    on_event: Callable[[str], None]
    is_over: Callable[[], Awaitable[bool]]
    may_start: Callable[[], Awaitable[None]] = _at_once
    excused: Callable[[], bool] = bool
    fruits: Callable[[], int | None] = uncounted
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    child: Child | None = None
    stopping: bool = False
    finished: bool = False
    log_start: int = 0
    """Where in the log the present process began."""

    async def run(self) -> None:
        """Until the run is over, or the worker is stopped. Raises GaveUp."""
        loop = asyncio.get_running_loop()
        while not self.stopping:
            await self.may_start()
            if self.stopping:
                return
            started = loop.time()
            self.child = Child(self.command, log=self.log_file)
            self.log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
            await self.child.start()
            if self.stopping:
                # `stop` came while the process was being started, and found nothing to stop.
                await self.child.stop(grace_s=STOPPED_AT_START_S)
            code = await self.child.wait()
            self.child.kill_group()
            self.on_end(self.child.pid)
            if self.stopping or (code == 0 and await self.is_over()):
                self.finished = True
                return
            killed = code == 0 or code in KILLED or self.excused()
            pause = self.policy.ended(loop.time() - started, killed=killed, fruits=self.fruits())
            if pause is None:
                raise GaveUp(
                    f"{self.name} {self.policy.given_up()}, the last time {self.how(code)}. "
                    f"Its last lines:\n{self.tail()}"
                )
            self.on_event(f"{self.name} {self.how(code)}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)

    def how(self, code: int) -> str:
        """How the last process ended, with its last error, if it told one, and where the rest stands."""
        if code == 0:
            return "left the run"
        if code in KILLED:
            return how_ended(code)
        lines = self._lines()
        said = last_error(lines) if lines else "it wrote nothing"
        return f"{how_ended(code)}{f': {said}' if said else ''} (log: {self.log_file})"

    @property
    def pid(self) -> int:
        """Of the living process; 0 if there is none."""
        return self.child.pid if self.child is not None and self.child.returncode is None else 0

    def end(self, why: str) -> None:
        """Kill the process and what it has started; `run` starts another. No more than that helps one that hangs."""
        if self.child is not None and self.pid and not self.stopping:
            self.on_event(f"{self.name} (pid {self.pid}) {why}; it is ended")
            self.child.kill_group()

    async def stop(self, grace_s: float) -> None:
        self.stopping = True
        if self.child is not None:
            await self.child.stop(grace_s=grace_s)

    def tail(self, lines: int = LOG_TAIL) -> str:
        """The last lines that the last process wrote."""
        return "\n".join(f"  {line}" for line in self._lines()[-lines:]) or "  (it wrote nothing)"

    def _lines(self) -> list[str]:
        return lines_since(self.log_file, self.log_start)
