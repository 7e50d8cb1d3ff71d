"""Two runs of a benchmark at the same time do not meet, and nothing stays of one that was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import namespaces
import pytest
from namespaces import LONGEST, Owner, began_at, left_over, own_name, owner_of
from privileges import privileged

BENCHMARKS = Path(namespaces.__file__).parent
SHAPING = """
import signal, sys
from relay import shaped, tidy_when_told_to_end
tidy_when_told_to_end()
with shaped(2, 1000.0) as names:
    print(*names, flush=True)
    signal.pause()
"""


def test_a_name_tells_whose_it_is_and_fits_an_interface() -> None:
    name = own_name("9i99")
    assert len(name) == LONGEST
    assert owner_of(name) == Owner(os.getpid(), began_at(os.getpid()))


@pytest.mark.parametrize("what", ["10i99", "a-b", "É", " "])
def test_an_end_that_no_interfaces_name_can_have_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="at most 4 small letters and digits"):
        own_name(what)


@pytest.mark.parametrize("name", ["lo", "eth0", "lb-r0", "lm", "lmo123", "LM0000100020x", "docker0", "lm-00001000x"])
def test_names_of_others_are_nobodys(name: str) -> None:
    assert owner_of(name) is None
    assert left_over([name], lambda pid: None) == []


def test_what_is_left_over_is_that_of_processes_that_ended_also_if_their_number_is_used_again() -> None:
    living, dead, followed = "lm0000100020r0", "lm0000200020r0", "lm0000300020r0"
    began = {1: 2, 3: 3}
    assert owner_of(living) == Owner(1, 2)
    assert left_over([living, dead, followed], began.get) == [dead, followed]


def test_a_process_that_has_ended_lives_no_more_though_nobody_has_asked_how() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert began_at(process.pid) is None
    process.wait()
    assert began_at(process.pid) is None


Start = Callable[[], tuple[subprocess.Popen[str], list[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that have shaped links, and the names of their namespaces. Skips where these are not allowed."""
    if shutil.which("tc") is None:
        pytest.skip("tc, by which links are shaped, is not installed")
    trial = own_name("try")
    privileged(["ip", "netns", "add", trial])
    try:
        privileged(["ip", "-n", trial, "link", "add", "next", "type", "veth", "peer", "name", "before"])
        privileged(f"tc -n {trial} qdisc add dev next root tbf rate 1gbit burst 8kb latency 100ms".split())
    finally:
        privileged(["ip", "netns", "delete", trial])
    processes: list[subprocess.Popen[str]] = []

    def begin() -> tuple[subprocess.Popen[str], list[str]]:
        paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
        process = subprocess.Popen(
            [sys.executable, "-c", SHAPING], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        processes.append(process)
        assert process.stdout is not None
        names = process.stdout.readline().split()
        assert len(names) == 2, f"it ended with {process.wait()}"
        return process, names

    yield begin
    for process in processes:
        process.kill()
        process.wait()
    namespaces.remove_left_over()


def there(names: list[str]) -> list[str]:
    return [name for name in names if (namespaces.NAMESPACES / name).exists()]


def test_two_at_a_time_have_names_of_their_own_and_what_a_killed_one_left_goes_with_the_next(start: Start) -> None:
    killed, lost = start()
    _, kept = start()
    assert not {*lost} & {*kept}
    killed.kill()
    killed.wait()
    assert there(lost) == lost, "nobody could remove them"
    _, new = start()
    assert there([*lost, *kept, *new]) == [*kept, *new]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_stays_of_one_that_is_told_to_end(start: Start, number: signal.Signals) -> None:
    process, names = start()
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    assert there(names) == []


def test_interfaces_of_the_host_that_a_dead_process_left_are_removed_and_those_of_living_ones_stay(
    start: Start,
) -> None:
    process, names = start()
    dead = names[0][:-2] + "x"
    living = own_name("x")
    try:
        for name in (dead, living):
            privileged(["ip", "link", "add", name, "type", "bridge"])
        namespaces.remove_left_over()
        assert there(names) == names and (namespaces.INTERFACES / dead).exists()
        process.kill()
        process.wait()
        assert {dead, *names} <= {*namespaces.remove_left_over()}
        assert not there(names) and not (namespaces.INTERFACES / dead).exists()
        assert (namespaces.INTERFACES / living).exists()
    finally:
        for name in (dead, living):
            subprocess.run(["ip", "link", "delete", name], check=False, stderr=subprocess.DEVNULL)
