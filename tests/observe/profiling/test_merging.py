"""Where events of other workers appear, from profiles that were made by hand."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch.autograd.profiler_util import FunctionEvent

from telegrad.observe.profiling import merging, sessions
from telegrad.observe.profiling.merging import add_events, add_to_trace, placed_events, trace_events
from telegrad.observe.profiling.sessions import RemoteProfile, Session
from telegrad.torch_private_profiler import empty_event_list
from telegrad.wire.profiles import ASYNC, REMOTE, Profile, ProfiledEvent, encode_profile

MICROSECOND = 1000


def event(name: int, start: int, duration: int, flags: int = 0, worker: int = 1, thread: int = 5) -> ProfiledEvent:
    """Return an event whose times are in microseconds after the beginning of its profile."""
    times = start * MICROSECOND, duration * MICROSECOND
    return ProfiledEvent(name, worker, thread, *times, flags, 0, -1, 0, 0, 0, 0, [], [])


def profile(*events: ProfiledEvent, began: int = 0, ended: int = 0, left_out: int = 0) -> bytes:
    names = ["aten::mul", "rpc_sync#f(b -> c)#remote_op: aten::add", "aten::add @c"]
    return encode_profile(Profile(began * MICROSECOND, ended * MICROSECOND, names, list(events), left_out))


def name_of(worker: int) -> str:
    return "abc"[worker]


def session_of(*profiles: RemoteProfile) -> Session:
    session = Session(0)
    for each in profiles:
        session.add(each)
    return session


def test_what_a_callee_recorded_is_in_the_middle_of_the_call() -> None:
    data = profile(event(0, 10, 20), began=5000, ended=5100)  # by a clock of its own
    window = 100 * MICROSECOND, 300 * MICROSECOND
    (placed,) = placed_events(session_of(RemoteProfile(data, name_of, window)))
    assert placed.start == (150 + 10) * MICROSECOND


def test_without_a_call_the_measured_offset_of_the_clock_counts() -> None:
    data = profile(event(0, 10, 20), began=5000, ended=5100)
    (placed,) = placed_events(session_of(RemoteProfile(data, name_of, clock_offset=-4000 * MICROSECOND)))
    assert placed.start == (1000 + 10) * MICROSECOND


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("", ["aten::mul @b", "rpc_sync#f(b -> c)#remote_op: aten::add", "aten::add @c"]),
        (
            "rpc_sync#g(a -> b)",
            [
                "rpc_sync#g(a -> b)#remote_op: aten::mul",
                "rpc_sync#g(a -> b)#remote_op: rpc_sync#f(b -> c)#remote_op: aten::add",
                "rpc_sync#g(a -> b)#remote_op: aten::add @c",
            ],
        ),
    ],
)
def test_events_have_the_name_of_their_worker_once_or_the_prefix_that_torch_gives_them(
    prefix: str, names: list[str]
) -> None:
    data = profile(event(0, 0, 1), event(1, 0, 1, REMOTE, 2), event(2, 0, 1, REMOTE, 2))
    placed = list(placed_events(session_of(RemoteProfile(data, name_of, prefix=prefix))))
    assert [each.name for each in placed] == names
    assert [each.worker for each in placed] == ["b", "c", "c"]


def test_what_is_missing_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(
        RemoteProfile(b"no profile", name_of),
        RemoteProfile(profile(left_out=3), name_of),
        RemoteProfile(profile(left_out=4), name_of),
    )
    monkeypatch.setattr(sessions, "MOST_HELD", 0)
    session.add(RemoteProfile(profile(), name_of))
    assert list(placed_events(session)) == []
    unreadable, incomplete = (record.getMessage() for record in caplog.records)
    assert unreadable.startswith("a profile of another worker cannot be read: ")
    assert "7 events of other workers were too many for their replies, and 1 replies for this worker" in incomplete


def test_nothing_is_said_if_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    assert len(list(placed_events(session_of(RemoteProfile(profile(event(0, 0, 1)), name_of))))) == 1
    assert caplog.records == []


@pytest.mark.parametrize(("left_out", "dropped"), [(1, 0), (0, 1)])
def test_either_is_said_if_it_alone_is_missing(caplog: pytest.LogCaptureFixture, left_out: int, dropped: int) -> None:
    session = session_of(RemoteProfile(profile(left_out=left_out), name_of))
    for _ in range(dropped):
        session.add(RemoteProfile(profile(event(0, 0, 1)), name_of), most=1)
    list(placed_events(session))
    assert f"{left_out} events of other workers were too many for their replies, and {dropped} " in caplog.text


def marker(session: Session, sent: int, marked: int, received: int, *, is_async: bool = False) -> FunctionEvent:
    """Return the event that torch has of the marker of a call. Its times are relative to Unix time 1000."""
    call = session.begin_call(0, "rpc_sync#f(a -> b)", is_async)
    call.sent, call.marked, call.received = (time * MICROSECOND for time in (sent, marked, received))
    return FunctionEvent(  # type: ignore[no-untyped-call]  # torch has no types here
        id=1, name=call.marker, thread=1, start_us=sent - 1000, end_us=marked - 1000
    )


@pytest.mark.parametrize("zero", [1000 * MICROSECOND, None])
def test_the_marker_of_a_call_becomes_an_event_that_lasts_as_long(zero: int | None) -> None:
    session = session_of(RemoteProfile(profile(event(0, 0, 20), began=1030, ended=1050), name_of))
    session.began = 1500 * MICROSECOND  # the profiler began before
    first = FunctionEvent(id=2, name="first", thread=1, start_us=5, end_us=6)  # type: ignore[no-untyped-call]
    events: list[Any] = [marker(session, 1010, 1011, 1090, is_async=True), first]
    add_events(session, events, zero)
    assert events.pop(0) is first
    call, served = events
    assert (call.name, call.is_async, call.node_id) == ("rpc_sync#f(a -> b)", True, 0)
    assert (call.time_range.start, call.time_range.end) == (10, 90)
    assert (served.name, served.node_id, served.is_remote) == ("aten::mul @b", 1, True)
    assert (served.time_range.start, served.time_range.end) == (30, 50)


def test_nothing_on_a_callee_precedes_its_call_if_the_clock_of_the_system_is_set_back() -> None:
    session = Session(0)
    events: list[Any] = [marker(session, 1010, 1011, 1090)]
    events[0].time_range.start += 500  # by the clock of the profiler, which nobody sets
    (call,) = session.calls()
    data = profile(event(0, 0, 20), began=1030, ended=1050)
    window = call.sent, call.received
    session.add(RemoteProfile(data, name_of, window, prefix=call.key, call=call))
    add_events(session, events, 1000 * MICROSECOND)
    assert [each.is_remote for each in events] == [False, True]
    assert (events[0].time_range.start, events[0].time_range.end) == (510, 589)
    assert (events[1].time_range.start, events[1].time_range.end) == (539, 559)


def test_a_call_that_has_not_ended_keeps_the_length_of_its_marker() -> None:
    session = Session(0)
    events: list[Any] = [marker(session, 1010, 1011, 0)]
    add_events(session, events, 1000 * MICROSECOND)
    assert (events[0].name, events[0].time_range.end) == ("rpc_sync#f(a -> b)", 11)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_in_a_trace_lasts_as_long_and_may_overlap_others_if_nobody_waits(tmp_path: Path, is_async: bool) -> None:
    session, path = Session(0), tmp_path / "trace.json"
    name = marker(session, 1010, 1011, 1090, is_async=is_async).name
    shown = {"ph": "X", "name": name, "ts": 10.0, "dur": 1.0, "pid": 7, "tid": 8}
    path.write_text(json.dumps({"baseTimeNanoseconds": 1000 * MICROSECOND, "traceEvents": [shown, {"ph": "M"}]}))
    add_to_trace(session, str(path))
    call, _, *more = json.loads(path.read_text())["traceEvents"]
    assert (call["name"], call["dur"]) == ("rpc_sync#f(a -> b)", 1.0 if is_async else 80.0)
    assert [(each["ph"], each["ts"], each["pid"], each["tid"]) for each in more] == (
        [("b", 10.0, 7, 8), ("e", 90.0, 7, 8)] if is_async else []
    )


def test_a_call_in_a_trace_that_has_not_ended_keeps_the_length_of_its_marker(tmp_path: Path) -> None:
    session, path = session_of(RemoteProfile(profile(event(0, 10, 20), began=1000), name_of)), tmp_path / "trace.json"
    name = marker(session, 1010, 1011, 0, is_async=True).name
    shown = {"ph": "X", "name": name, "ts": 10.0, "dur": 1.0, "pid": 7, "tid": 8}
    flow = {"ph": "s", "name": name, "ts": 10.0, "pid": 7, "tid": 8}
    path.write_text(json.dumps({"baseTimeNanoseconds": 1000 * MICROSECOND, "traceEvents": [shown, flow]}))
    add_to_trace(session, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert events[:2] == [{**shown, "name": "rpc_sync#f(a -> b)"}, flow]
    assert [(each["ph"], each["name"]) for each in events[2:]] == [("X", "aten::mul"), ("M", "process_name")]


def test_a_trace_that_is_no_json_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, path = session_of(RemoteProfile(profile(), name_of)), tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "\\"')
    add_to_trace(session, str(path))
    assert path.read_text() == '{"traceEvents": [{"name": "\\"'
    assert "it is not valid JSON" in caplog.text


def test_each_worker_is_a_process_of_a_trace() -> None:
    data = profile(event(0, 10, 20, ASYNC), event(2, 10, 30, REMOTE, 2), began=100)
    own, nested, *named = trace_events(placed_events(session_of(RemoteProfile(data, name_of))), 50 * MICROSECOND)
    assert (own["name"], own["ts"], own["dur"], own["args"]) == (
        "aten::mul",
        60.0,
        20.0,
        {"event": "aten::mul @b", "worker": "b"},
    )
    assert (nested["name"], nested["pid"] - own["pid"], nested["tid"]) == ("aten::add", 1, 5)
    assert [(each["ph"], each["pid"], each["args"]["name"]) for each in named] == [
        ("M", own["pid"], "worker 'b'"),
        ("M", nested["pid"], "worker 'c'"),
    ]


def test_events_that_are_nested_too_deeply_for_torch_do_not_end_the_profiler(caplog: pytest.LogCaptureFixture) -> None:
    """Or one worker could take all events from another that calls it."""
    deep = [ProfiledEvent(number % 2, 1, 7, number, 10**9 - 2 * number) for number in range(5000)]
    profiles = [encode_profile(Profile(0, 10**9, ["f", "g"], each)) for each in (deep, [ProfiledEvent(0, 2, 7, 0, 5)])]
    events = empty_event_list(False, False)
    with caplog.at_level(logging.WARNING, "telegrad"):
        merging.add_events(session_of(*(RemoteProfile(data, name_of) for data in profiles)), events, 0)
    assert [event.name for event in events] == ["f @c"]
    assert "5000 events of another worker are left out" in caplog.text
