"""Checks that frames arrive unchanged and in order, and that sending and receiving never block."""

from __future__ import annotations

import os
import time

from telegrad.testing.contract import BrokenPromise, NotApplicable
from telegrad.testing.transport_contract.harness import (
    PATIENCE,
    Check,
    Harness,
    expect,
    expect_same,
    queue_bulk,
    send_all,
)
from telegrad.transport.base import Ready
from telegrad.wire.frames import BULK_CHUNK, CHUNK, MESSAGE, Kind


def frames_arrive_unchanged_in_both_directions(harness: Harness) -> None:
    client, server = harness.pair()
    for sender, reader in ((client, server), (server, client)):
        for kind in Kind:
            sender.send(kind, b"the body", 2**63 + kind, 2**62, 2**61)
            (frame,) = harness.read(reader, 1)
            came = (frame.kind, bytes(frame.body), frame.sequence, frame.ack_control, frame.ack_bulk)
            expect(came == (kind, b"the body", 2**63 + kind, 2**62, 2**61), f"a {kind.name} arrived as {came}")


def empty_and_large_bodies_arrive(harness: Harness) -> None:
    client, server = harness.pair()
    bodies = [b"", b"x", bytes(range(256)) * 1000, os.urandom(5 * 1024 * 1024), b"", os.urandom(CHUNK)]
    sent = [(kind, body, number + 1) for kind in (MESSAGE, BULK_CHUNK) for number, body in enumerate(bodies)]
    send_all(client, sent)
    expect_same(harness.read(server, len(sent), sender=client), sent)


def many_small_frames_arrive_in_order(harness: Harness) -> None:
    client, server = harness.pair()
    sent = [(MESSAGE, b"%d" % number * (number % 40), number) for number in range(1, 5001)]
    send_all(client, sent)
    expect_same(harness.read(server, len(sent), sender=client), sent)


def frames_stay_whole_when_many_threads_send(harness: Harness) -> None:
    client, server = harness.pair()

    def send(thread: int) -> None:
        for number in range(1, 201):
            client.send(MESSAGE, bytes([thread]) * (number * 10), number, thread, 0)

    tasks = [harness.in_background(lambda thread=thread: send(thread)) for thread in range(4)]  # type: ignore[misc]  # mypy cannot type a default
    frames = harness.read(server, 800, sender=client)
    for task in tasks:
        task.result("sending")
    for thread in range(4):
        sequences = [frame.sequence for frame in frames if frame.ack_control == thread]
        expect(sequences == list(range(1, 201)), "the frames of one thread were reordered")
    expect(
        all(bytes(frame.body) == bytes([frame.ack_control]) * (frame.sequence * 10) for frame in frames),
        "frames were mixed up",
    )


def one_thread_can_send_while_another_waits(harness: Harness) -> None:
    client, server = harness.pair()

    def echo() -> None:
        for number in range(1, 101):
            (frame,) = harness.read(server, 1)
            server.send(MESSAGE, bytes(frame.body), number, 0, 0)

    task = harness.in_background(echo)
    for number in range(1, 101):
        client.send(MESSAGE, b"%d" % number, number, 0, 0)
        (frame,) = harness.read(client, 1)
        expect(bytes(frame.body) == b"%d" % number, "a reply arrived out of order")
    task.result("the echo")


def control_frames_overtake_queued_bulk(harness: Harness) -> None:
    client, server = harness.pair()
    bulk = queue_bulk(client)
    if not client.unsent():
        raise NotApplicable("the link never queues frames")
    client.send(MESSAGE, b"small", 1, 0, 0)
    client.send(Kind.ACK, b"", 0, 5, 6)
    frames = harness.read(server, len(bulk) + 2, sender=client)
    kinds = [frame.kind for frame in frames]
    expect(
        kinds.index(MESSAGE) < len(bulk) // 2, f"a message arrived after {kinds.index(MESSAGE)} of {len(bulk)} chunks"
    )
    expect(kinds.index(Kind.ACK) == kinds.index(MESSAGE) + 1, "control frames were reordered")
    expect_same([frame for frame in frames if frame.kind == BULK_CHUNK], bulk)


