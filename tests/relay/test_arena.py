"""Arenas: who can still see this memory is the kernel's word."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from laminar.errors import ConfigError, WeightsError
from laminar.relay import memory
from laminar.relay.arena import Arena, ArenaPool, ArenaState, arena_bytes, check_leases
from laminar.relay.mapping import HUGE_PAGE

SIZE = 1 << 16
HOLD = """
import mmap, os, sys
fd = int(sys.argv[1])
mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
os.close(fd)
print(mapping[0], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(SIZE)
    yield arena
    arena.close()


def test_this_kernel_can_tell_who_holds_an_arena() -> None:
    check_leases()


def test_own_mapping_does_not_count_but_every_other_description_does(arena: Arena) -> None:
    assert arena.is_exclusive()
    for reopen, protection in ((arena.open_for_reading, mmap.PROT_READ), (arena.open_for_writing, mmap.PROT_WRITE)):
        fd = reopen()
        assert not arena.is_exclusive()
        mapping = mmap.mmap(fd, SIZE, prot=protection)
        os.close(fd)
        assert not arena.is_exclusive(), "mapped, though its descriptor is closed"
        mapping.close()
        assert arena.is_exclusive()


def test_a_descriptor_under_way_in_a_socket_counts(arena: Arena) -> None:
    left, right = socket.socketpair()
    fd = arena.open_for_reading()
    socket.send_fds(left, [b"x"], [fd])
    os.close(fd)
    assert not arena.is_exclusive()
    left.close()
    right.close()
    assert arena.is_exclusive()


def test_a_read_only_descriptor_cannot_be_mapped_writable(arena: Arena) -> None:
    fd = arena.open_for_reading()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.write(fd, b"x")
    os.close(fd)


def test_kill_minus_nine_of_a_reader_frees_its_hold(arena: Arena) -> None:
    fd = arena.open_for_reading()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.close(fd)
    assert child.stdout is not None and child.stdout.readline() == b"0\n"
    assert not arena.is_exclusive()
    child.kill()
    child.communicate()
    assert arena.is_exclusive()


def test_an_arena_is_not_recycled_while_somebody_has_it_mapped() -> None:
    pool = ArenaPool(limit=2)
    pool.arenas.append(Arena.create(SIZE))
    arena = pool.take(SIZE)
    assert arena is not None and arena.state is ArenaState.INCOMING
    fd = arena.open_for_reading()
    pool.release(arena)
    assert arena.state is ArenaState.DRAINING and pool.take(SIZE) is None
    os.close(fd)
    assert pool.take(SIZE) is arena, "the same touched memory, again"
    pool.close()


def test_the_pool_takes_the_smallest_that_fits_and_gives_up_what_is_too_small() -> None:
    pool = ArenaPool(limit=2)
    pool.arenas += [Arena.create(4 * SIZE), Arena.create(SIZE)]
    small = pool.take(SIZE)
    assert small is not None and small.capacity == SIZE
    assert pool.take(8 * SIZE) is None and not pool.may_create(4 * SIZE)
    assert pool.outgrown(4 * SIZE) == [], "the small one is in use"
    pool.release(small)
    assert pool.may_create(8 * SIZE) and not pool.may_create(SIZE), "both free ones are too small and may go"
    outgrown = pool.outgrown(8 * SIZE)
    assert small in outgrown and len(outgrown) == 2 and pool.arenas == []
    for arena in outgrown:
        arena.close()


def test_states_follow_the_table_only(arena: Arena) -> None:
    with pytest.raises(AssertionError, match="free to serving"):
        arena.move(ArenaState.SERVING)


def test_an_arena_is_as_large_as_asked_and_no_larger(arena: Arena) -> None:
    assert arena.buffer(100).nbytes == 100
    with pytest.raises(WeightsError, match=f"{SIZE + 1} bytes do not fit"):
        arena.buffer(SIZE + 1)


def test_an_arena_of_some_size_takes_whole_huge_pages() -> None:
    """As many fit as memory is asked for: places count what is taken."""
    assert [arena_bytes(n) for n in (1, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1)] == [
        1, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE,
    ]  # fmt: skip
    arena = Arena.create(HUGE_PAGE + 1)
    assert arena.capacity == arena_bytes(HUGE_PAGE + 1)
    arena.close()


def test_memory_that_does_not_exist_is_refused_with_the_figures() -> None:
    available = memory.available_bytes()
    memory.check_memory(1 << 20, retain=2, spare=1)
    with pytest.raises(ConfigError, match=r"2 retained \+ 2 incoming \+ 1 spare.*lower relay.retain"):
        memory.check_memory(available, retain=2, spare=1)
    with pytest.raises(WeightsError, match="no memory for another arena of"):
        Arena.create(1 << 60)


def test_an_allocation_stops_when_others_take_the_memory_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two relays that allocate at once have both seen the same free memory."""
    left = [4 * SIZE, 3 * SIZE, SIZE]
    monkeypatch.setattr("laminar.relay.arena.STEP", SIZE)
    monkeypatch.setattr("laminar.relay.arena.available_bytes", lambda *, reserve: left.pop(0) - int(reserve * SIZE))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsError, match=f"of {4 * SIZE} bytes: it needs {2 * SIZE} more, {SIZE} are available"):
        Arena.create(4 * SIZE)
    assert set(os.listdir("/proc/self/fd")) <= before, "what it had got is given back"
    left[:] = [4 * SIZE]
    with pytest.raises(WeightsError, match="beside the 10% that stay free"):
        Arena.create(4 * SIZE, reserve=0.1)


def test_free_arenas_that_nothing_comes_for_are_given_up_and_what_comes_in_keeps_two() -> None:
    pool = ArenaPool(limit=10)
    pool.arenas += [Arena.create(SIZE) for _ in range(8)]
    taken = [pool.take(SIZE) for _ in range(2)]
    for arena in taken:
        assert arena is not None
        arena.move(ArenaState.SERVING)
    given_up = pool.surplus(4)
    assert (len(given_up), len(pool.arenas)) == (3, 5), "one more than come in stays"
    pool.limit = 4
    given_up += pool.surplus(4)
    assert len(pool.arenas) == 4 and pool.surplus(4) == []
    pool.limit = 3
    assert pool.surplus(3) == [], "two stay free for what comes in"
    for arena in given_up:
        arena.close()
    pool.close()
