"""Whoever fails within a broadcast, whenever and however: each relay that lives ends with the right bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from laminar.relay.transport.base import PullRequest
from laminar.simulator import links
from laminar.simulator.broadcast_cases import Case, How, Report, When, Who, cases
from laminar.simulator.broadcasts import broadcast

SEED = 4
SHARE = 7
"""Of the matrix, each seventh case runs here; `benchmarks/relay_faults.py` runs it whole, for many seeds."""


def sound(report: Report) -> None:
    assert not report.problems, "\n".join([str(report.case), *report.problems, *report.story])


@pytest.mark.parametrize("case", list(cases(SEED))[::SHARE], ids=str)
def test_who_lives_has_the_right_bytes_and_repairs_take_less_than_a_second(case: Case) -> None:
    sound(broadcast(case))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", list(Who), ids=lambda who: who.value)
def test_the_whole_matrix(who: Who) -> None:
    for case in cases(SEED + 1):
        if case.who is who:
            sound(broadcast(case))


def test_a_broadcast_is_repaired_by_those_that_received_from_the_dead() -> None:
    report = broadcast(Case(Who.MIDDLE, When.MIDWAY, How.KILLED, "tcp", 1, 0))
    sound(report)
    assert [repair.lost for _, repair in report.repairs] and "fault: " in "".join(report.story)
    assert all(0 < repair.seconds < 1.0 for _, repair in report.repairs)


def test_relays_that_join_beside_another_and_those_they_get_from_do_not_wait_for_each_other() -> None:
    """A newcomer gets from the last of the chain until the plan places it before that one."""
    sound(broadcast(Case(Who.MASTER, When.MIDWAY, How.JOINED, "tcp", 1, 4)))


def test_devices_that_fail_are_gone_round_by_sockets() -> None:
    report = broadcast(Case(Who.MIDDLE, When.MIDWAY, How.DEVICES, "verbs", 1, 0))
    sound(report)
    assert any("does not acknowledge" in repair.reason for _, repair in report.repairs)


def test_the_wait_of_a_relay_that_is_cut_off_itself_is_no_repair() -> None:
    reports = [broadcast(Case(Who.MIDDLE, When.MIDWAY, How.CUT_OFF, "tcp", 1, seed)) for seed in range(3)]
    for report in reports:
        sound(report)
        (victim,) = report.away
        own = [repair for relay, repair in report.repairs if relay == victim]
        assert len(report.gone_round) + len(own) == len(report.repairs)
        assert all(repair.seconds < 1.0 for repair in report.gone_round)
    assert any(report.gone_round for report in reports)
    assert any(len(report.gone_round) < len(report.repairs) for report in reports)
    reset = broadcast(Case(Who.MIDDLE, When.MIDWAY, How.RESET, "tcp", 1, 0))
    assert not reset.away and len(reset.gone_round) == len(reset.repairs), "its own repairs are repairs"


def test_equal_cases_give_equal_reports() -> None:
    case = Case(Who.TWO, When.BEFORE_LAST, How.CUT_OFF, "verbs", 2, 11)
    assert broadcast(case) == broadcast(case)
    other = broadcast(dataclasses.replace(case, seed=12))
    assert other.story != broadcast(case).story


def test_every_combination_is_in_the_matrix_once() -> None:
    matrix = list(cases(0))
    assert len(set(matrix)) == len(matrix)
    assert Counter(case.transport for case in matrix) == {"tcp": 4 * 4 * 6 * 2, "verbs": 4 * 4 * 7 * 2}


def test_bytes_that_come_to_a_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge looks at the bytes themselves: here the checks against the digest are switched off, and a link lies."""
    from laminar.relay.receiving import Arriving

    send = links.SimWire.send

    def lying(self: links.SimWire, to: str, message: links.Message, nbytes: int = 0) -> float:
        kind, content = message
        if kind == "piece" and content[0].first == 3:
            piece, start, data = content
            message = (kind, (piece, start, bytes(len(data))))
        return send(self, to, message, nbytes)

    monkeypatch.setattr(Arriving, "is_sound", lambda self, index: True)
    monkeypatch.setattr(links.SimWire, "send", lying)
    report = broadcast(Case(Who.LAST, When.MIDWAY, How.RESET, "tcp", 1, 0))
    assert any("holds other bytes" in problem for problem in report.problems)


def test_a_relay_that_is_never_reached_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(self: links.SimLink, request: PullRequest) -> None:
        raise links.LinkBroken("nobody answers")

    monkeypatch.setattr(links.SimLink, "find", find)
    monkeypatch.setattr("laminar.simulator.broadcasts.END_WITHIN_S", 10.0)
    report = broadcast(Case(Who.LAST, When.BEFORE_FIRST, How.RESET, "tcp", 1, 0))
    assert any("does not hold the version" in problem for problem in report.problems)
