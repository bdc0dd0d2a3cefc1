"""Asks other workers to describe themselves, for `telegrad.observe`.

These are no calls of the program: they count nowhere, no shutdown waits for them, and they are neither limited by the
call that is being served nor by its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from telegrad.calls.call import Call
from telegrad.calls.deadlines import Deadlines
from telegrad.calls.pipeline import pack_head
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.peers import Peers
from telegrad.errors import NotInitialized
from telegrad.wire.messages import ObserveReq

OBSERVE = "@telegrad.observe"
"""Stands for the function of such a request."""


class Asking:
    """The requests of one agent to describe other workers. `numbers` are those of its calls."""

    def __init__(self, local: LocalWorker, peers: Peers, numbers: Iterator[int], deadlines: Deadlines) -> None:
        self._local = local
        self._peers = peers
        self._numbers = numbers
        self._deadlines = deadlines

    def ask(self, to: str, request: bytes, deadline: float, on_done: Callable[[Call], None]) -> None:
        """Send a request. `on_done` is short, and called on the thread that reads the reply, or after the deadline."""
        if self._local.closed:
            raise NotInitialized(f"worker {self._local.me.name!r} cannot ask it: {self._local.closed}")
        peer = self._peers.find(to)
        channel = peer.outgoing or self._peers.connector.channel_to(peer, deadline)
        now = self._local.runtime.now()
        call = Call(next(self._numbers), channel, peer.record.name, OBSERVE, now, deadline, None, on_done, at_once=True)
        channel.calls[call.id] = call
        try:
            channel.post(pack_head(channel, ObserveReq(call.id), request), unwaited=True)
        except BaseException:
            channel.calls.pop(call.id, None)
            raise
        self._deadlines.add(call, deadline)
