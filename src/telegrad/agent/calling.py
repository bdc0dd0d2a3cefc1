"""The calls that this worker makes: from the request to the answer, a deadline, a cancellation or a loss."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, Protocol

from telegrad.agent.answers import read_answer
from telegrad.agent.calls import Call, Served, serving
from telegrad.agent.channel import Channel
from telegrad.agent.executor import Executor
from telegrad.agent.gathering import SERVICE
from telegrad.agent.group import WorkerRecord
from telegrad.agent.keeper import Keeper
from telegrad.agent.peers import Peer, Peers
from telegrad.agent.recorder import Recorder
from telegrad.agent.settings import AgentSettings
from telegrad.errors import CallCancelled, DeadlineExceeded, NotInitialized, TelegradError
from telegrad.protocol.verdicts import State
from telegrad.transport.base import Ready
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Runtime
from telegrad.wire import payload
from telegrad.wire.frames import Message, Outgoing, pack
from telegrad.wire.messages import Answer, Cancel, Creation, ForkInfo, Request, encode_head
from telegrad.wire.tensors import lay_out

_log = logging.getLogger("telegrad")


class CallingOwner(Protocol):
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

    def activity_ended(self) -> None:
        """A call has ended while a shutdown waits for quiet."""


class Calling:
    """The calls that one agent makes."""

    def __init__(self, owner: CallingOwner) -> None:
        self._owner = owner
        self._call_ids = itertools.count(1)
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
        call = Call(next(self._call_ids), channel, peer.record.name, what, now)
        call.deadline = deadline
        self.made += 1
        channel.calls[call.id] = call
        try:
            channel.post(pack(encode_head(make_head(call.id)), b"", 0, None, channel.room))
        except BaseException:
            self._forget(call)
            raise
        return call

    def call_async(
        self,
        to: str | int,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        on_done: Callable[[Call], None],
        creation: Creation | None = None,
    ) -> Call:
        """See `Agent.call_async`."""
        call = self.begin(to, function, args, kwargs, timeout, on_done, creation)
        if call.deadline is not None:
            call.timer = self._owner.executor.at(call.deadline, lambda: self._expire(call))
            if call.done():
                self._owner.executor.cancel(call.timer)
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
    ) -> Call:
        """See `Agent.begin`."""
        parent = serving.get()
        now = self._owner.runtime.now()
        peer, deadline = self._target(to, now, timeout)
        channel = peer.outgoing
        if channel is None:
            channel = self._owner.peers.channel_to(peer, deadline)
        name, frames, forks = self._pack_request(
            call_id := next(self._call_ids), peer, channel, function, args, kwargs, deadline, parent, creation
        )
        call = Call(call_id, channel, peer.record.name, name, now)
        call.deadline = deadline
        try:
            if parent is None:
                self._take_credit(call, sum(len(frame.body) for frame in frames))
            else:
                call.parent = parent
                parent.children[call.id] = call
            if name != SERVICE:
                self.made += 1
            channel.calls[call_id] = call
            if on_done is not None:
                call.on_done = partial(on_done, call)
                channel.post(frames)
                channel.expect(1)
            else:
                channel.post(frames)
        except BaseException:
            self._forget(call)
            if forks and self._owner.keeper is not None:
                self._owner.keeper.not_sent(peer.record.id, forks)
            raise
        return call

    def _target(self, to: str | int, now: float, timeout: float | None) -> tuple[Peer, float | None]:
        """Whom a call is for, and its deadline: never later than that of the call that is served meanwhile."""
        if self._owner.closed:
            raise NotInitialized(f"worker {self._owner.me.name!r} cannot call: {self._owner.closed}")
        peer = self._owner.peers.find(to)
        timeout = self._owner.settings.rpc_timeout if timeout is None else timeout
        deadline = now + timeout if timeout else None
        parent = serving.get()
        if parent is not None:
            parent.check()
            if parent.deadline is not None and (deadline is None or parent.deadline < deadline):
                deadline = parent.deadline
        return peer, deadline

    def _pack_request(
        self,
        call_id: int,
        peer: Peer,
        channel: Channel,
        function: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        deadline: float | None,
        parent: Served | None,
        creation: Creation | None,
    ) -> tuple[str, tuple[Outgoing, ...], tuple[ForkInfo, ...]]:
        by_name = peer.record.main == self._owner.me.main and bool(self._owner.me.main)
        values: tuple[Any, ...] = (args, kwargs or {})
        root: tuple[str, ...] = ("args", "kwargs")
        if isinstance(function, str):
            name = function
        else:
            name = payload.function_name(function, main_by_name=by_name) or ""
            if not name:
                values, root = (function, *values), ("function", *root)
        encoded = payload.encode(values, root=root, main_by_name=by_name)
        # Before the recorder counts the call: a context ends when all calls that were counted have been answered.
        layout = lay_out(encoded.attachments) if encoded.attachments else None
        autograd = None
        if self._owner.recorder is not None:
            scope = self._owner.recorder.scope()
            if scope is not None:
                autograd = self._owner.recorder.outgoing(scope, peer.record, encoded, request=True)
        forks: tuple[ForkInfo, ...] = ()
        if encoded.references and self._owner.keeper is not None:
            forks = self._owner.keeper.outgoing(peer.record.id, encoded.references)
        # The deadline travels as what is left of it: clocks differ between hosts.
        left = max(1e-3, deadline - self._owner.runtime.now()) if deadline is not None else 0.0
        if layout is None:
            head = encode_head(Request(call_id, name, left, parent is not None, (), autograd, forks, creation))
            return name, pack(head, encoded.data, 0, None, channel.room), forks
        head = encode_head(
            Request(call_id, name, left, parent is not None, layout.descriptors, autograd, forks, creation)
        )
        return name, pack(head, encoded.data, layout.size, layout.write, channel.room), forks

    def _take_credit(self, call: Call, size: int) -> None:
        """Wait until the peer takes another request of this size."""
        channel = call.channel
        while True:
            event = self._owner.runtime.event()
            if channel.take_credit(size, event.set):
                call.charge = size
                return
            if channel.session.state in (State.CLOSED, State.LOST):
                return  # posting says what happened
            if not self._owner.executor.wait(event, call.deadline):
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
        channel, executor, thread = call.channel, self._owner.executor, get_ident()
        until = call.deadline if deadline is None else deadline
        if deadline is not None and call.deadline is not None:
            until = min(deadline, call.deadline)
        while not call.done():
            link = channel.lead(call, thread)
            if link is None:
                event = call.event
                # Looked at again: it may have ended before there was an event to set.
                if call.done() or event is None:
                    continue
                if not executor.wait(event, until) and not self._time_is_up(call):
                    return call.done()
                continue
            try:
                while not call.done() and channel.link is link:
                    if executor.wait_for_link(link, until) & Ready.READ:
                        channel.pump()
                    elif until is not None and self._owner.runtime.now() >= until and not self._time_is_up(call):
                        return call.done()
            finally:
                channel.stop_leading(call)
        return True

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
        return read_answer(call, answer, message, self._owner.recorder, self._owner.peers.find(call.worker).record)

    def finish(
        self,
        call: Call,
        *,
        answer: Answer | None = None,
        message: Message | None = None,
        error: Exception | None = None,
    ) -> bool:
        """End a call; only the first end counts."""
        if call.channel.calls.pop(call.id, None) is None:
            return False
        if answer is not None:
            self._settle(call)
        call.message, call.error = message, error
        call.answer = answer
        if call.timer is not None:
            self._owner.executor.cancel(call.timer)
        if call.parent is not None:
            call.parent.children.pop(call.id, None)
        if call.on_done is not None:
            call.channel.expect(-1)
            self._owner.executor.submit(call.on_done)
        # A thread may wait for an asynchronous call, too.
        if call.event is not None:
            call.event.set()
        elif call.leading and call.leading != get_ident():
            link = call.channel.link
            if link is not None:
                link.wake()
        if self._owner.draining:
            self._owner.activity_ended()
        return True

    def _settle(self, call: Call) -> None:
        charge, call.charge = call.charge, 0
        if charge:
            call.channel.return_credit(charge)

    def _forget(self, call: Call) -> None:
        """The request never left."""
        call.channel.calls.pop(call.id, None)
        self._settle(call)
        if call.parent is not None:
            call.parent.children.pop(call.id, None)

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

    def _give_up(self, call: Call, error: Exception, reason: str) -> bool:
        if call.charge:
            # The callee counts the request until it answers it, so its credits come back only then.
            call.channel.abandoned[call.id] = call.charge
        if not self.finish(call, error=error):
            call.channel.abandoned.pop(call.id, None)
            return False
        try:
            call.channel.post(pack(encode_head(Cancel(call.id, reason)), b"", 0, None, call.channel.room))
        except TelegradError as lost:  # then there is nobody to tell
            _log.debug("%s was given up, but the worker is gone: %s", call, lost)
        return True
