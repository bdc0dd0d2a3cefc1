"""Checks the rules of the trace event format that viewers depend on."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Any

Events = list[dict[str, Any]]


def check_trace(events: Events) -> None:
    """Fail if a viewer would reject one of these events, or show it where it does not belong."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, Events] = defaultdict(list)
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    process_of: dict[int, int] = {}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys(), event
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] in named:
                named[event["name"]].add(place)
            continue
        assert event["ts"] >= 0, event
        assert float(event["ts"] * 8).is_integer(), f"not exact in nanoseconds: {event}"
        if event["tid"]:
            assert process_of.setdefault(event["tid"], event["pid"]) == event["pid"], f"two processes: {event}"
        if event["ph"] == "X":
            assert event["dur"] > 0, event
            tracks[place].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "stf":
            flows[event["id"]].append(event)
        else:
            assert event["ph"] in "iC", event
    assert set(tracks) <= named["thread_name"]
    assert {process for process, _ in tracks} <= {process for process, _ in named["process_name"]}
    for spans in tracks.values():
        _check_nesting(spans)
    for points in flows.values():
        _check_flow(points, tracks)


def _check_nesting(spans: list[tuple[float, float]]) -> None:
    around: list[tuple[float, float]] = []
    for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= began:
            around.pop()
        assert not around or ended <= around[-1][1], f"{(began, ended)} overlaps {around[-1]}"
        around.append((began, ended))
    spans.sort()


def _check_flow(points: Events, tracks: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    assert [point["ph"] for point in points] == ["s", *"t" * (len(points) - 2), "f"], points
    assert points[-1]["bp"] == "e"
    assert len({(point["name"], point["cat"]) for point in points}) == 1
    times = [point["ts"] for point in points]
    assert times == sorted(times), f"goes back in time: {points}"
    for point in points:
        spans = tracks[point["pid"], point["tid"]]
        before = spans[: bisect_right(spans, (point["ts"], float("inf")))]
        assert any(point["ts"] < ended for _, ended in before), f"not in a slice: {point}"
