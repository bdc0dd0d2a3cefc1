"""Checks of `Poller`: what it reports, how often, and until when."""

from __future__ import annotations

import os
import time

from telegrad.testing.contract import NotApplicable
from telegrad.testing.transport_contract.harness import (
    PATIENCE,
    Check,
    Harness,
    check_deadline,
    check_wake,
    expect,
)
from telegrad.transport.base import Link, Listener, Ready
from telegrad.wire.frames import BULK_CHUNK, CHUNK, MESSAGE


def the_poller_reports_a_listener_until_all_connections_are_accepted(harness: Harness) -> None:
    listener = harness.listener()
    harness.poller.add(listener, read=True)
    expect(not harness.polled(listener), "a listener was reported before anyone connected")
    harness.connect()
    harness.connect()
    for _ in range(3):
        harness.poll_for(listener, Ready.READ)
    links = [listener.accept()]
    harness.poll_for(listener, Ready.READ)
    links.append(listener.accept())
    expect(None not in links, "two clients connected, and fewer were accepted")
    expect(not harness.polled(listener), "a listener was reported after all connections were accepted")
    for link in links:
        if link is not None:
            link.close()
    harness.poller.remove(listener)


def the_poller_reports_a_one_shot_listener_once(harness: Harness) -> None:
    listener = harness.listener()
    harness.poller.add(listener, read=False)
    harness.connect()
    expect(not harness.polled(listener), "a listener that is not armed was reported")
    harness.poller.arm(listener, read=True)
    harness.poll_for(listener, Ready.READ)
    harness.poller.remove(listener)
    harness.poller.add(listener, read=True, once=True)
    harness.poll_for(listener, Ready.READ)
    expect(not harness.polled(listener), "a one-shot event was reported again")
    harness.poller.arm(listener, read=True)
    harness.poll_for(listener, Ready.READ)
    harness.poller.remove(listener)


def the_poller_reports_a_link_until_it_is_read(harness: Harness) -> None:
    client, server = harness.pair()
    harness.poller.add(server, read=True)
    expect(not harness.polled(server), "a link was reported before anything arrived")
    client.send(MESSAGE, b"x", 1, 0, 0)
    for _ in range(3):
        harness.poll_for(server, Ready.READ)
    harness.read(server, 1)
    expect(not harness.polled(server), "a link was reported after everything was read")
    client.send(MESSAGE, b"x", 2, 0, 0)
    harness.poll_for(server, Ready.READ)


def the_poller_reports_frames_that_arrived_before_the_link_was_added(harness: Harness) -> None:
    client, server = harness.pair()
    client.send(MESSAGE, b"x", 1, 0, 0)
    server.wait(time.monotonic() + PATIENCE)
    harness.poller.add(server, read=True)
    harness.poll_for(server, Ready.READ)


def the_poller_reports_a_one_shot_link_once_until_it_is_armed_again(harness: Harness) -> None:
    client, server = harness.pair()
    harness.poller.add(server, read=True, once=True)
    client.send(MESSAGE, b"x", 1, 0, 0)
    harness.poll_for(server, Ready.READ)
    client.send(MESSAGE, b"x", 2, 0, 0)
    expect(not harness.polled(server), "a one-shot event was reported again")
    harness.poller.arm(server, read=True)
    harness.poll_for(server, Ready.READ)
    harness.read(server, 2)
    harness.poller.arm(server, read=True)
    expect(not harness.polled(server), "a link was reported after everything was read")


def a_one_shot_link_that_is_added_again_is_reported_again(harness: Harness) -> None:
    client, server = harness.pair()
    harness.poller.add(server, read=True, once=True)
    client.send(MESSAGE, b"x", 1, 0, 0)
    harness.poll_for(server, Ready.READ)
    expect(not harness.polled(server), "a one-shot link was reported twice")
    harness.poller.add(server, read=True)
    harness.poll_for(server, Ready.READ)
    harness.poll_for(server, Ready.READ)


def sending_does_not_arm_the_poller(harness: Harness) -> None:
    client, server = harness.pair()
    harness.poller.add(server, read=True, once=True)
    client.send(MESSAGE, b"x", 1, 0, 0)
    harness.poll_for(server, Ready.READ)
    for sequence in range(1, 41):
        server.send(BULK_CHUNK, bytes(CHUNK), sequence, 0, 0)
    expect(not harness.polled(server) & Ready.READ, "sending made the poller report a one-shot event again")
    harness.poller.arm(server, read=True)
    harness.poll_for(server, Ready.READ)


def the_poller_reports_reads_only_while_armed(harness: Harness) -> None:
    for once in (False, True):
        client, server = harness.pair()
        harness.poller.add(server, read=False, once=once)
        client.send(MESSAGE, b"x", 1, 0, 0)
        expect(not harness.polled(server), "a read was reported while not armed")
        harness.poller.arm(server, read=True)
        harness.poll_for(server, Ready.READ)
        harness.poller.arm(server, read=False)
        expect(not harness.polled(server), "a read was reported after it was disarmed")


