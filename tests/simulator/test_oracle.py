"""The oracle of the simulation: each of its checks is seen to find what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mutations import CHECKS

from laminar.simulator.run import simulate

MOST_SEEDS = 300
"""One in sixty notices the rarest."""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", CHECKS, ids=lambda m: m.__name__)
def test_each_check_of_the_oracle_says_what_it_is_there_for(mutation: Callable[[], Any]) -> None:
    says, first = CHECKS[mutation]
    with mutation():
        assert any(says in p for seed in range(first, first + MOST_SEEDS) for p in simulate(seed).problems)
