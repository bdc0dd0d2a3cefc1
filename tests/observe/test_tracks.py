from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.observe.tracks import MOST_TRACKS, Interval, Row

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.booleans()), max_size=40)


@given(SPANS)
@settings(max_examples=100, deadline=None)
def test_spans_of_a_track_are_nested_or_apart(spans: list[tuple[int, int, bool]]) -> None:
    row, tracks = Row(), dict[int | None, list[tuple[int, int, bool]]]()
    for began, length, holds in sorted(spans, key=lambda span: (span[0], -span[1])):
        track = row.place(Interval(began, began + length, holds))
        for start, end, may_hold in tracks.get(track, []):
            apart = began + length <= start or end <= began
            assert apart or (start <= began and began + length <= end and may_hold)
        tracks.setdefault(track, []).append((began, began + length, holds))
    assert len(row) == len(tracks)


def test_a_span_that_fits_nowhere_gets_a_new_track() -> None:
    row = Row()
    assert row.place(Interval(0, 10)) == 0
    assert row.place(Interval(5, 15)) == 1
    assert row.place(Interval(6, 9)) == 0
    assert row.place(Interval(10, 12)) == 0
    assert len(row) == 2


def test_a_call_is_not_put_inside_another_one_but_its_parts_are() -> None:
    row = Row()
    assert row.place(Interval(0, 10, holds=False)) == 0
    row.add_part(0, Interval(0, 4, holds=False))
    row.add_part(0, Interval(4, 10, holds=False))
    assert row.place(Interval(5, 9, holds=False)) == 1


def test_a_part_that_is_not_inside_its_span_is_refused() -> None:
    row = Row()
    row.place(Interval(0, 10))
    with pytest.raises(ValueError, match="no part of a span"):
        row.add_part(0, Interval(5, 11))


def test_the_number_of_tracks_is_bounded() -> None:
    row = Row()
    numbers = [row.place(Interval(at, at + 1000)) for at in range(MOST_TRACKS + 3)]
    assert numbers == [*range(MOST_TRACKS), None, None, None]
