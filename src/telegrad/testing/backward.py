"""Runs random programs on simulated agents, against the oracle in one process.

>>> check_seed(0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from telegrad.autograd.contexts import DistAutogradContext, current
from telegrad.testing.passes import run_passes
from telegrad.testing.programs import (
    LEAVES,
    Body,
    Log,
    Outcome,
    Program,
    Worker,
    differences,
    draw_program,
    make_leaves,
    run_locally,
)
from telegrad.testing.simulation import Faults, Simulation

_STATE = ("num_autograd_contexts", "num_current_backward_passes", "sends", "recvs")
_LONG = 300.0  # seconds of virtual time in which any program ends


class Stage:
    """The agents' side of one program: each worker's leaves, stash and hooks."""

    def __init__(
        self, sim: Simulation, names: Sequence[str], program: Program, leaves: list[list[torch.Tensor]]
    ) -> None:
        self.sim = sim
        self.names = names
        self.program = program
        self.log = Log()
        self.workers = [Worker(leaves[number], self.log) for number in range(program.workers)]
        self.service = f"body of {id(self)}"
        for number in range(program.workers):
            sim[names[number]].register(self.service, self._serve(number))

    def _serve(self, number: int) -> Callable[..., list[torch.Tensor]]:
        def serve(body: Body, *arguments: torch.Tensor) -> list[torch.Tensor]:
            environment = self.workers[number].run(body, arguments, self._call(number), self._in_thread(number))
            return [environment[place] for place in body.results]

        return serve

    def _call(self, number: int) -> Callable[[int, Sequence[torch.Tensor], Body], list[torch.Tensor]]:
        def call(there: int, sent: Sequence[torch.Tensor], body: Body) -> list[torch.Tensor]:
            result: list[torch.Tensor] = self.sim[self.names[number]].call(
                self.names[there], f"@{self.service}", (body, *sent), timeout=0
            )
            return result

        return call

    def _in_thread(self, number: int) -> Callable[[Callable[[], Any]], Any]:
        def run(action: Callable[[], Any]) -> Any:
            box: list[Any] = []
            thread = self.sim.scheduler.start(self.names[number], "an op", lambda: box.append(action()))
            thread.join(None)
            return box[0]

        return run

    def run(self) -> Outcome:
        """Run the program, forward and backward, on worker 0's thread."""
        autograd = self.sim[self.names[0]].autograd
        before = autograd.postman.counts().get("probes", 0)
        context: DistAutogradContext = autograd.contexts.new()
        token = current.set(context)
        try:
            environment = self.workers[0].run(self.program.body, [], self._call(0), self._in_thread(0))
            wanted, failed = run_passes(self.program, environment, autograd, context)
            grads = [self._grads_of(number, context.id) for number in range(self.program.workers)]
        finally:
            current.reset(token)
            autograd.contexts.release(context)
            for worker in self.workers:
                worker.end()
        probes = autograd.postman.counts().get("probes", 0) - before
        return Outcome(grads, dict(self.log.calls), probes, wanted, failed)

    def _grads_of(self, number: int, context_id: int) -> list[torch.Tensor | None]:
        context = self.sim[self.names[number]].autograd.contexts.get(context_id)
        if context is None:
            return [None] * LEAVES
        return [context.gradients.get(leaf) for leaf in self.workers[number].leaves]


def _run_into(outcomes: dict[int, Outcome], number: int, stage: Stage) -> None:
    outcomes[number] = stage.run()


def _passes(autograd: Any) -> list[Any]:
    return [run for context in autograd.contexts.all() for run in context.passes.values()]


def _wait_until_nothing_is_left(sim: Simulation) -> None:
    """Word that a context has ended travels without an answer; a network with faults may delay it."""
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


def check_seed(seed: int, *, faults: Faults | None = None, together: int = 1, resumable: bool = True) -> int:
    """Run the program of a seed (or `together` of them at once) and compare. Returns how many probes there were."""
    programs = [
        draw_program(seed * 1000 + number if together > 1 else seed, leaf_hooks=together == 1)
        for number in range(together)
    ]
    names = [f"w{number}" for number in range(max(program.workers for program in programs))]
    sim = Simulation(seed, names, faults=faults or Faults(longest_delay=0.02), resumable=resumable)
    outcomes: dict[int, Outcome] = {}

    def main() -> None:
        stages = [Stage(sim, names, program, make_leaves(program.seed, program.workers)) for program in programs]
        threads = [
            sim.spawn(names[0], partial(_run_into, outcomes, number, stage)) for number, stage in enumerate(stages)
        ]
        for thread in threads:
            if not thread.join(sim.scheduler.now + _LONG):
                passes = [run for name in names for run in _passes(sim[name].autograd)]
                raise AssertionError(f"it hangs: {passes}\n{sim.scheduler.stacks()}\n{programs}")
        _wait_until_nothing_is_left(sim)

    with sim:
        sim.run(main)
    for number, program in enumerate(programs):
        found = differences(outcomes[number], run_locally(program), hooks=program.hooks_are_equal)
        if found:
            raise AssertionError("\n".join([*found, str(program)]))
        # Counted by agent, so only a program that ran alone knows its own.
        if together == 1 and outcomes[number].probes > len(program.passes):
            raise AssertionError(f"{outcomes[number].probes} probes in {len(program.passes)} passes\n{program}")
    return sum(outcome.probes for outcome in outcomes.values())
