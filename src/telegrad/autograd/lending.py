"""Lends the gradients of a context to optimizers: for the time of a step they stand in ``.grad``.

Optimizers look at ``.grad``, and gradients of passes are kept in contexts, several of which may have some for the same
leaf. So they are lent one context at a time: on one worker steps run one after the other, whoever asked for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from telegrad.agent.agent import Agent
from telegrad.agent.calls import serving
from telegrad.autograd.contexts import Contexts
from telegrad.autograd.gradients import AccumulateThrough, Gradients
from telegrad.errors import DeadlineExceeded, TelegradError
from telegrad.waiting import Event


class Lending:
    """One agent's."""

    def __init__(self, agent: Agent, contexts: Contexts, accumulate_through: AccumulateThrough) -> None:
        self._contexts = contexts
        self._through = accumulate_through
        self.turns = Turns(agent)
        """The time of one step."""

    def loan(self, leaves: Sequence[torch.Tensor]) -> Loan:
        """What is needed to lend gradients to these leaves, each of them named once, as often as wanted."""
        return Loan(self, leaves, [self._through.lock_of(leaf) for leaf in leaves])

    def gradients_of(self, context_id: int) -> Gradients:
        """What a context has on this worker; nothing, if the worker took no part in it."""
        context = self._contexts.get(context_id)
        if context is not None:
            return context.gradients
        if self._contexts.has_ended(context_id):
            raise TelegradError(f"context {int(context_id):#x} has been left: its gradients are gone")
        return Gradients()


class Loan:
    """Some leaves that steps are taken on."""

    def __init__(self, lending: Lending, leaves: Sequence[torch.Tensor], locks: Sequence[threading.Lock]) -> None:
        self._lending = lending
        self._leaves = list(leaves)
        # Passes that run hooks of a leaf swap its .grad, too. They hold one such lock at a time, and we take ours in
        # a turn that only one thread has: so nobody waits in a circle.
        self._locks = list(locks)

    @contextmanager
    def of(self, context_id: int | None) -> Iterator[None]:
        """In this block ``.grad`` of the leaves is the context's gradient, or None; without a context, as it is.

        What the block sets ``.grad`` to, is the context's gradient afterwards. The leaf's own is put back.
        """
        turns = self._lending.turns
        turns.take()
        try:
            for lock in self._locks:
                lock.acquire()
            try:
                if context_id is None:
                    yield
                else:
                    yield from self._lend(self._lending.gradients_of(context_id))
            finally:
                for lock in self._locks:
                    lock.release()
        finally:
            turns.pass_on()

    def _lend(self, gradients: Gradients) -> Iterator[None]:
        own = [leaf.grad for leaf in self._leaves]
        lent = [gradients.get(leaf) for leaf in self._leaves]
        try:
            for leaf, grad in zip(self._leaves, lent, strict=True):
                leaf.grad = grad
            yield
        finally:
            for leaf, grad, before in zip(self._leaves, lent, own, strict=True):
                if leaf.grad is not grad:
                    gradients.replace(leaf, leaf.grad)
                leaf.grad = before


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
        served = serving.get()
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
