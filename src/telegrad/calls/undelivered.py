"""Messages that arrived but that this worker cannot take, for lack of memory or because of a bug.

The peer did nothing wrong, so it stays connected. Only the call that the message belongs to fails: a request is
answered with the error, and a call whose reply is lost ends with it. For a message that belongs to no call, such as one
of a backward pass, no error can be reported: the channel tries for some seconds, and then gives up the session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from telegrad.calls.incoming_replies import IncomingReplies
from telegrad.calls.server import Server
from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.errors import CallError, LimitExceeded, ProtocolError, ResourceExhausted, is_shortage
from telegrad.wire.frames import Frame, Message
from telegrad.wire.messages import (
    Cancel,
    Failure,
    FailureWithProfiling,
    Reply,
    Request,
    RequestWithState,
    RpcWithProfilingReq,
    RpcWithProfilingResp,
    TracedRequest,
    peek_call,
)
from telegrad.wire.reassembly import peek_head

_log = logging.getLogger("telegrad")

Deliver = Callable[[Channel, Message], None]

_CANCEL = Cancel.__struct_config__.tag
_REQUESTS = frozenset(
    kind.__struct_config__.tag for kind in (Request, RequestWithState, RpcWithProfilingReq, TracedRequest)
)
_ANSWERS = frozenset(
    kind.__struct_config__.tag for kind in (Reply, Failure, RpcWithProfilingResp, FailureWithProfiling)
)


_TRIES = 100  # attempts to take a message for which there is no memory, and whose loss could not be reported


class Undeliverable:
    """Fails the calls whose messages this worker cannot take."""

    def __init__(self, local: LocalWorker, replies: IncomingReplies, server: Server, deliver: Deliver) -> None:
        self._local = local
        self._replies = replies
        self._server = server
        self._deliver = deliver

    def report(self, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
        """Fail the call that a message belongs to; False if it belongs to none, and could not be taken later either."""
        head = peek_head(frame) if message is None else message.head
        me, peer = self._local.name, channel.peer
        if not is_shortage(cause) and not isinstance(cause, LimitExceeded):
            _log.error("worker %r cannot process a message from worker %r", me, peer, exc_info=cause)
        tag, call = peek_call(head) or (None, 0)
        if channel.outgoing and tag in _ANSWERS:
            self._replies.unreadable(
                channel, call, _error(f"worker {me!r} cannot take the reply of", channel, cause, call)
            )
            return True
        if isinstance(cause, LimitExceeded) and channel.account is not None:
            reason = channel.account.count_refusal(cause)
            if reason or channel.outgoing or tag not in _REQUESTS:
                raise LimitExceeded(reason or str(cause)) from cause  # disconnects the peer
            self._server.refusals.reject(channel, call, cause)
            return True
        if not channel.outgoing and tag in _REQUESTS:
            error = _error(f"worker {me!r} cannot take a call from", channel, cause, call)
            self._server.refusals.cannot_take(channel, call, error)
            return True
        return tag == _CANCEL or (message is not None and is_shortage(cause) and self._taken_later(channel, message))

    def _taken_later(self, channel: Channel, message: Message) -> bool:
        for _ in range(_TRIES):
            self._local.executor.pause()
            try:
                self._deliver(channel, message)
            except MemoryError:
                continue
            except ProtocolError:  # its head was cut off by this worker, so it can never be read
                return False
            return True
        return False


def _error(what: str, channel: Channel, cause: Exception, call: int) -> Exception:
    if isinstance(cause, ResourceExhausted | LimitExceeded):
        return cause
    text = f"{what} worker {channel.peer!r}: {type(cause).__name__}: {cause}"
    error: CallError
    if is_shortage(cause):
        error = ResourceExhausted(f"{text}. Send less at once, or give the worker more", worker=channel.peer, call=call)
    else:
        error = CallError(f"{text}. This is a bug in telegrad: please report it", worker=channel.peer, call=call)
    error.__cause__ = cause
    return error
