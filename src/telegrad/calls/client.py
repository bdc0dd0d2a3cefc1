"""The calls that this worker makes: sends requests, and waits for replies. `telegrad.calls.completion` ends them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from telegrad.calls.call import Access, Call, current_served
from telegrad.calls.completion import Completion
from telegrad.calls.deadlines import Deadlines
from telegrad.calls.exceptions import exception_of
from telegrad.calls.extension import current_context
from telegrad.calls.link_reader import LinkReader, Waiter
from telegrad.calls.observing import Asking
from telegrad.calls.pipeline import Frames, Pipeline, pack_head
from telegrad.calls.registry import Registry
from telegrad.calls.service_names import GATHER
from telegrad.calls.shared_call import ROOT, SharedCall
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.errors import DeadlineExceeded, NotInitialized
from telegrad.execution.autocast import current_autocast
from telegrad.interrupts import shielded
from telegrad.protocol.limits import SessionSettings
from telegrad.torch_private import autocast_is_enabled
from telegrad.waiting import Event
from telegrad.waiting_report import seconds
from telegrad.wire import function_names
from telegrad.wire.devices import DevicePairs
from telegrad.wire.messages import Creation, Failure, Reply, Request, RequestWithState, RRefAccess

_log = logging.getLogger("telegrad")

_CONNECT = 1.0  # seconds that a creation has at least to connect to its owner

_NEVER = 1e6  # seconds, eleven days: a time that every transport can wait for


class Retried(Protocol):
    """A call that may be made several times."""

    def suspended(self) -> str:
        """Describe the call if no attempt is in flight; empty if one is."""


class Client:
    """The calls that one agent makes."""

    def __init__(self, local: LocalWorker, peers: Peers, pipeline: Pipeline, registry: Registry | None = None) -> None:
        self._local = local
        self._peers = peers
        self._pipeline = pipeline
        self._encode = pipeline.encode
        self._registry = registry  # in registered mode
        self._call_ids = itertools.count(1)
        self._slow = local.settings.slow_call or _NEVER
        self.completion = Completion(local)
        self.cancel = self.completion.cancel
        self._deadlines = Deadlines(local.runtime, local.executor, self.completion.expire)
        self.asking = Asking(local, peers, self._call_ids, self._deadlines)
        self._reader = LinkReader(local.name, local.runtime, local.executor, local.events)
        self.retried: set[Retried] = set()
        """Calls that are made again if their callee is lost. Between two attempts they are in no channel."""
        self.carries_autocast = True
        """Whether calls and passes carry the autocast of their caller."""
        self.made = 0
        """How many calls were ever made, without collectives; shutdown compares it."""

    def call(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        devices: DevicePairs | None = None,
    ) -> Any:
        """See `Agent.call`."""
        call = self.begin(to, function, args, kwargs, timeout, devices=devices)
        try:  # as `complete` does, without a function call for each call
            if call.answer is None:
                self.wait(call)
        except BaseException:
            _interrupted(self.completion, call)
            raise
        return self.result(call)

    def complete(self, call: Call) -> Any:
        """Wait for a call, and return its result."""
        try:
            if call.answer is None:
                self.wait(call)
        except BaseException:
            _interrupted(self.completion, call)
            raise
        return self.result(call)

    def ask(self, to: str | int, what: str, make_head: Callable[[int], Any], timeout: float | None) -> Call:
        """Start a call whose request is a message of its own kind, made from the call's number. It takes no credits."""
        now = self._local.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing or self._peers.connector.channel_to(peer, deadline)
        call = Call(next(self._call_ids), channel, peer.record.name, what, now, deadline, sent=now, thread=get_ident())
        self.made += 1
        channel.calls[call.id] = call
        try:
            channel.post(pack_head(channel, make_head(call.id)))
        except BaseException:
            self._forget(call)
            raise
        return call

    def begin(
        self,
        to: str | int,
        function: Callable[..., Any] | str | SharedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        on_done: Callable[[Call], None] | None = None,
        creation: Creation | None = None,
        rref_access: Access | None = None,
        devices: DevicePairs | None = None,
    ) -> Call:
        """See `Agent.begin` and, with `on_done`, `Agent.call_async`.

        For a call on an ordered object `rref_access` is a function that numbers it; see `protocol.credits`.
        """
        parent = current_served.get()
        now = self._local.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing
        if channel is None:
            # A creation whose time passes while it connects fails like one with a late reply: see its reference.
            until = deadline if deadline is None or creation is None else max(deadline, now + _CONNECT)
            channel = self._peers.connector.channel_to(peer, until)
        call = Call(next(self._call_ids), channel, peer.record.name, "", now, deadline, parent, on_done)
        call.at_once, call.thread = creation is not None, get_ident()  # at once: the RRef manager takes the reply
        try:
            if rref_access is not None and type(rref_access) is not RRefAccess:
                if parent is None:
                    _reserve_credit(self._local, call, function)
                assert callable(rref_access)
                rref_access = rref_access()
            frames = self._pack_request(call, peer, function, args, kwargs, creation, rref_access, devices)
            for frame in frames:
                call.size += len(frame.body)
                if frame.shared is not None:  # the only frame
                    call.shared = frame.size - call.size
            if parent is not None:
                parent.children[call.id] = call
            elif call.is_reserved:
                channel.credit_window.extend(call.size)
                call.charge += call.size
            elif call.function != GATHER:
                call.charge = call.size
            if call.function != GATHER:
                self.made += 1
            channel.calls[call.id] = call
            unwaited = on_done is not None
            if channel.post(frames, 0 if call.is_reserved else call.charge, unwaited=unwaited) is None:
                _take_credit(self._local, call)
                channel.post(frames, unwaited=unwaited)
        except BaseException:
            self._forget(call)
            raise
        call.outgoing = None  # it holds the arguments
        call.sent = self._local.runtime.now()
        if unwaited and deadline is not None:
            self._deadlines.add(call, deadline)
        return call

    def _target(self, to: str | int, now: float, timeout: float | None) -> tuple[Peer, float | None]:
        """Return the callee and the deadline, which is never later than that of the call that is being served."""
        if self._local.closed:
            raise NotInitialized(f"worker {self._local.me.name!r} cannot call: {self._local.closed}")
        peer = self._peers.find(to)
        timeout = self._local.settings.rpc_timeout if timeout is None else timeout
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
        function: Callable[..., Any] | str | SharedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        creation: Creation | None,
        rref_access: RRefAccess | None,
        devices: DevicePairs | None,
    ) -> Frames:
        by_name = peer.record.main == self._local.me.main != ""
        context = current_context.get()
        if context is not None:
            call.context_id = context.id
        if type(function) is SharedCall:
            name, encoded = function.encode(self._encode, by_name=by_name, edges=context is not None)
        else:
            values: tuple[Any, ...] = (args, kwargs or {})
            root: tuple[str, ...] = ROOT
            if isinstance(function, str):
                name = function
            elif self._registry is not None:
                name = self._registry.name_of(function)
            else:
                name = function_names.function_name(function, main_by_name=by_name) or ""
                if not name:
                    function_names.check_callable(function)
                    call.by_value = getattr(function, "__qualname__", type(function).__name__)
                    values, root = (function, *values), ("function", *root)
            encoded = self._encode(values, root=root, main_by_name=by_name, edges=context is not None)
        call.function = name
        if rref_access is not None:
            call.rref_access = rref_access
        left = 0.0
        if call.deadline is not None:
            # The deadline travels as the time that is left: clocks differ between hosts.
            left = call.deadline - self._local.runtime.now()
            if left < 1e-3:
                left = 1e-3  # 0 means no deadline
        rest: tuple[Any, ...] = (creation, rref_access)
        kind: type[Request] = Request
        channel = call.channel
        placement = channel.placements.requests if devices is None else channel.placements.for_request(devices)
        if (autocast_is_enabled() and self.carries_autocast) or placement.pairs:
            autocast = current_autocast() if autocast_is_enabled() and self.carries_autocast else None
            kind, rest = RequestWithState, (creation, rref_access, autocast, placement.pairs)
        make_head = partial(kind, call.id, name, left, call.parent is not None or call.is_reserved or name == GATHER)
        frames, call.outgoing = self._pipeline.pack(channel, encoded, make_head, rest, context, True, placement, call)
        return frames

    def wait(self, call: Call, deadline: float | None = None) -> bool:
        """Wait until `call` has ended; False if `deadline`, which is that of this wait only, passes first."""
        if call.answer is not None or call.error is not None:
            return True
        executor = self._local.executor
        if executor.current.held is not None:
            # Once for all waits in here: a thread that reads for others must not block on what it held in between.
            return executor.suspend_held_during(partial(self.wait, call, deadline))
        until, slow = call.deadline if deadline is None else deadline, call.started + self._slow
        if deadline is not None and call.deadline is not None:
            until = min(deadline, call.deadline)
        waiter = Waiter()
        call.waiters.append(waiter)
        try:
            # Checked again: the call may have ended before there was a waiter.
            while call.answer is None and call.error is None:
                if until is None or slow < until:
                    if not self._reader.wait(waiter, call.channel, slow):
                        slow = _report_slow(self._local, call, slow)
                elif not self._reader.wait(waiter, call.channel, until) and not self._time_is_up(call):
                    return call.done()
        finally:
            call.waiters.remove(waiter)
        return True

    def _time_is_up(self, call: Call) -> bool:
        """Expire the call if its own deadline has passed, not only that of a wait."""
        if call.deadline is None or self._local.runtime.now() < call.deadline:
            return False
        self.completion.expire(call)
        return True

    def result(self, call: Call) -> Any:
        """Return what a call that has ended returned, or raise what it raised."""
        if call.error is not None:
            raise call.error
        answer, message = call.answer, call.message
        assert answer is not None
        assert message is not None
        call.message = None
        if isinstance(answer, Reply):
            references, call.references = call.references, ()
            return self._pipeline.unpack(call.channel.worker, answer, message, references)
        if isinstance(answer, Failure):
            raise exception_of(call, answer, message, self._pipeline.exceptions)
        return None

    @shielded
    def _forget(self, call: Call) -> None:
        """Undo everything that was done for a request that was not sent."""
        outgoing, call.outgoing = call.outgoing, None
        self._pipeline.unsent(outgoing)
        call.channel.calls.pop(call.id, None)
        if call.parent is not None:
            call.parent.children.pop(call.id, None)
        charge, call.charge = call.charge, 0
        if charge:
            call.channel.credit_window.release(charge)


