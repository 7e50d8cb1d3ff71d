"""A round of the benchmark in which relays asked others than the chain says counts for nothing and is measured anew."""

from __future__ import annotations

import pytest
from relay import MOST_ANEW, Round, along

CHAIN = ["r0", "r1", "r2"]


def asked(seconds: float, *peers: list[str]) -> Round:
    return Round(seconds, [{"peers": whom} for whom in peers])


ALONG = asked(1.0, ["r0"], ["r1"])


@pytest.mark.parametrize(
    "other", [asked(9.0, ["r0"], ["r0"]), asked(9.0, ["r0"], ["r1", "r0"]), asked(9.0, ["r0", "r0"], ["r1"])]
)
def test_rounds_that_did_not_follow_the_chain_are_measured_anew_and_counted(
    other: Round, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = {1: ALONG, 2: other, 3: other, 4: ALONG}
    assert along(CHAIN, 2, rounds.__getitem__) == ([ALONG, ALONG], 2)
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" and is")[0] for line in told] == [f"round {i} did not follow the chain" for i in (2, 3)]


def test_none_is_measured_anew_where_all_follow_the_chain(capsys: pytest.CaptureFixture[str]) -> None:
    versions: list[int] = []

    def measure(version: int) -> Round:
        versions.append(version)
        return ALONG

    assert along(CHAIN, 3, measure) == ([ALONG] * 3, 0)
    assert versions == [1, 2, 3] and capsys.readouterr().err == ""


def test_a_machine_that_is_too_busy_to_measure_at_all_is_said_with_what_helps() -> None:
    with pytest.raises(RuntimeError, match=rf"{MOST_ANEW + 1} of {MOST_ANEW + 1} rounds .* chain of 3 .*--hops"):
        along(CHAIN, 1, lambda version: asked(1.0, ["r0"], ["r0"]))
