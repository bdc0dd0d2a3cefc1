from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded_groups import MadeUpGroup, worker_view

from telegrad.observe.model import ContextView, Event, GroupView, Kind, LiveCall, PassView
from telegrad.observe.recording import Recording
from telegrad.observe.timeline import Category, Part, Span, Timeline
from telegrad.observe.timeline_builder import build_timeline


def timeline_of(group: GroupView) -> Timeline:
    recording = Recording()
    recording.add(group)
    return build_timeline(recording)


def call_and_serve(shift: float = 0.0, estimate: float = 0.0) -> Timeline:
    """Return a call from 10 to 20 on a, served from 13 to 18 on b, whose clock is ahead by `shift`."""
    made = Event(0, Kind.CALL, 10.0, 20.0, 7, "b", "f", size=100, thread=1, marks=(11.0,))
    marks = (14.0 + shift, 16.0 + shift)
    served = Event(0, Kind.SERVE, 13.0 + shift, 18.0 + shift, 7, "a", "f", thread=2, marks=marks)
    views = worker_view("a", 0, events=(made,)), worker_view("b", 1, events=(served,))
    return timeline_of(GroupView(views, offsets={"a": 0.0, "b": estimate}, now=30.0))


def named(timeline: Timeline, name: str) -> Span:
    (span,) = (span for span in timeline.spans if span.name == name)
    return span


def test_a_call_is_shown_with_its_stages_on_both_sides() -> None:
    timeline = call_and_serve()
    call, serve, queued = (named(timeline, name) for name in ("call f", "serve f", "queued f"))
    assert call.parts == [
        Part(Category.SERIALISE, 10.0, 11.0),
        Part(Category.TRANSFER, 11.0, 13.0),
        Part(Category.WAIT, 13.0, 18.0),
        Part(Category.TRANSFER, 18.0, 20.0),
    ]
    assert serve.parts == [Part(Category.COMPUTE, 14.0, 16.0), Part(Category.SERIALISE, 16.0, 18.0)]
    assert (queued.began, queued.ended, queued.category) == (13.0, 14.0, Category.WAIT)
    assert [(arrow.name, [span for span, _ in arrow.points]) for arrow in timeline.arrows] == [
        ("request", [call, serve]),
        ("reply", [serve, call]),
    ]
    assert call.details["bytes sent"] == 100


def test_a_function_sent_by_value_has_the_name_that_the_callee_knows() -> None:
    made = Event(0, Kind.CALL, 10.0, 20.0, 7, "b", "", marks=(11.0,))
    served = Event(0, Kind.SERVE, 13.0, 18.0, 7, "a", "f", marks=(14.0, 16.0))
    views = worker_view("a", 0, events=(made,)), worker_view("b", 1, events=(served,))
    assert named(timeline_of(GroupView(views)), "call f").began == 10.0
    alone = timeline_of(GroupView(views[:1]))
    assert [span.name for span in alone.spans] == ["call a function by value"]


@pytest.mark.parametrize("error", [-4.0, 0.0, 4.0])
def test_a_wrong_estimate_of_a_clock_is_corrected_by_the_messages(error: float) -> None:
    timeline = call_and_serve(shift=1000.0, estimate=-1000.0 + error)
    call, serve = named(timeline, "call f"), named(timeline, "serve f")
    assert call.began <= serve.began
    assert serve.parts[0].ended <= call.ended


def test_without_the_callee_the_caller_waits_until_the_reply() -> None:
    made = Event(0, Kind.CALL, 10.0, 20.0, 7, "gone", "f", outcome="WorkerLost", marks=(11.0,))
    timeline = timeline_of(GroupView((worker_view("a", events=(made,)),)))
    (call,) = timeline.spans
    assert call.parts == [Part(Category.SERIALISE, 10.0, 11.0), Part(Category.WAIT, 11.0, 20.0)]
    assert call.details["failed with"] == "WorkerLost"
    assert timeline.arrows == []


@pytest.mark.parametrize("of_caller", ["", "@telegrad.method"])
def test_a_call_of_a_method_or_a_function_by_value_has_the_name_that_its_callee_knows(of_caller: str) -> None:
    made = Event(0, Kind.CALL, 1.0, 4.0, 7, "b", of_caller)
    served = Event(0, Kind.SERVE, 2.0, 3.0, 7, "a", "Actor.ping")
    timeline = timeline_of(GroupView((worker_view("a", 0, events=(made,)), worker_view("b", 1, events=(served,)))))
    assert {span.name for span in timeline.spans} == {"call Actor.ping", "serve Actor.ping"}


def test_a_function_that_nobody_knows_the_name_of_is_named_as_such() -> None:
    made = Event(0, Kind.CALL, 1.0, 4.0, 7, "gone", "")
    timeline = timeline_of(GroupView((worker_view("a", events=(made,)),)))
    assert [span.name for span in timeline.spans] == ["call a function by value"]


