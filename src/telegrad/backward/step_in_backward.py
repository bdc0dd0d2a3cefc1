"""Optimizer steps inside backward passes: a leaf is updated as soon as its gradient is final.

The worker that begins a pass names the optimizers that step in it, and their hyperparameters, in the pass's messages.
A hook on each leaf checks whether the running pass names its optimizer. So passes of two trainers on the same
parameters each step with their own optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.pass_run import running
from telegrad.wire.messages import INTO_CONTEXT, StepInPass


class StepInBackward:
    """One optimizer that steps in the passes that its worker begins, as long as this object is alive."""

    def __init__(self, number: int, hyperparameters: Callable[[], bytes]) -> None:
        self.number = number
        # Weak: its steps must end with the optimizer's last reference, and not when a cycle is collected.
        self._hyperparameters = weakref.WeakMethod(hyperparameters)

    def step(self) -> StepInPass | None:
        """Return what a pass carries for this optimizer, if it is still alive."""
        hyperparameters = self._hyperparameters()
        return None if hyperparameters is None else StepInPass(self.number, hyperparameters())

    def stepped_in(self, context: DistAutogradContext) -> bool:
        """Whether a pass of the context, begun here, has done the steps of this optimizer."""
        return self.number in context.stepped


class StepsInBackward:
    """The optimizers of one agent that step in passes."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self.added = False
        """Whether there has been such an optimizer."""
        self._optimizers: weakref.WeakValueDictionary[int, StepInBackward] = weakref.WeakValueDictionary()

    def add(self, hyperparameters: Callable[[], bytes]) -> StepInBackward:
        """Let an optimizer step in passes. `hyperparameters` is a method of it."""
        optimizer = StepInBackward(self._new_number(), hyperparameters)
        self._optimizers[optimizer.number] = optimizer
        self.added = True
        return optimizer

    def steps(self, leaves: int) -> tuple[StepInPass, ...]:
        """Return the steps of a pass that begins now. Only gradients that go into the context are stepped with."""
        if leaves != INTO_CONTEXT or not self._optimizers:
            return ()
        steps = [optimizer.step() for optimizer in list(self._optimizers.values())]
        return tuple(step for step in steps if step is not None)


def steps_of_this_pass() -> Sequence[StepInPass]:
    """Return the steps of the pass whose island the current thread runs."""
    run = running.get()
    return run.info.steps if run is not None else ()
