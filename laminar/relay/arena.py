"""Memory that versions live in: memfd-backed, handed to other processes as file descriptors, recycled.

    free ──take──▶ incoming ──sealed──▶ serving ──released──▶ draining ──nobody has it──▶ free

Fresh memory costs some twenty times a copy into touched memory, so arenas are touched once and used again. They
are used again only when nobody else can see them, and the kernel is the one who knows: a write lease on the relay's
own description is granted only if no other description of the file is open or mapped. What a process holds goes with
it, however it died. Raw memfd_create descriptors escape that count, and so do dups: hence each party gets a re-open
of its own through /proc/self/fd. Two traps: (1) mapping is by *description*, so the relay's own mapping does not count
against the lease; (2) a same-user process can re-open a read-only descriptor for writing: this guards against
accidents and stale writers, not against malice from inside the user account.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable
from enum import Enum

from laminar.errors import ConfigError, WeightsError
from laminar.relay.mapping import HUGE_PAGE, SharedMapping
from laminar.relay.memory import INCOMING, SPARE, available_bytes

STEP = 256 << 20
"""Bytes allocated between two looks at what is left: relays that allocate at the same time, and whoever else does,
cannot together go further beyond than one of these each."""


class ArenaState(Enum):
    FREE = "free"
    INCOMING = "incoming"
    SERVING = "serving"
    DRAINING = "draining"


TRANSITIONS = {
    ArenaState.FREE: {ArenaState.INCOMING},
    ArenaState.INCOMING: {ArenaState.SERVING, ArenaState.DRAINING},
    ArenaState.SERVING: {ArenaState.DRAINING},
    ArenaState.DRAINING: {ArenaState.FREE},
}


class Arena:
    """One memfd of `capacity` bytes, mapped read-write here. Its pages exist: writing cannot run out of memory."""

    def __init__(self, fd: int, mapping: SharedMapping) -> None:
        self.fd = fd
        self.state = ArenaState.FREE
        self.pins = 0
        """Uses within this process that the kernel does not count: transfers from or into this memory."""
        self.before_close: list[Callable[[], None]] = []
        """What must let go of the memory before it is unmapped, such as a device's registration."""
        self._mapping = mapping

    @classmethod
    def create(cls, capacity: int, *, reserve: float = 0.0) -> Arena:
        """Allocate and touch `arena_bytes(capacity)` bytes (0.3-1 GB/s: call it in a thread), while the share `reserve`
        of the host's memory stays free. Raises WeightsError without memory, or without descriptors."""
        capacity = arena_bytes(capacity)
        try:
            raw = os.memfd_create("laminar-arena", os.MFD_CLOEXEC)
        except OSError as e:
            raise WeightsError(f"cannot allocate an arena of {capacity} bytes: {_told(e)}") from e
        try:
            for start in range(0, capacity, STEP):
                _check_room(capacity, capacity - start, reserve)
                os.posix_fallocate(raw, start, min(STEP, capacity - start))
            fd = os.open(f"/proc/self/fd/{raw}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise WeightsError(f"cannot allocate an arena of {capacity} bytes: {_told(e)}") from e
        finally:
            os.close(raw)
        try:
            # Should anyone ever open the file during a lease check, the default SIGIO would end this process.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            mapping = SharedMapping(fd, capacity, writable=True)
        except OSError as e:
            os.close(fd)
            raise WeightsError(f"cannot map an arena of {capacity} bytes: {_told(e)}") from e
        mapping.use_huge_pages()
        mapping.populate()
        return cls(fd, mapping)

    @property
    def capacity(self) -> int:
        return self._mapping.nbytes

    @property
    def address(self) -> int:
        """Where the memory begins in this process, for devices that are told addresses."""
        return self._mapping.address

    def buffer(self, nbytes: int) -> memoryview:
        """The first `nbytes` bytes, writable, of this process's mapping."""
        if nbytes > self.capacity:
            raise WeightsError(f"{nbytes} bytes do not fit into an arena of {self.capacity}")
        return self._mapping.buffer[:nbytes]

    def open_for_reading(self) -> int:
        """A new read-only descriptor: it cannot be mapped writable. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def open_for_writing(self) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def is_exclusive(self) -> bool:
        """True if no other description of this memory is open or mapped, in any process."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def move(self, state: ArenaState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"an arena cannot go from {self.state.value} to {state.value}")
        self.state = state

    def let_go(self) -> None:
        """Part with devices that know the memory, in their thread, so that `close` may be called in another."""
        for part in self.before_close:
            part()
        self.before_close.clear()

    def close(self) -> None:
        """Give up this process's share; the memory is freed when the last holder elsewhere closes."""
        self.let_go()
        self._mapping.close()
        os.close(self.fd)


def arena_bytes(nbytes: int) -> int:
    """The size of an arena for `nbytes`: whole huge pages, where what is added is little."""
    return -(-nbytes // HUGE_PAGE) * HUGE_PAGE if nbytes >= HUGE_PAGE else nbytes


def _told(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        remedy = "let this process open more files (ulimit -n)"
    elif error.errno == errno.ENFILE:
        remedy = "let this host open more files (sysctl fs.file-max)"
    else:
        remedy = "free memory"
    return f"{error.strerror or error}; {remedy}"


def _check_room(capacity: int, rest: int, reserve: float) -> None:
    """Raises WeightsError unless `rest` bytes of an arena can still be had. The kernel would hand out pages until it
    kills a process: nothing limits a memfd."""
    available = available_bytes(reserve=reserve)
    if rest > available:
        kept = f" beside the {reserve:.0%} that stay free" if reserve else ""
        raise WeightsError(
            f"no memory for another arena of {capacity} bytes: it needs {rest} more, {max(0, available)} are available"
            f"{kept}; free memory"
        )


class ArenaPool:
    """At most `limit` arenas; more only until those that others still map come back. Touched from one thread only,
    except `Arena.create` and the `close` of what is no longer in it, which the owner runs in a thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.arenas: list[Arena] = []
        self.creating = 0

    def count(self, state: ArenaState) -> int:
        return sum(arena.state is state for arena in self.arenas)

    def reclaim(self) -> None:
        """Free what is draining and no longer open or mapped anywhere else."""
        for arena in self.arenas:
            if arena.state is ArenaState.DRAINING and arena.pins == 0 and arena.is_exclusive():
                arena.move(ArenaState.FREE)

    def take(self, nbytes: int) -> Arena | None:
        """The smallest free arena that fits `nbytes`, now incoming; None if there is none."""
        self.reclaim()
        fitting = [a for a in self.arenas if a.state is ArenaState.FREE and a.capacity >= nbytes]
        if not fitting:
            return None
        arena = min(fitting, key=lambda a: a.capacity)
        arena.move(ArenaState.INCOMING)
        return arena

    def may_create(self, nbytes: int) -> bool:
        """True if one more arena of `nbytes` is allowed, once those are gone that are `outgrown`."""
        return len(self.arenas) - len(self._too_small(nbytes)) + self.creating < self.limit

    def outgrown(self, nbytes: int) -> list[Arena]:
        """Free arenas that are too small for `nbytes`, no longer in the pool."""
        return self._part_with(self._too_small(nbytes))

    def _too_small(self, nbytes: int) -> list[Arena]:
        return [a for a in self.arenas if a.state is ArenaState.FREE and a.capacity < nbytes]

    def surplus(self, minimum: int) -> list[Arena]:
        """Free arenas that are not needed, no longer in the pool: those beyond the limit, and beyond `minimum` those
        that nothing has come for. What stays free or incoming suffices for what comes in."""
        self.reclaim()
        free = [arena for arena in self.arenas if arena.state is ArenaState.FREE]
        idle = len(free) + self.count(ArenaState.INCOMING) - INCOMING
        unused = min(idle - SPARE, len(self.arenas) - minimum)
        count = max(0, min(idle, max(unused, len(self.arenas) - self.limit)))
        return self._part_with(sorted(free, key=lambda a: a.capacity)[:count])

    def _part_with(self, arenas: list[Arena]) -> list[Arena]:
        for arena in arenas:
            arena.let_go()
            self.arenas.remove(arena)
        return arenas

    def release(self, arena: Arena) -> None:
        """The arena's content is no longer wanted here; others may still be reading (or writing) it."""
        arena.move(ArenaState.DRAINING)
        self.reclaim()

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()
        self.arenas.clear()


def check_leases() -> None:
    """Raises ConfigError where the kernel (or a sandbox in its place) cannot tell who has a memfd open."""
    arena = Arena.create(mmap.PAGESIZE)
    try:
        alone = arena.is_exclusive()
        reader = arena.open_for_reading()
        with_reader = arena.is_exclusive()
        os.close(reader)
    except OSError as e:
        raise ConfigError(f"no write lease on a memfd here ({e.strerror}): the relay needs Linux >= 5.4") from e
    finally:
        arena.close()
    if not alone or with_reader:
        raise ConfigError("write leases on a memfd do not show other holders here: the relay needs Linux >= 5.4")
