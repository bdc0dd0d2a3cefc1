"""What a transport promises of its poller, one function per promise; the name is the promise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from telegrad.testing.link_promises import check_deadline, check_wake
from telegrad.testing.transport_bench import PATIENCE, Bench, expect
from telegrad.transport.base import Link, Listener, Ready
from telegrad.wire.frames import BULK_CHUNK, CHUNK, MESSAGE


def the_poller_reports_a_listener_until_all_are_accepted(bench: Bench) -> None:
    listener = bench.listener()
    bench.poller.add(listener, read=True)
    expect(not bench.polled(listener), "a listener was reported although nobody connected")
    bench.connect()
    bench.connect()
    for _ in range(3):
        bench.poll_for(listener, Ready.READ)
    links = [listener.accept(), listener.accept()]
    expect(None not in links, "two connected, and fewer could be accepted")
    expect(not bench.polled(listener), "a listener was reported although all were accepted")
    for link in links:
        if link is not None:
            link.close()
    bench.poller.remove(listener)


def the_poller_reports_a_listener_once_if_told_so(bench: Bench) -> None:
    listener = bench.listener()
    bench.poller.add(listener, read=False)
    bench.connect()
    expect(not bench.polled(listener), "a listener was reported that was not to be")
    bench.poller.arm(listener, read=True)
    bench.poll_for(listener, Ready.READ)
    bench.poller.remove(listener)
    bench.poller.add(listener, read=True, once=True)
    bench.poll_for(listener, Ready.READ)
    expect(not bench.polled(listener), "what was to be reported once was reported again")
    bench.poller.arm(listener, read=True)
    bench.poll_for(listener, Ready.READ)
    bench.poller.remove(listener)


def the_poller_reports_a_link_until_it_is_read(bench: Bench) -> None:
    here, there = bench.pair()
    bench.poller.add(there, read=True)
    expect(not bench.polled(there), "a link was reported although nothing came")
    here.send(MESSAGE, b"x", 1, 0, 0)
    for _ in range(3):
        bench.poll_for(there, Ready.READ)
    bench.read(there, 1)
    expect(not bench.polled(there), "a link was reported although all was read")
    here.send(MESSAGE, b"x", 2, 0, 0)
    bench.poll_for(there, Ready.READ)


def the_poller_reports_what_came_before_the_link_was_added(bench: Bench) -> None:
    here, there = bench.pair()
    here.send(MESSAGE, b"x", 1, 0, 0)
    there.wait(time.monotonic() + PATIENCE)
    bench.poller.add(there, read=True)
    bench.poll_for(there, Ready.READ)


def the_poller_reports_once_until_it_is_armed_again(bench: Bench) -> None:
    here, there = bench.pair()
    bench.poller.add(there, read=True, once=True)
    here.send(MESSAGE, b"x", 1, 0, 0)
    bench.poll_for(there, Ready.READ)
    here.send(MESSAGE, b"x", 2, 0, 0)
    expect(not bench.polled(there), "what was to be reported once was reported again")
    bench.poller.arm(there, read=True)
    bench.poll_for(there, Ready.READ)
    bench.read(there, 2)
    bench.poller.arm(there, read=True)
    expect(not bench.polled(there), "a link was reported although all was read")


def sending_does_not_arm_the_poller_again(bench: Bench) -> None:
    here, there = bench.pair()
    bench.poller.add(there, read=True, once=True)
    here.send(MESSAGE, b"x", 1, 0, 0)
    bench.poll_for(there, Ready.READ)
    for sequence in range(1, 41):
        there.send(BULK_CHUNK, bytes(CHUNK), sequence, 0, 0)
    expect(not bench.polled(there) & Ready.READ, "sending made the poller report again what it had reported")
    bench.poller.arm(there, read=True)
    bench.poll_for(there, Ready.READ)


def the_poller_reports_reading_only_while_it_is_armed(bench: Bench) -> None:
    for once in (False, True):
        here, there = bench.pair()
        bench.poller.add(there, read=False, once=once)
        here.send(MESSAGE, b"x", 1, 0, 0)
        expect(not bench.polled(there), "something to read was reported, and was not to be")
        bench.poller.arm(there, read=True)
        bench.poll_for(there, Ready.READ)
        bench.poller.arm(there, read=False)
        expect(not bench.polled(there), "something to read was reported after that was turned off")


def the_poller_reports_the_end_of_a_link_even_if_it_is_not_armed(bench: Bench) -> None:
    for once in (False, True):
        here, there = bench.pair()
        bench.poller.add(there, read=False, once=once)
        here.close()
        bench.poll_for(there, Ready.READ)


def the_poller_reports_when_there_is_room_again(bench: Bench) -> None:
    for once in (False, True):
        here, there = bench.pair()
        bench.poller.add(here, read=True, once=once)
        count = 0
        while not here.unsent() and count < 100:
            count += 1
            here.send(BULK_CHUNK, bytes(CHUNK), count, 0, 0)
        if not here.unsent():
            return  # it always has room
        here.send(BULK_CHUNK, bytes(CHUNK), count + 1, 0, 0)
        reading = bench.errand(lambda: bench.read(there, count + 1))  # noqa: B023 - used in this round
        while here.unsent():
            bench.poll_for(here, Ready.WRITE)
            here.flush()
        reading.result("reading what was sent when there was room")
        there.send(MESSAGE, b"x", 1, 0, 0)
        bench.poll_for(here, Ready.READ)


def what_was_removed_is_not_reported(bench: Bench) -> None:
    here, there = bench.pair()
    listener = bench.listener()
    for item in (there, listener):
        bench.poller.add(item, read=True)
        bench.poller.remove(item)
        bench.poller.remove(item)
    here.send(MESSAGE, b"x", 1, 0, 0)
    bench.connect()
    there.wait(time.monotonic() + PATIENCE)
    expect(not bench.polled(there), "a link was reported that had been removed")
    expect(not bench.polled(listener), "a listener was reported that had been removed")
    bench.poller.add(there, read=True)
    bench.poll_for(there, Ready.READ)


def what_this_side_closed_is_not_reported(bench: Bench) -> None:
    _, there = bench.pair()
    listener = bench.listener()
    bench.poller.add(there, read=True)
    bench.poller.add(listener, read=True)
    there.close()
    listener.close()
    expect(not bench.polled(there), "a link was reported that this side had closed")
    expect(not bench.polled(listener), "a listener was reported that this side had closed")
    bench.poller.remove(there)
    bench.poller.remove(listener)


def the_poller_finds_all_that_are_ready(bench: Bench) -> None:
    pairs = [bench.pair() for _ in range(50)]
    for here, there in pairs:
        bench.poller.add(there, read=True)
        here.send(MESSAGE, b"x", 1, 0, 0)
    ready: set[Link | Listener] = set()
    deadline = time.monotonic() + PATIENCE
    while len(ready) < len(pairs) and time.monotonic() < deadline:
        for item, _ in bench.poller.wait(deadline):
            ready.add(item)
            for _, there in pairs:
                if there is item:
                    list(there.receive())
    expect(ready == {there for _, there in pairs}, f"{len(ready)} of {len(pairs)} links were reported, or others")


def a_poll_ends_at_its_deadline(bench: Bench) -> None:
    check_deadline(bench.poller.wait, [])


def wake_ends_the_current_or_the_next_poll(bench: Bench) -> None:
    check_wake(bench, bench.poller.wake, bench.poller.wait, [])


def a_link_that_comes_while_the_poller_waits_is_watched(bench: Bench) -> None:
    here, there = bench.pair()
    waiting = bench.errand(lambda: bench.poll_for(there, Ready.READ))
    bench.poller.add(there, read=True)
    here.send(MESSAGE, b"x", 1, 0, 0)
    waiting.result("a poll that was under way when a link was added")


def a_closed_poller_touches_nothing_any_more(bench: Bench) -> None:
    bench.poller.close()
    numbers = [number for _ in range(4) for number in os.pipe()]  # they are what the poller's handles were
    try:
        bench.poller.close()
        bench.poller.wake()
        bench.poller.remove(bench.listener())
        bench.poller.abandon()
        for number in numbers:
            os.set_blocking(number, False)
        for number in numbers[::2]:
            try:
                expect(not os.read(number, 1), "a closed poller wrote to a file that is not its own")
            except BlockingIOError:
                continue  # nothing was written
    finally:
        for number in numbers:
            os.close(number)


POLLER_PROMISES: tuple[Callable[[Bench], None], ...] = (
    the_poller_reports_a_listener_until_all_are_accepted,
    the_poller_reports_a_listener_once_if_told_so,
    the_poller_reports_a_link_until_it_is_read,
    the_poller_reports_what_came_before_the_link_was_added,
    the_poller_reports_once_until_it_is_armed_again,
    sending_does_not_arm_the_poller_again,
    the_poller_reports_reading_only_while_it_is_armed,
    the_poller_reports_the_end_of_a_link_even_if_it_is_not_armed,
    the_poller_reports_when_there_is_room_again,
    what_was_removed_is_not_reported,
    what_this_side_closed_is_not_reported,
    the_poller_finds_all_that_are_ready,
    a_poll_ends_at_its_deadline,
    wake_ends_the_current_or_the_next_poll,
    a_link_that_comes_while_the_poller_waits_is_watched,
    a_closed_poller_touches_nothing_any_more,
)
