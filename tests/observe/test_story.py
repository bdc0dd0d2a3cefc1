"""Stories of contexts and calls, from events that were made by hand."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.model import Event, GroupView, Kind, WorkerView
from telegrad.observe.story import latest, render, story_of_call, story_of_context


def view(name: str, *events: Event) -> WorkerView:
    base = WorkerView(name, 0, 1, 0, "host", 1, (), now=50.0, wall=0.0, started=0.0)
    return msgspec.structs.replace(base, events=events)


def test_a_call_and_those_that_it_made_are_told_in_the_order_of_the_observers_clock() -> None:
    a = view("a", Event(0, Kind.CALL, 1.0, 9.0, 1, "b", "m:f", marks=(1.1,)), Event(1, Kind.CALL, 1.0, 2.0, 2, "b"))
    b = view(
        "b",
        Event(0, Kind.CALL, 103.0, 105.0, 4, "a", "m:g", parent=("a", 1), outcome="ValueError"),
        Event(1, Kind.SERVE, 102.0, 108.0, 1, "a", "m:f", marks=(102.5, 107.0)),
    )
    lines = story_of_call(GroupView((a, b), offsets={"a": 0.0, "b": -100.0}), ("a", 1))
    assert [(line.time, line.worker) for line in lines] == [
        (1.0, "a"),
        (2.0, "b"),
        (2.5, "b"),
        (3.0, "b"),
        (5.0, "b"),
        (8.0, "b"),
        (9.0, "a"),
    ]
    assert "calls m:g on 'a' (call 4, 0 B), for call 1 of 'a'" in lines[3].text
    assert "ends with ValueError" in lines[4].text


@given(st.lists(st.tuples(st.sampled_from(list(Kind)), st.integers(0, 2), st.floats(0, 9)), max_size=10))
def test_a_context_has_all_its_events_and_no_others(events: list[tuple[Kind, int, float]]) -> None:
    made = [Event(n, kind, at, at + 1, n, "b", context=context) for n, (kind, context, at) in enumerate(events)]
    lines = story_of_context(GroupView((view("a", *made),)), 1)
    assert {line.id for line in lines} == {event.id for event in made if event.context == 1}
    assert lines == sorted(lines)


def test_an_unknown_context_says_so() -> None:
    assert "Nothing is known" in render(story_of_context(GroupView((view("a"),)), 7))


def test_the_latest_contexts_and_calls_are_listed_with_the_names_that_callees_know() -> None:
    a = view(
        "a",
        Event(0, Kind.CALL, 1.0, 2.0, 1, "b", "@telegrad.method"),
        Event(1, Kind.CALL, 3.0, 4.0, 2, "b", "@telegrad.gather"),
        Event(2, Kind.CALL, 5.0, 6.0, 3, "b", "m:f", parent=("b", 1)),
        Event(3, Kind.CONTEXT, 0.5, 7.0, 0x1F),
    )
    b = view("b", Event(0, Kind.SERVE, 1.2, 1.8, 1, "a", "Model.forward"), Event(1, Kind.CONTEXT, 1.3, 7.0, 0x1F))
    lines = latest(GroupView((a, b)))
    assert [(line.worker, line.text) for line in lines] == [
        ("a", "context 0x1f"),
        ("a", "call a:1 of Model.forward on 'b'"),
    ]
    assert "calls Model.forward on 'b'" in render(story_of_call(GroupView((a, b)), ("a", 1)))


def test_a_listed_call_that_its_callee_has_not_yet_ended_has_a_name_that_people_know() -> None:
    a = view("a", Event(0, Kind.CALL, 1.0, 2.0, 1, "b", "@telegrad.method"))
    lines = latest(GroupView((a, view("b"))))
    assert [line.text for line in lines] == ["call a:1 of a method of a remote object on 'b'"]


def test_a_gradient_arrives_after_it_was_sent_although_the_offsets_are_not_exact() -> None:
    a = view("a", Event(0, Kind.GRADIENT_SENT, 5.0, 5.2, 9, "b", context=1, pass_id=3))
    b = view("b", Event(0, Kind.GRADIENT_ARRIVED, 4.9, 4.9, 9, "a", context=1, pass_id=3))
    lines = story_of_context(GroupView((a, b), offsets={"a": 0.0, "b": 0.0}), 1)
    assert [line.worker for line in lines] == ["a", "b"]
