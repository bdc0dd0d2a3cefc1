"""Makes messages of one agent, on its real transports, late or lost: where a test needs faults without a simulation.

What happens to a message is decided when it is posted, before its session has numbered it:

- A message that is *late* is posted after its delay. Others overtake it.
- A request that *fails* is never sent, and its call ends at once with an error.
- Any other message that *fails* finds the connection broken, as often as it is told to. Its session opens a new one and
  sends it again, so it arrives once. That takes a transport whose sessions survive broken connections: tcp.

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
    """What is to happen to a message."""

    delay: float = 0.0
    """Seconds after which it is posted."""
    fails: int = 0
    """How many attempts to send it fail; a request is not tried again after the first."""


Decide = Callable[[Head], Fate | None]
"""Called with the head of every message that is posted; None: nothing happens to it."""


def inject(agent: Agent, decide: Decide) -> None:
    """Have `decide` say what happens to the messages of `agent`, which has no channels yet."""
    if any(peer.channels() for peer in agent.peers.all()):
        raise ValueError(f"worker {agent.me.name!r} has channels already: inject faults before its first call")

    class Injected(_FaultyChannel):
        pass

    Injected.agent, Injected.decide = agent, staticmethod(decide)
    agent.peers.make_channel = Injected


class _FaultyChannel(Channel):
    """A channel that asks what is to happen to each message."""

    agent: Agent
    decide: Decide

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count = threading.Lock()  # protects _breaks
        self._breaks = 0  # how many connections are still to break before what waits in the session goes out

    def post(self, frames: Sequence[OutgoingFrame], charge: int = 0, *, unwaited: bool = False) -> bool:
        """See `Channel.post`."""
        frames = tuple(frames)
        head = decode_head(_head_of(frames[0]))
        fate = self.decide(head) or Fate()
        if fate.fails and not isinstance(head, Request):
            self._break(fate.fails)
        elif fate.fails or fate.delay:
            # Its credits are taken and its answer is expected now, whatever becomes of it.
            if not super().post((), charge, unwaited=unwaited):
                return False
            if fate.fails:
                assert isinstance(head, Request)
                self._fail(head)
            else:
                runtime = self.owner.runtime
                self.owner.executor.at(runtime.now() + fate.delay, partial(self._post_late, frames))
            return True
        return super().post(frames, charge, unwaited=unwaited)

    def _post_late(self, frames: tuple[OutgoingFrame, ...]) -> None:
        try:
            super().post(frames)
        except TelegradError as error:  # whoever waits for the answer is told by the channel's end
            _log.debug("a message for worker %r that was late has no taker: %s", self.peer, error)

    def _fail(self, head: Request) -> None:
        call = self.calls.get(head.call)
        if call is None:
            return
        error = CallError(
            f"{call} was not sent: its failure was injected", worker=call.worker, function=call.function, call=call.id
        )
        calling = self.agent.client
        calling._forget(call, self.agent.peers.find(call.worker))
        self.calls[call.id] = call  # only then can it end
        on_done = None
        if call.at_once:  # a reference knows that it was not created before its maker has it, as in torch
            on_done, call.on_done = call.on_done, None
        calling.finish(call, error=error)
        if on_done is not None:
            self.expect_fewer(1)
            on_done(call)

    def _break(self, times: int) -> None:
        """Break the connection now, and so many attempts to open a new one that it is `times` in all."""
        if not self.resumable:
            raise ValueError(
                f"a broken connection with worker {self.peer!r} would be the end of it: such faults take tcp "
                "(TELEGRAD_TRANSPORTS=tcp, and a token in TELEGRAD_TOKEN)"
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
    """The head of a message, whose first frame this is: it follows the lengths, or ends the frame."""
    body = memoryview(frame.body)
    length = int.from_bytes(body[:4], "little")
    return body[PREFIX_SIZE : PREFIX_SIZE + length] if frame.kind == MESSAGE else body[len(body) - length :]
