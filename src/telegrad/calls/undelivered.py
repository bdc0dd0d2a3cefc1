"""What becomes of a message that came, and that this worker cannot take: it has no memory for it, or fails at it.

The peer did nothing wrong, so it stays. The one call that the message belongs to fails, with the cause: a request is
answered with the error, and a call whose answer is lost ends with it. Of a message that belongs to no call (one of a
backward pass, say) nobody could be told: the channel tries for some seconds, and then gives the session up.
"""

from __future__ import annotations

import logging
from typing import Protocol

from telegrad.calls.client import Client
from telegrad.calls.server import Server
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import CallError, ProtocolError, ResourceExhausted, is_shortage
from telegrad.execution.executor import Executor
from telegrad.wire.frames import Frame, Message
from telegrad.wire.messages import Cancel, Failure, Reply, Request, RequestInAutocast, peek_call
from telegrad.wire.reassembly import peek_head

_log = logging.getLogger("telegrad")

_CANCEL = Cancel.__struct_config__.tag
_REQUESTS = frozenset(kind.__struct_config__.tag for kind in (Request, RequestInAutocast))
_ANSWERS = frozenset(kind.__struct_config__.tag for kind in (Reply, Failure))


_TRIES = 100  # to take a message for which there is no memory, and whose loss nobody could be told


class UndeliveredOwner(Protocol):
    """What this needs of its agent."""

    me: WorkerRecord
    executor: Executor
    client: Client
    server: Server

    def deliver(self, channel: Channel, message: Message) -> None:
        """Take a message that arrived on a channel."""


def report(owner: UndeliveredOwner, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
    """Fail the call that a message belongs to; False: it belongs to none, and cannot be taken later either."""
    head = peek_head(frame) if message is None else message.head
    me, peer = owner.me.name, channel.peer
    if not is_shortage(cause):
        _log.error("worker %r cannot take a message of worker %r", me, peer, exc_info=cause)
    tag, call = peek_call(head) or (None, 0)
    if channel.outgoing and tag in _ANSWERS:
        owner.client.answer_lost(
            channel, call, _error(f"worker {me!r} cannot take the answer of", channel, cause, call)
        )
        return True
    if not channel.outgoing and tag in _REQUESTS:
        owner.server.refuse(channel, call, _error(f"worker {me!r} cannot take a call from", channel, cause, call))
        return True
    return tag == _CANCEL or (message is not None and is_shortage(cause) and _taken_later(owner, channel, message))


def _taken_later(owner: UndeliveredOwner, channel: Channel, message: Message) -> bool:
    for _ in range(_TRIES):
        owner.executor.pause()
        try:
            owner.deliver(channel, message)
        except MemoryError:
            continue
        except ProtocolError:  # its head was cut: it cannot be read, and that is our fault
            return False
        return True
    return False


def _error(what: str, channel: Channel, cause: Exception, call: int) -> Exception:
    if isinstance(cause, ResourceExhausted):
        return cause
    text = f"{what} worker {channel.peer!r}: {type(cause).__name__}: {cause}"
    error: CallError
    if is_shortage(cause):
        error = ResourceExhausted(f"{text}. Send less at once, or give the worker more", worker=channel.peer, call=call)
    else:
        error = CallError(f"{text}. This is a bug in telegrad: please report it", worker=channel.peer, call=call)
    error.__cause__ = cause
    return error
