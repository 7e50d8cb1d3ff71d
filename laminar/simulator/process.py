"""Simulated processes, and the gates through which all that they do to the outside passes.

    process code ──▶ gate: alive? crash here? ──▶ twin of etcd / storage / table / relay

A gate counts: "die at your 57th call, after it took effect" is a fault that a seed can name.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from laminar.simulator.faults import Kind
from laminar.simulator.loop import SimulationLoop, current

T = TypeVar("T")


class CrashAt(Enum):
    BEFORE = "before"
    """The call never reaches the other side."""
    AFTER = "after"
    """It took effect there; nobody here hears of it."""


@dataclass(eq=False)
class SimProcess:
    """One life of one process. `kind` as in `laminar worker KIND`; `rate`: see `loop.Inhabitant`."""

    kind: str
    name: str
    pid: int
    loop: SimulationLoop
    rate: float = 1.0
    dead: bool = False
    stopped: bool = False
    calls: int = 0
    crash: tuple[int, CrashAt] | None = None
    """Die at this call, counted from 1."""
    pause: tuple[int, CrashAt, float] | None = None
    """Be stopped at this call, for so many seconds."""
    struck: Callable[[Kind], object] = lambda kind: None
    """Told when one of the two comes true."""
    deferred: list[asyncio.Handle] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    on_death: list[Callable[[], None]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: BaseException | int | None = None
    """Its exit code, what ended it, or None after a kill."""
    _context: contextvars.Context = field(default_factory=contextvars.Context)

    def __post_init__(self) -> None:
        self._context.run(current.set, self)

    def start(self, main: Coroutine[Any, Any, int]) -> None:
        """Run `main` as this process; its result, or what it raises, ends the process."""
        self.loop.create_task(self._main(main), context=self._context, name=self.name)

    async def _main(self, main: Coroutine[Any, Any, int]) -> None:
        try:
            self.result = await main
        except Exception as error:
            self.result = error
        self._end()

    def kill(self) -> None:
        """SIGKILL: nothing of it runs again."""
        if not self.dead:
            self._end()

    def _end(self) -> None:
        self.dead = True
        for callback in self.on_death:
            # Its end is seen from outside: whoever held a connection to it.
            contextvars.Context().run(callback)
        contextvars.Context().run(self.ended.set)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def cont(self) -> None:
        """SIGCONT."""
        if self.stopped:
            self.loop.resume(self)

    async def gate(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call to the outside, unless this process dies of it."""
        self.calls += 1
        mine = self.calls
        if self._strikes(mine, CrashAt.BEFORE):
            await asyncio.sleep(0)  # comes back when the process is continued; never, if it died
        result = await call()
        if self._strikes(mine, CrashAt.AFTER):
            await asyncio.sleep(0)
        return result

    def _strikes(self, call: int, moment: CrashAt) -> bool:
        """Whether this process died, or was stopped, at this moment of its call."""
        if self.crash == (call, moment):
            self.struck(Kind.CRASH_AT_CALL)
            self.kill()
            return True
        if self.pause is not None and self.pause[:2] == (call, moment):
            self.struck(Kind.STOP_AT_CALL)
            self.stop()
            self.loop.call_later(self.pause[2], self.cont, context=contextvars.Context())
            return True
        return False

    def ask(self, make: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Future[T]:
        """Run a coroutine inside this process for somebody else. If it dies, the future ends with ConnectionError."""
        if self.dead:
            raise ConnectionRefusedError(f"{self.name} is dead")
        task = self.loop.create_task(make(), context=self._context)
        answer: asyncio.Future[T] = self.loop.create_future()

        def done(task: asyncio.Task[T]) -> None:
            if answer.done():
                return
            if task.cancelled():
                answer.set_exception(ConnectionResetError("cancelled there"))
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        def died() -> None:
            if not answer.done():
                answer.set_exception(ConnectionResetError(f"{self.name} died"))

        task.add_done_callback(done, context=contextvars.Context())
        self.on_death.append(died)
        answer.add_done_callback(lambda _: self.on_death.remove(died), context=contextvars.Context())
        return answer
