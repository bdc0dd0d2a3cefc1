"""What other workers recorded, between the events of a profiler of this one."""

from __future__ import annotations

import logging

import pytest

from telegrad.observe.profiling import merging
from telegrad.observe.profiling.sessions import RemoteProfile, Session
from telegrad.torch_private_profiler import empty_event_list
from telegrad.wire.profiles import Profile, ProfiledEvent, encode_profile


def session_with(*profiles: list[ProfiledEvent]) -> Session:
    session = Session(0)
    for events in profiles:
        data = encode_profile(Profile(0, 10**9, ["f", "g"], events))
        session.add(RemoteProfile(data, lambda worker: f"w{worker}"))
    return session


def test_events_that_are_nested_too_deeply_for_torch_do_not_end_the_profiler(caplog: pytest.LogCaptureFixture) -> None:
    """Or one worker could take all events from another that calls it."""
    deep = [ProfiledEvent(number % 2, 1, 7, number, 10**9 - 2 * number) for number in range(5000)]
    events = empty_event_list(False, False)
    with caplog.at_level(logging.WARNING, "telegrad"):
        merging.add_events(session_with(deep, [ProfiledEvent(0, 2, 7, 0, 5)]), events, 0)
    assert [event.name for event in events] == ["f @w2"]
    assert "5000 events of another worker are left out" in caplog.text
