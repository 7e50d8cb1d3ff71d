"""The pool of scoring processes: where environments and rewards run, so that they cannot hold up or end a rollout.

    rollout --reset/step/score--> EnvironmentHost --one line--> scoring process --> Environment, Reward
                                       |  past the limit: SIGKILL, start another
                                       '--> EnvironmentFailure(status, message)

Invariants: a process has one request at a time; one whose request was given up is killed, never asked again; a call
either returns what user code returned or raises EnvironmentFailure with a status; nothing outlives `close`.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from laminar.config import EnvironmentConfig, RewardConfig
from laminar.errors import ConfigError, EnvironmentFailure, LaminarError
from laminar.workers.environments import wire
from laminar.workers.environments.base import Prompt, Resume, Score, Transcript, Turn

log = logging.getLogger(__name__)

START_LIMIT = 120.0
"""Seconds in which a process must have imported and created its environment."""
CLOSE_GRACE = 1.0
"""Seconds that an idle process has to leave by itself."""
KILL_LIMIT = 5.0
"""Seconds in which a killed process must be gone; past it the kernel holds it and its slot is left behind."""
_TAIL_LINES = 20


class _Gone(Exception):
    """A scoring process ended in the middle of a request."""


class _ScoringProcess:
    """One child and its pipes. `ask` from one task at a time."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._closed = False
        self.busy = False
        self.resume: Resume = "state"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Raises ConfigError if the environment cannot be created, LaminarError if the process dies or is too slow."""
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        self._tail.clear()
        name = self._setup["environment"]["name"]
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "laminar.workers.environments.host_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=wire.LINE_LIMIT,
                env=environ,
                # A group of its own: a limit kills what user code started too, and Ctrl-C is the host's to handle.
                start_new_session=True,
            )
        except OSError as error:
            raise LaminarError(f"no scoring process for environment {name!r} could be started: {error}") from error
        self._drain = asyncio.create_task(self._drain_stderr(self._process))
        if self._closed:
            await self.kill()
            raise LaminarError("the scoring processes are closed")
        try:
            async with asyncio.timeout(START_LIMIT):
                reply = await self._exchange({**self._setup, "parent": os.getpid()})
        except TimeoutError as error:
            await self.kill()
            raise LaminarError(
                f"the scoring process of environment {name!r} was not ready within {START_LIMIT:.0f} s: importing or "
                "creating it takes too long; move slow work into its first call"
            ) from error
        except _Gone as error:
            await self.kill()
            raise LaminarError(f"the scoring process of environment {name!r} ended at its start: {error}") from error
        except BaseException:
            await self.kill()
            raise
        if "failed" in reply:
            await self.kill()
            raise ConfigError(reply["failed"])
        self.resume = reply["resume"]

    async def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer. Raises TimeoutError past `limit_s`, _Gone if the process ended. In both cases, and if this is
        cancelled, the process is killed before this returns."""
        self.busy = True
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(request)
        except BaseException:
            await self.kill()
            raise
        finally:
            self.busy = False

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(wire.encode(message))
            await process.stdin.drain()
            line = await process.stdout.readline()
            if line.endswith(b"\n"):
                return wire.decode(line)
        except (BrokenPipeError, ConnectionResetError):
            pass  # reported below, by how the process ended
        except ValueError as error:
            raise _Gone(f"its answer cannot be read: {error}") from error
        code = await process.wait()
        if self._drain is not None:
            await asyncio.wait([self._drain], timeout=CLOSE_GRACE)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = f"; its last line was {self._tail[-1]!r}" if self._tail else ""
        raise _Gone(f"it ended {how}{said}")

    async def _drain_stderr(self, process: asyncio.subprocess.Process) -> None:
        """What user code prints, kept for the case that the process dies, and shown at DEBUG."""
        assert process.stderr is not None
        rest = b""
        while chunk := await process.stderr.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-4096:]
            for line in lines:
                self._said(process.pid, line)
        if rest:
            self._said(process.pid, rest)

    def _said(self, pid: int, line: bytes) -> None:
        text = wire.shortened(wire.redacted(line.decode("utf-8", "replace").rstrip()))
        if text:
            self._tail.append(text)
            log.debug("scoring process %d: %s", pid, text)

    async def close(self) -> None:
        """For good: a start that is under way ends as well."""
        self._closed = True
        await (self.kill() if self.busy else self.leave())

    async def leave(self) -> None:
        """End an idle process: it sees the end of its requests; killed if it does not leave."""
        if self.alive and self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        # Forgotten first: if this is cancelled half-way, the next call starts another instead of asking a dying one.
        process, self._process = self._process, None
        drain, self._drain = self._drain, None
        if process is None:
            return
        # The group also holds what user code started, which may outlive the process itself.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_LIMIT):
                await process.wait()
        except TimeoutError:
            log.error("scoring process %d is still there %.0f s after SIGKILL", process.pid, KILL_LIMIT)
        if drain is not None:
            drain.cancel()
            await asyncio.wait([drain], timeout=CLOSE_GRACE)


