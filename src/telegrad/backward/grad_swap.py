"""Installs the gradients of a context in ``.grad`` during an optimizer step.

On one worker steps run one after the other, whoever asked for them. Hooks of passes use ``.grad``, too, and
`grad_slots` keeps them apart.
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
    """Swaps gradients of contexts into ``.grad`` on one agent."""

    def __init__(self, agent: Agent, contexts: Contexts, slots: Slots) -> None:
        self._contexts = contexts
        self._slots = slots
        self._agent = agent
        self.step_lock = FairLock(agent)
        """Held during a step."""

    def gradients_of(self, context_id: int) -> Gradients:
        """Return the gradients that a context has on this worker: none, if the worker took no part in it."""
        context = self._contexts.get(context_id)
        if context is not None:
            return context.gradients
        if self._contexts.has_ended(context_id):
            raise TelegradError(f"context {int(context_id):#x} has been left: its gradients are gone")
        return Gradients()

    def for_leaves(self, leaves: Sequence[torch.Tensor]) -> LeafSwap:
        """Return what swaps the gradients of these leaves, each named once."""
        return LeafSwap(self, leaves)

    def install(self, installed: Installed) -> None:
        """Install gradients for a step, which holds the step lock."""
        self._slots.add(installed, self.wait)

    def remove(self, installed: Installed) -> None:
        """Remove the gradients of a step again."""
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


class LeafSwap:
    """Swaps the gradients of some leaves, once per step."""

    def __init__(self, swap: GradSwap, leaves: Sequence[torch.Tensor]) -> None:
        self._swap = swap
        self._leaves = list(leaves)

    def installed(self, context_id: int | None) -> _Block:
        """Return a block in which ``.grad`` of the leaves is the context's gradient, or None.

        Whatever the block sets ``.grad`` to is the context's gradient afterwards, and the leaf gets back its own.
        Without a context ``.grad`` is left alone.
        """
        return _Block(self._swap, self._leaves, context_id)


class _Block:
    """The block of `LeafSwap.installed`. A generator would cost six calls more on every step."""

    __slots__ = ("_context", "_installed", "_leaves", "_swap")

    def __init__(self, swap: GradSwap, leaves: Sequence[torch.Tensor], context_id: int | None) -> None:
        self._swap = swap
        self._leaves = leaves
        self._context = context_id
        self._installed: Installed | None = None

    def __enter__(self) -> None:
        swap = self._swap
        swap.step_lock.acquire()
        try:
            gradients = None if self._context is None else swap.gradients_of(self._context)
            installed = Installed(self._leaves, gradients)
            swap.install(installed)
        except BaseException:
            swap.step_lock.release()
            raise
        self._installed = installed

    def __exit__(self, *_: object) -> None:
        try:
            if self._installed is not None:
                self._swap.remove(self._installed)
        finally:
            self._swap.step_lock.release()


class FairLock:
    """A lock that is granted in the order of asking. Its holder may make calls: threads wait through the executor."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # protects the two below
        self._taken = False
        self._waiting: deque[Event] = deque()

    def acquire(self) -> None:
        """Take the lock. Waits until the deadline of the call that is served, if there is one."""
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
                granted = event not in self._waiting  # at the last moment
                if not granted:
                    self._waiting.remove(event)
            if granted:
                self.release()
            raise

    def release(self) -> None:
        """Give the lock to the thread that has waited longest."""
        with self._lock:
            following = self._waiting.popleft() if self._waiting else None
            self._taken = following is not None
        if following is not None:
            following.set()
