"""Messages that are no calls: nobody waits for an answer by name, and what comes back is a message of its own.

They leave on the connection on which this worker calls the other. What comes back may take either way: the other
worker's own connection, which a runner reads; or, if the sender said that it will read there, the connection that
brought the message. The second is faster, because the thread that waits reads it itself: no other has to wake it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import msgspec

from telegrad.connection.channel import Channel
from telegrad.connection.peers import Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, NotInitialized, WorkerLost, is_shortage
from telegrad.execution.executor import AGAIN, Executor
from telegrad.transport.base import Link, Ready
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Event, Runtime
from telegrad.wire.frames import Message
from telegrad.wire.messages import encode_head
from telegrad.wire.packing import pack
from telegrad.wire.tensors import TensorDescriptor, encode_tensors

_log = logging.getLogger("telegrad")

Handler = Callable[[Channel, Any, Message], None]
MakeHead = Callable[[tuple[TensorDescriptor, ...]], Any]


class OneWayOwner(Protocol):
    """What one-way messages need of their agent."""

    me: WorkerRecord
    runtime: Runtime
    executor: Executor
    peers: Peers
    buffers: BufferPool
    closed: str


class Wakeup(msgspec.Struct, eq=False):
    """What a thread waits for in `OneWay.wait`. Raised by anybody; raising it again does nothing."""

    raised: bool = False
    channel: Channel | None = None
    event: Event | None = None
    """There while the thread sleeps without reading."""
    leading: int = 0
    """The thread, while it reads."""

    def done(self) -> bool:
        """Whether it has been raised."""
        return self.raised

    def set(self) -> None:
        """Raise it."""
        # Before the rest is looked at: the thread looks here after it has changed the rest, and before it sleeps.
        self.raised = True
        event = self.event
        if event is not None:
            event.set()
        elif self.leading and self.leading != get_ident() and self.channel is not None:
            link = self.channel.link
            if link is not None:
                link.wake()


class OneWay:
    """The messages of one agent that are no calls."""

    def __init__(self, owner: OneWayOwner) -> None:
        self._owner = owner
        self._handlers: dict[type, Handler] = {}
        self._returning: dict[type, Handler] = {}
        self._urgent: set[type] = set()

    # -- sending ----------------------------------------------------------------------------------------------

    def send(
        self,
        to: int,
        make_head: MakeHead,
        attachments: Sequence[Any] = (),
        data: bytes = b"",
        *,
        back: Channel | None = None,
    ) -> Channel:
        """Send a message: no credits, no deadline. Returns the channel that took it.

        `back` is the channel of a message that is answered, if its sender reads there.
        """
        channel = back or self._channel_to(to)
        if attachments:
            # Gradients: two that were one tensor here must be two there, or whoever changes one changes the other.
            layout = encode_tensors(attachments, share=False)
            frames = pack(encode_head(make_head(layout.descriptors)), data, layout, channel.room)
        else:
            frames = pack(encode_head(make_head(())), data, None, channel.room)
        channel.post(frames)
        return channel

    def _channel_to(self, worker: int) -> Channel:
        owner = self._owner
        if owner.closed:
            raise NotInitialized(f"worker {owner.me.name!r} cannot send: {owner.closed}")
        peer = owner.peers.find(worker)
        return peer.outgoing or owner.peers.channel_to(peer, None)

    def tell(self, to: int, head: Any, data: bytes = b"", *, back: Channel | None = None) -> None:
        """The same, for what a worker that is gone need not know: that is no error."""
        if back is None:
            back = self._owner.peers.find(to).outgoing
            if back is None:
                # Whoever tells may be the runner that polls, and connecting waits for the poller of the other side:
                # workers in a ring that tell each other something for the first time would wait for each other.
                self._owner.executor.submit(partial(self._tell, to, head, data, None), urgent=True)
                return
        self._tell(to, head, data, back)

    def _tell(self, to: int, head: Any, data: bytes, channel: Channel | None) -> None:
        try:
            channel = channel or self._channel_to(to)
            channel.post(pack(encode_head(head), data, None, channel.room))
        except (WorkerLost, NotInitialized, AuthenticationError) as error:
            _log.debug("%s for worker %d was not sent: %s", type(head).__name__, to, error)
        except Exception as error:
            if not is_shortage(error):
                raise
            # The peer may wait for it without a deadline, so it is sent when the shortage is over.
            _log.warning("%s for worker %d is sent later: %s", type(head).__name__, to, error)
            executor = self._owner.executor
            again = partial(executor.submit, partial(self._tell, to, head, data, channel), urgent=True)
            executor.at(self._owner.runtime.now() + AGAIN, again)

    # -- receiving --------------------------------------------------------------------------------------------

    def handle(self, kind: type, handler: Handler, *, returns: bool = False, urgent: bool = False) -> None:
        """Have `handler` run for messages of this kind. If it `returns`, it may come where this worker calls, too.

        An urgent handler is short, and runs even while all user functions that may run at once do.
        """
        self._handlers[kind] = handler
        if urgent:
            self._urgent.add(kind)
        self._returning.pop(kind, None)
        if returns:
            self._returning[kind] = handler

    def deliver(self, channel: Channel, head: Any, message: Message) -> bool:
        """Take a message that came; False: there is no handler for it."""
        handler = (self._returning if channel.outgoing else self._handlers).get(type(head))
        if handler is None:
            return False
        task = partial(handler, channel, head, message)
        inbox = channel.inbox
        if inbox is not None:
            inbox.append(task)
        else:
            self._owner.executor.submit(task, urgent=type(head) in self._urgent)
        return True

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, wakeup: Wakeup, channel: Channel | None, deadline: float | None) -> bool:
        """Wait until `wakeup` is raised; False if `deadline` passes first.

        Meanwhile this thread reads `channel`, unless another does, and runs the handlers of what comes back there.
        """
        if channel is None:
            event = wakeup.event = self._owner.runtime.event()
            return wakeup.raised or self._owner.executor.wait(event, deadline)
        wakeup.channel = channel
        while not wakeup.raised:
            link = channel.lead(wakeup, get_ident())
            if link is not None:
                in_time = self._read(channel, link, wakeup, deadline)
            else:
                in_time = self._follow(channel, wakeup, deadline)
            if not in_time:
                return wakeup.raised
        return True

    def _follow(self, channel: Channel, wakeup: Wakeup, deadline: float | None) -> bool:
        """Wait while another thread reads; False if the deadline passed."""
        event = wakeup.event
        over = True
        try:
            # Looked at again: it may have been raised before there was an event to set.
            in_time = wakeup.raised or event is None or self._owner.executor.wait(event, deadline)
            over = wakeup.raised or not in_time
        finally:
            if over:
                channel.stop_following(wakeup)
        return in_time

    def _read(self, channel: Channel, link: Link, wakeup: Wakeup, deadline: float | None) -> bool:
        """Read until something has come back, or there is no need; False if the deadline passed."""
        owner = self._owner
        inbox = channel.inbox = deque()
        in_time = True
        try:
            while in_time and not inbox and not wakeup.raised and channel.link is link:
                if owner.executor.wait_for_link(link, deadline) & Ready.READ:
                    channel.pump()
                elif deadline is not None and owner.runtime.now() >= deadline:
                    in_time = False
        finally:
            channel.inbox = None
            channel.stop_leading(wakeup)
            self._run(inbox)
        return in_time

    def _run(self, inbox: deque[Callable[[], None]]) -> None:
        try:
            while inbox:
                try:
                    inbox.popleft()()
                except Exception:  # noqa: BLE001 - handlers report their own errors; this is one of ours
                    _log.exception("worker %s: a handler failed", self._owner.me.name)
        finally:
            for task in inbox:  # this thread was interrupted, and others may wait for what came
                self._owner.executor.submit(task)
