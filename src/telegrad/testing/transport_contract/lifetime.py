"""Checks of how connections begin and end: listening, connecting, admission, limits, closing and forking."""

from __future__ import annotations

import os
import time
import warnings

from telegrad.errors import ProtocolError
from telegrad.testing.contract import BrokenPromise
from telegrad.testing.transport_contract.harness import (
    PATIENCE,
    Check,
    Harness,
    allocate,
    expect,
    expect_same,
    send_all,
)
from telegrad.transport.base import LinkClosed, Ready
from telegrad.wire.frames import BULK_CHUNK, HANDSHAKE_LIMITS, MESSAGE, Kind, Limits


def connecting_where_nobody_listens_is_refused(harness: Harness) -> None:
    listener = harness.listener()
    listener.close()
    try:
        harness.transport.connect(listener.address, time.monotonic() + PATIENCE).close()
    except ConnectionRefusedError:
        return
    raise BrokenPromise(f"a connection to {listener.address} succeeded after its listener was closed")


def listening_on_an_address_in_use_fails(harness: Harness) -> None:
    address = harness.listener().address
    try:
        harness.transport.listen(address).close()
    except OSError:
        while (probe := harness.listener().accept()) is not None:  # the second one may have tried whether it answers
            probe.close()
        harness.pair()  # the first listener still works
        return
    raise BrokenPromise(f"two listeners share {address}")


def closing_a_listener_frees_its_address(harness: Harness) -> None:
    harness.pair()
    listener = harness.listener()
    listener.close()
    again = harness.transport.listen(listener.address)
    try:
        expect(again.address == listener.address, f"{again.address} instead of {listener.address}")
        harness.pair(listener=again)
    finally:
        again.close()


def links_report_resumable_and_peer(harness: Harness) -> None:
    for link in harness.pair():
        expect(link.resumable == harness.transport.resumable, "a link and its transport differ in `resumable`")
        expect(bool(link.peer), "a link does not name its peer")


def _refused(harness: Harness, kind: int, size: int, *, limits: Limits | None = None) -> None:
    client, server = harness.pair(admitted=False)
    if limits is not None:
        server.admit(limits, allocate)
    client.send(kind, b"x" * size, 1, 0, 0)
    try:
        frames = harness.read(server, 1, sender=client)
    except (LinkClosed, ProtocolError):
        return
    raise BrokenPromise(f"a frame of kind {kind} and {len(frames[0].body)} bytes was accepted")


def only_a_small_handshake_passes_before_admission(harness: Harness) -> None:
    client, server = harness.pair(admitted=False)
    for sender, reader in ((client, server), (server, client)):
        sender.send(Kind.HANDSHAKE, b"x" * HANDSHAKE_LIMITS.frame, 0, 0, 0)
        (frame,) = harness.read(reader, 1)
        expect(len(frame.body) == HANDSHAKE_LIMITS.frame, "a handshake changed in transit")
    for kind in Kind:
        if kind != Kind.HANDSHAKE:
            _refused(harness, kind, 10)
    _refused(harness, Kind.HANDSHAKE, HANDSHAKE_LIMITS.frame + 1)
    _refused(harness, Kind.HANDSHAKE, 200_000)


def frames_above_the_limit_are_rejected(harness: Harness) -> None:
    for kind in (MESSAGE, BULK_CHUNK):
        _refused(harness, kind, 10_001, limits=Limits(frame=10_000))


def all_frames_are_read_before_the_link_reports_other_server(harness: Harness) -> None:
    client, server = harness.pair()
    server.send(MESSAGE, b"nobody reads this", 1, 0, 0)
    sent = [(MESSAGE, b"%d" % number, number) for number in range(1, 101)]
    send_all(client, sent)
    client.close()
    frames, error = harness.read_to_the_end(server)
    expect_same(frames, sent)
    expect(isinstance(error, LinkClosed) and bool(str(error)), f"{error!r} instead of a LinkClosed with a reason")
    frames, error = harness.read_to_the_end(server)
    expect(not frames and isinstance(error, LinkClosed), "a second read did not raise LinkClosed again")


def closing_one_side_ends_the_other(harness: Harness) -> None:
    for closes_first in (0, 1):
        links = harness.pair()
        waiting = harness.in_background(lambda: harness.read_to_the_end(links[1 - closes_first]))  # noqa: B023 - used in this iteration
        links[closes_first].close()
        _, error = waiting.result("reading from a link whose other side was closed")
        expect(isinstance(error, LinkClosed), f"{error!r} instead of LinkClosed")


def closing_wakes_a_reader_on_the_same_side(harness: Harness) -> None:
    for _ in range(20):
        client, _ = harness.pair()
        waiting = harness.in_background(lambda: harness.read_to_the_end(client))  # noqa: B023 - used in this iteration
        client.close()
        _, error = waiting.result("a wait on a link that was closed")
        expect(isinstance(error, LinkClosed), f"{error!r} instead of LinkClosed")


def sending_on_a_closed_link_does_nothing(harness: Harness) -> None:
    client, server = harness.pair()
    client.close()
    client.close()
    for link in (client, server):
        for number in range(1, 11):
            link.send(MESSAGE, b"x" * 100_000, number, 0, 0)
        link.flush()
        harness.read_to_the_end(link)


def abandoning_after_fork_does_not_affect_the_parent(harness: Harness) -> None:
    client, server = harness.pair()
    harness.poller.add(server, read=True)
    with warnings.catch_warnings():
        # Python warns about forking with threads; this child only calls abandon and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            for handle in (client, server, harness.listener(), harness.poller):
                handle.abandon()
            os._exit(0)
        finally:
            os._exit(1)
    expect(os.waitpid(child, 0)[1] == 0, "abandon failed in the child of a fork")
    client.send(MESSAGE, b"after the fork", 1, 0, 0)
    harness.poll_for(server, Ready.READ)
    expect(bytes(harness.read(server, 1)[0].body) == b"after the fork", "a frame changed")
    harness.poller.remove(server)
    harness.pair()


LIFETIME_CHECKS: tuple[Check, ...] = (
    connecting_where_nobody_listens_is_refused,
    listening_on_an_address_in_use_fails,
    closing_a_listener_frees_its_address,
    links_report_resumable_and_peer,
    only_a_small_handshake_passes_before_admission,
    frames_above_the_limit_are_rejected,
    all_frames_are_read_before_the_link_reports_other_server,
    closing_one_side_ends_the_other,
    closing_wakes_a_reader_on_the_same_side,
    sending_on_a_closed_link_does_nothing,
    abandoning_after_fork_does_not_affect_the_parent,
)
