"""The calls that this worker makes: from the request to the answer, a deadline, a cancellation or a loss."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from telegrad.calls.call import Call, Waiter, current_served
from telegrad.calls.collectives import SERVICE
from telegrad.calls.deadlines import Deadlines
from telegrad.calls.exceptions import read_answer, read_failure
from telegrad.calls.keeper import Keeper
from telegrad.calls.recorder import Recorder
from telegrad.connection.channel import Channel
from telegrad.connection.peers import Peer, Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallCancelled, DeadlineExceeded, NotInitialized, TelegradError
from telegrad.execution.autocast import current as current_autocast
from telegrad.execution.executor import Executor, Owed
from telegrad.interrupts import shielded
from telegrad.settings import AgentSettings
from telegrad.transport.base import Ready
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Runtime
from telegrad.wire import function_names, payload
from telegrad.wire.frames import Message
from telegrad.wire.messages import (
    Cancel,
    Creation,
    Failure,
    Request,
    RequestInAutocast,
    Response,
    RRefAccess,
    encode_head,
)
from telegrad.wire.packing import OutgoingFrame, pack
from telegrad.wire.tensors import encode_tensors
from telegrad.wire.torch_state import autocast_is_enabled

_log = logging.getLogger("telegrad")
_READ = Ready.READ
_ROOT = ("args", "kwargs")


class ClientOwner(Protocol):
    """What calling needs of its agent."""

    closed: str
    me: WorkerRecord
    settings: AgentSettings
    runtime: Runtime
    executor: Executor
    buffers: BufferPool
    peers: Peers
    recorder: Recorder | None
    keeper: Keeper | None
    draining: bool
    carries_autocast: bool

    def activity_ended(self) -> None:
        """A call has ended while a shutdown waits for quiet."""


class Client:
    """The calls that one agent makes."""

    def __init__(self, owner: ClientOwner) -> None:
        self._owner = owner
        self._call_ids = itertools.count(1)
        self._deadlines = Deadlines(owner.runtime, owner.executor, self._expire)
        self.made = 0
        """Calls ever made, but for gatherings; only compared."""

    def call(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
    ) -> Any:
        """See `Agent.call`."""
        return self.complete(self.begin(to, function, args, kwargs, timeout))

    def complete(self, call: Call) -> Any:
        """Wait for a call, and return its result."""
        try:
            if call.answer is None:
                self.wait(call)
        except BaseException:
            self.cancel(call, "the caller was interrupted")
            raise
        return self.result(call)

    def ask(self, to: str | int, what: str, make_head: Callable[[int], Any], timeout: float | None) -> Call:
        """Start a call that is a message of its own kind, made from the call's number. It takes no credits."""
        now = self._owner.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing or self._owner.peers.channel_to(peer, deadline)
        call = Call(next(self._call_ids), channel, peer.record.name, what, now, deadline)
        self.made += 1
        channel.calls[call.id] = call
        try:
            channel.post(pack(encode_head(make_head(call.id)), b"", None, channel.room))
        except BaseException:
            self._forget(call, peer)
            raise
        return call

    def begin(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        on_done: Callable[[Call], None] | None = None,
        creation: Creation | None = None,
        visit: RRefAccess | None = None,
    ) -> Call:
        """See `Agent.begin` and, with `on_done`, `Agent.call_async`."""
        parent = current_served.get()
        now = self._owner.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing
        if channel is None:
            channel = self._owner.peers.channel_to(peer, deadline)
        call = Call(next(self._call_ids), channel, peer.record.name, "", now, deadline, parent, on_done)
        call.at_once = creation is not None  # then it is the keeper's
        try:
            frames = self._pack_request(call, peer, function, args, kwargs, creation, visit)
            if parent is None:
                call.charge = len(frames[0].body) if len(frames) == 1 else sum([len(frame.body) for frame in frames])
            else:
                parent.children[call.id] = call
            if call.function != SERVICE:
                self.made += 1
            channel.calls[call.id] = call
            unwaited = on_done is not None
            if not channel.post(frames, call.charge, unwaited=unwaited):
                self._take_credit(call)
                channel.post(frames, unwaited=unwaited)
        except BaseException:
            self._forget(call, peer)
            raise
        if unwaited and deadline is not None:
            self._deadlines.add(call, deadline)
        return call

    def _target(self, to: str | int, now: float, timeout: float | None) -> tuple[Peer, float | None]:
        """Whom a call is for, and its deadline: never later than that of the call that is served meanwhile."""
        if self._owner.closed:
            raise NotInitialized(f"worker {self._owner.me.name!r} cannot call: {self._owner.closed}")
        peer = self._owner.peers.find(to)
        timeout = self._owner.settings.rpc_timeout if timeout is None else timeout
        deadline = now + timeout if timeout else None
        parent = current_served.get()
        if parent is not None:
            parent.check()
            if parent.deadline is not None and (deadline is None or parent.deadline < deadline):
                deadline = parent.deadline
        return peer, deadline

    def _pack_request(
        self,
        call: Call,
        peer: Peer,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        creation: Creation | None,
        visit: RRefAccess | None,
    ) -> tuple[OutgoingFrame, ...]:
        owner = self._owner
        by_name = peer.record.main == owner.me.main and bool(owner.me.main)
        values: tuple[Any, ...] = (args, kwargs or {})
        root: tuple[str, ...] = _ROOT
        if isinstance(function, str):
            name = function
        else:
            name = function_names.function_name(function, main_by_name=by_name) or ""
            if not name:
                values, root = (function, *values), ("function", *root)
        call.function = name
        recorder = owner.recorder
        scope = recorder.scope() if recorder is not None else None
        encoded = payload.encode(values, root=root, main_by_name=by_name, edges=scope is not None)
        layout = encode_tensors(encoded.attachments) if encoded.attachments else None
        if scope is not None and recorder is not None:
            call.recorded = recorder.outgoing(scope, peer.record, encoded, request=True)
        if encoded.references and owner.keeper is not None:
            call.forks = owner.keeper.outgoing(peer.record.id, encoded.references)
        left = 0.0
        if call.deadline is not None:
            # The deadline travels as what is left of it: clocks differ between hosts.
            left = call.deadline - owner.runtime.now()
            if left < 1e-3:
                left = 1e-3  # 0 would be none
        descriptors = () if layout is None else layout.descriptors
        nested = call.parent is not None
        what = (call.id, name, left, nested, descriptors, call.recorded, call.forks, creation, visit)
        if autocast_is_enabled() and owner.carries_autocast:
            request: Request = RequestInAutocast(*what, current_autocast())
        else:
            request = Request(*what)
        return pack(encode_head(request), encoded.data, layout, call.channel.room)

    def _take_credit(self, call: Call) -> None:
        """Wait until the peer takes another request of this size."""
        channel, size = call.channel, call.charge
        call.charge = 0
        channel.calls.pop(call.id, None)  # it is not under way
        while True:
            event = self._owner.runtime.event()
            wake = event.set
            if channel.take_credit(size, wake):
                call.charge = size
                channel.calls[call.id] = call
                return
            if channel.session.state.is_over:
                return  # posting says what happened
            in_time = False
            try:
                in_time = self._owner.executor.wait(event, call.deadline)
            finally:
                if not in_time:
                    channel.stop_starving(wake)
            if not in_time:
                elapsed, limits = self._owner.runtime.now() - call.started, self._owner.settings.session
                raise DeadlineExceeded(
                    f"{call} was not sent within {elapsed:.3g} s: the worker has {limits.request_credits} requests or "
                    f"{limits.request_bytes:,} bytes of ours that it has not answered",
                    worker=call.worker,
                    function=call.function,
                    call=call.id,
                    elapsed=elapsed,
                )

    def wait(self, call: Call, deadline: float | None = None) -> bool:
        """Wait until `call` has ended; False if `deadline`, of this wait only, passes first."""
        if call.answer is not None or call.error is not None:
            return True
        executor = self._owner.executor
        if executor.current.held is not None:
            # Not for each wait in here alone: a thread that reads for others must not wait in between for what it held.
            return executor.without_held(partial(self.wait, call, deadline))
        until = call.deadline if deadline is None else deadline
        if deadline is not None and call.deadline is not None:
            until = min(deadline, call.deadline)
        waiter = Waiter(call)
        call.waiters.append(waiter)
        try:
            return self._wait(call, waiter, until)
        finally:
            call.waiters.remove(waiter)

    def _wait(self, call: Call, waiter: Waiter, until: float | None) -> bool:
        channel, executor, thread = call.channel, self._owner.executor, get_ident()
        while call.answer is None and call.error is None:
            try:
                link = channel.lead(waiter, thread)
                if link is None:
                    if not self._follow(waiter, until) and not self._time_is_up(call):
                        return call.done()
                    continue
                while call.answer is None and call.error is None and channel.link is link:
                    if executor.wait_for_link(link, until) & _READ:
                        channel.pump()
                    elif until is not None and self._owner.runtime.now() >= until and not self._time_is_up(call):
                        return call.done()
            finally:
                if waiter.leading:
                    channel.stop_leading(waiter)
        return True

    def _follow(self, waiter: Waiter, until: float | None) -> bool:
        """Wait while another thread reads; False if time is up."""
        event = waiter.event
        appointed = False
        try:
            # Looked at again: the call may have ended before there was an event to set.
            in_time = waiter.done() or event is None or self._owner.executor.wait(event, until)
            appointed = in_time and not waiter.done()
        finally:
            if not appointed:
                # It may have been appointed all the same; then another must be, or nobody would read.
                waiter.call.channel.stop_following(waiter)
        return in_time

    def _time_is_up(self, call: Call) -> bool:
        """End the call if its own deadline has passed; if not, it was only that of a wait."""
        if call.deadline is not None and self._owner.runtime.now() >= call.deadline:
            self._expire(call)
            return True
        return False

    def result(self, call: Call) -> Any:
        """What the call returned; raises what it raised. The call has ended."""
        if call.error is not None:
            raise call.error
        answer, message = call.answer, call.message
        assert answer is not None
        assert message is not None
        call.message = None
        return read_answer(call, answer, message, self._owner.recorder, self._owner.peers)

    def failure(self, call: Call) -> Exception | None:
        """What a call that has ended raises, anew each time; None: it returned."""
        if call.error is not None:
            return call.error
        if not isinstance(call.answer, Failure) or call.message is None:
            return None
        return read_failure(call, call.answer, call.message)

    def finish(
        self,
        call: Call,
        answer: Response | None = None,
        message: Message | None = None,
        error: Exception | None = None,
        *,
        given_up: bool = False,
    ) -> bool:
        """End a call; only the first end counts. If it was given up, its answer may still come."""
        channel = call.channel
        if given_up:
            with channel.lock:
                if channel.calls.pop(call.id, None) is None:
                    return False
                if call.charge:
                    # The callee counts the request until it answers it, so its credits come back only then.
                    channel.abandoned[call.id] = call.charge
        elif channel.calls.pop(call.id, None) is None:
            return False
        charge = call.charge
        if charge and answer is not None:
            call.charge = 0
            channel.return_credit(charge)
        call.message, call.error = message, error
        call.answer = answer
        if call.timer is not None:
            self._owner.executor.cancel(call.timer)
        parent, call.parent = call.parent, None  # what ends with it must not live as long as the call is remembered
        if parent is not None:
            parent.children.pop(call.id, None)
        on_done, call.on_done = call.on_done, None  # a future and its call must not keep each other, and the result
        if on_done is not None:
            if answer is None:
                channel.expect_fewer(1)
                self._owner.executor.submit(Owed(on_done, call))
            elif call.at_once:
                channel.expect_fewer(1)
                self._run_at_once(on_done, call)
            else:
                # Whoever reads submits it, with those that came at the same time.
                channel.ended.append(Owed(on_done, call))
        # Threads may wait for an asynchronous call, too, and several for one.
        for waiter in list(call.waiters):
            if waiter.event is not None:
                waiter.event.set()
            elif waiter.leading and waiter.leading != get_ident():
                link = channel.link
                if link is not None:
                    link.wake()
        if self._owner.draining:
            self._owner.activity_ended()
        return True

    def answer_lost(self, channel: Channel, number: int, error: Exception) -> None:
        """The answer of a call came, and this worker could not take it."""
        call = channel.calls.get(number)
        if call is None:
            with channel.lock:
                charge = channel.abandoned.pop(number, 0)
        else:
            charge, call.charge = call.charge, 0  # the callee has answered, and counts it no longer
            self.finish(call, error=error)
        if charge:
            channel.return_credit(charge)

    def _run_at_once(self, on_done: Callable[[Call], None], call: Call) -> None:
        try:
            on_done(call)
        except Exception:  # noqa: BLE001 - a fault of ours, which must not end the reading
            _log.exception("worker %r: what follows from %s failed", self._owner.me.name, call)

    @shielded
    def _forget(self, call: Call, peer: Peer) -> None:
        """The request never left: take back all that was done for it."""
        call.channel.calls.pop(call.id, None)
        charge, call.charge = call.charge, 0
        if charge:
            call.channel.return_credit(charge)
        if call.parent is not None:
            call.parent.children.pop(call.id, None)
        if call.recorded is not None and self._owner.recorder is not None:
            self._owner.recorder.not_sent(peer.record, call.recorded)
        if call.forks and self._owner.keeper is not None:
            self._owner.keeper.not_sent(peer.record.id, call.forks)

    def _expire(self, call: Call) -> None:
        elapsed = self._owner.runtime.now() - call.started
        error = DeadlineExceeded(
            f"{call} was not answered within {elapsed:.3g} s; the worker has been told to give it up. "
            "If it needs longer, give the call a larger timeout (0 for none)",
            worker=call.worker,
            function=call.function,
            call=call.id,
            elapsed=elapsed,
        )
        self._give_up(call, error, "its deadline passed")

    def cancel(self, call: Call, reason: str = "the caller cancelled it") -> bool:
        """End a call and tell the callee; False if it has ended already."""
        error = CallCancelled(f"{call}: {reason}", worker=call.worker, function=call.function, call=call.id)
        return self._give_up(call, error, reason)

    @shielded
    def _give_up(self, call: Call, error: Exception, reason: str) -> bool:
        if not self.finish(call, error=error, given_up=True):
            return False
        try:
            call.channel.post(pack(encode_head(Cancel(call.id, reason)), b"", None, call.channel.room))
        except TelegradError as lost:  # then there is nobody to tell
            _log.debug("%s was given up, but the worker is gone: %s", call, lost)
        return True
