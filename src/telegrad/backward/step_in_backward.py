"""Optimizer steps that are folded into passes: a leaf is updated as soon as its gradient is final.

The worker that begins a pass says which optimizers step in it, and with which hyperparameters; that travels with the
pass. Where a leaf is, a hook on it looks whether the pass that runs names its optimizer. So passes of two trainers, on
the same parameters, each step with their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from telegrad.backward.contexts import DistAutogradContext
from telegrad.backward.pass_run import running
from telegrad.wire.messages import INTO_CONTEXT, StepInPass


class StepInBackward:
    """One optimizer that steps in the passes that its worker begins, for as long as this object is kept."""

    def __init__(self, number: int, hyperparameters: Callable[[], bytes]) -> None:
        self.number = number
        # Weak: with the optimizer's last reference its steps must end, not when a cycle is found.
        self._hyperparameters = weakref.WeakMethod(hyperparameters)

    def step(self) -> StepInPass | None:
        hyperparameters = self._hyperparameters()
        return None if hyperparameters is None else StepInPass(self.number, hyperparameters())

    def stepped_in(self, context: DistAutogradContext) -> bool:
        """Whether a pass of the context, begun here, has done the steps of this optimizer."""
        return self.number in context.stepped


class StepsInBackward:
    """One agent's optimizers of that kind."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self._folded: weakref.WeakValueDictionary[int, StepInBackward] = weakref.WeakValueDictionary()

    def add(self, hyperparameters: Callable[[], bytes]) -> StepInBackward:
        """Let an optimizer step in passes; `hyperparameters` is a method of it."""
        folded = StepInBackward(self._new_number(), hyperparameters)
        self._folded[folded.number] = folded
        return folded

    def steps(self, leaves: int) -> tuple[StepInPass, ...]:
        """What a pass that begins now is to carry. Gradients that go elsewhere than into the context stay whole."""
        if leaves != INTO_CONTEXT or not self._folded:
            return ()
        steps = [folded.step() for folded in list(self._folded.values())]
        return tuple(step for step in steps if step is not None)


def steps_of_this_pass() -> Sequence[StepInPass]:
    """The steps that belong to the pass whose island the current thread runs."""
    run = running.get()
    return run.info.steps if run is not None else ()
