"""The ring of events."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from telegrad.events import EventRing


def record(ring: EventRing, count: int) -> None:
    for number in range(count):
        ring.record("member", 1.0, 2.0, number, what="joined")


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=5))
def test_a_reader_gets_every_event_once_or_is_told_how_many_were_dropped(size: int, bursts: list[int]) -> None:
    ring, following, seen, lost = EventRing(size), 0, 0, 0
    for burst in bursts:
        record(ring, burst)
        entries, following, dropped = ring.since(following)
        assert len(entries) <= size
        if entries:
            assert [entry[0] for entry in entries] == list(range(following - len(entries), following))
        seen, lost = seen + len(entries), lost + dropped
    assert seen + lost == sum(bursts)


def test_an_event_whose_number_was_taken_and_that_is_not_there_yet_is_read_next_time() -> None:
    ring = EventRing(1000)
    record(ring, 2)
    late = next(ring.numbers)
    record(ring, 3)
    entries, following, dropped = ring.since(0)
    assert ([entry[0] for entry in entries], following, dropped) == ([0, 1], 2, 0)
    ring.append((late, "member"))
    assert [entry[0] for entry in ring.since(following)[0]] == [2, 3, 4, 5]


def test_an_event_that_never_comes_counts_as_dropped_in_the_end() -> None:
    ring = EventRing(1000)
    next(ring.numbers)
    record(ring, 400)
    entries, following, dropped = ring.since(0)
    assert (len(entries), following, dropped) == (400, 401, 1)


def test_a_hole_between_events_counts_as_dropped_when_many_have_come_after_it() -> None:
    ring = EventRing(1000)
    record(ring, 2)
    next(ring.numbers)
    record(ring, 255)
    entries, following, dropped = ring.since(0)
    assert (len(entries), following, dropped) == (2, 2, 0)
    record(ring, 1)
    entries, following, dropped = ring.since(0)
    assert (len(entries), following, dropped) == (258, 259, 1)


def test_an_event_says_which_thread_recorded_it_unless_another_did_what_it_tells() -> None:
    ring = EventRing()
    record(ring, 1)
    ring.record("step", 1.0, 2.0, thread=7)
    assert [entry[13] for entry in ring.since(0)[0]] == [threading.get_ident(), 7]


def test_calls_that_have_ended_are_recorded_before_what_came_after_them_and_before_a_reader_looks() -> None:
    ring = EventRing()

    def catch_up() -> None:
        while ring.unrecorded:
            ring.append((next(ring.numbers), *ring.unrecorded.pop()))

    ring.catch_up = catch_up
    ring.unrecorded.append(("first", 1.0, 2))
    record(ring, 1)
    ring.unrecorded.append(("last", 3.0, 4))
    assert [entry[1] for entry in ring.since(0)[0]] == ["first", "member", "last"]


def test_each_listener_gets_whole_events_until_it_ends() -> None:
    ring, one, other = EventRing(), list[str](), list[str]()
    end_one = ring.listen(lambda entry: one.append(entry[1]))
    end_other = ring.listen(lambda entry: other.append(entry[1]))
    ring.append((next(ring.numbers), lambda entry: (entry[0], "call"), 1.0))
    end_one()
    ring.record("step", 1.0, 2.0)
    end_other()
    ring.record("pass", 1.0, 2.0)
    assert (one, other) == (["call"], ["call", "step"])
    assert [entry[1] for entry in ring.since(0)[0]] == ["call", "step", "pass"]


def test_a_ring_of_size_0_records_nothing() -> None:
    ring = EventRing(0)
    record(ring, 3)
    assert not ring.on
    assert ring.since(0) == ([], 0, 0)


def test_events_of_several_threads_get_different_numbers() -> None:
    ring = EventRing(10_000)
    threads = [threading.Thread(target=record, args=(ring, 500)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries, following, dropped = ring.since(0)
    assert ([entry[0] for entry in entries], following, dropped) == (list(range(2000)), 2000, 0)
