"""Checks of `Link.wait` and `Link.wake`: deadlines, wake-ups, and waits that also watch a poller."""

from __future__ import annotations

import time

from telegrad.testing.transport_contract.harness import (
    PATIENCE,
    Check,
    Harness,
    check_deadline,
    check_wake,
    expect,
    expect_same,
    queue_bulk,
)
from telegrad.transport.base import Ready
from telegrad.wire.frames import MESSAGE


def a_wait_ends_at_its_deadline(harness: Harness) -> None:
    client, server = harness.pair()
    check_deadline(client.wait, Ready.NOTHING)
    check_deadline(lambda deadline: server.wait(deadline, harness.poller), Ready.NOTHING)


def wake_ends_the_current_or_the_next_wait(harness: Harness) -> None:
    client, server = harness.pair()
    check_wake(harness, client.wake, client.wait, Ready.NOTHING)
    check_wake(harness, server.wake, lambda deadline: server.wait(deadline, harness.poller), Ready.NOTHING)


def waking_a_closed_link_does_nothing(harness: Harness) -> None:
    client, server = harness.pair()
    client.close()
    for link in (client, server):
        link.wake()
        harness.read_to_the_end(link)


def a_wait_reports_that_the_given_poller_is_ready(harness: Harness) -> None:
    client, server = harness.pair()
    other_client, other_server = harness.pair()
    harness.poller.add(other_server, read=True)
    for _ in range(10):
        waiting = harness.in_background(lambda: client.wait(time.monotonic() + 2 * PATIENCE, harness.poller))
        other_client.send(MESSAGE, b"for the poller", 1, 0, 0)
        ready = waiting.result("a wait whose poller is ready")
        expect(ready == Ready.POLLER, f"{ready!r} instead of POLLER")
        expect(harness.polled(other_server) == Ready.READ, "the poller lost its event")
        harness.read(other_server, 1)
    waiting = harness.in_background(lambda: client.wait(time.monotonic() + 2 * PATIENCE, harness.poller))
    harness.poller.wake()
    ready = waiting.result("a wait whose poller was woken")
    expect(ready == Ready.POLLER, f"{ready!r} instead of POLLER when the poller was woken")
    harness.poller.wait(time.monotonic())
    server.send(MESSAGE, b"for the link", 1, 0, 0)
    ready = client.wait(time.monotonic() + PATIENCE, harness.poller)
    expect(ready == Ready.READ, f"{ready!r} instead of READ when only the link is ready")
    harness.poller.remove(other_server)


def a_wait_flushes_the_send_queue(harness: Harness) -> None:
    client, server = harness.pair()
    sent = queue_bulk(client)

    def wait_until_sent() -> None:
        deadline = time.monotonic() + PATIENCE
        while client.unsent() and time.monotonic() < deadline:
            client.wait(deadline)

    waiting = harness.in_background(wait_until_sent)
    expect_same(harness.read(server, len(sent)), sent)
    waiting.result("waiting until everything is sent")
    expect(not client.unsent(), "a wait did not flush the send queue")


WAITING_CHECKS: tuple[Check, ...] = (
    a_wait_ends_at_its_deadline,
    wake_ends_the_current_or_the_next_wait,
    waking_a_closed_link_does_nothing,
    a_wait_reports_that_the_given_poller_is_ready,
    a_wait_flushes_the_send_queue,
)