def _interrupted(completion: Completion, call: Call) -> None:
    """Give up a call whose only waiting thread was interrupted."""
    completion.cancel(call, "the caller was interrupted")
    call.message = None  # of a reply that came in the last moment: the call is kept until it is recorded


def _take_credit(local: LocalWorker, call: Call) -> None:
    """Wait until the peer accepts another request of this size."""
    channel, size = call.channel, call.charge
    call.charge = 0
    channel.calls.pop(call.id, None)  # it is not in flight
    while True:
        event = local.runtime.event()
        wake = event.set
        if channel.credit_window.acquire(size, wake):
            call.charge = size
            channel.calls[call.id] = call
            return
        if channel.session.state.is_over:
            return  # posting raises the reason
        in_time = False
        try:
            in_time = _wait_for_credit(local, call, event)
        finally:
            if not in_time:
                channel.credit_window.cancel(wake)
        if not in_time:
            raise _not_sent(call, local.runtime.now() - call.started, local.settings.session)


def _reserve_credit(local: LocalWorker, call: Call, function: object) -> None:
    """Wait for the credit of a call before it is encoded, and so before its size is known."""
    call.function = function if isinstance(function, str) else ""
    call.charge = 1  # a byte; the rest is added when it is known
    _take_credit(local, call)
    call.channel.calls.pop(call.id, None)  # it is not in flight yet
    call.is_reserved = True


