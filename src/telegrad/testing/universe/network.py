"""The network of a universe: everything that `SimNetwork` does to frames, and routes that can be blocked.

What the faults mean for a stream transport, frame by frame:

- Loss, duplication and cuts are per frame, as in `Faults`. Frames of the handshake are spared unless `hits_handshakes`.
- Reorder: the two lanes of a connection overtake each other, as they do in the queue of a socket's writer, and so do
  different connections. A lane stays in order, and frames without a number (PING, GOODBYE, ACK) come after all frames
  that were sent before them: a stream keeps its order.
- A blocked direction keeps the frames, as TCP does, and delivers them when it is unblocked, if the connection still
  exists. Unless `accepts`, no connection can be opened either way while one direction is blocked.
- A connection cut half open ends at one side only. The other side learns it later, or by its own timeouts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

from telegrad.agent.agent import Agent
from telegrad.testing.scheduler import Scheduler, SimRuntime
from telegrad.testing.simulation import Faults, SimNetwork, Simulation
from telegrad.transport.base import Link
from telegrad.transport.memory import MemoryLink, MemoryTransport
from telegrad.waiting import Event
from telegrad.wire.frames import BULK, CONTROL, Frame, Kind, lane_of

Direction = tuple[str, str]
"""From which address to which."""

_FINGERPRINT = struct.Struct("<dHIII")


class UniverseNetwork(SimNetwork):
    """A simulated network whose directions can be blocked."""

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        super().__init__(scheduler, faults)
        self.hits_handshakes = False
        self.reorders = False
        self.fingerprint = 0
        """A checksum of all frames that were transmitted, with their times: equal for equal runs."""
        self._blocked: dict[Direction, list[Callable[[], None]]] = {}
        self._unreachable: set[Direction] = set()
        self._connecting: list[Event] = []
        self._lanes: dict[tuple[MemoryLink, int], float] = {}

    # -- frames -------------------------------------------------------------------------------------------------

    def deliver(self, link: MemoryLink, frame: Frame) -> None:
        if frame.kind == Kind.HANDSHAKE and not self.hits_handshakes:
            if link.origin not in self.dead:
                self.counts["frames"] += 1
                self._transmit(link, frame)
            return
        super().deliver(link, frame)

    def _transmit(self, link: MemoryLink, frame: Frame) -> None:
        held = self._blocked.get((link.origin, link.target))
        if held is not None:
            held.append(lambda: self._transmit(link, frame))
            return
        scheduler, faults = self.scheduler, self.faults
        arrival = scheduler.now + scheduler.random.uniform(faults.shortest_delay, faults.longest_delay)
        key = link, lane_of(frame.kind)
        if frame.sequence and self.reorders:
            arrival = max(arrival, self._lanes.get(key, 0.0))
        else:
            arrival = max(arrival, self._last.get(link, 0.0))
        self._lanes[key] = arrival
        self._last[link] = max(arrival, self._last.get(link, 0.0))
        if not frame.sequence:  # nothing overtakes it
            self._lanes[link, CONTROL] = self._lanes[link, BULK] = arrival
        self._mix(arrival, frame.kind, frame.sequence, len(frame.body), zlib.crc32(frame.body))

        def arrive() -> None:
            with self.lock:
                link.other.arrived(frame)

        scheduler.at(arrival, arrive)

    def _mix(self, when: float, *numbers: int) -> None:
        self.fingerprint = zlib.crc32(_FINGERPRINT.pack(when, *numbers), self.fingerprint)

    def hang_up(self, link: MemoryLink, reason: str) -> None:
        held = self._blocked.get((link.origin, link.target))
        if held is not None:
            held.append(lambda: self.hang_up(link, reason))
            return
        super().hang_up(link, reason)

    def unsent(self, link: MemoryLink) -> bool:
        return bool(self._blocked.get((link.origin, link.target)))

    # -- connections --------------------------------------------------------------------------------------------

    def between(self, one: str, other: str) -> Iterator[MemoryLink]:
        """Yield the connections of two workers, as the ends of those who opened them."""
        for link in self.links:
            if {link.origin, link.target} == {address(one), address(other)} and not link.over():
                yield link

    def cut_half_open(self, link: MemoryLink, seconds: float) -> None:
        """End a connection at one side at once, and at the other one later. Frames in flight still arrive there."""
        with self.lock:
            self.counts["cuts"] += 1
            link.ended("the connection was reset")

        def end() -> None:
            with self.lock:
                link.other.ended("the connection was reset")

        self.scheduler.at(self.scheduler.now + seconds, end)

    # -- blocked directions -------------------------------------------------------------------------------------

    def block(self, source: str, target: str, *, accepts: bool = False) -> None:
        """Let nothing through from `source` to `target`. With `accepts`, connections can still be opened."""
        direction = address(source), address(target)
        with self.lock:
            self._blocked.setdefault(direction, [])
            if not accepts:
                self._unreachable.add(direction)

    def unblock(self, source: str, target: str) -> None:
        """Undo `block`: what was kept is sent, in order."""
        direction = address(source), address(target)
        with self.lock:
            self._unreachable.discard(direction)
            for send in self._blocked.pop(direction, ()):
                send()
            waiting, self._connecting = self._connecting, []
        for event in waiting:
            event.set()

    def is_unreachable(self, source: str, target: str) -> bool:
        """Return whether no connection can be opened: a packet of its opening would not arrive."""
        return not self._unreachable.isdisjoint(((source, target), (target, source)))

    def wait_for_route(self, source: str, target: str, deadline: float) -> None:
        """Wait while `source` cannot open a connection to `target`. Raises TimeoutError at the deadline."""
        while self.is_unreachable(source, target):
            event = SimRuntime(self.scheduler, "").event()
            self._connecting.append(event)
            if not event.wait(deadline):
                raise TimeoutError(f"no route from {source} to {target}")


class UniverseTransport(MemoryTransport):
    """Waits for a route before it connects, as TCP does."""

    def __init__(self, network: UniverseNetwork, *, resumable: bool, origin: str) -> None:
        super().__init__(network, resumable=resumable, origin=origin)
        self._routes = network
        self._here = origin

    def connect(self, address: str, deadline: float) -> Link:
        self._routes.wait_for_route(self._here, address, deadline)
        return super().connect(address, deadline)


class UniverseSimulation(Simulation):
    """A simulation on a `UniverseNetwork`."""

    network: UniverseNetwork
    generations_apart = 65536

    def make_network(self, faults: Faults) -> UniverseNetwork:
        return UniverseNetwork(self.scheduler, faults)

    def make_transport(self, address: str) -> UniverseTransport:
        return UniverseTransport(self.network, resumable=self.resumable, origin=address)


def address(place: str) -> str:
    """Return the address of a worker in a place."""
    return f"memory://{place}"


def place_of(agent: Agent) -> str:
    """Return the place in which a worker runs."""
    return agent.me.addresses[0].removeprefix("memory://")
