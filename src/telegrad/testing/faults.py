"""Delays or fails messages of one agent on its real transports, for tests without a simulation.

The fate of a message is decided when it is posted, before its session numbers it:

- A *delayed* message is posted later. Other messages overtake it.
- A request that *fails* is never sent, and its call fails at once.
- Any other message that *fails* breaks its connection, as many times as `Fate.fails` says. The session reconnects and
  sends it again, so it arrives once. This requires a transport whose sessions survive broken connections: tcp.

>>> from telegrad.testing.group import local_group
>>> with local_group() as group:
...     inject(group["a"], lambda head: Fate(fails=1) if isinstance(head, Request) else None)
...     group["a"].call("b", print)
Traceback (most recent call last):
  ...
telegrad.errors.CallError: call 1 of builtins:print on worker 'b' was not sent: its failure was injected
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from telegrad.agent.agent import Agent
from telegrad.connection.channel import Channel
from telegrad.errors import CallError, TelegradError
from telegrad.transport.base import Link, LinkClosed
from telegrad.wire.frames import MESSAGE, PREFIX_SIZE
from telegrad.wire.messages import Head, Request, decode_head
from telegrad.wire.packing import OutgoingFrame

_log = logging.getLogger("telegrad")


class Fate(NamedTuple):
    """What happens to a message."""

    delay: float = 0.0
    """Seconds until it is posted."""
    fails: int = 0
    """How many attempts to send it fail. A request is not retried."""


Decide = Callable[[Head], Fate | None]
"""Called with the head of every posted message. None means no fault."""


def inject(agent: Agent, decide: Decide) -> None:
    """Let `decide` choose the fate of every message that `agent` posts. Call this before its first call."""
    if any(peer.channels() for peer in agent.peers.all()):
        raise ValueError(f"worker {agent.me.name!r} already has channels: inject faults before its first call")

    class Injected(_FaultyChannel):
        pass

    Injected.agent, Injected.decide = agent, staticmethod(decide)
    agent.peers.make_channel = Injected


class _FaultyChannel(Channel):
    """A channel that asks `decide` about each message."""

    agent: Agent
    decide: Decide

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count = threading.Lock()  # protects _breaks
        self._breaks = 0  # how many more connections break before the queued messages are sent

    def post(self, frames: Sequence[OutgoingFrame], charge: int = 0, *, unwaited: bool = False) -> int | None:
        """See `Channel.post`."""
        frames = tuple(frames)
        head = decode_head(_head_of(frames[0]))
        fate = self.decide(head) or Fate()
        if fate.fails and not isinstance(head, Request):
            self._break(fate.fails)
        elif fate.fails or fate.delay:
            # Takes its credits and expects its reply now, whatever happens to it later.
            if super().post((), charge, unwaited=unwaited) is None:
                return None
            if fate.fails:
                assert isinstance(head, Request)
                self._fail(head)
            else:
                runtime = self.local.runtime
                self.local.executor.timers.at(runtime.now() + fate.delay, partial(self._post_late, frames))
            return sum(frame.size for frame in frames)
        return super().post(frames, charge, unwaited=unwaited)

    def _post_late(self, frames: tuple[OutgoingFrame, ...]) -> None:
        try:
            super().post(frames)
        except TelegradError as error:  # the caller fails when the channel closes
            _log.debug("could not send a delayed message to worker %r: %s", self.peer, error)

    def _fail(self, head: Request) -> None:
        call = self.calls.get(head.call)
        if call is None:
            return
        error = CallError(
            f"{call} was not sent: its failure was injected", worker=call.worker, function=call.function, call=call.id
        )
        client = self.agent.client
        client._forget(call)
        self.calls[call.id] = call  # finish() expects it there
        on_done = None
        if call.at_once:  # like torch, fail an RRef before its creator has the handle
            on_done, call.on_done = call.on_done, None
        client.completion.finish(call, error=error)
        if on_done is not None:
            self.readers.expect_fewer(1)
            on_done(call)

    def _break(self, times: int) -> None:
        """Break the connection now and fail the next `times` - 1 reconnects."""
        if not self.resumable:
            raise ValueError(
                f"the connection to worker {self.peer!r} cannot be resumed once broken: such faults need tcp "
                "(set TELEGRAD_TRANSPORTS=tcp and TELEGRAD_TOKEN)"
            )
        with self._count:
            self._breaks = max(self._breaks, times - 1)
        link = self.link
        if link is not None:
            self.link_ended(link, "its failure was injected")

    def attach(self, link: Link, peer_received: tuple[int, int]) -> None:
        """See `Channel.attach`."""
        with self._count:
            broken, self._breaks = self._breaks > 0, max(0, self._breaks - 1)
        if broken:
            raise LinkClosed("its failure was injected")
        super().attach(link, peer_received)


def _head_of(frame: OutgoingFrame) -> memoryview:
    """Return the head of a message from its first frame: it follows the lengths, or ends the frame."""
    body = memoryview(frame.body)
    length = int.from_bytes(body[:4], "little")
    return body[PREFIX_SIZE : PREFIX_SIZE + length] if frame.kind == MESSAGE else body[len(body) - length :]
