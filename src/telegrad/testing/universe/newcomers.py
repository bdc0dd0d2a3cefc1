"""Processes that want to be workers of a universe: replacements, rivals for one place, and newcomers of open groups."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from functools import partial

from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError
from telegrad.protocol.membership import State
from telegrad.testing.universe.actions import Program
from telegrad.testing.universe.network import address
from telegrad.testing.universe.plan import Action, Fault, draw_action
from telegrad.testing.universe.services import Services
from telegrad.testing.universe.world import World

USURPED_AFTER = 70.0
"""Seconds after which a worker that is cut off is lost to the others, and another process takes its place."""
SIDES_APART = 45.0
"""Seconds for which the two sides of a contest cannot reach each other."""

Later = Callable[[float, Callable[[], None]], None]
"""Runs a function some seconds later, on the thread of the faults."""


class Newcomers:
    """Starts processes that want to be workers."""

    def __init__(self, world: World, later: Later) -> None:
        self._world = world
        self._sim = world.sim
        self._network = world.sim.network
        self._later = later
        self._programs = itertools.count(20)  # the numbers of programs: actors serve the calls of each one in order
        self._rivals: Counter[str] = Counter()  # by name: processes that ran in other places than the worker's own

    # -- replacements -------------------------------------------------------------------------------------------

    def restart(self, name: str, vouched: bool, place: str = "") -> None:
        """Start a worker again."""
        world = self._world
        if name in world.live() and not place:
            return
        if not place and address(name) in self._network.listeners:
            place = self._another_place(name)  # of a process that was replaced, and lives on
        world.replaced.add(name)

        def greet(agent: Agent) -> None:
            world.gone.discard(name)
            world.story.add(place or name, "is there again, in generation %s", agent.me.generation)
            world.counts["voted" if not vouched else "vouched"] += 1
            others = [other for other in world.live() if other != name and other in world.ready]
            kinds = ("call", "create", "fetch") if others else ()
            actions = [Action(kind, (self._sim.random.choice(others),)) for kind in kinds]
            Program(world, name, 9).run(tuple(actions))

        start = partial(self._sim.restart, name, vouched=vouched, place=place)
        self._start(place or name, lambda prepare: start(prepare=prepare), greet)

    def _start(
        self, place: str, join: Callable[[Callable[[Agent], None]], Agent], greet: Callable[[Agent], None]
    ) -> None:
        """Start a process on a thread of its own, because joining may take long. `greet` runs when it has joined."""
        world = self._world
        agents: list[Agent] = []

        def prepare(agent: Agent) -> None:
            agents.append(agent)
            Services(world, agent)

        def run() -> None:
            world.starting.add(place)
            try:
                agent = join(prepare)
            except TelegradError as error:
                world.story.add(place, "cannot join: %s: %s", type(error).__name__, str(error))
                world.counts["not admitted"] += 1
                agents[0].close()
                if not (world.suspects or world.anyone):
                    world.violated(f"{place} could not join, although nothing had happened to any worker: {error}")
                return
            finally:
                world.starting.discard(place)
            world.admitted(agent.me)
            with acting_as(agent):
                greet(agent)

        context = copy_context()
        world.threads.append(self._sim.scheduler.start(place, "start", lambda: context.run(run)))

    def _another_place(self, name: str) -> str:
        """Return a place for a process that wants to be a worker, in which none ever was."""
        self._rivals[name] += 1
        return f"{name}.{self._rivals[name]}"  # no name of a worker has a dot

    # -- open groups --------------------------------------------------------------------------------------------

    def join(self, fault: Fault) -> None:
        """Start a worker with a new name. It leaves after the seconds of the fault, and a visitor returns."""
        world, sim, name = self._world, self._sim, fault.workers[0]
        world.joined.add(name)

        def greet(agent: Agent) -> None:
            world.story.add(name, "has joined")
            world.counts["joined"] += 1
            self._check_known(name, agent)
            world.ready.add(name)
            others = tuple(other for other in world.live() if other in world.ready)
            member = sim.random.choice([other for other in others if other != name] or [name])
            for host, kinds in ((member, 2), (name, 3)):
                drawn = [draw_action(sim.random, others) for _ in range(kinds)]
                actions = [Action("call", (name,)), *drawn] if host == member else drawn
                program = Program(world, host, next(self._programs))
                world.threads.append(world.spawn(host, partial(program.run, tuple(actions))))

            if fault.seconds:
                world.threads.append(sim.scheduler.start("", "leave", lambda: self._leave(fault)))

        self._start(name, lambda prepare: sim.join(name, prepare=prepare), greet)

    def _check_known(self, name: str, agent: Agent) -> None:
        """Check that all who were there before know a newcomer when its start returns."""
        world = self._world
        if world.suspects or world.anyone:
            return
        for other in world.plan.workers:
            member = world.live()[other].peers.members.find(name)
            if member is None or member.identity.incarnation != agent.me.incarnation or member.state is not State.ALIVE:
                world.violated(f"{other} does not know {name}, which has joined: {member}")

    def _leave(self, fault: Fault) -> None:
        """Let a newcomer leave some seconds after it joined, and a visitor return after as many."""
        world, name = self._world, fault.workers[0]
        self._sim.sleep(fault.seconds)
        world.suspects.add(name)
        world.gone.add(name)
        leaving = world.spawn(name, partial(Program(world, name, 11).shut_down, 0.0))
        leaving.join(None)  # the universe waits for this thread, for a limited time
        world.story.add(name, "has left")
        if fault.kind == "visit":
            self._sim.sleep(fault.seconds)
            self.restart(name, vouched=False)

    # -- several processes for one name -------------------------------------------------------------------------

    def isolate(self, name: str, seconds: float) -> None:
        """Cut a worker off, let another process take its place, and let it try to go on afterwards."""
        world, network, agent = self._world, self._network, self._sim[name]
        others = [other for other in world.live() if other != name]
        here = self._sim.place_of(name)
        places = [self._sim.place_of(other) for other in others]
        for there in places:
            network.block(here, there)
            network.block(there, here)
        world.anyone = True

        def heal() -> None:
            world.story.add("", "%s is not cut off any more", here)
            for there in places:
                network.unblock(here, there)
                network.unblock(there, here)
            if agent in self._sim.replaced and not agent.closed:
                context = copy_context()
                thread = self._sim.scheduler.start(here, "usurped", lambda: context.run(self._go_on, agent, others))
                world.threads.append(thread)

        self._later(USURPED_AFTER, lambda: self._usurp(name, agent))
        self._later(seconds, heal)

    def _usurp(self, name: str, agent: Agent) -> None:
        if self._sim.agents.get(name) is agent and not agent.closed:
            self.restart(name, vouched=True, place=self._another_place(name))

    def _go_on(self, agent: Agent, others: list[str]) -> None:
        """Call a worker that knows that this incarnation was replaced: it must not serve it."""
        world, name = self._world, agent.me.name
        for other in others:
            there = world.live().get(other)
            if there is None or agent.peers.members.find(other) is None:
                continue
            peer = agent.peers.find(other)
            if peer.gone or peer.outgoing is not None:
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

    def contest(self, name: str) -> None:
        """Divide the others in two, and let a process on each side want to take the place of a dead worker."""
        world, network = self._world, self._network
        others = [other for other in world.live() if other != name]
        own = self._another_place(name) if address(name) in network.listeners else name
        rival = self._another_place(name)
        sides = {self._sim.place_of(other): self._sim.random.random() < 0.5 for other in others}
        sides |= {own: True, rival: False}
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

        self._later(SIDES_APART, heal)
        self.restart(name, vouched=False, place="" if own == name else own)
        self.restart(name, vouched=False, place=rival)
