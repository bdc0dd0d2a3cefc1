"""What the programs of a universe share: the simulation, the suspects, and the record of what ran and returned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from telegrad.agent.agent import Agent
from telegrad.connection.members import Described
from telegrad.protocol.membership import Member
from telegrad.rref.handle import RRef
from telegrad.testing.scheduler import SimThread
from telegrad.testing.universe.network import UniverseSimulation
from telegrad.testing.universe.plan import Fault, Plan
from telegrad.testing.universe.story import Story

Handle = RRef[Any]


class Violated(AssertionError):
    """A universe broke a promise of telegrad."""


class World:
    """One universe while it runs."""

    def __init__(self, plan: Plan, sim: UniverseSimulation) -> None:
        self.plan = plan
        self.sim = sim
        self.story = Story(lambda: sim.scheduler.now)
        self.violations: list[str] = []
        self.suspects: set[str] = set()
        """The workers that may be lost because of the faults so far."""
        self.anyone = False
        """Whether any worker may seem lost: to one whose clock jumped, or on a very bad network."""
        self.disturbed = False
        self.gone: set[str] = set()
        """The workers that were killed or left, and did not return."""
        self.replaced: set[str] = set()
        """The workers that were started again."""
        self.joined: set[str] = set()
        """The workers that joined under new names, or are about to."""
        self.ready = set(plan.workers)
        """The workers that are in the group, or were."""
        self.starting: set[str] = set()
        """The places in which processes are about to join. They serve calls, and may not know everybody yet."""
        self.is_apart = False
        """Whether workers could not reach each other, or only late: they may know different groups."""
        self._losses: set[tuple[int, int]] = set()  # incarnations: who told the program that it had lost whom
        self._admitted: dict[tuple[str, int], int] = {}  # name and generation -> incarnation
        self.ran: Counter[str] = Counter()
        self.tried: Counter[str] = Counter()
        """How often functions ran that may run again."""
        self.returned: set[str] = set()
        self.lineage: defaultdict[str, set[str]] = defaultdict(set)
        """By value: the workers that created, own, held or passed on a reference to it."""
        self.actors: set[str] = set()
        """The values that are actors."""
        self.mine: defaultdict[str, list[tuple[str, Handle]]] = defaultdict(list)
        """By worker: the references that its programs hold, with the names of their values."""
        self.kept: defaultdict[str, list[tuple[str, Handle]]] = defaultdict(list)
        """By worker: the references that others asked it to keep."""
        self.weights: dict[tuple[str, str], torch.Tensor] = {}
        """By training and owner: the parameter."""
        self.counts: Counter[str] = Counter()
        self.threads: list[SimThread] = []
        """The programs that run."""
        self.is_over = False
        """Whether the checks are done: what follows, while threads are unwound, says nothing."""
        self.started = 0
        """How many processes were started, whether they live or not."""
        self._graveyard: list[object] = []
        self._keys = 0

    # -- the record ---------------------------------------------------------------------------------------------

    def new_key(self, what: str, worker: str) -> str:
        """Return a name for a call or a value, which says who made it."""
        self._keys += 1
        return f"{what} {self._keys} of {worker}"

    def violated(self, text: str) -> None:
        """Record that a promise was broken."""
        if self.is_over:
            return
        self.story.add("", "VIOLATED: %s", text.partition("\n")[0])
        self.violations.append(text)

    def serves(self, key: str, worker: str) -> None:
        """Record that a function runs."""
        self.ran[key] += 1
        self.story.add(worker, "runs %s", key)
        if self.ran[key] > 1:
            self.violated(f"{key} ran {self.ran[key]} times")

    def tries(self, key: str, worker: str) -> None:
        """Record that a function runs that may run again."""
        self.tried[key] += 1
        self.story.add(worker, "runs %s", key)

    def has_returned(self, key: str) -> None:
        """Record that a caller has the result of a call."""
        self.returned.add(key)
        if self.ran[key] != 1:
            self.violated(f"{key} returned, but ran {self.ran[key]} times")

    # -- workers ------------------------------------------------------------------------------------------------

    def suspect(self, fault: Fault) -> None:
        """Record that a fault may make workers seem lost."""
        self.disturbed = True
        if not fault.may_lose(self.plan.resumable):
            return
        self.suspects.update(fault.workers)
        self.is_apart = self.is_apart or fault.kind not in ("kill", "restart", "rejoin", "leave")
        if fault.kind in ("jump", "freeze", "slow", "harsh noise"):
            self.anyone = True

    def admitted(self, worker: Described) -> None:
        """Record that a group has admitted an incarnation. Another one must not have the same generation."""
        first = self._admitted.setdefault((worker.name, worker.generation), worker.incarnation)
        if first != worker.incarnation:
            self.violated(
                f"two incarnations of {worker.name} were admitted in generation {worker.generation}: "
                f"{first:x} and {worker.incarnation:x}"
            )

    def lost(self, agent: Agent, member: Member, reason: str) -> None:
        """Record that a worker told its program of the loss of another one."""
        name, here = member.identity.name, agent.me.name
        loss = agent.me.incarnation, member.identity.incarnation
        if loss in self._losses:
            self.violated(f"{here} was told twice that it had lost {name}")
        self._losses.add(loss)
        if not self.anyone and self.suspects.isdisjoint((name, here)):
            self.violated(f"{here} was told that it had lost {name}, to which nothing had happened: {reason}")

    def bury(self, name: str, agent: Agent) -> None:
        """Keep what a worker that is gone held: nothing of it may run again, not even a destructor."""
        self._graveyard += [agent, self.mine.pop(name, None), self.kept.pop(name, None)]

    def end(self) -> None:
        """Forget everything, once no simulated thread runs."""
        self._graveyard.clear()
        self.mine.clear()
        self.kept.clear()

    def live(self) -> dict[str, Agent]:
        """Return the agents that can be used."""
        return {name: agent for name, agent in self.sim.agents.items() if not agent.closed}

    def spawn(self, name: str, program: Callable[[], Any]) -> SimThread:
        """Run a program on a thread of a worker."""
        return self.sim.spawn(name, program)
