"""How a call ends: with a reply, an error of its peer, a deadline or a cancellation. Only the first end counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Protocol

from telegrad.calls.call import Call, Served
from telegrad.calls.link_reader import Waiter
from telegrad.calls.observing import OBSERVE
from telegrad.calls.pipeline import pack_head
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer
from telegrad.errors import CallCancelled, DeadlineExceeded, TelegradError, WorkerLost
from telegrad.events import CALL, Entry, EventRing
from telegrad.execution.executor import GuaranteedTask
from telegrad.interrupts import shielded
from telegrad.waiting import Event
from telegrad.wire.frames import Message
from telegrad.wire.messages import Cancel, Failure, Reply, Response

_log = logging.getLogger("telegrad")


_MOST_EXPLAINING = 3.0  # seconds
_HOLD = 1.0  # seconds
_LONGEST_TYPE = 200  # characters


class Explainer(Protocol):
    """Says why something took longer than its deadline."""

    def is_worth(self, elapsed: float) -> bool:
        """Return whether something that took so many seconds is worth an explanation."""

    def explain(self, what: str, call: int) -> str:
        """Return what a call, or something else (`call` is 0), waits for. May take a second, and be empty."""


class Completion:
    """Ends the calls that one agent made."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local
        self._now = local.runtime.now
        self._events = local.events
        self._lock = threading.Lock()  # protects the two below
        self._explaining: dict[int, Event] = {}  # calls whose deadlines are being explained
        self.failed = 0
        """How many calls ended with an error."""
        self.explainer: Explainer | None = None
        """Says what a call waits for whose deadline has passed."""
        local.events.catch_up = self._record_ended

    def _record_ended(self) -> None:
        """Record the calls that have ended well, and wait for that."""
        ring = self._events
        unrecorded, append = ring.unrecorded, ring.append
        try:
            while True:
                call, ended, received = unrecorded.pop(0)
                append(
                    (
                        next(ring.numbers),
                        _whole,
                        call.started,
                        ended,
                        call.id,
                        call.worker,
                        call.function,
                        call.context_id,
                        call.size + call.shared,
                        received,
                        call.thread,
                        call.sent,
                    )
                )
                if not unrecorded:
                    return
        except (IndexError, MemoryError):
            return  # there were none, or another thread has recorded the rest; or see `telegrad.events`

    def finish(
        self,
        call: Call,
        answer: Response | None = None,
        message: Message | None = None,
        error: Exception | None = None,
        *,
        given_up: bool = False,
    ) -> bool:
        """End a call; False if it has ended before. The reply to a call that was `given_up` may still arrive."""
        channel = call.channel
        if given_up:
            with channel.lock:
                if channel.calls.pop(call.id, None) is None:
                    return False
                # The callee counts the request until it replies, so its credits are returned only then. The poller
                # reads the reply: no thread may wait for another one.
                channel.abandoned[call.id] = call.charge
                channel.readers.unwaited += 1
                channel.readers.arm_poller()
        elif channel.calls.pop(call.id, None) is None:
            return False
        outcome = None
        if type(answer) is not Reply:
            outcome = self._outcome(call, answer, error)
        charge = call.charge
        if charge and answer is not None:
            call.charge = 0
            channel.credit_window.release(charge)
        call.message, call.error = message, error
        call.answer = answer
        if call.on_response is not None:
            self._run_at_once(call.on_response, call)
            call.on_response = None
        for waiter in call.waiters:  # before anything that may fail; again below, where none can be missed
            waiter.finished = True
        if call.timer is not None:
            self._local.executor.timers.cancel(call.timer)
        parent, call.parent = call.parent, None  # what ends with it must not live as long as the call
        if parent is not None:
            parent.children.pop(call.id, None)
        ring = self._events
        if ring.on:
            now = self._now  # looked up first: see `EventRing.append`
            try:
                if call.waiters and outcome is None and parent is None and message is not None:
                    # The thread that waits for the call gets it first, and records it while it waits for the next one.
                    ring.unrecorded.append((call, now(), message.total))
                else:
                    _record(ring, call, parent, outcome, now(), 0 if message is None else message.total)
            except MemoryError:
                _log.debug("no memory to record %s", call)  # whoever waits for it must get it
        on_done, call.on_done = call.on_done, None  # a future and its call must not keep each other alive
        if on_done is not None:
            if answer is None:
                channel.readers.expect_fewer(1)
                self._local.executor.submit(GuaranteedTask(on_done, call))
            elif call.at_once:
                channel.readers.expect_fewer(1)
                self._run_at_once(on_done, call)
            else:
                # The reading thread submits it, together with those that arrived at the same time.
                channel.receiver.completions.append(GuaranteedTask(on_done, call))
        # Threads may also wait for an asynchronous call, and several for one call.
        for waiter in list(call.waiters):
            # As `Waiter.set` does, without a function call for each reply.
            waiter.finished = True
            event = waiter.event
            if event is not None:
                event.set()
            elif waiter.leading and waiter.leading != get_ident():
                link = channel.link
                if link is not None:
                    link.wake()
        if (on_idle := self._local.on_idle) is not None:  # it may be removed now
            on_idle()
        return True

    def _outcome(self, call: Call, answer: Response | None, error: Exception | None) -> str | None:
        """Return the name of the class of what a call raises; None if it returns."""
        if error is None and not isinstance(answer, Failure):
            return None
        if call.function != OBSERVE:  # looking at the group leaves no traces
            with self._lock:
                self.failed += 1
        if isinstance(answer, Failure):
            return answer.type_name.rpartition(".")[2][:_LONGEST_TYPE]  # it is recorded, and may be any text
        return type(error).__name__

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the calls that a lost worker has not answered."""
        name = peer.record.name
        for channel in channels:
            for call in list(channel.calls.values()):
                elapsed = self._local.runtime.now() - call.started
                error = WorkerLost(
                    f"worker {name!r} is lost ({reason}) while it had {call.name()} to run, "
                    f"after {elapsed:.3g} s; the call may or may not have run",
                    worker=name,
                    function=call.function,
                    call=call.id,
                    elapsed=elapsed,
                )
                self.finish(call, error=error)

    def _run_at_once(self, on_done: Callable[[Call], None], call: Call) -> None:
        try:
            on_done(call)
        except Exception:  # noqa: BLE001 - a bug of ours must not stop the reader
            _log.exception("worker %r: the callback of %s failed", self._local.me.name, call)

    def expire(self, call: Call) -> None:
        elapsed = self._local.runtime.now() - call.started
        error = DeadlineExceeded(
            f"{call} was not answered within {elapsed:.3g} s; the worker was asked to cancel it. "
            "If it needs longer, give the call a larger timeout (0 for none)",
            worker=call.worker,
            function=call.function,
            call=call.id,
            elapsed=elapsed,
        )
        # Before the callee cancels it: after that, nothing can be seen any more.
        explainer = self.explainer
        if explainer is None or call.function == OBSERVE or not explainer.is_worth(elapsed):
            self._give_up(call, error, "its deadline passed")
        else:
            self._explain(explainer, call, error)

    def _explain(self, explainer: Explainer, call: Call, error: DeadlineExceeded) -> None:
        """Give a call up, with a note that says what it waited for."""
        with self._lock:
            done = self._explaining.get(call.id)
            if done is None:
                mine = self._explaining[call.id] = self._local.runtime.event()
        if done is not None:  # its waiting thread and a timer see the same deadline
            self._local.executor.wait(done, self._now() + _MOST_EXPLAINING)
            self._give_up(call, error, "its deadline passed")  # no effect if the other one has
            return
        try:
            parent = call.parent
            if parent is not None and parent.deadline == call.deadline:
                self._hold(call)
            if not call.done():
                text = explainer.explain(str(call), call.id)
                if text:
                    error.add_note(text)
                self._give_up(call, error, "its deadline passed")
        finally:
            with self._lock:
                del self._explaining[call.id]
            mine.set()

    def _hold(self, call: Call) -> None:
        """Wait for a moment before giving up a nested call whose deadline is that of the call that made it.

        The caller of that one sees its deadline pass now, too. It shall see what is here before it cancels all of it.
        """
        waiter = Waiter(event=self._local.runtime.event())
        call.waiters.append(waiter)
        try:
            if not call.done() and waiter.event is not None:
                self._local.executor.wait(waiter.event, self._now() + _HOLD)
        finally:
            call.waiters.remove(waiter)

    def cancel(self, call: Call, reason: str = "the caller cancelled it", error: TelegradError | None = None) -> bool:
        """Cancel a call, which then raises `error`, and tell the callee; False if it has ended already."""
        if error is None:
            error = CallCancelled(f"{call}: {reason}", worker=call.worker, function=call.function, call=call.id)
        return self._give_up(call, error, reason)

    @shielded
    def _give_up(self, call: Call, error: Exception, reason: str) -> bool:
        if not self.finish(call, error=error, given_up=True):
            return False
        try:
            call.channel.post(pack_head(call.channel, Cancel(call.id, reason)))
        except TelegradError as lost:  # nobody is left to tell
            _log.debug("%s was cancelled, but its worker is gone: %s", call, lost)
        return True


def _whole(entry: Entry) -> Entry:
    """Return the event of a call that went well with all fields."""
    return (entry[0], CALL, *entry[2:8], 0, None, "", *entry[8:])


def _record(
    ring: EventRing, call: Call, parent: Served | None, outcome: str | None, ended: float, received: int
) -> None:
    ring.record(
        CALL,
        call.started,
        ended,
        call.id,
        peer=call.worker,
        what=call.function,
        context=call.context_id,
        parent=None if parent is None else (parent.worker.name, parent.id),
        outcome=outcome or "",
        size=call.size + call.shared,
        received=received,
        thread=call.thread,
        marks=(call.sent,),
    )
