"""The order of calls at one object."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from telegrad.protocol.ownership import LIFE
from telegrad.rref.ordered import OrderedQueue, Task
from telegrad.wire.messages import StreamPosition

REF = (0, 0, 0)


def log_to(log: list[str], what: str) -> Task:
    def task(ended: Callable[[], None]) -> None:
        log.append(what)
        ended()

    return task


def test_one_call_at_a_time() -> None:
    mailbox, log, ends = OrderedQueue(), [], []

    def hold(ended: Callable[[], None]) -> None:
        log.append("first")
        ends.append(ended)

    mailbox.put(1, StreamPosition(REF, 0, 0), hold)
    mailbox.put(2, StreamPosition(REF, 0, 0), log_to(log, "second"))
    assert log == ["first"]
    ends[0]()
    assert log == ["first", "second"]


def test_what_will_not_come_is_not_waited_for() -> None:
    mailbox, log = OrderedQueue(), []
    mailbox.put(1, StreamPosition(REF, 0, 2), log_to(log, "third"))
    mailbox.skip(1, StreamPosition(REF, 0, 1))
    assert log == []
    mailbox.skip(1, StreamPosition(REF, 0, 0))
    assert log == ["third"]


def test_a_stream_is_forgotten_when_it_has_ended() -> None:
    mailbox, log = OrderedQueue(), []
    mailbox.put(1, StreamPosition(REF, 0, 1), log_to(log, "second"))
    mailbox.skip(1, StreamPosition(REF, 0, 2), last=True)
    assert mailbox.waiting() == 1
    mailbox.put(1, StreamPosition(REF, 0, 0), log_to(log, "first"))
    assert log == ["first", "second"]
    assert mailbox.waiting() == 0
    mailbox.put(1, StreamPosition(REF, 1, 0), log_to(log, "third"))
    mailbox.skip(1, StreamPosition(REF, 1, 1), last=True)
    assert mailbox.waiting() == 0


def test_calls_of_a_lost_caller_do_not_wait_for_those_that_will_never_come() -> None:
    """Each must be answered, if only to be no longer under way."""
    mailbox, log = OrderedQueue(), []
    mailbox.put(1, StreamPosition(REF, 5 << LIFE, 2), log_to(log, "third"))
    mailbox.put(1, StreamPosition(REF, 5 << LIFE, 1), log_to(log, "second"))
    mailbox.put(1, StreamPosition(REF, 6 << LIFE, 1), log_to(log, "of the next life"))
    mailbox.lost(1, 5)
    assert log == ["second", "third"]
    mailbox.put(1, StreamPosition(REF, 5 << LIFE, 7), log_to(log, "late"))
    mailbox.skip(1, StreamPosition(REF, 5 << LIFE, 8), last=True)
    assert log == ["second", "third", "late"]
    assert mailbox.waiting() == 1


@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_each_callers_order_is_kept_whatever_order_they_come_in(seed: int, calls: list[tuple[int, bool]]) -> None:
    mailbox, random = OrderedQueue(), Random(seed)
    ran: list[tuple[int, int]] = []
    numbers, arrivals, expected = {}, [], {0: [], 1: [], 2: []}
    for caller, sent in calls:
        number = numbers[caller] = numbers.get(caller, -1) + 1
        arrivals.append((caller, number, sent))
        if sent:
            expected[caller].append(number)
    random.shuffle(arrivals)
    running: list[Callable[[], None]] = []

    def task(caller: int, number: int) -> Task:
        def run(ended: Callable[[], None]) -> None:
            assert not running, "two at a time"
            ran.append((caller, number))
            running.append(ended)

        return run

    for caller, number, sent in arrivals:
        if sent:
            mailbox.put(caller, StreamPosition(REF, 0, number), task(caller, number))
        else:
            mailbox.skip(caller, StreamPosition(REF, 0, number))
        if running and random.random() < 0.5:
            running.pop()()
    while running:
        running.pop()()
    assert {caller: [number for who, number in ran if who == caller] for caller in expected} == expected
    for caller, number in numbers.items():
        mailbox.skip(caller, StreamPosition(REF, 0, number + 1), last=True)
    assert mailbox.waiting() == 0
