"""A channel with a scripted link and an agent that records what it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from telegrad.connection.channel import Channel
from telegrad.connection.peer_account import PeerAccounts
from telegrad.connection.worker_record import WorkerRecord
from telegrad.current_waits import CurrentWaits
from telegrad.events import EventRing
from telegrad.execution.timers import Timer
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.transport.buffers import BufferPool
from telegrad.waiting import Event, RealRuntime
from telegrad.wire.devices import DevicePairs, Placement
from telegrad.wire.frames import Frame, Limits, Message


class FakeLink:
    """A link that yields `incoming` (an exception is raised) and records what is sent as (kind, body, sequence)."""

    shares_memory = False
    resumable = True
    peer = "a test"

    def __init__(self) -> None:
        self.incoming: list[Frame | BaseException] = []
        self.sent: list[tuple[int, bytes, int]] = []
        self.closed = False
        self.owner: Any = None

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        """Accept the limits of an authenticated peer."""

    def receive(self) -> Iterator[Frame]:
        """Yield the scripted frames."""
        while self.incoming:
            item = self.incoming.pop(0)
            if isinstance(item, BaseException):
                raise item
            yield item

    def send(self, kind: int, body: Any, sequence: int, ack_control: int, ack_bulk: int) -> None:
        """Record a frame."""
        self.sent.append((int(kind), bytes(body), sequence))

    def flush(self) -> None:
        """Do nothing: everything was sent."""

    def close(self) -> None:
        """Record the end."""
        self.closed = True


class FakeAgent:
    """Stands for the local worker with its runtime, poller and executor, and for the peers. The test moves the time."""

    def __init__(self) -> None:
        self.me = WorkerRecord("a", 0, 1, ())
        self.runtime: Any = self
        self.poller: Any = self
        self.executor: Any = self
        self.timers: Any = self
        self.lost_workers: Any = self
        self.name = self.me.name
        self.closed = ""
        self.leaving = False
        self.departing = False
        self.given_up: Exception | None = None
        self.limits = Limits()
        self.accounts = PeerAccounts(self.name, AgentSettings(), self.runtime)
        self.device_maps: dict[str, DevicePairs] = {}
        self.placement = Placement
        self.direct = None
        self.slabs: Any = None
        self.buffers = BufferPool()
        self.time = 0.0
        self.set_timers: list[Timer] = []
        self.events = EventRing(0)
        self.waits = CurrentWaits(self.now)
        self.reported: list[tuple[Any, ...]] = []
        """What the channel reported: ("delivered", head), ("lost", reason), ("left", cause), ("reconnect",), ..."""
        self.fail_delivery: Exception | None = None
        self.can_report = False

    # The runtime, the poller, the executor and its timers.

    def now(self) -> float:
        return self.time

    def add(self, link: object, *, read: bool, once: bool) -> None:
        pass

    def arm(self, link: object, *, read: bool) -> None:
        pass

    def at(self, when: float, action: Callable[[], object]) -> Timer:
        self.set_timers.append(Timer(when, action))
        return self.set_timers[-1]

    def cancel(self, timer: Timer) -> None:
        timer.action = None

    def event(self) -> Event:
        """Return a new event."""
        return RealRuntime().event()

    def wait(self, event: Event, deadline: float | None) -> bool:
        """Wait for an event that another thread is about to set."""
        return event.wait(None if deadline is None else time.monotonic() + deadline - self.time)

    def pause(self) -> None:
        self.reported.append(("paused",))

    def submit_all(self, tasks: list[Callable[[], object]]) -> None:
        for task in tasks:
            task()

    def advance(self, seconds: float) -> None:
        """Move time, and run the timers that become due."""
        self.time += seconds
        for timer in list(self.set_timers):
            if timer.action is not None and timer.when <= self.time:
                action, timer.action = timer.action, None
                action()

    # The agent.

    def deliver(self, channel: Channel, message: Message) -> None:
        if self.fail_delivery is not None:
            raise self.fail_delivery
        self.reported.append(("delivered", bytes(message.head)))

    def undelivered(self, channel: Channel, frame: Frame, message: Message | None, cause: Exception) -> bool:
        self.reported.append(("undelivered", cause))
        return self.can_report

    def channel_lost(self, channel: Channel, reason: str) -> None:
        self.reported.append(("lost", reason))

    def channel_left(self, channel: Channel, cause: str) -> None:
        self.reported.append(("left", cause))

    def reconnect(self, channel: Channel) -> None:
        self.reported.append(("reconnect",))


def connected_channel(agent: FakeAgent, link: FakeLink, *, resumable: bool = False) -> Channel:
    """Return an outgoing channel to worker "b" that is connected through `link`."""
    local: Any = agent
    peers: Any = agent
    channel = Channel(
        local,
        peers,
        WorkerRecord("b", 1, 2, ()),
        outgoing=True,
        resumable=resumable,
        session_id=7,
        settings=SessionSettings(),
        allocate=lambda size: memoryview(bytearray(size)),
    )
    attached: Any = link
    channel.attach(attached, (0, 0))
    return channel