def test_what_has_not_ended_is_shown_until_now() -> None:
    view = worker_view(
        "a",
        now=9.0,
        made=(LiveCall(1, "a", "b", "f", 2.0, thread=5),),
        served=(LiveCall(4, "b", "a", "g", 3.0, state="queued"),),
        passes=(PassView(8, 6, 4.0, "a"),),
        contexts=(ContextView(6, 1.0),),
    )
    timeline = timeline_of(GroupView((view,), now=9.0))
    assert sorted((span.name, span.began, span.ended) for span in timeline.spans) == [
        ("backward pass in 0x6 (open)", 4.0, 9.0),
        ("call f (open)", 2.0, 9.0),
        ("context 0x6 (open)", 1.0, 9.0),
        ("serve g (open)", 3.0, 9.0),
    ]
    assert named(timeline, "serve g (open)").parts == [Part(Category.WAIT, 3.0, 9.0)]


def test_a_call_that_ended_after_it_was_seen_open_is_shown_once() -> None:
    recording = Recording()
    live = LiveCall(1, "a", "b", "f", 2.0)
    recording.add(GroupView((worker_view("a", now=3.0, made=(live,)),)))
    ended = Event(0, Kind.CALL, 2.0, 4.0, 1, "b", "f")
    recording.add(GroupView((worker_view("a", now=5.0, events=(ended,), made=(live,)),)))
    assert [span.name for span in build_timeline(recording).spans] == ["call f"]


def test_a_gradient_leads_from_island_to_island() -> None:
    a = (
        Event(0, Kind.GRADIENT_SENT, 2.0, 2.0, 5, "b", pass_id=9, thread=1),
        Event(1, Kind.ISLAND, 1.0, 3.0, what="from the roots", pass_id=9, thread=1),
    )
    b = (
        Event(0, Kind.GRADIENT_ARRIVED, 2.5, 2.5, 5, "a", pass_id=9, thread=4),
        Event(1, Kind.ISLAND, 2.6, 4.0, pass_id=9, thread=4),
        Event(2, Kind.ISLAND, 2.55, 4.0, pass_id=9, thread=3),
    )
    timeline = timeline_of(GroupView((worker_view("a", 0, events=a), worker_view("b", 1, events=b))))
    (arrow,) = timeline.arrows
    assert [(span.name, span.thread, time) for span, time in arrow.points] == [
        ("island from the roots", 1, 2.0),
        ("gradient from a", 0, 2.5),
        ("island", 4, 2.6),
    ]


def test_a_gradient_that_a_gate_waits_for_leads_to_the_gate() -> None:
    events = (
        Event(0, Kind.GRADIENT_ARRIVED, 2.5, 2.5, 5, "b", pass_id=9, thread=4),
        Event(1, Kind.GATE, 1.5, 2.6, 5, "b", pass_id=9, thread=3),
        Event(2, Kind.ISLAND, 1.0, 4.0, pass_id=9, thread=3),
    )
    (arrow,) = timeline_of(GroupView((worker_view("a", events=events),))).arrows
    assert [span.name for span, _ in arrow.points] == ["gradient from b", "gate"]


def test_a_gradient_that_never_arrived_is_an_instant() -> None:
    sent = Event(0, Kind.GRADIENT_SENT, 2.0, 2.0, 5, "b", pass_id=9)
    timeline = timeline_of(GroupView((worker_view("a", 0, events=(sent,)), worker_view("b", 1))))
    assert [(instant.name, instant.time) for instant in timeline.instants] == [("gradient to b", 2.0)]


def test_a_gradient_to_a_worker_that_is_not_in_the_recording_is_not_shown() -> None:
    sent = Event(0, Kind.GRADIENT_SENT, 2.0, 2.1, 5, "gone", pass_id=9)
    assert timeline_of(GroupView((worker_view("a", 0, events=(sent,)),))).instants == []


def test_a_gradient_is_on_its_way_from_the_end_of_its_sending_until_it_arrives() -> None:
    sent = Event(0, Kind.GRADIENT_SENT, 2.0, 2.2, 5, "b", pass_id=9, thread=1)
    arrived = Event(0, Kind.GRADIENT_ARRIVED, 2.5, 2.5, 5, "a", pass_id=9, thread=4)
    views = worker_view("a", 0, events=(sent,)), worker_view("b", 1, events=(arrived,))
    timeline = timeline_of(GroupView(views))
    way = named(timeline, "gradient from a")
    assert (way.began, way.ended, way.row, way.thread) == (2.2, 2.5, "gradients", 0)
    assert way.details == {"pass": "0x9", "message": 5}
    assert timeline.arrows == []  # no island is known that it came from, or is for