def ping_and_goodbye_overtake_nothing(harness: Harness) -> None:
    for kind in (Kind.PING, Kind.GOODBYE):
        client, server = harness.pair()
        bulk = queue_bulk(client)
        client.send(MESSAGE, b"before", 1, 0, 0)
        client.send(kind, b"", 0, 0, 0)
        frames = harness.read(server, len(bulk) + 2, sender=client)
        expect(frames[-1].kind == kind, f"a {kind.name} overtook frames that were sent before it")


def an_offer_carries_its_file_descriptor(harness: Harness) -> None:
    client, server = harness.pair()
    for sender, reader in ((client, server), (server, client)):
        end, other_end = os.pipe()
        try:
            offered = sender.offer(b"the body", end)
            os.close(end)
            expect(offered == sender.shares_memory, "`offer` and `shares_memory` do not agree")
            if not offered:
                continue
            sender.send(MESSAGE, b"after it", 1, 0, 0)
            first, second = harness.read(reader, 2)
            expect(
                (first.kind, bytes(first.body)) == (Kind.SLAB_OFFER, b"the body"), f"a SLAB_OFFER arrived as {first}"
            )
            expect(bytes(second.body) == b"after it", "the frame after a SLAB_OFFER changed")
            came = reader.take_fd()
            expect(came is not None, "a SLAB_OFFER arrived without its file descriptor")
            assert came is not None  # for mypy
            os.write(other_end, b"x")
            expect(os.read(came, 1) == b"x", "the file descriptor that arrived is not the one that was offered")
            os.close(came)
            expect(reader.take_fd() is None, "more file descriptors arrived than were offered")
        finally:
            os.close(other_end)


def an_offered_descriptor_that_was_not_taken_is_closed_with_the_link(harness: Harness) -> None:
    client, server = harness.pair()
    if not client.shares_memory:
        raise NotApplicable("the link cannot pass file descriptors")
    end, other_end = os.pipe()
    expect(client.offer(b"", end), "an idle link refuses an offer")
    os.close(end)
    harness.read(server, 1)
    server.close()
    try:
        os.write(other_end, b"x")
    except BrokenPipeError:
        return
    finally:
        os.close(other_end)
    raise BrokenPromise("the received file descriptor is still open")


def send_never_blocks_even_if_nobody_reads(harness: Harness) -> None:
    client, server = harness.pair()
    sent = harness.in_background(lambda: queue_bulk(client)).result("sending 50 MB that nobody reads")
    expect_same(harness.read(server, len(sent), sender=client), sent)
    expect(not client.unsent(), "`unsent` is true after everything arrived")


def receive_never_blocks(harness: Harness) -> None:
    client, server = harness.pair()
    for link in (client, server):
        frames = harness.in_background(lambda link=link: list(link.receive())).result("receive on a silent link")  # type: ignore[misc]  # mypy cannot type a default
        expect(frames == [], f"{len(frames)} frames arrived that nobody sent")


def accept_never_blocks(harness: Harness) -> None:
    listener = harness.listener()
    link = harness.in_background(listener.accept).result("accept without a pending connection")
    expect(link is None, "accept returned a connection that nobody made")


def receive_resumes_after_the_last_frame_that_was_read(harness: Harness) -> None:
    client, server = harness.pair()
    send_all(client, [(MESSAGE, b"%d" % number, number) for number in range(1, 11)])
    sequences: list[int] = []
    while len(sequences) < 10:
        expect(bool(server.wait(time.monotonic() + PATIENCE) & Ready.READ), "a wait did not report unread frames")
        for frame in server.receive():
            sequences.append(frame.sequence)
            break
    expect(sequences == list(range(1, 11)), f"the frames arrived as {sequences}")


DELIVERY_CHECKS: tuple[Check, ...] = (
    frames_arrive_unchanged_in_both_directions,
    empty_and_large_bodies_arrive,
    many_small_frames_arrive_in_order,
    frames_stay_whole_when_many_threads_send,
    one_thread_can_send_while_another_waits,
    control_frames_overtake_queued_bulk,
    ping_and_goodbye_overtake_nothing,
    an_offer_carries_its_file_descriptor,
    an_offered_descriptor_that_was_not_taken_is_closed_with_the_link,
    send_never_blocks_even_if_nobody_reads,
    receive_never_blocks,
    accept_never_blocks,
    receive_resumes_after_the_last_frame_that_was_read,
)
