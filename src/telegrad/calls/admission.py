"""Checks the messages of a peer that has limits, and refuses those that exceed them.

A refused call is answered with LimitExceeded and never runs. A refused message of a backward pass fails that pass. Any
other message cannot be refused, because both sides would then disagree about what exists: its sender is disconnected,
and so is a peer that causes too many refusals. See `telegrad.connection.peer_account`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.calls.extension import IncomingMessage
from telegrad.calls.pipeline import Pipeline
from telegrad.calls.server import Server
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peer_account import Held, PeerAccount
from telegrad.errors import LimitExceeded
from telegrad.wire.frames import Message
from telegrad.wire.messages import Request, RRefBackwardReq
from telegrad.wire.reassembly import DiscardedMessage

Refuse = Callable[[Channel, Any, LimitExceeded], None]
"""Tells the sender of a one-way message that it was refused, given the channel and the head."""


class Admission:
    """Admits or refuses the messages of peers that have limits."""

    def __init__(self, local: LocalWorker, pipeline: Pipeline, server: Server) -> None:
        self._local = local
        self._pipeline = pipeline
        self._server = server
        self.refusals: dict[type, Refuse] = {}
        """How one-way messages are refused, by kind."""

    def admit_request(self, channel: Channel, account: PeerAccount, request: Request, message: Message) -> Held | None:
        """Return what a request holds; None if it was refused."""
        try:
            return self._take_call(channel, account, message)
        except LimitExceeded as error:
            self.refuse_request(channel, request, error)
            self._count(account, message, error)
            return None

    def _take_call(self, channel: Channel, account: PeerAccount, message: Message) -> Held:
        _check(account, message)
        receiver = channel.receiver
        taken, receiver.held = receiver.held, None
        return account.take_call(_size(message), channel.unread(), taken)

    def refuse_request(self, channel: Channel, request: Request, error: LimitExceeded) -> None:
        """Answer a request that was not run, and have extensions undo what its caller did for it."""
        references = bool(request.references) or request.creation is not None or request.rref_access is not None
        arrived = IncomingMessage(
            channel.worker,
            request.autograd,
            forks=request.references,
            creation=request.creation,
            account=channel.account,
        )
        if request.rref_access is not None:
            arrived.stream_position = request.rref_access.stream_position
        for extension in self._pipeline.concerned[(request.autograd is not None) + (2 if references else 0)]:
            extension.refused(arrived)
        self._server.refusals.reject(channel, request.call, error)

    def admit_message(self, channel: Channel, account: PeerAccount, head: Any, message: Message) -> Held | None:
        """Return what a one-way message holds; None if it was refused. Raises LimitExceeded if it cannot be."""
        try:
            if type(head) is RRefBackwardReq:  # a call, although it is a message of its own kind
                return self._take_call(channel, account, message)
            _check(account, message)
            receiver = channel.receiver
            taken, receiver.held = receiver.held, None
            return account.take_message(_size(message)) if taken is None else taken
        except LimitExceeded as error:
            if type(head) is RRefBackwardReq:
                self._server.refusals.reject(channel, head.call, error)
            else:
                refuse = self.refusals.get(type(head))
                if refuse is None:
                    raise
                self._local.executor.submit_in(account.tasks, partial(refuse, channel, head, error))
            self._count(account, message, error)
            return None

    def _count(self, account: PeerAccount, message: Message, error: LimitExceeded) -> None:
        if type(message) is DiscardedMessage and message.error is error:
            return  # counted when it was announced
        reason = account.count_refusal(error)
        if reason:
            raise LimitExceeded(reason)


def _check(account: PeerAccount, message: Message) -> None:
    if type(message) is DiscardedMessage and isinstance(message.error, LimitExceeded):
        raise message.error
    account.check_size(_size(message))


def _size(message: Message) -> int:
    """Return the bytes of a message, which are more than `message.size` if it is in shared memory."""
    if type(message) is DiscardedMessage:
        return message.size
    return len(message.head) + len(message.data) + len(message.region)
