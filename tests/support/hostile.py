"""A member of a group that knows the token and speaks the protocol, but sends whatever it wants."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call
from telegrad.calls.client import failure_of
from telegrad.connection.channel import Channel
from telegrad.wire.encoded import Encoded
from telegrad.wire.messages import Request, encode_head
from telegrad.wire.packing import pack
from telegrad.wire.plain_encode import encode
from telegrad.wire.tensors import encode_tensors

PATIENCE = 30.0

fired: list[str] = []
"""What the gadgets have run. Every attack must leave it empty."""


def fire(what: str) -> str:
    """Record that code of the attacker's choice has run."""
    fired.append(what)
    return what


class Gadget:
    """Runs code when it is unpickled."""

    def __init__(self, what: str = "a gadget") -> None:
        self.what = what

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return fire, (self.what,)


def pickled(value: object = None) -> bytes:
    """Return a pickle that fires when it is loaded."""
    return pickle.dumps((Gadget(), value), protocol=5)


def plain(*args: Any, **kwargs: Any) -> bytes:
    """Return the data of a request with plain arguments."""
    return encode((args, kwargs)).data


class HostileMember:
    """Sends hand-made messages through the connections of a real agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._numbers = itertools.count(1 << 40)

    def channel_to(self, worker: str) -> Channel:
        """Return an open channel to a worker."""
        peer = self.agent.peers.find(worker)
        return peer.outgoing or self.agent.peers.connector.channel_to(peer, self.agent.runtime.now() + PATIENCE)

    def send(self, worker: str, head: Any, data: bytes = b"", attachments: Sequence[Any] = ()) -> None:
        """Send a message with this head, and these tensors."""
        channel = self.channel_to(worker)
        layout = encode_tensors(list(attachments)) if attachments else None
        channel.post(pack(encode_head(head), data, layout, channel.room))

    def request(
        self, worker: str, function: str, data: bytes, tensors: Sequence[Any] = (), **fields: Any
    ) -> Exception | Any:
        """Send a request, and return the error that the worker answers with, or the result."""
        layout = encode_tensors(list(tensors)) if tensors else None
        if layout is not None and "attachments" not in fields:
            fields["attachments"] = layout.descriptors
        number = next(self._numbers)
        return self.ask(worker, number, Request(number, function, 0.0, True, **fields), data, layout)

    def ask(self, worker: str, number: int, head: Any, data: bytes = b"", layout: Any = None) -> Exception | Any:
        """Send a message that is answered as a call with that number is, and return the answer."""
        channel, client = self.channel_to(worker), self.agent.client
        call = Call(number, channel, worker, "an attack", self.agent.runtime.now())
        channel.calls[number] = call
        channel.post(pack(encode_head(head), data, layout, channel.room))
        assert client.wait(call, self.agent.runtime.now() + PATIENCE)
        failure = failure_of(call, client._pipeline)
        return failure if failure is not None else client.result(call)

    def answer_with(self, data: bytes) -> None:
        """Answer all calls with this data from now on."""
        self.agent.server.replier._encode = lambda value, **_: Encoded(data, [])
