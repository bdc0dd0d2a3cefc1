"""Lends the gradients of a context to optimizers: they are installed in ``.grad`` during a step.

On one worker steps run one after the other, whoever asked for them. Hooks of passes use ``.grad``, too: `slots` keeps
them apart.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from telegrad.agent.agent import Agent
from telegrad.backward.accumulate import Gradients
from telegrad.backward.contexts import Contexts
from telegrad.backward.grad_slots import Installed, Slots
from telegrad.calls.call import current_served
from telegrad.errors import DeadlineExceeded, TelegradError
from telegrad.waiting import Event


class GradSwap:
    """One agent's."""

    def __init__(self, agent: Agent, contexts: Contexts, slots: Slots) -> None:
        self._contexts = contexts
        self._slots = slots
        self._agent = agent
        self.turns = Turns(agent)
        """The time of one step."""

    def gradients_of(self, context_id: int) -> Gradients:
        """What a context has on this worker; nothing, if the worker took no part in it."""
        context = self._contexts.get(context_id)
        if context is not None:
            return context.gradients
        if self._contexts.has_ended(context_id):
            raise TelegradError(f"context {int(context_id):#x} has been left: its gradients are gone")
        return Gradients()

    def loan(self, leaves: Sequence[torch.Tensor]) -> Loan:
        """What is needed to lend gradients to these leaves, each of them named once, as often as wanted."""
        return Loan(self, leaves)

    def lend(self, installed: Installed) -> None:
        """Install gradients for a step, whose turn it is."""
        self._slots.add(installed, self.wait)

    def take_back(self, installed: Installed) -> None:
        """End that."""
        self._slots.remove(installed)

    def wait(self, event: Event, until: float | None = None) -> None:
        """Wait for ``.grad`` of leaves, until a deadline and that of the call that is served, if there are any."""
        served = current_served.get()
        deadlines = [until, served.deadline if served is not None else None]
        if not self._agent.executor.wait(event, min([each for each in deadlines if each is not None], default=None)):
            raise DeadlineExceeded(
                f"post-accumulate hooks of other passes used .grad of the parameters on worker {self._agent.me.name!r} "
                "until the deadline of this step or pass",
                worker=self._agent.me.name,
            )


class Loan:
    """Some leaves that steps are taken on."""

    def __init__(self, lending: GradSwap, leaves: Sequence[torch.Tensor]) -> None:
        self._lending = lending
        self._leaves = list(leaves)

    def of(self, context_id: int | None) -> _Lent:
        """In this block ``.grad`` of the leaves is the context's gradient, or None; without a context, as it is.

        What the block sets ``.grad`` to, is the context's gradient afterwards. The leaf's own is put back.
        """
        return _Lent(self._lending, self._leaves, context_id)


class _Lent:
    """The block of `Loan.of`. (Not a generator: those cost six calls more, on every step.)"""

    __slots__ = ("_context", "_installed", "_leaves", "_lending")

    def __init__(self, lending: GradSwap, leaves: Sequence[torch.Tensor], context_id: int | None) -> None:
        self._lending = lending
        self._leaves = leaves
        self._context = context_id
        self._installed: Installed | None = None

    def __enter__(self) -> None:
        lending = self._lending
        lending.turns.take()
        try:
            gradients = None if self._context is None else lending.gradients_of(self._context)
            installed = Installed(self._leaves, gradients)
            lending.lend(installed)
        except BaseException:
            lending.turns.pass_on()
            raise
        self._installed = installed

    def __exit__(self, *_: object) -> None:
        try:
            if self._installed is not None:
                self._lending.take_back(self._installed)
        finally:
            self._lending.turns.pass_on()


class Turns:
    """One at a time, in the order of asking. Waits as all waiting is done here, so that a holder may make calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # protects the two below
        self._taken = False
        self._waiting: deque[Event] = deque()

    def take(self) -> None:
        """Have the turn until `pass_on`. Waits for it until the deadline of the call that is served, if any."""
        with self._lock:
            event = None
            if self._taken:
                event = self._agent.runtime.event()
                self._waiting.append(event)
            self._taken = True
        if event is not None:
            self._wait(event)

    def _wait(self, event: Event) -> None:
        served = current_served.get()
        try:
            if self._agent.executor.wait(event, served.deadline if served is not None else None):
                return
            raise DeadlineExceeded(
                f"another step ran on worker {self._agent.me.name!r} until the deadline of this one",
                worker=self._agent.me.name,
            )
        except BaseException:
            with self._lock:
                ours = event not in self._waiting  # it came at the last moment
                if not ours:
                    self._waiting.remove(event)
            if ours:
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Let the next one have it."""
        with self._lock:
            following = self._waiting.popleft() if self._waiting else None
            self._taken = following is not None
        if following is not None:
            following.set()