def the_poller_reports_the_end_of_a_link_even_if_not_armed(harness: Harness) -> None:
    for once in (False, True):
        client, server = harness.pair()
        harness.poller.add(server, read=False, once=once)
        client.close()
        harness.poll_for(server, Ready.READ)


def the_poller_reports_that_a_link_can_send_again(harness: Harness) -> None:
    for once in (False, True):
        client, server = harness.pair()
        harness.poller.add(client, read=True, once=once)
        count = 0
        while not client.unsent() and count < 100:
            count += 1
            client.send(BULK_CHUNK, bytes(CHUNK), count, 0, 0)
        if not client.unsent():
            raise NotApplicable("the link never queues frames")
        client.send(BULK_CHUNK, bytes(CHUNK), count + 1, 0, 0)
        reading = harness.in_background(lambda: harness.read(server, count + 1))  # noqa: B023 - used in this iteration
        while client.unsent():
            harness.poll_for(client, Ready.WRITE)
            client.flush()
        reading.result("reading everything that was sent")
        server.send(MESSAGE, b"x", 1, 0, 0)
        harness.poll_for(client, Ready.READ)


def the_poller_does_not_report_what_was_removed(harness: Harness) -> None:
    client, server = harness.pair()
    listener = harness.listener()
    for item in (server, listener):
        harness.poller.add(item, read=True)
        harness.poller.remove(item)
        harness.poller.remove(item)
    client.send(MESSAGE, b"x", 1, 0, 0)
    harness.connect()
    server.wait(time.monotonic() + PATIENCE)
    expect(not harness.polled(server), "a removed link was reported")
    expect(not harness.polled(listener), "a removed listener was reported")
    harness.poller.add(server, read=True)
    harness.poll_for(server, Ready.READ)


def the_poller_does_not_report_what_this_side_closed(harness: Harness) -> None:
    _, server = harness.pair()
    listener = harness.listener()
    harness.poller.add(server, read=True)
    harness.poller.add(listener, read=True)
    server.close()
    listener.close()
    expect(not harness.polled(server), "a link was reported after this side closed it")
    expect(not harness.polled(listener), "a listener was reported after this side closed it")
    harness.poller.remove(server)
    harness.poller.remove(listener)


def the_poller_reports_all_ready_links(harness: Harness) -> None:
    pairs = [harness.pair() for _ in range(50)]
    for client, server in pairs:
        harness.poller.add(server, read=True)
        client.send(MESSAGE, b"x", 1, 0, 0)
    ready: set[Link | Listener] = set()
    deadline = time.monotonic() + PATIENCE
    while len(ready) < len(pairs) and time.monotonic() < deadline:
        for item, _ in harness.poller.wait(deadline):
            ready.add(item)
            for _, server in pairs:
                if server is item:
                    list(server.receive())
    expect(
        ready == {server for _, server in pairs}, f"{len(ready)} of {len(pairs)} links were reported, or the wrong ones"
    )


def a_poll_ends_at_its_deadline(harness: Harness) -> None:
    check_deadline(harness.poller.wait, [])


def wake_ends_the_current_or_the_next_poll(harness: Harness) -> None:
    check_wake(harness, harness.poller.wake, harness.poller.wait, [])


def a_link_added_during_a_poll_is_watched(harness: Harness) -> None:
    client, server = harness.pair()
    waiting = harness.in_background(lambda: harness.poll_for(server, Ready.READ))
    harness.poller.add(server, read=True)
    client.send(MESSAGE, b"x", 1, 0, 0)
    waiting.result("a poll during which a link was added")


def a_closed_poller_leaves_reused_descriptors_alone(harness: Harness) -> None:
    harness.poller.close()
    numbers = [number for _ in range(4) for number in os.pipe()]  # they reuse the poller's descriptors
    try:
        harness.poller.close()
        harness.poller.wake()
        harness.poller.remove(harness.listener())
        harness.poller.abandon()
        for number in numbers:
            os.set_blocking(number, False)
        for number in numbers[::2]:
            try:
                expect(not os.read(number, 1), "a closed poller wrote to a descriptor it no longer owns")
            except BlockingIOError:
                continue  # nothing was written
    finally:
        for number in numbers:
            os.close(number)


POLLING_CHECKS: tuple[Check, ...] = (
    the_poller_reports_a_listener_until_all_connections_are_accepted,
    the_poller_reports_a_one_shot_listener_once,
    the_poller_reports_a_link_until_it_is_read,
    the_poller_reports_frames_that_arrived_before_the_link_was_added,
    the_poller_reports_a_one_shot_link_once_until_it_is_armed_again,
    a_one_shot_link_that_is_added_again_is_reported_again,
    sending_does_not_arm_the_poller,
    the_poller_reports_reads_only_while_armed,
    the_poller_reports_the_end_of_a_link_even_if_not_armed,
    the_poller_reports_that_a_link_can_send_again,
    the_poller_does_not_report_what_was_removed,
    the_poller_does_not_report_what_this_side_closed,
    the_poller_reports_all_ready_links,
    a_poll_ends_at_its_deadline,
    wake_ends_the_current_or_the_next_poll,
    a_link_added_during_a_poll_is_watched,
    a_closed_poller_leaves_reused_descriptors_alone,
)
