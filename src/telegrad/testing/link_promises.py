"""What a transport promises of its links and listeners, one function per promise; the name is the promise."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

from telegrad.errors import ProtocolError
from telegrad.testing.transport_bench import PATIENCE, SHORT, Bench, BrokenPromise, allocate, expect
from telegrad.transport.base import Link, LinkClosed, Ready
from telegrad.wire.frames import BULK_CHUNK, CHUNK, HANDSHAKE_LIMITS, MESSAGE, Frame, Kind, Limits, lane_of

_QUEUED = 50 * 1024 * 1024


def _same(frames: list[Frame], sent: list[tuple[int, bytes, int]]) -> None:
    """Compare what came with what was sent: kind, body and sequence, in order within each lane."""
    for lane in sorted({lane_of(kind) for kind, _, _ in sent}):
        came = [(frame.kind, bytes(frame.body), frame.sequence) for frame in frames if lane_of(frame.kind) == lane]
        expected = [entry for entry in sent if lane_of(entry[0]) == lane]
        expect(
            [sequence for _, _, sequence in came] == [sequence for _, _, sequence in expected],
            f"lane {lane} sent sequences up to {len(expected)}; {len(came)} frames came, or in another order",
        )
        expect(came == expected, f"a frame of lane {lane} changed on its way")


def _send_all(link: Link, frames: list[tuple[int, bytes, int]]) -> None:
    for kind, body, sequence in frames:
        link.send(kind, body, sequence, 0, 0)


def _queue_bulk(link: Link) -> list[tuple[int, bytes, int]]:
    """Send chunks until some wait for room, or 50 MB are on their way."""
    sent = []
    for sequence in range(1, _QUEUED // CHUNK + 1):
        sent.append((BULK_CHUNK, bytes([sequence % 251]) * CHUNK, sequence))
        link.send(BULK_CHUNK, sent[-1][1], sequence, 0, 0)
    return sent


# -- what is sent arrives -------------------------------------------------------------------------------------


def frames_arrive_unchanged_in_both_directions(bench: Bench) -> None:
    here, there = bench.pair()
    for sender, reader in ((here, there), (there, here)):
        for kind in Kind:
            sender.send(kind, b"the body", 2**63 + kind, 2**62, 2**61)
            (frame,) = bench.read(reader, 1)
            came = (frame.kind, bytes(frame.body), frame.sequence, frame.ack_control, frame.ack_bulk)
            expect(came == (kind, b"the body", 2**63 + kind, 2**62, 2**61), f"a {kind.name} arrived as {came}")


def empty_and_large_bodies_arrive(bench: Bench) -> None:
    here, there = bench.pair()
    bodies = [b"", b"x", bytes(range(256)) * 1000, os.urandom(5 * 1024 * 1024), b"", os.urandom(CHUNK)]
    sent = [(kind, body, number + 1) for kind in (MESSAGE, BULK_CHUNK) for number, body in enumerate(bodies)]
    _send_all(here, sent)
    _same(bench.read(there, len(sent), sender=here), sent)


def many_small_frames_arrive_in_order(bench: Bench) -> None:
    here, there = bench.pair()
    sent = [(MESSAGE, b"%d" % number * (number % 40), number) for number in range(1, 5001)]
    _send_all(here, sent)
    _same(bench.read(there, len(sent), sender=here), sent)


def what_was_sent_is_a_frame_even_if_many_threads_send(bench: Bench) -> None:
    here, there = bench.pair()

    def send(thread: int) -> None:
        for number in range(1, 201):
            here.send(MESSAGE, bytes([thread]) * (number * 10), number, thread, 0)

    errands = [bench.errand(lambda thread=thread: send(thread)) for thread in range(4)]  # type: ignore[misc]  # mypy cannot type a default
    frames = bench.read(there, 800, sender=here)
    for errand in errands:
        errand.result("send")
    for thread in range(4):
        sequences = [frame.sequence for frame in frames if frame.ack_control == thread]
        expect(sequences == list(range(1, 201)), "frames of one thread came in another order")
    expect(all(bytes(frame.body) == bytes([frame.ack_control]) * (frame.sequence * 10) for frame in frames), "mixed up")


def one_thread_can_send_while_another_waits_for_frames(bench: Bench) -> None:
    here, there = bench.pair()

    def echo() -> None:
        for number in range(1, 101):
            (frame,) = bench.read(there, 1)
            there.send(MESSAGE, bytes(frame.body), number, 0, 0)

    errand = bench.errand(echo)
    for number in range(1, 101):
        here.send(MESSAGE, b"%d" % number, number, 0, 0)
        (frame,) = bench.read(here, 1)
        expect(bytes(frame.body) == b"%d" % number, "an answer came out of order")
    errand.result("an echo")


def control_frames_pass_bulk_that_waits_for_room(bench: Bench) -> None:
    here, there = bench.pair()
    bulk = _queue_bulk(here)
    if not here.unsent():
        return  # whatever is sent has left at once: there is nothing to pass
    here.send(MESSAGE, b"small", 1, 0, 0)
    here.send(Kind.ACK, b"", 0, 5, 6)
    frames = bench.read(there, len(bulk) + 2, sender=here)
    kinds = [frame.kind for frame in frames]
    expect(kinds.index(MESSAGE) < len(bulk) // 2, f"a message came after {kinds.index(MESSAGE)} of {len(bulk)} chunks")
    expect(kinds.index(Kind.ACK) == kinds.index(MESSAGE) + 1, "control frames came in another order")
    _same([frame for frame in frames if frame.kind == BULK_CHUNK], bulk)


def ping_and_goodbye_pass_nothing(bench: Bench) -> None:
    for kind in (Kind.PING, Kind.GOODBYE):
        here, there = bench.pair()
        bulk = _queue_bulk(here)
        here.send(MESSAGE, b"before", 1, 0, 0)
        here.send(kind, b"", 0, 0, 0)
        frames = bench.read(there, len(bulk) + 2, sender=here)
        expect(frames[-1].kind == kind, f"a {kind.name} came before frames that were sent before it")


def a_link_that_shares_memory_passes_it_on_with_its_offer(bench: Bench) -> None:
    here, there = bench.pair()
    for sender, reader in ((here, there), (there, here)):
        end, other_end = os.pipe()
        try:
            offered = sender.offer(b"the body", end)
            os.close(end)
            expect(offered == sender.shares_memory, "`offer` and `shares_memory` do not agree")
            if not offered:
                continue
            sender.send(MESSAGE, b"after it", 1, 0, 0)
            first, second = bench.read(reader, 2)
            expect(
                (first.kind, bytes(first.body)) == (Kind.SLAB_OFFER, b"the body"), f"a SLAB_OFFER arrived as {first}"
            )
            expect(bytes(second.body) == b"after it", "the frame behind a SLAB_OFFER changed")
            came = reader.take_fd()
            expect(came is not None, "a SLAB_OFFER came without what was offered")
            assert came is not None  # for mypy
            os.write(other_end, b"x")
            expect(os.read(came, 1) == b"x", "another file descriptor came than the one that was offered")
            os.close(came)
            expect(reader.take_fd() is None, "more came than was offered")
        finally:
            os.close(other_end)


def what_was_offered_and_not_taken_is_closed_with_the_link(bench: Bench) -> None:
    here, there = bench.pair()
    if not here.shares_memory:
        return
    end, other_end = os.pipe()
    expect(here.offer(b"", end), "an idle link takes no offer")
    os.close(end)
    bench.read(there, 1)
    there.close()
    try:
        os.write(other_end, b"x")
    except BrokenPipeError:
        return
    finally:
        os.close(other_end)
    raise BrokenPromise("a file descriptor that came is still open")


# -- nothing waits --------------------------------------------------------------------------------------------


def send_never_waits_even_if_nobody_reads(bench: Bench) -> None:
    here, there = bench.pair()
    sent = bench.errand(lambda: _queue_bulk(here)).result("sending 50 MB that nobody reads")
    _same(bench.read(there, len(sent), sender=here), sent)
    expect(not here.unsent(), "something is said to be unsent after everything arrived")


def receive_never_waits(bench: Bench) -> None:
    here, there = bench.pair()
    for link in (here, there):
        frames = bench.errand(lambda link=link: list(link.receive())).result("receive on a silent link")  # type: ignore[misc]  # mypy cannot type a default
        expect(frames == [], f"{len(frames)} frames came that nobody sent")


def accept_never_waits(bench: Bench) -> None:
    listener = bench.listener()
    link = bench.errand(listener.accept).result("accept where nobody waits")
    expect(link is None, "a connection came that nobody made")


def frames_that_were_left_unread_come_next(bench: Bench) -> None:
    here, there = bench.pair()
    _send_all(here, [(MESSAGE, b"%d" % number, number) for number in range(1, 11)])
    sequences: list[int] = []
    while len(sequences) < 10:
        expect(bool(there.wait(time.monotonic() + PATIENCE) & Ready.READ), "frames that are there were not reported")
        for frame in there.receive():
            sequences.append(frame.sequence)
            break
    expect(sequences == list(range(1, 11)), f"the frames came as {sequences}")


# -- the end --------------------------------------------------------------------------------------------------


def the_link_ends_after_the_last_frame_that_came(bench: Bench) -> None:
    here, there = bench.pair()
    there.send(MESSAGE, b"nobody reads this", 1, 0, 0)
    sent = [(MESSAGE, b"%d" % number, number) for number in range(1, 101)]
    _send_all(here, sent)
    here.close()
    frames, error = bench.read_to_the_end(there)
    _same(frames, sent)
    expect(isinstance(error, LinkClosed) and bool(str(error)), f"{error!r} instead of a LinkClosed that says why")
    frames, error = bench.read_to_the_end(there)
    expect(not frames and isinstance(error, LinkClosed), "reading again did not say again that the link is closed")


def closing_ends_the_other_side(bench: Bench) -> None:
    for closes_first in (0, 1):
        links = bench.pair()
        waiting = bench.errand(lambda: bench.read_to_the_end(links[1 - closes_first]))  # noqa: B023 - used in this round
        links[closes_first].close()
        _, error = waiting.result("reading from a link whose other side was closed")
        expect(isinstance(error, LinkClosed), f"{error!r} instead of LinkClosed")


def closing_wakes_a_reader_on_this_side(bench: Bench) -> None:
    for _ in range(20):
        here, _ = bench.pair()
        waiting = bench.errand(lambda: bench.read_to_the_end(here))  # noqa: B023 - used in this round
        here.close()
        _, error = waiting.result("a wait on a link that was closed")
        expect(isinstance(error, LinkClosed), f"{error!r} instead of LinkClosed")


def sending_on_a_closed_link_does_nothing(bench: Bench) -> None:
    here, there = bench.pair()
    here.close()
    here.close()
    for link in (here, there):
        for number in range(1, 11):
            link.send(MESSAGE, b"x" * 100_000, number, 0, 0)
        link.flush()
        bench.read_to_the_end(link)


def abandoning_in_the_child_of_a_fork_leaves_the_parent_alone(bench: Bench) -> None:
    here, there = bench.pair()
    bench.poller.add(there, read=True)
    with warnings.catch_warnings():
        # Of fork beside threads: this child only abandons, and exits.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            for handle in (here, there, bench.listener(), bench.poller):
                handle.abandon()
            os._exit(0)
        finally:
            os._exit(1)
    expect(os.waitpid(child, 0)[1] == 0, "abandon failed in the child of a fork")
    here.send(MESSAGE, b"still there", 1, 0, 0)
    bench.poll_for(there, Ready.READ)
    expect(bytes(bench.read(there, 1)[0].body) == b"still there", "a frame changed")
    bench.poller.remove(there)
    bench.pair()


# -- waiting --------------------------------------------------------------------------------------------------


def check_deadline(wait: Callable[[float | None], object], nothing: object) -> None:
    """A wait in which nothing happens ends at its deadline, and not before."""
    for seconds in (-1.0, 0.0, SHORT):
        deadline = time.monotonic() + seconds
        result = wait(deadline)
        late = time.monotonic() - deadline
        expect(result == nothing, f"{result!r} was reported although nothing happened")
        expect(late > -0.002, f"a wait ended {-late:.3f} s before its deadline")
        expect(late < 1 + PATIENCE, f"a wait ended {late:.3f} s after its deadline")


def check_wake(bench: Bench, wake: Callable[[], None], wait: Callable[[float | None], object], nothing: object) -> None:
    """`wake` ends a wait that is under way or the next one, and only one."""
    for _ in range(20):
        waiting = bench.errand(lambda: wait(time.monotonic() + 2 * PATIENCE))
        wake()
        result = waiting.result("a wait that was woken")
        expect(result == nothing, f"{result!r} was reported after wake")
    wake()
    wake()
    bench.errand(lambda: wait(time.monotonic() + 2 * PATIENCE)).result("the wait after wake")
    check_deadline(wait, nothing)


def a_wait_ends_at_its_deadline(bench: Bench) -> None:
    here, there = bench.pair()
    check_deadline(here.wait, Ready.NOTHING)
    check_deadline(lambda deadline: there.wait(deadline, bench.poller), Ready.NOTHING)


def wake_ends_the_current_or_the_next_wait(bench: Bench) -> None:
    here, there = bench.pair()
    check_wake(bench, here.wake, here.wait, Ready.NOTHING)
    check_wake(bench, there.wake, lambda deadline: there.wait(deadline, bench.poller), Ready.NOTHING)


def waking_a_closed_link_does_nothing(bench: Bench) -> None:
    here, there = bench.pair()
    here.close()
    for link in (here, there):
        link.wake()
        bench.read_to_the_end(link)


def a_wait_reports_what_the_given_poller_has(bench: Bench) -> None:
    here, there = bench.pair()
    other, its_end = bench.pair()
    bench.poller.add(its_end, read=True)
    for _ in range(10):
        waiting = bench.errand(lambda: here.wait(time.monotonic() + 2 * PATIENCE, bench.poller))
        other.send(MESSAGE, b"for the poller", 1, 0, 0)
        ready = waiting.result("a wait whose poller has something")
        expect(ready == Ready.POLLER, f"{ready!r} instead of POLLER")
        expect(bench.polled(its_end) == Ready.READ, "the poller lost what it had")
        bench.read(its_end, 1)
    waiting = bench.errand(lambda: here.wait(time.monotonic() + 2 * PATIENCE, bench.poller))
    bench.poller.wake()
    ready = waiting.result("a wait whose poller was woken")
    expect(ready == Ready.POLLER, f"{ready!r} instead of POLLER when the poller was woken")
    bench.poller.wait(time.monotonic())
    there.send(MESSAGE, b"for the link", 1, 0, 0)
    ready = here.wait(time.monotonic() + PATIENCE, bench.poller)
    expect(ready == Ready.READ, f"{ready!r} instead of READ when only the link has something")
    bench.poller.remove(its_end)


def a_wait_sends_what_is_queued(bench: Bench) -> None:
    here, there = bench.pair()
    sent = _queue_bulk(here)

    def wait_until_sent() -> None:
        deadline = time.monotonic() + PATIENCE
        while here.unsent() and time.monotonic() < deadline:
            here.wait(deadline)

    waiting = bench.errand(wait_until_sent)
    _same(bench.read(there, len(sent)), sent)
    waiting.result("waiting until all is sent")
    expect(not here.unsent(), "a wait did not send what was queued")


# -- strangers ------------------------------------------------------------------------------------------------


def _refused(bench: Bench, kind: int, size: int, *, limits: Limits | None = None) -> None:
    here, there = bench.pair(admitted=False)
    if limits is not None:
        there.admit(limits, allocate)
    here.send(kind, b"x" * size, 1, 0, 0)
    try:
        frames = bench.read(there, 1, sender=here)
    except (LinkClosed, ProtocolError):
        return
    raise BrokenPromise(f"a frame of kind {kind} and {len(frames[0].body)} bytes was let through")


def a_stranger_gets_only_its_handshake_through(bench: Bench) -> None:
    here, there = bench.pair(admitted=False)
    for sender, reader in ((here, there), (there, here)):
        sender.send(Kind.HANDSHAKE, b"x" * HANDSHAKE_LIMITS.frame, 0, 0, 0)
        (frame,) = bench.read(reader, 1)
        expect(len(frame.body) == HANDSHAKE_LIMITS.frame, "a greeting changed on its way")
    for kind in Kind:
        if kind != Kind.HANDSHAKE:
            _refused(bench, kind, 10)
    _refused(bench, Kind.HANDSHAKE, HANDSHAKE_LIMITS.frame + 1)
    _refused(bench, Kind.HANDSHAKE, 200_000)


def nobody_gets_more_through_than_the_limit(bench: Bench) -> None:
    for kind in (MESSAGE, BULK_CHUNK):
        _refused(bench, kind, 10_001, limits=Limits(frame=10_000))


# -- listening and connecting ---------------------------------------------------------------------------------


def connecting_where_nobody_listens_is_refused(bench: Bench) -> None:
    listener = bench.listener()
    listener.close()
    try:
        bench.transport.connect(listener.address, time.monotonic() + PATIENCE).close()
    except ConnectionRefusedError:
        return
    raise BrokenPromise(f"somebody answered at {listener.address}, where the listener was closed")


def an_address_in_use_cannot_be_listened_at(bench: Bench) -> None:
    address = bench.listener().address
    try:
        bench.transport.listen(address).close()
    except OSError:
        bench.pair()  # the one that was first still listens
        return
    raise BrokenPromise(f"two listen at {address}")


def an_address_is_free_again_when_its_listener_is_closed(bench: Bench) -> None:
    bench.pair()
    listener = bench.listener()
    listener.close()
    again = bench.transport.listen(listener.address)
    try:
        expect(again.address == listener.address, f"{again.address} instead of {listener.address}")
        bench.transport.connect(again.address, time.monotonic() + PATIENCE).close()
    finally:
        again.close()


def links_say_whether_they_can_be_resumed_and_who_is_there(bench: Bench) -> None:
    for link in bench.pair():
        expect(link.resumable == bench.transport.resumable, "a link and its transport differ in `resumable`")
        expect(bool(link.peer), "a link does not say who is at its other end")


LINK_PROMISES: tuple[Callable[[Bench], None], ...] = (
    frames_arrive_unchanged_in_both_directions,
    empty_and_large_bodies_arrive,
    many_small_frames_arrive_in_order,
    what_was_sent_is_a_frame_even_if_many_threads_send,
    one_thread_can_send_while_another_waits_for_frames,
    control_frames_pass_bulk_that_waits_for_room,
    ping_and_goodbye_pass_nothing,
    a_link_that_shares_memory_passes_it_on_with_its_offer,
    what_was_offered_and_not_taken_is_closed_with_the_link,
    send_never_waits_even_if_nobody_reads,
    receive_never_waits,
    accept_never_waits,
    frames_that_were_left_unread_come_next,
    the_link_ends_after_the_last_frame_that_came,
    closing_ends_the_other_side,
    closing_wakes_a_reader_on_this_side,
    sending_on_a_closed_link_does_nothing,
    abandoning_in_the_child_of_a_fork_leaves_the_parent_alone,
    a_wait_ends_at_its_deadline,
    wake_ends_the_current_or_the_next_wait,
    waking_a_closed_link_does_nothing,
    a_wait_reports_what_the_given_poller_has,
    a_wait_sends_what_is_queued,
    a_stranger_gets_only_its_handshake_through,
    nobody_gets_more_through_than_the_limit,
    connecting_where_nobody_listens_is_refused,
    an_address_in_use_cannot_be_listened_at,
    an_address_is_free_again_when_its_listener_is_closed,
    links_say_whether_they_can_be_resumed_and_who_is_there,
)
