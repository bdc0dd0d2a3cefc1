from __future__ import annotations

from tests.support.recorded_groups import worker_view

from telegrad.observe.model import Event, GroupView, Kind
from telegrad.observe.recording import Recording


def event(number: int, ended: float = 1.0) -> Event:
    return Event(number, Kind.MEMBER, ended, ended)


def group(*numbers: int, dropped: int = 0, offset: float = 0.0, error: float = 0.1, incarnation: int = 1) -> GroupView:
    view = worker_view(
        "a",
        incarnation=incarnation,
        events=tuple(event(number) for number in numbers),
        next_event=numbers[-1] + 1 if numbers else 0,
        dropped=dropped,
    )
    return GroupView((view,), offsets={"a": offset}, errors={"a": error}, now=2.0)


def test_events_that_are_read_twice_are_kept_once() -> None:
    recording = Recording()
    recording.add(group(0, 1, 2))
    recording.add(group(1, 2, 3))
    (recorded,) = recording.workers.values()
    assert [found.number for found in recorded.events] == [0, 1, 2, 3]
    assert recording.positions() == {"a": (1, 4)}
    assert recorded.view.events == ()


def test_events_from_before_the_beginning_are_left_out() -> None:
    recording = Recording(began=11.0)
    view = worker_view("a", events=(event(0, 0.9), event(1, 1.1)), next_event=2)
    recording.add(GroupView((view,), offsets={"a": 10.0}))
    (recorded,) = recording.workers.values()
    assert [found.number for found in recorded.events] == [1]


def test_the_memory_is_bounded_and_what_does_not_fit_is_counted() -> None:
    recording = Recording(limit=2)
    recording.add(group(0))
    assert not recording.full
    recording.add(group(1, 2, 3))
    assert recording.full
    assert recording.left_out == 2


def test_events_that_the_worker_dropped_are_counted_but_not_those_before_the_first_answer() -> None:
    recording = Recording()
    recording.add(group(50, dropped=50))
    recording.add(group(60, dropped=9))
    assert [recorded.missed for recorded in recording.workers.values()] == [9]


def test_the_best_estimate_of_an_offset_is_used() -> None:
    recording = Recording()
    for offset, error in ((1.0, 0.5), (1.2, 0.1), (1.5, 0.3)):
        view = GroupView((worker_view("b"),), offsets={"a": 0.0, "b": offset}, errors={"a": 0.0, "b": error})
        recording.add(view)
    assert [recorded.offset for recorded in recording.workers.values()] == [1.2]


def test_offsets_of_several_answers_have_one_reference() -> None:
    recording = Recording()
    for shift, error in ((0.0, 0.2), (5.0, 0.1)):
        views = worker_view("a"), worker_view("b", 1)
        offsets = {"a": 1.0 + shift, "b": 2.0 + shift}
        recording.add(GroupView(views, offsets=offsets, errors={"a": 0.0, "b": error}))
    assert [recorded.offset for recorded in recording.workers.values()] == [1.0, 2.0]


def test_a_restarted_worker_is_another_one() -> None:
    recording = Recording()
    recording.add(group(0, 1, incarnation=1))
    recording.add(group(0, incarnation=2))
    assert [len(recorded.events) for recorded in recording.workers.values()] == [2, 1]
    assert recording.positions() == {"a": (2, 1)}
