"""A whole agent, and a member that sends it messages with valid heads and hostile contents.

The agent has no threads: tasks run one after the other, and whatever would wait raises `WouldWait`. A task that raises
anything is a crash, because tasks report their own errors. Afterwards the member is lost, then the other worker, and the
agent must hold nothing of either: what a member leaves behind would grow without limit over its incarnations.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from fuzz.census import held
from fuzz.choices import Choices
from fuzz.hostile_messages import HostileMember, pack_body
from fuzz.target import Target
from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.connection.channel import Channel
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import ProtocolError
from telegrad.rref.ids import incarnation_of
from telegrad.rref.manager import RRefManager
from telegrad.wire.frames import MESSAGE, Frame, Limits
from telegrad.wire.messages import encode_head

B, C = WorkerRecord("b", 1, 6, ("memory://b",)), WorkerRecord("c", 2, 7, ("memory://c",))
MOST_MESSAGES = 64


class WouldWait(Exception):  # noqa: N818 - says what happened
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
    """A link that takes everything and brings nothing."""

    resumable = shares_memory = False
    peer = "a test"
    owner: Any = None

    def admit(self, limits: Limits, place: object) -> None:
        """Accept."""

    def receive(self) -> Iterator[Frame]:
        return iter(())

    def send(self, kind: int, body: Any, sequence: int, ack_control: int, ack_bulk: int) -> None:
        """Drop the frame."""

    def unsent(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Crash(logging.Handler):
    """Makes a logged traceback a crash: code that logs one considers it a bug in telegrad."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and not isinstance(record.exc_info[1], WouldWait):
            raise AssertionError(f"logged as a bug: {record.getMessage()}") from record.exc_info[1]


class _Harness:
    """Worker a, with connected peers b and c."""

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

    def deliver(self, channel: Channel, body: bytes) -> None:
        """Take one message, and run what it causes."""
        if channel.session.state.is_over:
            return
        sequence = channel.session.received_up_to()[0] + 1
        channel.receiver._take(Frame(MESSAGE, sequence, 0, 0, bytearray(body)))
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


def _any(value: object) -> Any:
    return value


def _run(data: bytes) -> None:
    choices = Choices(data)
    harness = _Harness()
    tag = incarnation_of(harness.agent.me)
    member = HostileMember((1, incarnation_of(B)), (0, tag), ((2, incarnation_of(C)),))
    log = logging.getLogger("telegrad")
    handler = _Crash()
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(MOST_MESSAGES):
                if not choices:
                    break
                is_reply = choices.rarely()
                head, body, region = member.message(choices, is_reply=is_reply)
                channel = (harness.outgoing if is_reply else harness.incoming)["b"]
                try:
                    harness.deliver(channel, pack_body(encode_head(head), body, region))
                except ProtocolError:
                    break
            harness.lose("b")
            harness.lose("c")
            left = {name: count for name, count in held(harness.agent).items() if count and name not in _ALLOWED}
            assert not left, f"after both workers are lost the agent holds {left}"
    finally:
        log.removeHandler(handler)


_ALLOWED = ("peers", "timers", "unacked")
"""What is left after losses: the records of peers, and timers that have not run because the clock stands still."""


def _seeds() -> Iterable[bytes]:
    rng = random.Random(4)
    return [rng.randbytes(30 * index) for index in range(1, 30)]


MEMBER = Target("member", _run, (), _seeds, max_size=2048)
