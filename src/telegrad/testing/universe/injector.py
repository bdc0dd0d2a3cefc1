"""Carries out the faults of a plan, at their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from contextvars import copy_context
from functools import partial

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.testing.simulation import Faults
from telegrad.testing.universe.actions import Program
from telegrad.testing.universe.plan import FOREVER, Action, Fault
from telegrad.testing.universe.services import Services
from telegrad.testing.universe.world import World

NOISE = (
    Faults(drop=0.02, duplicate=0.05, cut=0.01),
    Faults(duplicate=0.3),
    Faults(cut=0.05),
    Faults(drop=0.05),
)
HARSH_NOISE = Faults(drop=0.15, duplicate=0.2, cut=0.1)

USURPED_AFTER = 70.0
"""Seconds after which a worker that is cut off is lost to the others, and another process takes its place."""
SIDES_APART = 45.0
"""Seconds for which the two sides of a contest cannot reach each other."""


class Injector:
    """The faults of one universe, as events that one thread carries out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sim = world.sim
        self._network = world.sim.network
        self._calm = world.sim.network.faults
        self._order = itertools.count()
        self._events: list[tuple[float, int, bool, Callable[[], None]]] = []  # time, order, whether one begins
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
        if not set(fault.workers) <= world.live().keys():
            return
        world.story.add("", "begins: %s", fault)
        world.counts[f"fault {fault.kind}"] += 1
        world.suspect(fault)
        now = sim.scheduler.now
        one, other = (*fault.workers, "", "")[:2]
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
                for link in list(network.between(one, other)):
                    network.cut(link, "the connection was cut")
            case "half open":
                for link in list(network.between(one, other)):
                    end = link if sim.random.random() < 0.5 else link.other
                    network.cut_half_open(end, fault.seconds)
            case "stall":
                network.block(one, other, accepts=True)
                self._end_later(fault, lambda: network.unblock(one, other))
            case "one-way":
                network.block(one, other)
                self._end_later(fault, lambda: network.unblock(one, other))
            case "partition":
                for pair in ((one, other), (other, one)):
                    network.block(*pair)
                    self._end_later(fault, partial(network.unblock, *pair))
            case "slow":
                sim.scheduler.slow(one, now + fault.seconds, 0.0, min(0.2, fault.seconds / 4))
                self._end_later(fault, _nothing)
            case "freeze":
                sim.scheduler.freeze(one, now + fault.seconds)
                self._end_later(fault, _nothing)
            case "jump":
                sim.scheduler.jump(one, fault.seconds)
            case "leave":
                world.gone.add(one)
                world.spawn(one, lambda: self._leave(one))
            case "contest":
                self._kill(one)
                world.anyone = True
                self._end_later(fault, lambda: self._contest(one))
            case "usurpation":
                self._isolate(one, fault)
            case "kill" | "restart" | "rejoin":
                self._kill(one)
                if fault.kind != "kill":
                    vouched = fault.kind == "restart"
                    self._end_later(fault, lambda: self._restart(one, vouched))
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

    def _restart(self, name: str, vouched: bool, place: str = "") -> None:
        """Start a worker again, on a thread of its own: joining may take long."""
        world = self._world
        if name in world.live() and not place:
            return
        agents: list[Agent] = []
        world.replaced.add(name)

        def prepare(agent: Agent) -> None:
            agents.append(agent)
            Services(world, agent)

        def run() -> None:
            before = self._sim.agents.get(name)
            try:
                agent = self._sim.restart(name, vouched=vouched, prepare=prepare, place=place)
            except TelegradError as error:
                world.story.add(place or name, "cannot join: %s: %s", type(error).__name__, str(error))
                world.counts["not admitted"] += 1
                agents[0].close()
                return
            if before is not None and before is not agent and not before.closed:
                world.former.append(before)
            world.admitted(agent.me)
            world.gone.discard(name)
            world.story.add(place or name, "is there again, in generation %s", agent.me.generation)
            world.counts["voted" if not vouched else "vouched"] += 1
            others = [other for other in world.live() if other != name]
            kinds = ("call", "create", "fetch") if others else ()
            actions = [Action(kind, (self._sim.random.choice(others),)) for kind in kinds]
            with acting_as(agent):
                Program(world, name, 9).run(tuple(actions))

        context = copy_context()
        world.threads.append(self._sim.scheduler.start(place or name, "restart", lambda: context.run(run)))

    def _isolate(self, name: str, fault: Fault) -> None:
        """Cut a worker off, let another process take its place, and let it try to go on afterwards."""
        world, network, agent = self._world, self._network, self._sim[name]
        others = [other for other in world.live() if other != name]
        for other in others:
            network.block(name, other)
            network.block(other, name)
        world.anyone = True

        def heal() -> None:
            for other in others:
                network.unblock(name, other)
                network.unblock(other, name)
            if agent in world.former:
                context = copy_context()
                thread = self._sim.scheduler.start(name, "usurped", lambda: context.run(self._go_on, agent, others))
                world.threads.append(thread)

        self._at(self._sim.scheduler.now + USURPED_AFTER, lambda: self._usurp(name, agent))
        self._end_later(fault, heal)

    def _usurp(self, name: str, agent: Agent) -> None:
        if self._sim.agents.get(name) is agent and not agent.closed:
            self._restart(name, vouched=True, place=f"{name}'")

    def _go_on(self, agent: Agent, others: list[str]) -> None:
        """Call a worker that knows that this incarnation was replaced: it must not serve it."""
        world, name = self._world, agent.me.name
        for other in others:
            peer, there = agent.peers.find(other), world.live().get(other)
            if there is None or peer.gone or peer.outgoing is not None:
                continue
            known = there.peers.members.find(name)
            if known is None or known.identity.generation <= agent.me.generation:
                continue
            world.counts["usurped"] += 1
            try:
                agent.call(other, "@hop", (world.new_key("call", name), [], b""), timeout=5.0)
            except TelegradError as error:
                world.story.add(name, "was replaced, and is refused by %s: %s", other, str(error))
            else:
                world.violated(f"{other} served {name}, which was replaced")

    def _contest(self, name: str) -> None:
        """Divide the others in two, and let a process on each side want to take the place of a dead worker."""
        world, network = self._world, self._network
        others = [other for other in world.live() if other != name]
        rival = f"{name}'"
        sides = {other: self._sim.random.random() < 0.5 for other in others} | {name: True, rival: False}
        for one, side in sides.items():
            for other, other_side in sides.items():
                if side and not other_side:
                    network.block(one, other)
                    network.block(other, one)
        world.story.add("", "the sides are %s", str(sides))

        def heal() -> None:
            world.story.add("", "the sides are one again")
            for one in sides:
                for other in sides:
                    network.unblock(one, other)

        self._at(self._sim.scheduler.now + SIDES_APART, heal)
        self._restart(name, vouched=False)
        self._restart(name, vouched=False, place=rival)


def _nothing() -> None:
    """Do nothing: the scheduler ends the fault, and this keeps the universe waiting until then."""
