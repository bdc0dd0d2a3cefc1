"""Reports of a shutdown: however they are summed up, the result is the same as of all at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.shutdown_report import Report, from_plain, report_of, to_plain, total

counts = st.dictionaries(st.integers(0, 6), st.integers(1, 2), max_size=4)


@st.composite
def groups(draw: Any) -> list[Report]:
    """The reports of workers 0 to n - 1; they may have sent to others, too. Often all has arrived."""
    size = draw(st.integers(1, 6))
    sent = [draw(counts) for _ in range(size)]
    received: list[dict[int, int]] = [{} for _ in range(size)]
    if draw(st.booleans()):
        for who, to_others in enumerate(sent):
            for to, count in to_others.items():
                if to < size:
                    received[to][who] = count
    else:
        received = [draw(counts) for _ in range(size)]
    flags = st.sampled_from([False, False, False, True])
    return [
        report_of(
            worker,
            busy=draw(flags),
            calls=draw(st.integers(0, 5)),
            pending=draw(flags),
            sent=sent[worker],
            received=received[worker],
        )
        for worker in range(size)
    ]


@given(groups(), st.randoms(use_true_random=False))
def test_the_order_in_which_reports_are_summed_up_does_not_matter(reports: list[Report], random: Any) -> None:
    parts = list(reports)
    while len(parts) > 1:
        random.shuffle(parts)
        some = random.randint(2, len(parts))
        summed = from_plain(to_plain(total(parts[:some])), 6)
        parts = [*parts[some:], summed]
    assert parts[0] == total(reports)


def test_messages_settle_when_both_ends_have_counted_them() -> None:
    def report(worker: int, **fields: Any) -> Report:
        given = {"busy": False, "calls": 1, "pending": False, "sent": {}, "received": {}} | fields
        return report_of(worker, **given)

    assert total([report(0, sent={1: 2}), report(1, received={0: 2})]).settled
    assert not total([report(0, sent={1: 2}), report(1, received={0: 1})]).settled
    assert not total([report(0, sent={1: 2}), report(1)]).settled
    assert not total([report(0), report(1, pending=True)]).settled
    assert total([report(0, sent={9: 2}), report(1)]).settled, "worker 9 is gone"
    assert total([report(0, sent={1: 2}), report(1, received={0: 2})]).made == 4
    assert not report(0, sent={0: 1}).settled
    assert report(0, sent={0: 1}, received={0: 1}).settled


def test_a_sum_keeps_only_what_concerns_others() -> None:
    reports = [
        report_of(
            worker,
            busy=False,
            calls=0,
            pending=False,
            sent=dict.fromkeys(range(50), 1),
            received=dict.fromkeys(range(50), 1),
        )
        for worker in range(50)
    ]
    summed = total(reports)
    assert summed.settled
    assert not summed.sent
    assert not summed.received
    assert to_plain(summed)[0] == ((0, 49),)


@pytest.mark.parametrize(
    "data",
    [
        None,
        (),
        (((0, 0),), False, 0, False, False, ()),
        (((1, 0),), False, 0, False, False, (), ()),
        (((0, 10**12),), False, 0, False, False, (), ()),
        (((0, 5),), False, 0, False, False, (), ()),
        (((0, 1), (2, 3)), False, 0, False, False, (), ()),
        (((0, 1), (0, 1)), False, 0, False, False, (), ()),  # a message has room for millions
        (((1, 1), (0, 0)), False, 0, False, False, (), ()),
        ((), False, 0, False, False, (), ()),
        (((0, 0),), 1, 0, False, False, (), ()),
        (((0, 0),), False, 2**64, False, False, (), ()),
        (((0, 0),), False, 0, False, False, ((1, 2),), ()),
        (((0, 0),), False, 0, False, False, ((1, 2, "3"),), ()),
        ((5,), False, 0, False, False, (), ()),
    ],
)
def test_a_malformed_report_is_an_error(data: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_plain(data, 3)
