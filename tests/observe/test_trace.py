from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded_groups import MadeUpGroup, worker_view
from tests.support.trace_format import check_trace

from telegrad.observe.model import Event, GroupView, Kind
from telegrad.observe.recording import Recording
from telegrad.observe.timeline_builder import build_timeline
from telegrad.observe.trace import trace_events, write_trace
from telegrad.observe.tracks import MOST_TRACKS


def trace_of(group: GroupView) -> list[dict[str, Any]]:
    recording = Recording()
    recording.add(group)
    return list(trace_events(build_timeline(recording)))


@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 40))
@settings(max_examples=20, deadline=None)
def test_every_trace_is_valid_and_shows_every_call(seed: int, workers: int, calls: int) -> None:
    group = MadeUpGroup(seed, workers, calls)
    events = trace_of(group.view())
    check_trace(events)
    shown = [event for event in events if event.get("cat") == "call"]
    assert len(shown) == calls
    assert sum(bool(event["args"].get("open")) for event in shown) == calls - len(group.true)
    requests = [event for event in events if event["ph"] == "s" and event["name"] == "request"]
    assert len(requests) == calls


def test_calls_that_overlap_are_on_several_tracks_and_nested_calls_on_one() -> None:
    def track(*calls: tuple[float, float]) -> list[int]:
        events = [Event(0, Kind.SERVE, 0.0, 9.0, 5, "b", "g", thread=1, marks=(0.0, 9.0))]
        for number, (began, ended) in enumerate(calls):
            events.append(Event(number + 1, Kind.CALL, began, ended, number, "b", "f", thread=1))
        trace = trace_of(GroupView((worker_view("a", events=tuple(events)),)))
        check_trace(trace)
        serving = {event["tid"] for event in trace if event.get("cat") == "serve"}
        return [int(event["tid"] in serving) for event in trace if event.get("cat") == "call"]

    assert track((1.0, 2.0), (3.0, 4.0)) == [1, 1]
    assert track((1.0, 3.0), (2.0, 4.0)) == [1, 0]
    assert track((1.0, 10.0)) == [0]


def test_too_many_calls_at_once_are_counted_instead_of_shown() -> None:
    calls = [Event(number, Kind.CALL, number, 1e6, number, "b", "f", thread=1) for number in range(MOST_TRACKS + 5)]
    trace = trace_of(GroupView((worker_view("a", events=tuple(calls)),)))
    check_trace(trace)
    assert [event["name"] for event in trace if event["ph"] == "i"] == ["5 more overlap with these and are not shown"]


def test_a_process_is_named_after_its_worker_and_two_lives_of_one_are_told_apart() -> None:
    views = worker_view("a", incarnation=0xA), worker_view("b", 1), worker_view("a", incarnation=0xB)
    names = [event["args"]["name"] for event in trace_of(GroupView(views)) if event["name"] == "process_name"]
    assert names == ["a, incarnation a", "b", "a, incarnation b"]


def test_the_file_is_json_with_the_clocks_that_were_used() -> None:
    group = MadeUpGroup(3)
    recording, file = Recording(), io.StringIO()
    recording.add(group.view())
    timeline = build_timeline(recording)
    slices = write_trace(timeline, file)
    trace = json.loads(file.getvalue())
    check_trace(trace["traceEvents"])
    assert slices == sum(event["ph"] == "X" for event in trace["traceEvents"]) > 0
    assert trace["otherData"]["clock offsets"] == dict(zip(("w0", "w1", "w2"), timeline.offsets, strict=True))


def test_a_group_that_did_nothing_gives_a_valid_trace() -> None:
    check_trace(trace_of(GroupView((worker_view("a"),))))
    check_trace(trace_of(GroupView(())))
