"""Runs random programs on simulated agents, and compares them with autograd in one process.

>>> check_seed(0).probes
0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from telegrad.backward.contexts import DistAutogradContext, current
from telegrad.testing.programs import (
    FEATURES,
    Found,
    Log,
    Outcome,
    Pass,
    Program,
    Progress,
    Worker,
    differences,
    draw_leaves,
    draw_program,
    install_post_hooks,
    make_leaves,
    refusal,
    run_locally,
)
from telegrad.testing.programs.running import Tensors, left_in_context
from telegrad.testing.simulation import Faults, Simulation

_STATE = ("num_autograd_contexts", "num_current_backward_passes", "sends", "recvs")
_LONG = 300.0  # seconds of virtual time, enough for any program


class SimulatedGroup:
    """The simulated workers of one program, with their leaves, stashes and hooks."""

    def __init__(
        self, sim: Simulation, names: Sequence[str], program: Program, leaves: list[list[torch.Tensor]]
    ) -> None:
        self.sim = sim
        self.names = names
        self.program = program
        self.log = Log()
        self.workers = [Worker(number, program, leaves[number], self.log, self) for number in range(program.workers)]
        self._service = f"of {program.seed}"
        self.context_id = 0
        for number, worker in enumerate(self.workers):
            agent = sim[names[number]]
            for service in ("body", "relay", "use_views", "make_views", "pass"):
                agent.register(f"{service} {self._service}", getattr(worker, f"serve_{service}"))

    # -- the Group interface ----------------------------------------------------------------------------

    def call(self, here: int, target: int, service: str, *args: Any) -> Any:
        return self.sim[self.names[here]].call(self.names[target], f"@{service} {self._service}", args, timeout=0)

    def message(self, tensors: Tensors) -> list[torch.Tensor]:
        return list(tensors)

    def sent_together(self, tensors: Tensors) -> None:
        """Do nothing: only the oracle needs it."""

    def hooked(self, key: int, tensors: Tensors, mode: str = "") -> None:
        """Do nothing: only the oracle needs it."""

    def in_thread(self, here: int, action: Callable[[], Any]) -> Any:
        box: list[Any] = []
        thread = self.sim.scheduler.start(self.names[here], "an op", lambda: box.append(action()))
        thread.join(None)
        return box[0]

    def backward(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors | None) -> Found:
        autograd = self._autograd(here)
        autograd.backward(
            self.context_id,
            roots,
            retain,
            grad_tensors=grads,
            inputs=inputs,
            accumulate=self.program.accumulate,
        )
        return [self._gradient(here, tensor) for tensor in inputs or ()]

    def grad(self, here: int, roots: Tensors, grads: Tensors, retain: bool, inputs: Tensors, unused: bool) -> Found:
        found = self._autograd(here).grad(
            self.context_id, roots, inputs, grads, retain_graph=retain, allow_unused=unused
        )
        return list(found)

    # -- the program --------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run the program, forward and backward, on a thread of worker 0."""
        autograd = self._autograd(0)
        before = autograd.messaging.counts().get("probes", 0)
        context: DistAutogradContext = autograd.contexts.new()
        self.context_id = context.id
        token = current.set(context)
        progress = Progress(self.program)
        try:
            progress.run(self._forward, self._pass, self._look)
        finally:
            current.reset(token)
            autograd.contexts.release(context)
            for worker in self.workers:
                worker.end()
        outcome = progress.outcome(self.log)
        outcome.probes = autograd.messaging.counts().get("probes", 0) - before
        return outcome

    def _forward(self) -> None:
        self.workers[0].environment = self.workers[0].run(0, [])

    def _pass(self, number: int, one: Pass) -> Found | None:
        self.log.number = number
        if one.worker == 0:
            return self.workers[0].serve_pass(one)
        found: Found | None = self.call(0, one.worker, "pass", one)
        return found

    def _look(self) -> list[Found]:
        return [[self._gradient(worker.number, leaf) for leaf in worker.leaves] for worker in self.workers]

    def _autograd(self, number: int) -> Any:
        return self.sim[self.names[number]].autograd

    def _gradient(self, number: int, tensor: torch.Tensor) -> torch.Tensor | None:
        if self.program.accumulate == "grad":
            return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        context = self._autograd(number).contexts.get(self.context_id)
        found: torch.Tensor | None = None if context is None else context.gradients.get(tensor)
        return left_in_context(self.program, tensor, found)


@dataclass
class Checked:
    """The result of a check whose programs matched one process."""

    probes: int = 0
    refusals: list[str] = field(default_factory=list)
    """What telegrad refused to do, as documented."""


