from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded_groups import MadeUpGroup, worker_view

from telegrad.observe.model import Event, GroupView, Kind, LiveCall
from telegrad.observe.recording import Recording
from telegrad.observe.timeline_builder import build_timeline
from telegrad.observe.trace_summary import Share, subtract, summarize, table, union

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


def shares_of(group: GroupView, began: float | None = None) -> list[Share]:
    recording = Recording(began)
    recording.add(group)
    return summarize(build_timeline(recording))


def test_the_wait_for_a_nested_call_is_not_busy() -> None:
    """b serves from 0 to 10, and calls c from 2 to 8 meanwhile, which computes from 3 to 7."""
    served = Event(0, Kind.SERVE, 0.0, 10.0, 1, "a", "f", thread=1, marks=(0.0, 10.0))
    made = Event(1, Kind.CALL, 2.0, 8.0, 1, "c", "g", thread=1, marks=(2.5,))
    inner = Event(0, Kind.SERVE, 3.0, 7.0, 1, "b", "g", thread=1, marks=(3.0, 7.0))
    views = worker_view("b", 0, events=(served, made)), worker_view("c", 1, events=(inner,))
    b, c = shares_of(GroupView(views, now=10.0), began=0.0)
    assert (b.compute, b.serialise, b.transfer, b.wait, b.idle) == pytest.approx((0.4, 0.05, 0.15, 0.4, 0.0))
    assert (c.busy, c.idle, c.calls) == pytest.approx((0.4, 0.6, 1))


def test_a_worker_that_takes_part_in_a_pass_and_runs_nothing_waits() -> None:
    events = (
        Event(0, Kind.ISLAND, 1.0, 2.0, pass_id=5, thread=1),
        Event(1, Kind.PASS, 1.0, 9.0, pass_id=5),
    )
    (share,) = shares_of(GroupView((worker_view("a", events=events),), now=10.0), began=0.0)
    assert (share.busy, share.wait, share.idle) == pytest.approx((0.1, 0.7, 0.2))


def test_a_worker_does_not_wait_while_others_wait_for_it_in_a_collective() -> None:
    waiting = LiveCall(1, "b", "a", "a collective", 0.0, state="deferred")
    views = worker_view("a", 0, now=10.0, served=(waiting,)), worker_view("b", 1, now=10.0, made=(waiting,))
    a, b = shares_of(GroupView(views, now=10.0), began=0.0)
    assert (a.wait, a.idle) == pytest.approx((0.0, 1.0))
    assert b.wait == pytest.approx(1.0)


def test_work_on_several_threads_counts_once() -> None:
    events = tuple(Event(number, Kind.STEP, 1.0, 5.0, thread=number) for number in range(4))
    (share,) = shares_of(GroupView((worker_view("a", events=events),), now=10.0), began=0.0)
    assert share.busy == pytest.approx(0.4)


def test_shares_are_parts_of_one() -> None:
    for share in shares_of(MadeUpGroup(5, calls=40).view()):
        parts = share.busy, share.transfer, share.wait, share.idle
        assert all(0.0 <= part <= 1.0 for part in parts)
        assert sum(parts) == pytest.approx(1.0)


def test_the_table_has_a_line_for_each_worker() -> None:
    lines = table([Share("trainer", 0.5, 0.1, 0.1, 0.2, 12)]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["trainer", "60.0%", "10.0%", "10.0%", "20.0%", "10.0%", "12"]


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_times(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def times(intervals: list[tuple[float, float]]) -> set[int]:
        return {time for start, end in intervals for time in range(int(start), int(end))}

    assert times(union([*one, *other])) == times([*one]) | times([*other])
    assert times(subtract(union([*one]), union([*other]))) == times([*one]) - times([*other])