def test_a_reply_is_shown_only_if_both_sides_have_ended() -> None:
    made = Event(0, Kind.CALL, 1.0, 6.0, 7, "b", "f")
    live = LiveCall(7, "a", "b", "f", 2.0, state="replying")
    timeline = timeline_of(
        GroupView((worker_view("a", 0, events=(made,)), worker_view("b", 1, now=5.0, served=(live,))))
    )
    assert [arrow.name for arrow in timeline.arrows] == ["request"]
    assert named(timeline, "call f").parts == [
        Part(Category.TRANSFER, 1.0, 2.0),
        Part(Category.WAIT, 2.0, 6.0),
    ]


@pytest.mark.parametrize(("state", "what"), [("deferred", "f"), ("running", "@telegrad.gather")])
def test_no_thread_works_on_a_call_that_is_answered_later(state: str, what: str) -> None:
    live = LiveCall(7, "a", "b", what, 2.0, state=state)
    (span,) = timeline_of(GroupView((worker_view("b", now=5.0, served=(live,)),))).spans
    assert span.parts == [Part(Category.WAIT, 2.0, 5.0)]
    assert span.details == {"caller": "a", "call": 7, "state": state, "open": True, "deferred": True}


def test_what_takes_no_time_is_an_instant() -> None:
    events = (
        Event(0, Kind.MEMBER, 1.0, 1.0, 3, "c", "lost", outcome="its cable was cut"),
        Event(1, Kind.REFERENCE, 2.0, 2.0, 4, what="made"),
    )
    view = worker_view("a", events=events)
    timeline = timeline_of(GroupView((view,), offsets={"a": 10.0}))
    assert [(instant.name, instant.time) for instant in timeline.instants] == [
        ("member lost c", 11.0),
        ("reference made", 12.0),
    ]
    assert timeline.instants[0].details == {"failed with": "its cable was cut"}
    assert timeline.spans == []


def test_spans_say_on_which_row_they_are_and_what_is_known_of_them() -> None:
    known = {"context": 6, "parent": ("c", 3), "size": 10, "received": 20, "outcome": "ValueError"}
    events = (
        Event(0, Kind.CALL, 1.0, 2.0, 7, "b", "f", thread=5, **known),  # type: ignore[arg-type] - all by name
        Event(1, Kind.CALL, 1.0, 2.0, 8, "b", "g"),
        Event(2, Kind.PASS, 1.0, 2.0, context=6, pass_id=9, thread=5),
        Event(3, Kind.STEP, 1.0, 2.0, what="Adam"),
        Event(4, Kind.GATE, 1.0, 2.0, 4, "b", pass_id=9, thread=5),
    )
    spans = timeline_of(GroupView((worker_view("a", events=events),))).spans
    assert [(span.name, span.row, span.thread) for span in spans] == [
        ("call f", "thread 5", 5),
        ("call g", "calls", 0),
        ("backward pass in 0x6", "passes", 0),
        ("step Adam", "other", 0),
        ("gate", "thread 5", 5),
    ]
    assert [span.details for span in spans] == [
        {
            "callee": "b",
            "call": 7,
            "context": "0x6",
            "made by": "call 3 of c",
            "failed with": "ValueError",
            "bytes sent": 10,
            "bytes received": 20,
        },
        {"callee": "b", "call": 8},
        {"context": "0x6", "pass": "0x9"},
        {},
        {"peer": "b", "pass": "0x9", "message": 4},
    ]


def test_what_began_before_the_recording_begins_with_it() -> None:
    made = Event(0, Kind.CALL, 1.0, 4.0, 7, "b", "f", marks=(1.5,))
    step = Event(1, Kind.STEP, 2.5, 3.5, what="Adam")
    recording = Recording(began=2.0)
    recording.add(GroupView((worker_view("a", events=(made, step)),), now=3.0))
    timeline = build_timeline(recording)
    call = named(timeline, "call f")
    assert (call.began, call.ended, call.details["began earlier by"]) == (2.0, 4.0, "1.000 s")
    assert call.parts == [Part(Category.WAIT, 2.0, 4.0)]
    assert (named(timeline, "step Adam").began, timeline.began, timeline.ended) == (2.5, 2.0, 4.0)


@given(st.integers(0, 2**32), st.integers(2, 5))
@settings(max_examples=15, deadline=None)
def test_after_correction_no_reply_precedes_its_request(seed: int, workers: int) -> None:
    group = MadeUpGroup(seed, workers, calls=25)
    timeline = timeline_of(group.view())
    calls, serves = {}, {}
    for span in timeline.spans:
        if span.category is Category.CALL:
            calls[timeline.workers[span.worker].name, span.details["call"]] = span
        elif span.category is Category.SERVE:
            serves[span.details["caller"], span.details["call"]] = span
    assert calls.keys() == serves.keys()
    for key, serve in serves.items():
        call, slack = calls[key], 1e-6
        assert call.began <= serve.began + slack
        if not call.open:
            assert serve.began <= call.ended + slack
            assert all(part.began <= call.ended + slack for part in serve.parts)
        assert all(part.ended > part.began for part in call.parts + serve.parts)
