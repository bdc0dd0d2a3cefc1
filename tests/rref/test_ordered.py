"""The order in which the calls of an ordered object run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import ReferenceGone
from telegrad.protocol.rref_ids import COUNTER_BITS
from telegrad.rref.ordered import CallSequencer, OrderedQueue, Task
from telegrad.wire.messages import StreamPosition

REF = (0, 0, 0)


def log_to(log: list[str], what: str) -> Task:
    def task(finish: Callable[[], None]) -> None:
        log.append(what)
        finish()

    return task


def test_one_call_runs_at_a_time() -> None:
    queue, log, ends = OrderedQueue(), [], []

    def hold(finish: Callable[[], None]) -> None:
        log.append("first")
        ends.append(finish)

    queue.put(1, StreamPosition(REF, 0, 0), hold)
    queue.put(2, StreamPosition(REF, 0, 0), log_to(log, "second"))
    assert log == ["first"]
    ends[0]()
    assert log == ["first", "second"]


def test_skipped_calls_are_not_waited_for() -> None:
    queue, log = OrderedQueue(), []
    queue.put(1, StreamPosition(REF, 0, 2), log_to(log, "third"))
    queue.skip(1, StreamPosition(REF, 0, 1))
    assert log == []
    queue.skip(1, StreamPosition(REF, 0, 0))
    assert log == ["third"]


def test_a_number_that_is_used_again_neither_blocks_nor_loses_a_call() -> None:
    queue, log = OrderedQueue(), []
    queue.put(1, StreamPosition(REF, 0, 0), log_to(log, "first"))
    queue.put(1, StreamPosition(REF, 0, 0), log_to(log, "first again"))
    queue.put(1, StreamPosition(REF, 0, -5), log_to(log, "before the first"))
    queue.put(1, StreamPosition(REF, 0, 2), log_to(log, "third"))
    queue.put(1, StreamPosition(REF, 0, 2), log_to(log, "third again"))
    queue.skip(1, StreamPosition(REF, 0, 2))
    queue.put(1, StreamPosition(REF, 0, 1), log_to(log, "second"))
    assert log == ["first", "first again", "before the first", "third again", "second", "third"]


def test_a_sequence_is_discarded_when_it_is_complete() -> None:
    queue, log = OrderedQueue(), []
    queue.put(1, StreamPosition(REF, 0, 1), log_to(log, "second"))
    queue.skip(1, StreamPosition(REF, 0, 2), last=True)
    assert queue.sequence_count() == 1
    queue.put(1, StreamPosition(REF, 0, 0), log_to(log, "first"))
    assert log == ["first", "second"]
    assert queue.sequence_count() == 0
    queue.put(1, StreamPosition(REF, 1, 0), log_to(log, "third"))
    queue.skip(1, StreamPosition(REF, 1, 1), last=True)
    assert queue.sequence_count() == 0


def test_calls_of_a_lost_caller_do_not_wait_for_missing_ones() -> None:
    """Each call must still get a response, so that it is no longer in progress."""
    queue, log = OrderedQueue(), []
    queue.put(1, StreamPosition(REF, 5 << COUNTER_BITS, 2), log_to(log, "third"))
    queue.put(1, StreamPosition(REF, 5 << COUNTER_BITS, 1), log_to(log, "second"))
    queue.put(1, StreamPosition(REF, 6 << COUNTER_BITS, 1), log_to(log, "of the next incarnation"))
    queue.caller_lost(1, 5)
    assert log == ["second", "third"]
    queue.put(1, StreamPosition(REF, 5 << COUNTER_BITS, 7), log_to(log, "late"))
    queue.skip(1, StreamPosition(REF, 5 << COUNTER_BITS, 8), last=True)
    assert log == ["second", "third", "late"]
    assert queue.sequence_count() == 1


@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_each_callers_order_is_kept_in_any_order_of_arrival(seed: int, calls: list[tuple[int, bool]]) -> None:
    queue, random = OrderedQueue(), Random(seed)
    ran: list[tuple[int, int]] = []
    numbers, calls, expected = {}, [], {0: [], 1: [], 2: []}
    for caller, sent in calls:
        number = numbers[caller] = numbers.get(caller, -1) + 1
        calls.append((caller, number, sent))
        if sent:
            expected[caller].append(number)
    random.shuffle(calls)
    running: list[Callable[[], None]] = []

    def task(caller: int, number: int) -> Task:
        def run(finish: Callable[[], None]) -> None:
            assert not running, "two at a time"
            ran.append((caller, number))
            running.append(finish)

        return run

    for caller, number, sent in calls:
        if sent:
            queue.put(caller, StreamPosition(REF, 0, number), task(caller, number))
        else:
            queue.skip(caller, StreamPosition(REF, 0, number))
        if running and random.random() < 0.5:
            running.pop()()
    while running:
        running.pop()()
    assert {caller: [number for who, number in ran if who == caller] for caller in expected} == expected
    for caller, number in numbers.items():
        queue.skip(caller, StreamPosition(REF, 0, number + 1), last=True)
    assert queue.sequence_count() == 0


def test_all_handles_of_an_object_share_one_sequence() -> None:
    sequencer = CallSequencer(incarnation=5)
    sequencer.open(1, REF)
    first = sequencer.next(1, REF)
    sequencer.open(1, REF)
    second = sequencer.next(1, REF)
    assert (first.stream, first.number, second.number) == (second.stream, 0, 1)
    assert first.stream >> COUNTER_BITS == 5
    assert sequencer.close(1, REF) is None
    assert sequencer.close(1, REF) == StreamPosition(REF, first.stream, 2)
    assert sequencer.count() == 0


def test_a_sequence_without_calls_has_no_end_to_announce() -> None:
    sequencer = CallSequencer(incarnation=5)
    sequencer.open(1, REF)
    assert sequencer.close(1, REF) is None
    with pytest.raises(ReferenceGone, match="was released"):
        sequencer.next(1, REF)
