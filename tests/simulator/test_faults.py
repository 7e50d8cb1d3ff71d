"""Runs of the real workers under seeded faults: no invariant breaks, a seed replays exactly, and bugs are noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from mutations import MUTATIONS, SOME_SEEDS_BEFORE

from laminar.errors import ConfigError
from laminar.simulator.faults import Kind, draw_plan
from laminar.simulator.run import describe, simulate
from laminar.simulator.seeds import Tally, parse_seeds, report

MOST_SEEDS = 1000


@pytest.mark.parametrize("seed", range(12))
def test_no_invariant_breaks_under_the_faults_of_a_seed(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.problems, describe(outcome)


def test_a_run_without_faults_ends_and_tells_of_none() -> None:
    outcome = simulate(5, without=frozenset(Kind) - {Kind.COMPACTION})
    assert not outcome.problems, describe(outcome)
    assert outcome.injected.keys() <= {Kind.COMPACTION.value}


@pytest.mark.slow
def test_a_seed_replays_exactly_in_another_process_with_another_hash_seed() -> None:
    program = "import json; from dataclasses import asdict; from laminar.simulator.run import simulate\n"
    program += "print(json.dumps([asdict(simulate(s)) for s in (7, 13, 24)]))"
    told = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, text=True,
            stdout=subprocess.PIPE, timeout=300,
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    here = json.loads(json.dumps([asdict(simulate(s)) for s in (7, 13, 24)]))
    assert json.loads(told[0]) == json.loads(told[1]) == here


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_bug_is_noticed(name: str) -> None:
    """Each bug is caught within 1,000 seeds; most within a few dozen."""
    first = SOME_SEEDS_BEFORE.get(name, 0)
    with MUTATIONS[name]():
        assert any(simulate(seed).problems for seed in range(first, first + MOST_SEEDS)), f"{name} was not noticed"


def test_equal_seeds_draw_equal_plans_and_all_kinds_are_drawn() -> None:
    plans = [draw_plan(seed, window_s=15, lease_s=4) for seed in range(200)]
    assert plans == [draw_plan(seed, window_s=15, lease_s=4) for seed in range(200)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(Kind)


def test_seeds_are_a_number_or_a_range_with_both_ends() -> None:
    assert parse_seeds("7") == range(7, 8)
    assert list(parse_seeds("3..5")) == [3, 4, 5]
    for wrong in ("", "a..b", "5..3", "-1"):
        with pytest.raises(ConfigError):
            parse_seeds(wrong)


def test_the_report_counts_faults_and_names_failing_seeds() -> None:
    tally = Tally()
    outcome = simulate(5)
    tally.add(outcome)
    tally.add(type(outcome)(9, ["broken"], {"kill": 2}, 3.0, []))
    text = report(tally, 2.0)
    assert "rollouts sent to rest" in text
    assert "2 seeds in 2 s" in text and "1 seeds broke an invariant: 9" in text and "2 kill" in text