class EnvironmentHost:
    """Runs the configured environment and reward in `workers` processes.

    `counts` tells how many calls ended with which status ("ok" among them). Calls may come from many tasks at once;
    those beyond `workers` wait for a process, each at most for the limits of the calls before it.
    """

    def __init__(self, environment: EnvironmentConfig, reward: RewardConfig, *, workers: int) -> None:
        setup = {
            "environment": environment.model_dump(mode="json"),
            "reward": reward.model_dump(mode="json"),
        }
        self._limit = reward.timeout
        self._processes = [_ScoringProcess(setup) for _ in range(workers)]
        self._idle: asyncio.Queue[_ScoringProcess] = asyncio.Queue()
        self._waiting = 0
        self._told_at = -math.inf
        self._closed = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.resume: Resume = "state"

    async def start(self) -> None:
        """Start all processes. Raises ConfigError naming the object that cannot be loaded or created."""
        started = await asyncio.gather(*(p.start() for p in self._processes), return_exceptions=True)
        failed = [result for result in started if isinstance(result, BaseException)]
        if failed:
            await self.close()
            raise failed[0]
        self.resume = self._processes[0].resume
        for process in self._processes:
            self._idle.put_nowait(process)

    async def reset(self, prompt: Prompt) -> Turn:
        """The first messages. Raises EnvironmentFailure('environment_error' | 'environment_timeout')."""
        return wire.turn_from(await self._call("reset", prompt))

    async def step(self, prompt: Prompt, state: str, reply: str) -> Turn:
        """The environment's reaction. Raises as `reset` does."""
        return wire.turn_from(await self._call("step", prompt, state=state, reply=reply))

    async def score(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Raises EnvironmentFailure('reward_error' | 'reward_timeout' | 'reward_no_result')."""
        return wire.score_from(await self._call("score", prompt, transcript=wire.plain(transcript)))

    async def close(self) -> None:
        """Stop all processes, in seconds, also those that are in a call; such calls raise LaminarError."""
        self._closed = True
        await asyncio.gather(*(p.close() for p in self._processes))

    async def _call(self, call: str, prompt: Prompt, **more: Any) -> dict[str, Any]:
        request = {"call": call, "prompt": wire.plain(prompt), **more}
        kind = "reward" if call == "score" else "environment"
        what = f"{call} of prompt {prompt.prompt_index}"
        process = await self._acquire(what)
        try:
            if not process.alive:
                await process.start()
            reply = await process.ask(request, self._limit)
        except TimeoutError as error:
            log.warning("%s took more than %.1f s: its scoring process was killed", what, self._limit)
            message = f"{what} took more than reward.timeout = {self._limit:g} s"
            raise self._failure(f"{kind}_timeout", message) from error
        except (_Gone, LaminarError) as error:
            if self._closed:
                raise LaminarError(f"the scoring processes were closed during {what}") from error
            log.warning("%s lost its scoring process: %s", what, error)
            raise self._failure(f"{kind}_error", wire.shortened(f"the scoring process failed: {error}")) from error
        finally:
            self._idle.put_nowait(process)
        if "status" in reply:
            log.warning("%s: %s: %s", what, reply["status"], reply["message"])
            raise self._failure(reply["status"], reply["message"])
        self.counts["ok"] += 1
        result: dict[str, Any] = reply["result"]
        return result

    def _failure(self, status: str, message: str) -> EnvironmentFailure:
        self.counts[status] += 1
        return EnvironmentFailure(status, message)

    async def _acquire(self, what: str) -> _ScoringProcess:
        """A process without a request. The wait is bounded by the limits of the calls ahead, and told once in each,
        by one for all who wait."""
        self._waiting += 1
        try:
            while not self._closed:
                try:
                    async with asyncio.timeout(self._limit):
                        process = await self._idle.get()
                    if not self._closed:
                        return process
                    self._idle.put_nowait(process)
                except TimeoutError:
                    now = asyncio.get_running_loop().time()
                    if now - self._told_at < self._limit:
                        continue
                    self._told_at = now
                    log.warning(
                        "%s has waited %.1f s for one of %d scoring processes, %d calls wait; raise reward.workers",
                        what, self._limit, len(self._processes), self._waiting,
                    )  # fmt: skip
            raise LaminarError(f"the scoring processes are closed: {what} was not begun")
        finally:
            self._waiting -= 1
