"""Carries out the faults of a plan, at their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial

from telegrad.testing.simulation import Faults
from telegrad.testing.universe.newcomers import Newcomers
from telegrad.testing.universe.plan import FOREVER, Fault
from telegrad.testing.universe.world import World

NOISE = (
    Faults(drop=0.02, duplicate=0.05, cut=0.01),
    Faults(duplicate=0.3),
    Faults(cut=0.05),
    Faults(drop=0.05),
)
HARSH_NOISE = Faults(drop=0.15, duplicate=0.2, cut=0.1)


class Injector:
    """The faults of one universe, as events that one thread carries out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sim = world.sim
        self._network = world.sim.network
        self._calm = world.sim.network.faults
        self._order = itertools.count()
        self._events: list[tuple[float, int, bool, Callable[[], None]]] = []  # time, order, whether one begins
        self._newcomers = Newcomers(world, lambda seconds, event: self._at(self._sim.scheduler.now + seconds, event))
        self.is_over = False
        """Whether the programs have ended: nothing more begins, but what has begun ends."""
        for fault in world.plan.faults:
            self._at(fault.at, partial(self._begin, fault), begins=True)

    def _at(self, when: float, event: Callable[[], None], *, begins: bool = False) -> None:
        heapq.heappush(self._events, (when, next(self._order), begins, event))

    def run(self) -> None:
        """Wait for each event, and carry it out."""
        while self._events:
            when, _, begins, event = heapq.heappop(self._events)
            if begins and self.is_over:
                continue
            if when > self._sim.scheduler.now:
                self._sim.sleep(when - self._sim.scheduler.now)
            if not (begins and self.is_over):
                event()

    def _end_later(self, fault: Fault, end: Callable[[], None]) -> None:
        if fault.seconds < FOREVER:

            def run() -> None:
                self._world.story.add("", "ends: %s", fault)
                end()

            self._at(self._sim.scheduler.now + fault.seconds, run)

    def _begin(self, fault: Fault) -> None:
        world, sim, network = self._world, self._sim, self._network
        if not set(fault.workers).intersection(world.plan.workers) <= world.live().keys():
            return
        world.story.add("", "begins: %s", fault)
        world.counts[f"fault {fault.kind}"] += 1
        world.suspect(fault)
        now = sim.scheduler.now
        one, other = (*fault.workers, "", "")[:2]
        here, there = sim.place_of(one), sim.place_of(other)
        match fault.kind:
            case "noise":
                noise = sim.random.choice(NOISE)
                network.faults = Faults(
                    drop=noise.drop,
                    duplicate=noise.duplicate,
                    cut=noise.cut,
                    longest_delay=self._calm.longest_delay * sim.random.choice((1, 4)),
                )
                self._end_later(fault, self._calm_down)
            case "harsh noise":
                network.faults, network.hits_handshakes = HARSH_NOISE, True
                self._end_later(fault, self._calm_down)
            case "cut":
                for link in list(network.between(here, there)):
                    network.cut(link, "the connection was cut")
            case "half open":
                for link in list(network.between(here, there)):
                    end = link if sim.random.random() < 0.5 else link.other
                    network.cut_half_open(end, fault.seconds)
            case "stall":
                network.block(here, there, accepts=True)
                self._end_later(fault, lambda: network.unblock(here, there))
            case "one-way":
                network.block(here, there)
                self._end_later(fault, lambda: network.unblock(here, there))
            case "partition":
                for pair in ((here, there), (there, here)):
                    network.block(*pair)
                    self._end_later(fault, partial(network.unblock, *pair))
            case "slow":
                sim.scheduler.slow(here, now + fault.seconds, 0.0, min(0.2, fault.seconds / 4))
                self._end_later(fault, _nothing)
            case "freeze":
                sim.scheduler.freeze(here, now + fault.seconds)
                self._end_later(fault, _nothing)
            case "jump":
                sim.scheduler.jump(here, fault.seconds)
            case "leave":
                world.gone.add(one)
                world.spawn(one, lambda: self._leave(one))
            case "contest":
                self._kill(one)
                world.anyone = True
                self._end_later(fault, lambda: self._newcomers.contest(one))
            case "join" | "visit":
                self._newcomers.join(fault)
            case "usurpation":
                self._newcomers.isolate(one, fault.seconds)
            case "kill" | "restart" | "rejoin":
                self._kill(one)
                if fault.kind != "kill":
                    vouched = fault.kind == "restart"
                    self._end_later(fault, lambda: self._newcomers.restart(one, vouched))
            case _:
                raise AssertionError(f"unknown fault {fault}")

    def _calm_down(self) -> None:
        self._network.faults, self._network.hits_handshakes = self._calm, False

    def calm_down(self) -> None:
        """End the noise, when the programs have ended."""
        self._calm_down()

    def _kill(self, name: str) -> None:
        self._world.gone.add(name)
        self._world.bury(name, self._sim[name])
        self._sim.kill(name)

    def _leave(self, name: str) -> None:
        agent = self._sim[name]
        agent.shutdown(graceful=False)
        self._world.story.add(name, "has left")


def _nothing() -> None:
    """Do nothing: the scheduler ends the fault, and this keeps the universe waiting until then."""