def _wait_for_credit(local: LocalWorker, call: Call, event: Event) -> bool:
    def text() -> str:
        return f"room for {call}: that worker has not answered enough earlier requests of this one"

    key = local.waits.enter("credit", (call.worker,), text, call.parent)
    try:
        return local.executor.wait(event, call.deadline)
    finally:
        local.waits.leave(key)


def _report_slow(local: LocalWorker, call: Call, due: float) -> float:
    """Log that a call takes long, and return when it is to be logged again: when it has lasted twice as long."""
    now = local.runtime.now()
    if now < due:
        return due
    elapsed = now - call.started
    if call.function != GATHER:  # collectives say for whom they wait
        _log.warning("worker %r has waited %s for %s, which is not answered yet", local.name, seconds(elapsed), call)
    return call.started + 2 * elapsed


def _not_sent(call: Call, elapsed: float, limits: SessionSettings) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{call} was not sent within {elapsed:.3g} s: the worker has not answered {limits.request_credits} requests or "
        f"{limits.request_bytes:,} bytes of requests of this worker",
        worker=call.worker,
        function=call.function,
        call=call.id,
        elapsed=elapsed,
    )


def failure_of(call: Call, pipeline: Pipeline) -> Exception | None:
    """Return a new instance of what a call that has ended raises; None if it returned."""
    if call.error is not None:
        return call.error
    if not isinstance(call.answer, Failure) or call.message is None:
        return None
    return exception_of(call, call.answer, call.message, pipeline.exceptions)
