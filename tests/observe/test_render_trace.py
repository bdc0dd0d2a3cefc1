from __future__ import annotations

from xml.etree import ElementTree

import pytest
from tests.support.recorded_groups import MadeUpGroup, worker_view

from telegrad.observe.model import Event, GroupView, Kind, LiveCall
from telegrad.observe.recording import Recording
from telegrad.observe.render_trace import LOOKS, flatten, render_trace
from telegrad.observe.render_trace import _Slice as Slice
from telegrad.observe.timeline_builder import build_timeline
from telegrad.observe.trace import trace_events

SVG = "{http://www.w3.org/2000/svg}"


def events_of(group: GroupView) -> list[dict[str, object]]:
    recording = Recording()
    recording.add(group)
    return list(trace_events(build_timeline(recording)))


def served(number: int, began: float, ended: float, thread: int = 1) -> Event:
    return Event(number, Kind.SERVE, began, ended, number, "x", "work", thread=thread, marks=(began, ended))


def bars(picture: str, look: str) -> list[tuple[float, float]]:
    """Return left and right of all bars of a look, as parts of the longest row."""
    root = ElementTree.fromstring(picture)
    left, width = 110.0, float(root.attrib["width"]) - 126
    found = []
    for box in root.findall(f"{SVG}rect"):
        if box.attrib["fill"] == LOOKS[look][0] and float(box.attrib["height"]) == 16:
            x = float(box.attrib["x"])
            found.append(((x - left) / width, (x + float(box.attrib["width"]) - left) / width))
    return sorted(found)


def test_a_row_shows_what_its_thread_did() -> None:
    call = Event(9, Kind.CALL, 2.0, 8.0, 9, "x", "f", thread=1, marks=(2.0,))
    picture = render_trace(events_of(GroupView((worker_view("a", events=(served(0, 0.0, 10.0), call)),))))
    assert bars(picture, "forward") == [pytest.approx((0.0, 0.2), abs=1e-3), pytest.approx((0.8, 1.0), abs=1e-3)]
    assert bars(picture, "wait") == [pytest.approx((0.2, 0.8), abs=1e-3)]


def test_merged_rows_show_what_any_thread_did() -> None:
    call = Event(9, Kind.CALL, 0.0, 10.0, 9, "x", "f", thread=2, marks=(0.0,))
    views = (worker_view("a", events=(served(0, 0.0, 3.0), served(1, 5.0, 8.0, thread=3), call)),)
    picture = render_trace(events_of(GroupView(views)), merged=True, title="A & B")
    tops = {box.attrib.get("y") for box in ElementTree.fromstring(picture).findall(f"{SVG}rect")}
    assert len(tops) == 4  # the page, the lane, the bars and the legend
    assert bars(picture, "wait") == [pytest.approx((0.0, 1.0), abs=1e-3)]
    assert len(bars(picture, "forward")) == 2
    assert picture.index(LOOKS["wait"][0] + '"/>') < picture.index(LOOKS["forward"][0])  # painted over it


def test_a_thread_waits_for_a_call_that_it_makes_while_a_collective_is_answered_later() -> None:
    collective = Event(8, Kind.SERVE, 0.0, 10.0, 8, "x", "@telegrad.gather", thread=1, marks=(0.0, 0.0))
    call = Event(9, Kind.CALL, 2.0, 8.0, 9, "x", "f", thread=1, marks=(2.0,))
    step = Event(10, Kind.STEP, 8.0, 10.0, what="Adam", thread=1)
    picture = render_trace(events_of(GroupView((worker_view("a", events=(collective, call, step)),))))
    assert bars(picture, "wait") == [pytest.approx((0.2, 0.8), abs=1e-3)]


@pytest.mark.parametrize("merged", [False, True])
def test_a_worker_does_not_wait_while_others_wait_for_it_in_a_collective(merged: bool) -> None:
    waiting = LiveCall(1, "b", "a", "a collective", 0.0, state="deferred")
    view = worker_view("a", now=10.0, events=(served(0, 0.0, 10.0),), served=(waiting,))
    picture = render_trace(events_of(GroupView((view,), now=10.0)), merged=merged)
    assert bars(picture, "wait") == []
    assert bars(picture, "forward") == [pytest.approx((0.0, 1.0), abs=1e-3)]


def test_a_window_cuts_what_is_outside() -> None:
    events = events_of(GroupView((worker_view("a", events=(served(0, 0.0, 4.0), served(1, 6.0, 10.0))),)))
    picture = render_trace(events, window=(2e6, 8e6))
    assert bars(picture, "forward") == [pytest.approx((0, 1 / 3), abs=1e-3), pytest.approx((2 / 3, 1), abs=1e-3)]
    assert len(bars(render_trace(events, window=(4.5e6, 5.5e6)), "forward")) == 0


def test_all_workers_and_text_are_inside_the_picture() -> None:
    events = events_of(MadeUpGroup(4, workers=4, calls=60).view())
    for merged in (False, True):
        root = ElementTree.fromstring(render_trace(events, title="All", merged=merged))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        texts = list(root.iter(f"{SVG}text"))
        assert {"All", "w0", "w1", "w2", "w3"} <= {text.text for text in texts}
        for text in texts:
            assert 0 <= float(text.attrib["x"]) <= width
            assert 0 < float(text.attrib["y"]) < height


def test_the_same_trace_gives_the_same_bytes() -> None:
    events = events_of(MadeUpGroup(4).view())
    assert render_trace(events) == render_trace(list(events))


def test_an_empty_trace_is_a_picture() -> None:
    assert render_trace([]).startswith("<svg")


def test_what_is_innermost_is_shown() -> None:
    nested = [Slice(0, 10, "a", "x"), Slice(2, 6, "b", "y"), Slice(3, 4, "c", "z"), Slice(12, 13, "d", "x")]
    assert [(each.began, each.ended, each.name) for each in flatten(nested)] == [
        *((0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 6, "b"), (6, 10, "a")),
        (12, 13, "d"),
    ]
