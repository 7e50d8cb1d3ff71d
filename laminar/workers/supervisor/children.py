"""Child processes that never outlive their parent: spawned, in a session of their own, killed by the kernel if the
parent dies (PR_SET_PDEATHSIG through `setpriv`), and stopped as a whole group."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from laminar.buffer.etcd_access import EtcdAccess
from laminar.workers.supervisor.overheard import Overheard


def worker_command(kind: str, access: EtcdAccess, run: str) -> list[str]:
    """`laminar worker KIND …` with the interpreter that runs now."""
    return [sys.executable, "-m", "laminar.cli", "worker", kind, *access.arguments(), "--run", run]


class Child:
    """One child process. `log`: a file that takes its output (appended); None: this process's own. `overheard`: the
    output goes there by way of this process, which keeps the end of it (`said`)."""

    def __init__(self, command: Sequence[str], *, log: Path | None = None, overheard: bool = False) -> None:
        self.command = list(command)
        self.log = log
        self.heard = Overheard() if overheard else None
        self.process: Process | None = None

    async def start(self) -> None:
        """The parent-death signal follows the spawning thread: call this on the main thread's loop."""
        guard = shutil.which("setpriv")
        prefix = [guard, "--pdeathsig", "KILL"] if guard else []
        output: IO[bytes] | None = self.log.open("ab") if self.log else None
        if self.heard is not None:
            output = os.fdopen(await self.heard.begin(), "wb")
        try:
            self.process = await asyncio.create_subprocess_exec(
                *prefix,
                *self.command,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def returncode(self) -> int | None:
        return self.process.returncode if self.process else None

    async def wait(self) -> int:
        assert self.process is not None, "start() comes first"
        return await self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, `grace_s` seconds of patience, then SIGKILL to its whole group."""
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            pass
        self.kill_group()
        await self.process.wait()
        if self.heard is not None:
            await self.heard.end()

    def said(self) -> list[str]:
        """The last lines that it wrote, if it was overheard; all of them after `stop`."""
        return self.heard.lines() if self.heard is not None else []

    def kill_group(self) -> None:
        """Whatever the child left behind in its session goes with it."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
