"""Lends the gradients of a context to optimizers: for the time of a step they stand in ``.grad``.

Optimizers look at ``.grad``, and gradients of passes are kept in contexts, several of which may have some for the same
leaf. So they are lent one context at a time: on one worker steps run one after the other, whoever asked for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

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

    def of(self, context_id: int | None) -> _Lent:
        """In this block ``.grad`` of the leaves is the context's gradient, or None; without a context, as it is.

        What the block sets ``.grad`` to, is the context's gradient afterwards. The leaf's own is put back.
        """
        return _Lent(self._lending, self._leaves, self._locks, context_id)


class _Lent:
    """The block of `Loan.of`. (Not a generator: those cost six calls more, on every step.)"""

    __slots__ = ("_context", "_gradients", "_leaves", "_lending", "_lent", "_locks", "_own")

    def __init__(
        self,
        lending: Lending,
        leaves: Sequence[torch.Tensor],
        locks: Sequence[threading.Lock],
        context_id: int | None,
    ) -> None:
        self._lending = lending
        self._leaves = leaves
        self._locks = locks
        self._context = context_id
        self._gradients: Gradients | None = None
        self._own: list[torch.Tensor | None] = []
        self._lent: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._lending.turns.take()
        held = 0
        try:
            for lock in self._locks:
                lock.acquire()
                held += 1
            if self._context is not None:
                self._gradients = gradients = self._lending.gradients_of(self._context)
                for leaf in self._leaves:
                    grad = gradients.get(leaf)
                    self._lent.append(grad)
                    self._own.append(leaf.grad)
                    leaf.grad = grad
        except BaseException:
            for leaf, before in zip(self._leaves, self._own, strict=False):
                leaf.grad = before
            self._let_go(held)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            gradients = self._gradients
            if gradients is not None:
                for leaf, grad, before in zip(self._leaves, self._lent, self._own, strict=True):
                    if leaf.grad is not grad:
                        gradients.replace(leaf, leaf.grad)
                    leaf.grad = before
        finally:
            self._let_go(len(self._locks))

    def _let_go(self, held: int) -> None:
        for lock in self._locks[:held]:
            lock.release()
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
