"""How a call ends: with a reply, an error of its peer, a deadline or a cancellation. Only the first end counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import get_ident

from telegrad.calls.call import Call
from telegrad.calls.pipeline import pack_head
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peer
from telegrad.errors import CallCancelled, DeadlineExceeded, TelegradError, WorkerLost
from telegrad.execution.executor import GuaranteedTask
from telegrad.interrupts import shielded
from telegrad.wire.frames import Message
from telegrad.wire.messages import Cancel, Response

_log = logging.getLogger("telegrad")


class Completion:
    """Ends the calls that one agent made."""

    def __init__(self, local: LocalWorker) -> None:
        self._local = local

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
        charge = call.charge
        if charge and answer is not None:
            call.charge = 0
            channel.credit_window.release(charge)
        call.message, call.error = message, error
        call.answer = answer
        for waiter in call.waiters:  # before anything that may fail; again below, where none can be missed
            waiter.finished = True
        if call.timer is not None:
            self._local.executor.timers.cancel(call.timer)
        parent, call.parent = call.parent, None  # what ends with it must not live as long as the call
        if parent is not None:
            parent.children.pop(call.id, None)
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
        if self._local.on_idle is not None:
            self._local.on_idle()
        return True

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the calls that a lost worker has not answered."""
        name = peer.record.name
        for channel in channels:
            for call in list(channel.calls.values()):
                elapsed = self._local.runtime.now() - call.started
                error = WorkerLost(
                    f"worker {name!r} is lost ({reason}) while it had {call.function or 'a function'} to run, "
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
        self._give_up(call, error, "its deadline passed")

    def cancel(self, call: Call, reason: str = "the caller cancelled it") -> bool:
        """Cancel a call and tell the callee; False if it has ended already."""
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