class _Check:
    """One simulation that runs one program, or several at the same time."""

    def __init__(self, sim: Simulation, names: Sequence[str], programs: Sequence[Program]) -> None:
        self._sim = sim
        self._names = names
        self._programs = programs
        self.groups: list[SimulatedGroup] = []
        self.outcomes: dict[int, Outcome] = {}

    def run(self) -> None:
        """Run in the simulation's main thread."""
        handles = self._prepare()
        sim = self._sim
        threads = [sim.spawn(self._names[0], partial(self._run_group, number)) for number in range(len(self._programs))]
        for thread in threads:
            if not thread.join(sim.scheduler.now + _LONG):
                passes = [run for agent in sim.agents.values() for run in _passes(agent.autograd)]
                shown = "\n".join(map(str, self._programs))
                raise AssertionError(f"the program hangs: {passes}\n{sim.scheduler.stacks()}\n{shown}")
        _wait_until_nothing_is_left(sim)
        for handle in handles:
            handle.remove()

    def _prepare(self) -> list[Any]:
        """Create the groups. Programs that run at the same time share their leaves and the hooks on them."""
        leaves = self._programs[0].leaves
        made = make_leaves(leaves)
        self.groups = [SimulatedGroup(self._sim, self._names, program, made) for program in self._programs]
        first = self.groups[0]
        return [
            handle
            for number in range(len(leaves.kinds))
            for handle in install_post_hooks(leaves, made, self._log, first, self._programs[0].counts_only, number)
        ]

    def _log(self) -> Log:
        """Return the log of the program whose pass is running."""
        if len(self.groups) == 1:
            return self.groups[0].log
        context = current.get()
        (group,) = [group for group in self.groups if context is not None and group.context_id == context.id]
        return group.log

    def _run_group(self, number: int) -> None:
        self.outcomes[number] = self.groups[number].run()


def _passes(autograd: Any) -> list[Any]:
    return [run for context in autograd.contexts.all() for run in context.passes.values()]


def _wait_until_nothing_is_left(sim: Simulation) -> None:
    """Wait until all workers have released their contexts: one-way messages that faults may delay."""
    give_up = sim.scheduler.now + _LONG
    while True:
        left = {
            name: {key: count for key, count in agent.autograd.debug_info().items() if key in _STATE and count}
            for name, agent in sim.agents.items()
        }
        if not any(left.values()):
            return
        if sim.scheduler.now > give_up:
            raise AssertionError(f"left behind: {left}")
        sim.sleep(1.0)


def draw_programs(seed: int, together: int, features: Mapping[str, float] = FEATURES) -> list[Program]:
    """Draw the program of a seed, or `together` programs that share their leaves."""
    if together == 1:
        return [draw_program(seed, features=features)]
    has = draw_program(seed, features=features).features
    leaves = draw_leaves(seed, 6, has, reachable=2)
    return [
        draw_program(seed * 1000 + number, features=dict.fromkeys(sorted(has), 1.0), leaves=leaves)
        for number in range(together)
    ]


def check_seed(
    seed: int,
    *,
    faults: Faults | None = None,
    together: int = 1,
    resumable: bool = True,
    features: Mapping[str, float] = FEATURES,
) -> Checked:
    """Run the program of a seed (or `together` at the same time). Raise `Different` if it differs from one process."""
    return check_programs(draw_programs(seed, together, features), seed, faults=faults, resumable=resumable)


def check_programs(
    programs: Sequence[Program], seed: int, *, faults: Faults | None = None, resumable: bool = True
) -> Checked:
    """Run programs at the same time in one simulation. Raise `Different` if one differs from one process."""
    together = len(programs)
    count = max(program.workers for program in programs) if together == 1 else len(programs[0].leaves.kinds)
    names = [f"w{number}" for number in range(count)]
    sim = Simulation(seed, names, faults=faults or Faults(longest_delay=0.02), resumable=resumable)
    check = _Check(sim, names, programs)
    with sim:
        sim.run(check.run)
    checked = Checked()
    for number, program in enumerate(programs):
        got, want = check.outcomes[number], run_locally(program)
        refused = refusal(got, want)
        found = differences(got, want, program, until_error=bool(refused))
        # Probes are counted per agent, so only for a program that ran alone.
        if together == 1 and got.probes > len(program.passes):
            found.append(f"{got.probes} probes in {len(program.passes)} passes")
        if found:
            raise Different("\n".join([*found, str(program)])) from got.error
        checked.probes += got.probes
        checked.refusals += [refused] if refused else []
    return checked


class Different(AssertionError):
    """A distributed program gave another result than in one process."""
