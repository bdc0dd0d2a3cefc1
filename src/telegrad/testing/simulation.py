"""A group of agents in one process, on a simulated network and clock, with faults drawn from a seed.

>>> import operator
>>> with Simulation(seed=1, workers=["a", "b"]) as sim:
...     print(sim.run(lambda: sim["a"].call("b", operator.add, (1, 2))))
3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from telegrad.agent.agent import Agent
from telegrad.backward.engine import Autograd
from telegrad.connection.packed_group import PackedGroup, pack
from telegrad.connection.worker_record import WorkerRecord
from telegrad.default_agent import acting_as
from telegrad.observe.profiling.agent import Profiling
from telegrad.rpc.exposing import default_registry
from telegrad.rref.manager import RRefManager
from telegrad.settings import AgentSettings
from telegrad.testing.scheduler import Scheduler, SimRuntime, SimThread
from telegrad.transport.memory import MemoryLink, MemoryNetwork, MemoryTransport
from telegrad.wire.frames import Frame

TOKEN = b"the token of the simulated group"
JOIN_TIMEOUT = 60.0
"""Seconds that a restarted worker waits for votes."""


@dataclass
class Faults:
    """Faults of the network: delays in seconds, everything else as probabilities per frame."""

    shortest_delay: float = 0.0001
    longest_delay: float = 0.005
    drop: float = 0.0
    duplicate: float = 0.0
    cut: float = 0.0
    """The connection breaks, and this frame and all frames in flight on it are lost."""


class SimNetwork(MemoryNetwork):
    """Delivers frames in virtual time, in order on each connection, and injects faults."""

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        super().__init__(SimRuntime(scheduler, ""))
        self.scheduler = scheduler
        self.faults = faults
        self.parted: set[frozenset[str]] = set()
        self.dead: set[str] = set()
        self.links: list[MemoryLink] = []
        self._last: dict[MemoryLink, float] = {}
        self.counts = {"frames": 0, "dropped": 0, "repeated": 0, "cuts": 0}

    def deliver(self, link: MemoryLink, frame: Frame) -> None:
        faults, random = self.faults, self.scheduler.random
        if link.origin in self.dead:
            return
        self.counts["frames"] += 1
        if link.resumable:
            if random.random() < faults.cut:
                self.cut(link, "the connection was cut")
                return
            if random.random() < faults.drop:
                self.counts["dropped"] += 1
                return
        self._transmit(link, frame)
        if link.resumable and random.random() < faults.duplicate:
            self.counts["repeated"] += 1
            self._transmit(link, frame)

    def _transmit(self, link: MemoryLink, frame: Frame) -> None:
        delay = self.scheduler.random.uniform(self.faults.shortest_delay, self.faults.longest_delay)
        when = max(self.scheduler.now + delay, self._last.get(link, 0.0))
        self._last[link] = when

        def arrive() -> None:
            with self.lock:
                link.other.arrived(frame)

        self.scheduler.at(when, arrive)

    def hang_up(self, link: MemoryLink, reason: str) -> None:
        # After all frames that were sent before.
        when = max(self.scheduler.now + self.faults.shortest_delay, self._last.get(link, 0.0))

        def end() -> None:
            with self.lock:
                link.other.ended(reason)

        self.scheduler.at(when, end)

    def connecting(self, source: str, target: str) -> None:
        if frozenset((source, target)) in self.parted:
            raise TimeoutError(f"no route from {source} to {target}")

    def connected(self, link: MemoryLink) -> None:
        self.links.append(link)

    def cut(self, link: MemoryLink, reason: str) -> None:
        """Break one connection at once, in both directions."""
        with self.lock:
            self.counts["cuts"] += 1
            link.ended(reason)
            link.other.ended(reason)

    def part(self, one: str, other: str) -> None:
        """Partition two workers from each other until `heal`."""
        with self.lock:
            pair = frozenset((f"memory://{one}", f"memory://{other}"))
            self.parted.add(pair)
            for link in self.links:
                if frozenset((link.origin, link.target)) == pair:
                    self.cut(link, "the network was partitioned")

    def heal(self) -> None:
        """Undo every `part`."""
        with self.lock:
            self.parted.clear()

    def silence(self, address: str) -> None:
        """Close the listener and connections of `address`, as the kernel does when a process dies."""
        with self.lock:
            self.listeners.pop(address, None)
            for link in self.links:
                for end in (link, link.other):
                    if end.origin == address:
                        self.hang_up(end, "end of file")
            self.dead.add(address)


class Simulation:
    """A group of agents with the given names, in virtual time.

    `run` runs a program as the simulation's main thread, and `spawn` starts others.
    """

    generations_apart = 1
    """How far apart the generations are that a launcher gives. Votes may give those between."""

    def __init__(
        self,
        seed: int,
        workers: Sequence[str],
        *,
        faults: Faults | None = None,
        resumable: bool = True,
        settings: AgentSettings | None = None,
        is_open: bool = False,
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.network = self.make_network(faults or Faults())
        self.random = self.scheduler.random
        self._names = list(workers)
        self.resumable = resumable
        self._settings = settings
        self._is_open = is_open
        self.agents: dict[str, Agent] = {}
        self._records: dict[str, WorkerRecord] = {}  # the latest of each worker
        self._starts = dict.fromkeys(self._names, 0)
        self.replaced: list[Agent] = []
        """Agents that were replaced while they were alive."""
        self._places: dict[str, str] = {}  # where workers run that are not in their own place
        self._ran = False

    def make_network(self, faults: Faults) -> SimNetwork:
        """Return the network of the simulation. Overridden where it has more faults."""
        return SimNetwork(self.scheduler, faults)

    def make_transport(self, address: str) -> MemoryTransport:
        """Return the transport of the worker at `address`."""
        return MemoryTransport(self.network, resumable=self.resumable, origin=address)

    def __getitem__(self, name: str) -> Agent:
        return self.agents[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ran:
            raise AssertionError("the simulation was never run")

    def run(self, program: Callable[[], Any]) -> Any:
        """Start the agents, run `program`, close the agents, and return its result. Raise if any thread failed."""
        self._ran = True

        def main() -> Any:
            for name in self._names:
                self.agents[name] = self._make(name)
            records = [agent.me for agent in self.agents.values()]
            self._records = {record.name: record for record in records}
            group = records if self._is_open else PackedGroup(pack(records))
            for agent in self.agents.values():
                agent.start(group, is_open=self._is_open)
            result = program()
            for name, agent in list(self.agents.items()):  # by the clock of each worker
                self.scheduler.start(self.place_of(name), "close", agent.close).join(None)
            return result

        result = self.scheduler.run(main)
        for thread, error in self.scheduler.errors:
            raise AssertionError(f"thread {thread.node}:{thread.name} failed") from error
        return result

    def _make(self, name: str, generation: int = 0, place: str = "") -> Agent:
        place = place or name
        address = f"memory://{place}"
        transport = self.make_transport(address)
        agent = Agent(
            name,
            self._names.index(name),
            transports=[(transport, address)],
            poller=transport.poller(),
            runtime=SimRuntime(self.scheduler, place),
            token=TOKEN,
            main="simulation",
            generation=generation,
            settings=self._settings,
            registry=default_registry,
        )
        Autograd(agent)
        RRefManager(agent)
        Profiling(agent)
        return agent

    def spawn(self, name: str, program: Callable[[], Any]) -> SimThread:
        """Run `program` on a thread of worker `name`, which is the default agent there."""

        def run() -> None:
            with acting_as(self.agents[name]):
                program()

        context = copy_context()
        return self.scheduler.start(self.place_of(name), "program", lambda: context.run(run))

    def place_of(self, name: str) -> str:
        """Return where a worker runs: the name of its threads and, behind ``memory://``, its address."""
        return self._places.get(name, name)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        scheduler = self.scheduler
        SimRuntime(scheduler, "").event().wait(scheduler.time_of(scheduler.current.node) + seconds)

    def kill(self, name: str) -> None:
        """Kill a worker as ``kill -9`` does."""
        agent = self.agents.pop(name)
        self.scheduler.kill(self._places.pop(name, name))
        self.network.silence(agent.me.addresses[0])

    def restart(
        self,
        name: str,
        *,
        vouched: bool = True,
        prepare: Callable[[Agent], object] | None = None,
        place: str = "",
    ) -> Agent:
        """Start a killed worker again, with a new incarnation, and return when all members know it.

        If it is not `vouched` for, as it would be by a launcher, it needs the votes of a quorum. `prepare` is called
        with the agent before it serves calls. `place` is another place than the worker's own, in which no process ever
        was, for a second process that wants to be the same worker.
        """
        if not place:
            self.network.dead.discard(f"memory://{name}")
        self._starts[name] += 1
        agent = self._make(name, self._starts[name] * self.generations_apart if vouched else 0, place)
        if prepare is not None:
            prepare(agent)
        members = list(self._records.values())
        # Whoever returns to an open group after it has left in order needs no votes: the store lets only one in.
        returns = self._is_open and not vouched and not place and self._has_left(name)
        generation = self._records[name].generation + 1 if returns else -1
        if not place:
            self._settle_in(name, agent, name)
        deadline = agent.runtime.now() + JOIN_TIMEOUT
        agent.join(members, deadline=deadline, vouched=vouched, is_open=self._is_open, generation=generation)
        self._records[name] = agent.me
        self._settle_in(name, agent, place or name)
        return agent

    def join(self, name: str, *, prepare: Callable[[Agent], object] | None = None) -> Agent:
        """Start a worker with a new name, and return when all members know it. The group must be open.

        `prepare` is called with the agent before it serves calls.
        """
        members = [record for other, record in self._records.items() if not self._has_left(other)]
        self._names.append(name)
        self._starts[name] = 0
        agent = self._make(name)
        if prepare is not None:
            prepare(agent)
        self._records[name] = agent.me  # as at a rendezvous: of two that join, one knows the other
        self._settle_in(name, agent, name)
        agent.join(members, deadline=agent.runtime.now() + JOIN_TIMEOUT, is_open=True)
        return agent

    def _has_left(self, name: str) -> bool:
        return name in self.agents and bool(self.agents[name].closed)

    def _settle_in(self, name: str, agent: Agent, place: str) -> None:
        before = self.agents.get(name)
        if before is not None and before is not agent and not before.closed:
            self.replaced.append(before)
        self.agents[name] = agent
        self._places[name] = place
