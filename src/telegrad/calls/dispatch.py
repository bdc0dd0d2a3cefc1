"""Where whole messages arrive: each goes to the client, to the server, or to the handler of its kind."""

from __future__ import annotations

from collections.abc import Iterable

from telegrad.calls.admission import Admission
from telegrad.calls.call import Served
from telegrad.calls.completion import Completion
from telegrad.calls.incoming_replies import IncomingReplies
from telegrad.calls.oneway import OneWay
from telegrad.calls.server import Server
from telegrad.connection.channel import Channel
from telegrad.connection.peer_table import Peer
from telegrad.errors import ProtocolError
from telegrad.wire.frames import Message
from telegrad.wire.messages import RESPONSES, Cancel, Request, decode_head


class Dispatcher:
    """Takes the messages that channels deliver."""

    def __init__(
        self,
        completion: Completion,
        replies: IncomingReplies,
        server: Server,
        oneway: OneWay,
        admission: Admission,
    ) -> None:
        self._completion = completion
        self._replies = replies
        self._server = server
        self._oneway = oneway
        self._admission = admission

    def deliver(self, channel: Channel, message: Message) -> None:
        """Take a message that arrived on a channel."""
        head = decode_head(message.head)
        if channel.outgoing:
            if isinstance(head, RESPONSES):
                call = channel.calls.get(head.call)
                if call is None or head.references:
                    self._replies.receive(channel, call, head, message)
                elif not self._completion.finish(call, head, message):  # it was given up just now
                    self._replies.return_abandoned(channel, head.call)
                return
        elif isinstance(head, Request):
            held = None
            if channel.account is not None:
                held = self._admission.admit_request(channel, channel.account, head, message)
                if held is None:
                    return
            if not head.nested:
                with channel.lock:
                    channel.credits.admit(message.size)
            self._server.take(channel, head, message, held)
            return
        elif isinstance(head, Cancel):
            self.cancel_children(self._server.cancel(channel, head.call, head.reason))
            return
        held = None
        if channel.account is not None:
            held = self._admission.admit_message(channel, channel.account, head, message)
            if held is None:
                return
        if not self._oneway.deliver(channel, head, message, held):
            raise ProtocolError(f"worker {channel.peer!r} sent a {type(head).__name__} in the wrong direction")

    def cancel_children(self, cancelled: Iterable[Served]) -> None:
        """Cancel the calls that cancelled calls have made."""
        for served in cancelled:
            for call in list(served.children.values()):
                self._completion.cancel(call, f"{served.function}, which made it, was given up: {served.cancelled}")

    def peer_lost(self, peer: Peer, channels: list[Channel], reason: str) -> None:
        """Fail the calls that a lost worker has not answered, and cancel those that it made."""
        self._completion.peer_lost(peer, channels, reason)
        for channel in channels:
            self.cancel_children(
                self._server.cancel_all(channel, f"worker {peer.record.name!r}, which called it, is gone")
            )
