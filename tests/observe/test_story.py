"""Stories of contexts and calls, from events that were made by hand."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.model import ContextView, Event, GroupView, Kind, LiveCall, PassView, WorkerView
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


def test_a_call_is_told_with_what_each_side_did_how_long_and_how_much() -> None:
    a = view("a", Event(0, Kind.CALL, 1.0, 1.0125, 1, "b", "m:f", size=10, received=20))
    b = view("b", Event(0, Kind.SERVE, 1.002, 1.012, 1, "a", "m:f", size=20, marks=(1.003, 1.008), outcome="OSError"))
    assert render(story_of_call(GroupView((a, b)), ("a", 1))).splitlines() == [
        "    0.000000  a  calls m:f on 'b' (call 1, 10 B)",
        "    0.002000  b  gets call 1 of 'a': m:f",
        "    0.003000  b  runs m:f for 'a'",
        "    0.012000  b  has replied to call 1 of 'a' with OSError, 20 B",
        "    0.012500  a  call 1 on 'b' ends after 12.50 ms, 20 B",
    ]


def test_causes_are_told_first_of_what_happened_at_the_same_time() -> None:
    a = view(
        "a",
        Event(0, Kind.CONTEXT, 1.0, 1.0, 6, context=6),
        Event(1, Kind.PASS, 1.0, 1.0, context=6, pass_id=8),
        Event(2, Kind.GRADIENT_ARRIVED, 1.0, 1.0, 5, "b", context=6, pass_id=8),
        Event(3, Kind.STEP, 1.0, 1.0, what="Adam", context=6),
        Event(4, Kind.GATE, 1.0, 1.0, 5, "b", context=6),
    )
    assert [line.text for line in story_of_context(GroupView((a,)), 6)] == [
        "enters context 0x6",
        "begins to take part in backward pass 0x8",
        "gate ('b'): 0.00 ms",
        "step Adam: 0.00 ms",
        "gets the gradients of message 0x5 from 'b'",
        "has done its part of backward pass 0x8",
        "leaves context 0x6",
    ]


def test_what_has_not_ended_is_told_too() -> None:
    call = LiveCall(1, "a", "a", "m:f", 2.0, context=6, state="sent")  # a calls itself
    served = LiveCall(1, "a", "a", "m:f", 2.0, context=6, state="running")
    run = PassView(8, 6, 4.0, "a", state="waits in gates")
    own = msgspec.structs.replace(view("a"), made=(call,), served=(served,), passes=(run,))
    group = GroupView((own,), offsets={"a": 10.0})
    told = [(12.0, "calls m:f on 'a' (call 1): sent, no reply yet"), (12.0, "got call 1 of 'a', m:f: running")]
    assert [(line.time, line.text) for line in story_of_call(group, ("a", 1))] == told
    assert [(line.time, line.text) for line in story_of_context(group, 6)] == [
        *told,
        (14.0, "takes part in backward pass 0x8, which has not ended: waits in gates"),
    ]


def test_only_the_latest_are_listed_contexts_before_calls_that_began_with_them() -> None:
    calls = [Event(n, Kind.CALL, float(n), n + 1.0, n, "b", "m:f") for n in range(1, 6)]
    alive = tuple(ContextView(n, float(n)) for n in (5, 3))
    a = msgspec.structs.replace(view("a", *reversed(calls)), contexts=alive)
    assert [line.text for line in latest(GroupView((a,)), most=2)] == [
        "context 0x3, which exists now",
        "call a:4 of m:f on 'b'",
        "context 0x5, which exists now",
        "call a:5 of m:f on 'b'",
    ]
