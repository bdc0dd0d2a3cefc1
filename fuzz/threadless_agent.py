"""An agent without threads, clock or sockets, with two connected peers: every input gives the same result each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fuzz.hostile_messages import pack_body
from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.rref.manager import RRefManager
from telegrad.wire.frames import MESSAGE, PREFIX_SIZE, Frame, Limits, unpack_prefix
from telegrad.wire.messages import decode_head, encode_head

B, C = WorkerRecord("b", 1, 6, ("memory://b",)), WorkerRecord("c", 2, 7, ("memory://c",))


class WouldWait(Exception):
    """The agent would have waited here."""


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, deadline: float | None) -> bool:
        if not self._is_set:
            raise WouldWait
        return True


class _Runtime:
    """A clock that stands still, and no threads."""

    preemptive = False

    def __init__(self) -> None:
        self._random = random.Random(3)

    def now(self) -> float:
        return 1000.0

    def event(self) -> _Event:
        return _Event()

    def start_thread(self, name: str, target: Callable[[], None]) -> Any:
        raise WouldWait  # the finalizer and the event loop have threads

    def random_bits(self, count: int) -> int:
        return self._random.getrandbits(count)


class _Poller:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Link:
    """A link that records what is sent, and brings nothing."""

    resumable = shares_memory = False
    peer = "a test"
    owner: Any = None

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def admit(self, limits: Limits, place: object) -> None:
        """Accept."""

    def receive(self) -> Iterator[Frame]:
        return iter(())

    def send(self, kind: int, body: Any, sequence: int, ack_control: int, ack_bulk: int) -> None:
        self.sent.append(bytes(body))

    def unsent(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class ThreadlessAgent:
    """Worker a, with connected peers b and c. What would wait raises `WouldWait`."""

    def __init__(self) -> None:
        with mock.patch("os.register_at_fork"):  # it can never be undone, and there is one agent for each input
            self.agent = Agent("a", 0, transports=[], poller=_any(_Poller()), runtime=_any(_Runtime()), incarnation=5)
        Autograd(self.agent)
        manager = RRefManager(self.agent)
        manager._finalizer.start = lambda: None  # type: ignore[method-assign]  # it has a thread; see `settle`
        self._finalizer = manager._finalizer
        self.agent.peers.set_group([self.agent.me, B, C])
        self.incoming = {record.name: self._channel(record, outgoing=False) for record in (B, C)}
        self.outgoing = {record.name: self._channel(record, outgoing=True) for record in (B, C)}

    def _channel(self, record: WorkerRecord, *, outgoing: bool) -> Channel:
        agent = self.agent
        channel = Channel(
            agent.local,
            agent.peers,
            record,
            outgoing=outgoing,
            resumable=False,
            session_id=1,
            settings=agent.settings.session,
            allocate=lambda size: memoryview(bytearray(size)),
        )
        peer = agent.peers.find(record.name)
        if outgoing:
            peer.outgoing = channel
        else:
            peer.incoming = channel
        channel.attach(_any(_Link()), (0, 0))
        return channel

    def deliver(
        self, sender: str, head: Any, data: bytes = b"", region: bytes = b"", *, is_reply: bool = False
    ) -> None:
        """Take one message of a peer, and run what it causes. A reply comes where this worker calls the peer."""
        channel = (self.outgoing if is_reply else self.incoming)[sender]
        if channel.session.state.is_over:
            return
        sequence = channel.session.received_up_to()[0] + 1
        body = bytearray(pack_body(encode_head(head), data, region))
        channel.receiver._take(Frame(MESSAGE, sequence, 0, 0, body))
        self.settle()

    def settle(self) -> None:
        """Run all tasks, and release the handles that were dropped."""
        queue, finalizer = self.agent.executor.queue, self._finalizer
        while True:
            if queue.urgent or queue.ready:
                (queue.urgent or queue.ready).popleft()()
            elif not self._release(finalizer):
                return

    def _release(self, finalizer: Any) -> bool:
        dropped = finalizer._queue
        if not dropped:
            return False
        finalizer._finalize(dropped.popleft())
        return True

    def lose(self, name: str) -> None:
        """Lose a worker, and run what follows."""
        self.agent.peers.lost_workers.peer_lost(self.agent.peers.find(name), "the test lost it")
        self.settle()

    def answers(self, name: str) -> list[Any]:
        """Return the heads of what was sent to a peer that called, and forget them."""
        link: Any = self.incoming[name].link
        sent, link.sent = link.sent, []
        return [decode_head(body[PREFIX_SIZE : PREFIX_SIZE + unpack_prefix(body)[0]]) for body in sent]


def _any(value: object) -> Any:
    return value
