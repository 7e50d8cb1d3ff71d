"""One `laminar run` for a run: on this host by a lock that its process holds, among hosts by a leased key in etcd.

Neither outlives its holder: the kernel drops the lock of a process that was killed, and the key goes with its lease,
or at once where its process can be seen to be gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from laminar.buffer.coordination import Compare, Coordination, Delete, Put, Transaction, absent, created_at, unchanged
from laminar.buffer.keys import Keys
from laminar.buffer.records import SupervisorRecord
from laminar.buffer.session import Session, transact_or_read_back
from laminar.clock import Clock
from laminar.errors import ConfigError, CoordinationError, CoordinationUnavailable, Fenced

log = logging.getLogger(__name__)

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
TRIES = 8
CLAIM_AGAIN_S = 1.0


@contextmanager
def only_here(folder: Path, run: str) -> Iterator[bool]:
    """Hold this host's lock of a run for the time of the block. Raises ConfigError naming the process that holds it.

    The value says whether there is a lock at all: some file systems have none."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.pread(handle, 100, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"run {run!r} is in use by {holder}: another `laminar run` (or `laminar audit`) works on it; wait for "
                "it, stop it, or choose another run.name"
            ) from e
        except OSError as e:
            if e.errno not in NO_LOCKS:
                raise
            yield False
            return
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield True
    finally:
        os.close(handle)


def this_process(clock: Clock) -> SupervisorRecord:
    pid = os.getpid()
    return SupervisorRecord(
        host=socket.gethostname(), pid=pid, place=_place(), began=_began(pid) or "", started_at_us=clock.now_us()
    )


def _place() -> str:
    """This boot of this machine, and the space of process numbers within it: only there does a pid mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> str | None:
    """When the process started, in the kernel's ticks: a pid may be used again. None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def is_gone(holder: SupervisorRecord) -> bool:
    """Whether the process certainly does not live any more."""
    return holder.place == _place() and _began(holder.pid) != holder.began


class Supervision:
    """The leased key `supervisor` of a run, held by this process. `keep` holds it for the time of the run."""

    def __init__(self, coordination: Coordination, keys: Keys, clock: Clock, lease_ttl: float) -> None:
        self.coordination = coordination
        self.keys = keys
        self.clock = clock
        self.lease_ttl = lease_ttl
        self.record = this_process(clock)
        self.session: Session | None = None
        self._create_revision = 0
        """Of the key, as this process holds it; 0 before it has claimed it."""

    async def claim(self) -> None:
        """Raises ConfigError naming the living holder, or the one that cannot be seen from here."""
        if self.session is None or not self.session.alive:
            self.session = await Session.open(self.coordination, self.lease_ttl)
        value, key = self.record.dump(), self.keys.supervisor
        for _ in range(TRIES):
            kv = await self.coordination.get(key)
            if kv is None:
                put = Put(key, value, self.session.lease)
                created = Transaction((absent(key),), (put,))
                await transact_or_read_back(self.coordination, created, committed=self._is_ours)
                kv = await self.coordination.get(key)
                if kv is not None and kv.lease == self.session.lease:
                    self._create_revision = kv.create_revision
                    return
                continue
            holder = SupervisorRecord.parse(kv.value)
            if holder != self.record and not is_gone(holder):
                raise ConfigError(
                    f"run {self.keys.run!r} is being run by `laminar run` on host {holder.host} (pid {holder.pid}): "
                    "stop that one, or choose another run.name; if it was killed, or lost its host, its hold ends by "
                    f"itself within {self.lease_ttl:.0f} s: then run this again"
                )
            # What a killed process left, or our own of before the lease was lost.
            await self.coordination.transact(Transaction((unchanged(kv),), (Delete(key),)))
        raise CoordinationError(f"{key} changed hands {TRIES} times while it was claimed; run this again")

    async def _is_ours(self) -> bool:
        kv = await self.coordination.get(self.keys.supervisor)
        return kv is not None and self.session is not None and kv.lease == self.session.lease

    def guard(self) -> Compare:
        """Goes into what this process writes to the run in etcd: nothing of it takes effect once the hold is lost."""
        return created_at(self.keys.supervisor, self._create_revision)

    async def check(self) -> None:
        """Raises Fenced if the hold is lost."""
        kv = await self.coordination.get(self.keys.supervisor)
        if kv is None or kv.create_revision != self._create_revision:
            raise Fenced(
                f"this `laminar run` lost its hold on run {self.keys.run!r}: it was stopped, or cut off from etcd, for "
                f"longer than its lease of {self.lease_ttl:.0f} s; another one may work on the run: see `laminar "
                "status`, and run this again if none does"
            )

    async def keep(self) -> None:
        """Claim again whenever the lease is lost (etcd was away for long). Raises ConfigError if another took over."""
        while True:
            assert self.session is not None, "claim() comes first"
            await self.session.lost.wait()
            while not await self._claimed_again():
                await self.clock.sleep(CLAIM_AGAIN_S)

    async def _claimed_again(self) -> bool:
        try:
            await self.claim()
        except CoordinationUnavailable as e:
            log.debug("the hold on run %s cannot be renewed yet: %s", self.keys.run, e)
            return False
        return True

    async def release(self) -> None:
        if self.session is not None:
            with contextlib.suppress(TimeoutError):  # it expires by itself
                async with asyncio.timeout(5):
                    await self.session.close()


@asynccontextmanager
async def only_supervisor(
    coordination: Coordination, keys: Keys, clock: Clock, lease_ttl: float
) -> AsyncIterator[Supervision]:
    """Hold the run among all hosts for the time of the block. Raises ConfigError naming who holds it."""
    supervision = Supervision(coordination, keys, clock, lease_ttl)
    try:
        await supervision.claim()
        yield supervision
    finally:
        await supervision.release()
