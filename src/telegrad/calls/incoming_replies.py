"""Replies that arrive: for calls that wait for them, for calls that were given up, and replies that cannot be read."""

from __future__ import annotations

from telegrad.calls.call import Call
from telegrad.calls.completion import Completion
from telegrad.calls.extension import Concern, IncomingMessage
from telegrad.calls.pipeline import Pipeline
from telegrad.connection.channel import Channel
from telegrad.wire.frames import Message
from telegrad.wire.messages import Reply, Response


class IncomingReplies:
    """Takes the replies to the calls that one agent made."""

    def __init__(self, completion: Completion, pipeline: Pipeline) -> None:
        self._completion = completion
        self._pipeline = pipeline

    def receive(self, channel: Channel, call: Call | None, answer: Response, message: Message) -> None:
        """Take a reply that brings references, or that nobody waits for any more."""
        if isinstance(answer, Reply) and answer.references:
            # Even if nobody waits for the reply any more: its sender must learn that the references were dropped.
            arrived = IncomingMessage(channel.worker, forks=answer.references)
            for extension in self._pipeline.concerned[Concern.REFERENCES]:
                extension.arrived(arrived)
            if call is not None:
                call.references = arrived.references
        if call is None or not self._completion.finish(call, answer, message):  # it was given up, perhaps just now
            self.return_abandoned(channel, answer.call)

    def return_abandoned(self, channel: Channel, number: int) -> None:
        """Return the credits of a call that was given up, and has now been answered."""
        with channel.lock:
            charge = channel.abandoned.pop(number, None)
        if charge is not None:
            channel.readers.expect_fewer(1)
        if charge:
            channel.credit_window.release(charge)

    def unreadable(self, channel: Channel, number: int, error: Exception) -> None:
        """Fail a call whose reply arrived but could not be read by this worker."""
        call = channel.calls.get(number)
        if call is None:
            self.return_abandoned(channel, number)
            return
        charge, call.charge = call.charge, 0  # the callee no longer counts it
        self._completion.finish(call, error=error)
        if charge:
            channel.credit_window.release(charge)
