"""The calls that this worker makes: sends requests, and waits for replies. `telegrad.calls.completion` ends them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from telegrad.calls.call import Call, current_served
from telegrad.calls.collectives import SERVICE
from telegrad.calls.completion import Completion
from telegrad.calls.deadlines import Deadlines
from telegrad.calls.exceptions import exception_of
from telegrad.calls.extension import current_context
from telegrad.calls.link_reader import LinkReader, Waiter
from telegrad.calls.pipeline import Frames, Pipeline, pack_head
from telegrad.calls.registry import Registry
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peer, Peers
from telegrad.errors import DeadlineExceeded, NotInitialized
from telegrad.execution.autocast import current_autocast
from telegrad.interrupts import shielded
from telegrad.torch_private import autocast_is_enabled
from telegrad.wire import function_names
from telegrad.wire.devices import DevicePairs
from telegrad.wire.messages import Creation, Failure, Reply, Request, RequestWithState, RRefAccess

_log = logging.getLogger("telegrad")
_ROOT = ("args", "kwargs")


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
        self.completion = Completion(local)
        self.cancel = self.completion.cancel
        self._deadlines = Deadlines(local.runtime, local.executor, self.completion.expire)
        self._reader = LinkReader(local.name, local.runtime, local.executor)
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
            self.completion.cancel(call, "the caller was interrupted")
            raise
        return self.result(call)

    def complete(self, call: Call) -> Any:
        """Wait for a call, and return its result."""
        try:
            if call.answer is None:
                self.wait(call)
        except BaseException:
            self.completion.cancel(call, "the caller was interrupted")
            raise
        return self.result(call)

    def ask(self, to: str | int, what: str, make_head: Callable[[int], Any], timeout: float | None) -> Call:
        """Start a call whose request is a message of its own kind, made from the call's number. It takes no credits."""
        now = self._local.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing or self._peers.connector.channel_to(peer, deadline)
        call = Call(next(self._call_ids), channel, peer.record.name, what, now, deadline)
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
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        on_done: Callable[[Call], None] | None = None,
        creation: Creation | None = None,
        rref_access: RRefAccess | None = None,
        devices: DevicePairs | None = None,
    ) -> Call:
        """See `Agent.begin` and, with `on_done`, `Agent.call_async`."""
        parent = current_served.get()
        now = self._local.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing
        if channel is None:
            channel = self._peers.connector.channel_to(peer, deadline)
        call = Call(next(self._call_ids), channel, peer.record.name, "", now, deadline, parent, on_done)
        call.at_once = creation is not None  # then the RRef manager takes the reply
        try:
            frames = self._pack_request(call, peer, function, args, kwargs, creation, rref_access, devices)
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
            self._forget(call)
            raise
        call.outgoing = None  # it holds the arguments
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
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        creation: Creation | None,
        rref_access: RRefAccess | None,
        devices: DevicePairs | None,
    ) -> Frames:
        me = self._local.me
        by_name = peer.record.main == me.main and bool(me.main)
        values: tuple[Any, ...] = (args, kwargs or {})
        root: tuple[str, ...] = _ROOT
        if isinstance(function, str):
            name = function
        elif self._registry is not None:
            name = self._registry.name_of(function)
        else:
            name = function_names.function_name(function, main_by_name=by_name) or ""
            if not name:
                values, root = (function, *values), ("function", *root)
        call.function = name
        context = current_context.get()
        encoded = self._encode(values, root=root, main_by_name=by_name, edges=context is not None)
        left = 0.0
        if call.deadline is not None:
            # The deadline travels as the time that is left: clocks differ between hosts.
            left = call.deadline - self._local.runtime.now()
            if left < 1e-3:
                left = 1e-3  # 0 means no deadline
        rest: tuple[Any, ...] = (creation, rref_access)
        kind: type[Request] = Request
        placements = call.channel.placements
        placement = placements.requests if devices is None else placements.for_request(devices)
        if (autocast_is_enabled() and self.carries_autocast) or placement.pairs:
            autocast = current_autocast() if autocast_is_enabled() and self.carries_autocast else None
            kind, rest = RequestWithState, (creation, rref_access, autocast, placement.pairs)
        make_head = partial(kind, call.id, name, left, call.parent is not None)
        frames, call.outgoing = self._pipeline.pack(call.channel, encoded, make_head, rest, context, True, placement)
        return frames

    def _take_credit(self, call: Call) -> None:
        """Wait until the peer accepts another request of this size."""
        channel, size = call.channel, call.charge
        call.charge = 0
        channel.calls.pop(call.id, None)  # it is not in flight
        while True:
            event = self._local.runtime.event()
            wake = event.set
            if channel.credit_window.acquire(size, wake):
                call.charge = size
                channel.calls[call.id] = call
                return
            if channel.session.state.is_over:
                return  # posting raises the reason
            in_time = False
            try:
                in_time = self._local.executor.wait(event, call.deadline)
            finally:
                if not in_time:
                    channel.credit_window.cancel(wake)
            if not in_time:
                elapsed, limits = self._local.runtime.now() - call.started, self._local.settings.session
                raise DeadlineExceeded(
                    f"{call} was not sent within {elapsed:.3g} s: the worker has not answered {limits.request_credits} "
                    f"requests or {limits.request_bytes:,} bytes of requests of this worker",
                    worker=call.worker,
                    function=call.function,
                    call=call.id,
                    elapsed=elapsed,
                )

    def wait(self, call: Call, deadline: float | None = None) -> bool:
        """Wait until `call` has ended; False if `deadline`, which is that of this wait only, passes first."""
        if call.answer is not None or call.error is not None:
            return True
        executor = self._local.executor
        if executor.current.held is not None:
            # Once for all waits in here: a thread that reads for others must not block on what it held in between.
            return executor.suspend_held_during(partial(self.wait, call, deadline))
        until = call.deadline if deadline is None else deadline
        if deadline is not None and call.deadline is not None:
            until = min(deadline, call.deadline)
        waiter = Waiter()
        call.waiters.append(waiter)
        try:
            # Checked again: the call may have ended before there was a waiter.
            while call.answer is None and call.error is None:
                if not self._reader.wait(waiter, call.channel, until) and not self._time_is_up(call):
                    return call.done()
        finally:
            call.waiters.remove(waiter)
        return True

    def _time_is_up(self, call: Call) -> bool:
        """Expire the call if its own deadline has passed, not only that of a wait."""
        if call.deadline is not None and self._local.runtime.now() >= call.deadline:
            self.completion.expire(call)
            return True
        return False

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


def failure_of(call: Call, pipeline: Pipeline) -> Exception | None:
    """Return a new instance of what a call that has ended raises; None if it returned."""
    if call.error is not None:
        return call.error
    if not isinstance(call.answer, Failure) or call.message is None:
        return None
    return exception_of(call, call.answer, call.message, pipeline.exceptions)
