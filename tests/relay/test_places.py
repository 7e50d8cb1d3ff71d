"""How many versions a relay keeps: what memory allows, never fewer than it needs, never more than others can spare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from laminar.relay import memory
from laminar.relay.memory import Scope
from laminar.relay.places import LEAST_RESERVE, RESERVE, kept, places

SIZES = st.integers(1, 1000)
SHARES = st.floats(0.01, 0.99)
MINIMA = st.integers(3, 6)


@st.composite
def scopes(draw: st.DrawFn) -> Scope:
    total = draw(st.integers(1, 100_000))
    return Scope("this host", total, draw(st.integers(0, total)), draw(st.integers(0, total)))


SCOPES = st.lists(scopes(), min_size=1, max_size=3)


@given(SIZES, MINIMA, st.integers(0, 50), SCOPES, SHARES)
def test_there_are_the_fewest_always_and_more_only_within_every_limit(
    size: int, minimum: int, arenas: int, found: list[Scope], share: float
) -> None:
    mapped = arenas * size
    count = places(size, minimum=minimum, mapped=mapped, scopes=found, share=share).count
    assert count >= minimum
    if count > minimum:
        for scope in found:
            others = max(0, scope.shared - mapped)
            assert count * size + others <= share * scope.total
            assert count * size <= mapped or scope.available - (count * size - mapped) >= int(RESERVE * scope.total)
            assert scope.available >= int(LEAST_RESERVE * scope.total) or count < arenas


@given(SIZES, MINIMA, st.integers(0, 50), SCOPES, SHARES, st.integers(0, 10_000))
def test_more_memory_or_a_larger_share_never_means_fewer(
    size: int, minimum: int, arenas: int, found: list[Scope], share: float, more: int
) -> None:
    def count(scopes: list[Scope], share: float) -> int:
        return places(size, minimum=minimum, mapped=arenas * size, scopes=scopes, share=share).count

    before = count(found, share)
    assert count([replace(s, available=s.available + more) for s in found], share) >= before
    assert count(found, min(0.99, share * 1.5)) >= before


def with_arenas(scope: Scope, added: int) -> Scope:
    """As the kernel tells of it after `added` bytes of arenas more, or fewer."""
    return replace(scope, available=scope.available - added, shared=scope.shared + added)


@given(SIZES, MINIMA, st.integers(0, 20), scopes(), SHARES)
def test_a_relay_that_filled_its_places_or_gave_up_what_is_too_many_is_told_the_same_again(
    size: int, minimum: int, arenas: int, scope: Scope, share: float
) -> None:
    """Else it would take and give up a place in turn, and lose a version each time."""
    scope = replace(scope, shared=scope.shared + arenas * size)
    first = places(size, minimum=minimum, mapped=arenas * size, scopes=[scope], share=share).count
    after = with_arenas(scope, (first - arenas) * size)
    second = places(size, minimum=minimum, mapped=first * size, scopes=[after], share=share).count
    # Having given some up it keeps the rest; it may come back up only by what rounding left.
    assert second == first


@given(st.integers(1, 50), SIZES, SHARES, st.integers(0, 1000))
def test_it_keeps_what_it_has_while_free_memory_is_between_the_two_reserves(
    arenas: int, size: int, share: float, tenths: int
) -> None:
    total = int(arenas * size / share) + 1000
    least, reserve = int(LEAST_RESERVE * total), int(RESERVE * total)
    scope = Scope("this host", total, least + (reserve - least) * tenths // 1000, arenas * size)
    assert places(size, minimum=1, mapped=arenas * size, scopes=[scope], share=share).count == arenas


@given(st.lists(st.integers(0, 3), max_size=60), SIZES, MINIMA, SHARES, st.integers(100, 100_000))
def test_relays_of_one_host_share_its_memory(
    turns: list[int], size: int, minimum: int, share: float, total: int
) -> None:
    """In any order of theirs, each beginning with the fewest: a relay adds an arena when it is told that it may."""
    mapped = [minimum * size] * 4
    reserve = int(RESERVE * total)
    for turn in turns:
        host = Scope("this host", total, total - sum(mapped), sum(mapped))
        count = places(size, minimum=minimum, mapped=mapped[turn], scopes=[host], share=share).count
        if count * size > mapped[turn]:
            mapped[turn] += size
            assert sum(mapped) <= share * total and total - sum(mapped) >= reserve


@given(SIZES, MINIMA, SCOPES)
def test_no_share_means_the_fewest(size: int, minimum: int, found: list[Scope]) -> None:
    assert places(size, minimum=minimum, mapped=0, scopes=found, share=0.0).count == minimum


def test_what_bounds_is_named_with_what_raises_it() -> None:
    gib = 1 << 30
    host = Scope("this host", 100 * gib, 60 * gib, 8 * gib)
    by_share = places(gib, minimum=5, mapped=5 * gib, scopes=[host], share=0.25)
    assert by_share.count == 22 and by_share.why == (
        "relay.memory_share = 0.25 of the 100.00 GiB of this host, of which 3.00 GiB are other shared memory; raise it"
    )
    container = Scope("the cgroup pod", 20 * gib, 4 * gib, 5 * gib)
    by_free = places(gib, minimum=5, mapped=5 * gib, scopes=[host, container], share=0.6)
    assert by_free.count == 7 and by_free.why == (
        "4.00 GiB of the 20.00 GiB of the cgroup pod are free, 2.00 GiB stay so; give it more memory, "
        "relay.memory_share = 0.6 would allow 12.00 GiB"
    )


some_versions = st.sets(st.integers(0, 20))


@given(some_versions, st.integers(1, 4), some_versions, some_versions, st.integers(4, 8))
def test_retention_keeps_the_newest_always_and_never_more_than_fit(
    versions: set[int], newest: int, wanted: set[int], recent: set[int], room: int
) -> None:
    first = min(versions, default=None)
    keep = kept(versions, newest=newest, wanted=wanted, first=first, room=room, recent=recent)
    top = set(sorted(versions)[-newest:])
    assert top <= keep <= versions and len(keep) <= room
    assert keep <= top | wanted | recent | {first}
    left_out = (versions & (wanted | recent)) - keep
    assert not left_out or len(keep) == room
    assert not (versions & wanted) - keep or keep <= top | wanted | {first}, "what is wanted goes before what may be"


# -- what the kernel tells ------------------------------------------------------------------------------------------


def written(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


HOST = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\nShmem: 50 kB\nHugePages_Total: 1\nHugetlb: 200 kB"}
OF_HOST = Scope("this host", 800 * 1024, 600 * 1024, 50 * 1024)


def test_huge_pages_that_were_set_aside_are_no_memory_for_versions(tmp_path: Path) -> None:
    assert memory.scopes(written(tmp_path, HOST)) == [OF_HOST]


def test_each_cgroup_around_us_counts_with_the_lower_of_its_limits(tmp_path: Path) -> None:
    inner, outer = "sys/fs/cgroup/pod/one", "sys/fs/cgroup/pod"
    statistics = "anon 1\ninactive_file 3000\nshmem 7000"
    root = written(tmp_path, HOST | {
        "proc/self/cgroup": "0::/pod/one",
        f"{inner}/memory.max": "max", f"{inner}/memory.high": "100000",
        f"{inner}/memory.current": "40000", f"{inner}/memory.stat": statistics,
        f"{outer}/memory.max": "200000", f"{outer}/memory.high": "max",
        f"{outer}/memory.current": "260000", f"{outer}/memory.stat": statistics,
    })  # fmt: skip
    assert memory.scopes(root) == [
        OF_HOST,
        Scope("the cgroup one", 100000, 63000, 7000),
        Scope("the cgroup pod", 200000, 0, 7000),
    ]


def test_a_container_whose_own_cgroup_is_mounted_at_the_top_is_found(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = written(tmp_path, HOST | {
        "proc/self/cgroup": "0::/of/the/host",
        f"{top}/memory.max": "5000", f"{top}/memory.current": "1000", f"{top}/memory.stat": "shmem 10",
    })  # fmt: skip
    assert memory.scopes(root)[1:] == [Scope("this container", 5000, 4000, 10)]


def test_cgroups_of_version_1_count_with_their_children_and_no_limit_is_none(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    statistics = "shmem 1\ninactive_file 1\ntotal_shmem 500\ntotal_inactive_file 2000"
    root = written(tmp_path, HOST | {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:hugetlb,memory:/box\n0::/",
        f"{top}/box/memory.limit_in_bytes": "50000", f"{top}/box/memory.usage_in_bytes": "10000",
        f"{top}/box/memory.stat": statistics,
        f"{top}/memory.limit_in_bytes": str((1 << 63) - 4096), f"{top}/memory.usage_in_bytes": "10000",
        f"{top}/memory.stat": statistics,
    })  # fmt: skip
    assert memory.scopes(root) == [OF_HOST, Scope("the cgroup box", 50000, 42000, 500)]


def test_this_host_has_memory_and_tells_of_it() -> None:
    host = memory.scopes()[0]
    assert 0 < host.available <= host.total and 0 <= host.shared <= host.total
    assert memory.available_bytes(reserve=0.5) < memory.available_bytes()
