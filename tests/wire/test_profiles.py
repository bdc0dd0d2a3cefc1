"""Profiles as bytes: they survive the way, are bounded, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ProtocolError
from telegrad.wire.profiles import NameTable, Profile, ProfiledEvent, decode_profile, encode_profile

LONG = "a name of a function"


def profile_of(durations: list[int]) -> Profile:
    table = NameTable()
    events = [
        ProfiledEvent(table.index(f"op{number}"), 1, 2, number, duration, stack=table.indices(["line", f"at{number}"]))
        for number, duration in enumerate(durations)
    ]
    return Profile(10, 20, table.names, events)


@given(st.lists(st.integers(0, 2**40)))
def test_decoding_returns_what_was_encoded(durations: list[int]) -> None:
    profile = profile_of(durations)
    assert decode_profile(encode_profile(profile)) == profile


@given(st.lists(st.integers(0, 100), min_size=50, max_size=200), st.integers(300, 1500))
def test_the_longest_events_are_kept_where_not_all_fit(durations: list[int], most: int) -> None:
    profile = profile_of(durations)
    data = encode_profile(profile, most)
    found = decode_profile(data)
    assert len(data) <= most
    assert found.left_out + len(found.events) == len(durations)
    kept = [event.duration for event in found.events]
    assert sorted(kept) == sorted(durations)[len(durations) - len(kept) :]
    starts = [event.start for event in found.events]
    assert starts == sorted(starts)
    for event in found.events:  # names and stacks are still theirs
        assert found.names[event.name] == f"op{event.start}"
        assert [found.names[line] for line in event.stack] == ["line", f"at{event.start}"]


def test_a_profile_with_names_that_are_too_long_has_no_events() -> None:
    table = NameTable()
    profile = Profile(1, 2, table.names, [ProfiledEvent(table.index(LONG * 100), 0, 0, 0, 1)])
    found = decode_profile(encode_profile(profile, 100))
    assert (found.names, found.events, found.left_out) == ([], [], 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode([1, 2, ["x"], [["x", 0, 0, 0, 0]]]),
        msgspec.msgpack.encode([1, 2, ["x"], [[1, 0, 0, 0, 0]]]),
        msgspec.msgpack.encode([1, 2, ["x"], [[0, 0, 0, 0, -1]]]),  # torch cannot make a table of it
        msgspec.msgpack.encode([1, 2, ["x"], [[-1, 0, 0, 0, 0]]]),
        msgspec.msgpack.encode(Profile(1, 2, ["x"], [ProfiledEvent(0, 0, 0, 0, 0, stack=[7])])),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="invalid profile"):
        decode_profile(data)
