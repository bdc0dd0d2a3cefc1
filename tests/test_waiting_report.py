"""The times at which a wait is reported, and the names in the report."""

from __future__ import annotations

import pytest

from telegrad.waiting_report import WaitingReport, workers


def test_a_wait_is_reported_after_three_seconds_and_then_whenever_it_has_doubled() -> None:
    report = WaitingReport(50.0)
    assert [now for now in range(50, 150) if report.is_due(float(now))] == [53, 56, 62, 74, 98, 146]
    assert report.due == 50 + 192


def test_a_short_wait_is_not_reported() -> None:
    report = WaitingReport(0.0)
    assert not report.is_due(2.999)
    assert report.due == 3.0


def test_a_report_that_comes_late_is_not_followed_by_those_that_were_missed() -> None:
    report = WaitingReport(0.0)
    assert report.is_due(100.0)
    assert not report.is_due(199.0)
    assert report.is_due(200.0)
    assert report.elapsed(200.0) == 200.0


def test_the_first_report_can_come_at_another_time() -> None:
    report = WaitingReport(10.0, first=0.5)
    assert not report.is_due(10.4)
    assert report.is_due(10.5)
    assert report.due == 11.0


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["b"], "worker 'b'"),
        (["d", "b"], "workers 'b' and 'd'"),
        (["d", "b", "c"], "workers 'b', 'c' and 'd'"),
        ([f"w{n}" for n in range(10)], "workers 'w0', 'w1', 'w2', 'w3', 'w4', 'w5', 'w6', 'w7' and 2 more"),
    ],
)
def test_workers_are_named_in_order_and_many_are_counted(names: list[str], text: str) -> None:
    assert workers(names) == text
