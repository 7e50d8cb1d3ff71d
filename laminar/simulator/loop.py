"""An event loop on which many simulated processes live in virtual time.

Every callback belongs to the process in whose context it was scheduled. A dead process's callbacks never run again,
not even its `finally` blocks, as after SIGKILL; a stopped one's wait until it is continued, as under SIGSTOP. Time
jumps to the next timer; a process's clock may run fast or slow. Threads do not exist: what code runs in a thread is
called here, a little later. Equal seeds give equal runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from asyncio import events
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

current: contextvars.ContextVar[Inhabitant | None] = contextvars.ContextVar("current", default=None)
"""The simulated process whose code is running; None outside of all."""

TICK_S = 1e-9
"""By this much a timer is late on a process's own clock: rounding must not let it fire before the moment that it was
set for, or code that sets it again until then would never see time pass."""
THREAD_S = (0.0005, 0.01)
"""How long what runs in a thread takes, drawn uniformly."""


class Inhabitant(Protocol):
    """What the loop needs to know of a process. `rate`: seconds that its clock counts in one second."""

    dead: bool
    stopped: bool
    rate: float
    deferred: list[events.Handle]
    tasks: list[asyncio.Task[Any]]


class _Handle(events.Handle):
    """A callback that asks first whether its process runs."""

    def _run(self) -> None:
        if may_run(self):
            super()._run()


class _Timer(events.TimerHandle):
    def _run(self) -> None:
        if may_run(self):
            super()._run()


def may_run(handle: Any) -> bool:
    process: Inhabitant | None = handle._context.get(current)
    if process is None:
        return True
    if process.dead:
        return False
    if process.stopped:
        process.deferred.append(handle)
        return False
    return True


class _NoWaiting:
    """In the place of a selector: there is no outside, so waiting moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is scheduled any more: every simulated process waits for ever")
        self.now += max(0.0, timeout)
        return []


class SimulationLoop(asyncio.BaseEventLoop):
    """`source` draws all chance of the loop itself."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self._selector = _NoWaiting()
        self._source = source
        self.faults: list[str] = []
        """Exceptions that nobody took: faults of the code under test."""
        self.set_exception_handler(self._untaken)
        self.set_task_factory(_make_task)

    @property
    def now(self) -> float:
        """Virtual seconds since the start, for everybody the same."""
        return self._selector.now

    def time(self) -> float:
        process = current.get()
        return self.now if process is None else self.now * process.rate

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        process = current.get()
        return self._at(when if process is None else when / process.rate + TICK_S, callback, args, context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> events.TimerHandle:
        process = current.get() if context is None else context.get(current)
        return self._at(self.now + (delay if process is None else delay / process.rate), callback, args, context)

    def outside(self, call: Callable[[], T]) -> T:
        """Call what belongs to no process."""
        return contextvars.Context().run(call)

    def resume(self, process: Inhabitant) -> None:
        """Let a stopped process go on with what has fallen due meanwhile, in the order in which it did."""
        process.stopped = False
        deferred, process.deferred = process.deferred, []
        self._ready.extend(deferred)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not future.cancelled():
                    future.set_exception(error)
                return
            if not future.cancelled():
                future.set_result(result)

        self.call_later(self._source.uniform(*THREAD_S), work)
        return future

    def _at(self, when: float, callback: Any, args: Any, context: Any) -> events.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _call_soon(self, callback: Any, args: Any, context: Any) -> events.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _process_events(self, found: list[Any]) -> None:
        pass  # there is no outside from which anything could come

    def _write_to_self(self) -> None:
        pass

    def _untaken(self, loop: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        error = about.get("exception")
        self.faults.append(f"{about.get('message', 'an error')}: {error!r}")


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Keep the tasks of each process: of a dead one they stay, unfinished, until the simulation ends."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    process = current.get() if context is None else context.get(current)
    if process is not None:
        process.tasks.append(task)
        if len(process.tasks) > 256:
            process.tasks[:] = [t for t in process.tasks if not t.done()]
    return task
