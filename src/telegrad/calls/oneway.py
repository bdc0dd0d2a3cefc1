"""One-way messages: the sender waits for no reply, and whatever comes back is a message of its own.

They leave on the connection on which this worker calls the other. What comes back may take either way: the other
worker's own connection, which a worker thread reads; or, if the sender said that it will read there, the connection
that brought the message. The second is faster, because the waiting thread reads it itself, so no other thread has to
wake it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from telegrad.calls.link_reader import LinkReader, Waiter
from telegrad.calls.pipeline import Descriptors, Pipeline, pack_head
from telegrad.connection.channel import Channel
from telegrad.connection.handshake import Refused, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_account import Held
from telegrad.connection.peer_table import Peer
from telegrad.connection.peers import Peers
from telegrad.errors import (
    AuthenticationError,
    NotInitialized,
    OtherVersion,
    TelegradError,
    UnknownWorker,
    WorkerLost,
    is_shortage,
)
from telegrad.execution.timers import RETRY_DELAY
from telegrad.wire.frames import Message

_log = logging.getLogger("telegrad")

Handler = Callable[[Channel, Any, Message], None]


class OneWay:
    """The one-way messages of one agent."""

    def __init__(self, local: LocalWorker, peers: Peers, pipeline: Pipeline) -> None:
        self._local = local
        self._peers = peers
        self._pipeline = pipeline
        self._reader = LinkReader(local.name, local.runtime, local.executor, local.events)
        self._handlers: dict[type, Handler] = {}
        self._returning: dict[type, Handler] = {}
        self._urgent: set[type] = set()
        self._lock = threading.Lock()  # protects _waiting
        # Messages for workers that are being connected to: not by id, because one may be replaced meanwhile.
        self._waiting: dict[Peer, list[tuple[Any, bytes]]] = {}

    # -- sending ----------------------------------------------------------------------------------------------

    def send(self, to: int, head: Any, *, back: Channel | None = None) -> Channel:
        """Send a message without tensors: no credits, no deadline. Returns the channel that took it.

        `back` is the channel of a message that this one answers, if its sender reads there.
        """
        channel = back or self._channel_to(to)
        channel.post(pack_head(channel, head))
        return channel

    def send_gradients(
        self,
        to: int,
        make_head: Callable[[Descriptors], Any],
        gradients: Sequence[Any],
        devices: Sequence[str] = (),
        *,
        back: Channel | None = None,
        owned: bool = False,
    ) -> tuple[Channel, int]:
        """Send gradients to these devices, with a head that is made from their descriptors; otherwise as `send`.

        `owned`: nobody but telegrad holds them. Also returns the bytes of the message.
        """
        channel = back
        if channel is None:
            channel = None if self._local.closed else self._peers.find(to).outgoing
            if channel is None:
                channel = self._channel_to(to)
        frames = self._pipeline.pack_gradients(channel, gradients, make_head, devices, owned=owned)
        return channel, channel.post(frames) or 0

    def _channel_to(self, worker: int) -> Channel:
        if self._local.closed:
            raise self._closed()
        peer = self._peers.find(worker)
        return peer.outgoing or self._peers.connector.channel_to(peer, None)

    def _closed(self) -> NotInitialized:
        return NotInitialized(f"worker {self._local.name!r} cannot send: {self._local.closed}")

    def tell(self, to: int, head: Any, data: bytes = b"", *, back: Channel | None = None) -> None:
        """Send a message that a worker which is gone need not get: that is no error."""
        try:
            peer = self._peers.find(to)
        except UnknownWorker as error:  # a peer named it, and may have made it up
            self._not_told(to, head, data, None, error)
            return
        channel = back or peer.outgoing
        if channel is None:
            # Whoever calls this may be the thread that polls, and connecting waits for the poller of the other side:
            # workers in a ring that tell each other something for the first time would wait for each other. One task
            # connects for all messages: a worker that cannot be reached must not hold a thread for each.
            with self._lock:
                waiting = self._waiting.setdefault(peer, [])
                waiting.append((head, data))
                is_first = len(waiting) == 1
            if is_first:
                self._local.executor.submit(partial(self._connect_and_tell, peer), urgent=True)
            return
        try:
            channel.post(pack_head(channel, head, data))
        except Exception as error:  # noqa: BLE001 - raised again if it is a bug
            self._not_told(to, head, data, channel, error)

    def _connect_and_tell(self, peer: Peer, give_up: float | None = None) -> None:
        to = peer.record.id
        channel: Channel | None = None
        failure: Exception | None = None
        later, waiting = False, []
        try:
            if self._local.closed:
                raise self._closed()
            channel = peer.outgoing or self._peers.connector.channel_to(peer, None)
        except (AuthenticationError, OtherVersion) as error:
            later = self._connects_later(peer, give_up, error)
            failure = WorkerLost(f"worker {to} did not prove itself: {error}")
        except Exception as error:  # noqa: BLE001 - raised again if it is a bug
            failure = error
        finally:
            if not later:
                with self._lock:
                    waiting = self._waiting.pop(peer)
        for head, data in waiting:
            if failure is not None:
                self._not_told(to, head, data, None, failure)
            else:
                self.tell(to, head, data, back=channel)

    def _connects_later(self, peer: Peer, give_up: float | None, error: TelegradError) -> bool:
        """Try again to connect to a worker that did not prove itself, for as long as a session tries to.

        Somebody else may be at its address for a while, and it may wait for the messages without a deadline. If it
        cannot be told at all, it is lost: then nobody waits for anybody.
        """
        now, limit = self._local.runtime.now(), self._local.settings.session.resume_limit
        give_up = now + limit if give_up is None else give_up
        if isinstance(error, Refused | Rejected) or now >= give_up:
            self._peers.lost_workers.peer_lost(peer, str(error))
            return False
        executor = self._local.executor
        again = partial(executor.submit, partial(self._connect_and_tell, peer, give_up), urgent=True)
        executor.timers.at(now + RETRY_DELAY, again)
        return True

    def _not_told(self, to: int, head: Any, data: bytes, channel: Channel | None, error: Exception) -> None:
        kind = type(head).__name__
        if isinstance(error, WorkerLost | NotInitialized | UnknownWorker):
            _log.debug("%s for worker %d was not sent: %s", kind, to, error)
            return
        if not is_shortage(error):
            raise error
        # The peer may wait for it without a deadline, so it is sent when the shortage is over.
        _log.warning("%s for worker %d is sent later: %s", kind, to, error)
        executor = self._local.executor
        again = partial(executor.submit, partial(self.tell, to, head, data, back=channel), urgent=True)
        executor.timers.at(self._local.runtime.now() + RETRY_DELAY, again)

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

    def deliver(self, channel: Channel, head: Any, message: Message, held: Held | None = None) -> bool:
        """Take a message that came; False: there is no handler for it. `held` counts until it has been handled."""
        handler = (self._returning if channel.outgoing else self._handlers).get(type(head))
        if handler is None:
            return False
        task = partial(handler, channel, head, message)
        if held is not None:
            task = partial(_run_held, held, task)
        inbox = channel.receiver.inbox
        if inbox is not None:
            inbox.append(task)
        elif held is not None and channel.account is not None and type(head) not in self._urgent:
            self._local.executor.submit_in(channel.account.tasks, task)
        else:
            self._local.executor.submit(task, urgent=type(head) in self._urgent)
        return True

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter, channel: Channel | None, deadline: float | None) -> bool:
        """Wait until `waiter` is set; False if `deadline` passes first.

        Meanwhile this thread reads `channel`, unless another does, and runs the handlers of what comes back there.
        """
        if channel is not None:
            return self._reader.wait(waiter, channel, deadline, handle=True)
        event = waiter.event = self._local.runtime.event()
        return waiter.finished or self._local.executor.wait(event, deadline)


def _run_held(held: Held, task: Callable[[], None]) -> None:
    try:
        task()
    finally:
        held.release()
