"""A failure that goes on fills no log."""

from __future__ import annotations

from laminar.buffer.outage import Outage


def test_the_first_failure_then_one_line_in_five_seconds_then_the_end() -> None:
    outage = Outage()
    assert outage.over(0.0) is None and not outage.on
    told = [(t / 4, seconds) for t in range(40, 100) if (seconds := outage.failed(t / 4)) is not None]
    assert told == [(10.0, 0.0), (15.0, 5.0), (20.0, 10.0)]
    assert outage.on and outage.failures == 60 and outage.lasts(24.0) == 14.0
    assert outage.over(24.75) == 14.75
    assert outage.over(30.0) is None and outage.lasts(31.0) == 0.0


def test_the_next_outage_is_told_at_once() -> None:
    outage = Outage()
    assert outage.failed(1.0) == 0.0
    assert outage.over(1.1) is not None
    assert outage.failed(1.2) == 0.0
