"""Autograd contexts of one worker: what each holds, and when each ends.

A context has the same id on every worker that takes part. Its end spreads along its calls: a worker that leaves it
tells the workers it called, and how many calls it made to each. They leave when they have replied to as many. So a
cleanup never overtakes a call, and needs no reply.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from telegrad.backward.accumulate import Gradients
from telegrad.backward.graph_breaks import keep_uncompiled
from telegrad.backward.nodes import Recv, SendRpcBackward
from telegrad.calls.extension import current_context
from telegrad.errors import TelegradError
from telegrad.interrupts import shielded

if TYPE_CHECKING:
    from telegrad.backward.pass_run import PassRun

_COUNTER_BITS = 48
_COUNTER = (1 << _COUNTER_BITS) - 1
_REMEMBERED = 16384  # ended contexts, which late messages must not make again; and refused calls

_log = logging.getLogger("telegrad")


class DistAutogradContext:
    """One context on one worker."""

    def __init__(self, context_id: int, began: float = 0.0) -> None:
        self.id = context_id
        self.began = began
        """When it was made here."""
        self.opener: int | None = None
        """The worker whose message made the context here; None if it began here."""
        self.lock = threading.Lock()  # protects everything below
        self.sends: dict[int, SendRpcBackward] = {}
        self.recvs: dict[int, Recv] = {}
        self.recv_numbers = itertools.count()
        self.made: dict[int, int] = {}
        """How many calls this worker made in it, by callee."""
        self.served: dict[int, int] = {}
        """How many calls this worker replied to in it, by caller."""
        self.callers: set[int] = set()
        self.cleanups: dict[int, int] = {}
        """Callers that have said that it ended, and how many calls they made to this worker."""
        self.adopted: set[int] = set()
        """Workers that its owner has to tell when it ends, because the worker that called them in it is lost."""
        self.passes: dict[int, PassRun] = {}
        self.stepped: set[int] = set()
        """Optimizers that stepped in passes that began here."""
        self.released = False
        self.gradients = Gradients()

    @property
    def owner(self) -> int:
        """Return the worker that made it."""
        return self.id >> _COUNTER_BITS

    def workers(self) -> set[int]:
        """Return the workers that this one exchanges messages with in it."""
        with self.lock:
            return (
                {send.target for send in self.sends.values()}
                | {recv.source for recv in self.recvs.values()}
                | set(self.made)
                | self.callers
            )

    # -- PyTorch's names ----------------------------------------------------------------------------------------

    def _context_id(self) -> int:
        return self.id

    def _known_worker_ids(self) -> set[int]:
        with self.lock:
            return set(self.made) | {send.target for send in self.sends.values()}

    def _send_functions(self) -> dict[int, SendRpcBackward]:
        with self.lock:
            return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        with self.lock:
            return {message: recv.node for message, recv in self.recvs.items()}

    def __repr__(self) -> str:
        with self.lock:
            return (
                f"<context {self.id:#x}: {len(self.sends)} sends, {len(self.recvs)} recvs, "
                f"{len(self.gradients.as_dict())} gradients, {len(self.passes)} passes"
                f"{', released' if self.released else ''}>"
            )


current: ContextVar[DistAutogradContext | None] = current_context
"""The context that the current thread or task works in."""


class Contexts:
    """The contexts that one worker takes part in."""

    def __init__(
        self,
        worker: int,
        first: int,
        on_release: Callable[[DistAutogradContext], None],
        ask_owner: Callable[[DistAutogradContext], None],
        random_id: Callable[[int], int] | None = None,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`random_id` is for registered mode. It makes numbers of so many bits, which nobody can guess: whoever knows
        the id of a context may take part in it.
        """
        self._random_id = random_id
        self._now = now
        self._worker = worker
        self._ids = itertools.count(first)
        self._messages = itertools.count(first)
        self.orders = itertools.count(1)
        self._on_release = on_release
        self._ask_owner = ask_owner
        self._lock = threading.Lock()  # protects the four below
        self._opened: Counter[int] = Counter()  # contexts that are alive, by the worker that opened them here
        self._refused: dict[tuple[int, int], int] = {}  # calls that were refused, by context and caller
        self._alive: dict[int, DistAutogradContext] = {}
        self.get: Callable[[int], DistAutogradContext | None] = self._alive.get
        """Returns the context of an id, if it is alive here."""
        self._ended: OrderedDict[int, None] = OrderedDict()  # a dict takes long to find its first item after deletions

    def new_message(self) -> int:
        """Return a new message id."""
        return self._worker << _COUNTER_BITS | next(self._messages) & _COUNTER

    def new(self) -> DistAutogradContext:
        """Make a context that begins here."""
        number = next(self._ids) if self._random_id is None else self._random_id(_COUNTER_BITS)
        context = DistAutogradContext(self._worker << _COUNTER_BITS | number & _COUNTER, self._now())
        with self._lock:
            self._alive[context.id] = context
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("context %#x begins", context.id)
        return context

    def has_ended(self, context_id: int) -> bool:
        """Whether a context was left."""
        with self._lock:
            return context_id in self._ended or (
                context_id >> _COUNTER_BITS == self._worker and context_id not in self._alive
            )

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """Return a context. Raises if it is not alive here."""
        context = self._alive.get(context_id)
        if context is None:
            raise TelegradError(
                f"Could not find autograd context with id: {int(context_id)}. It was never made on this worker, or has "
                "been left already; use it inside its `with telegrad.autograd.context()` block"
            )
        return context

    def enter(
        self, context_id: int, opener: int, check: Callable[[str, int], None] | None = None
    ) -> DistAutogradContext | None:
        """Return the context that another worker named, made if need be; None if it has ended.

        `check` is called before one is made, with the number of contexts that `opener` would then have opened here.
        """
        with self._lock:
            context = self._alive.get(context_id)
            if context is None and context_id not in self._ended and context_id >> _COUNTER_BITS != self._worker:
                if check is not None:
                    check("contexts", self._opened[opener] + 1)
                context = self._alive[context_id] = DistAutogradContext(context_id, self._now())
                context.opener = opener
                self._opened[opener] += 1
            return context

    def opened_by(self, worker: int) -> int:
        """Return how many contexts are alive here because of messages of a worker."""
        with self._lock:
            return self._opened[worker]

    def refused(self, context_id: int, caller: int) -> None:
        """Note that a call of `caller` in a context was refused. Its caller counts it when the context ends."""
        with self._lock:
            context = self._alive.get(context_id)
            if context is None and context_id not in self._ended:
                self._refused[context_id, caller] = self._refused.pop((context_id, caller), 0) + 1
                if len(self._refused) > _REMEMBERED:
                    del self._refused[next(iter(self._refused))]
        if context is not None:
            with context.lock:
                context.callers.add(caller)
            self.served(context, caller)

    def ended(self, context_id: int) -> DistAutogradContext:
        """Return a stand-in for a context that has ended, for a call that was made in it."""
        context = DistAutogradContext(context_id)
        context.released = True
        return context

    @shielded
    def release(self, context: DistAutogradContext) -> None:
        """Leave a context, and tell the workers that this one called in it."""
        with self._lock:
            if self._alive.get(context.id) is not context:
                return
            del self._alive[context.id]
            if context.opener is not None:
                self._opened[context.opener] -= 1
            self._ended[context.id] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("context %#x ends on worker %d", context.id, self._worker)
        self._on_release(context)

    def served(self, context: DistAutogradContext, caller: int) -> None:
        """Note that a call of `caller` in the context was replied to."""
        with context.lock:
            if caller not in context.callers:
                return  # the caller is lost
            context.served[caller] = context.served.get(caller, 0) + 1
            due = bool(context.cleanups) and self._is_due(context)
        if due:
            self.release(context)

    def cleanup(
        self, context_id: int, caller: int, calls: int, check: Callable[[str, int], None] | None = None
    ) -> None:
        """Note that the context has ended for `caller`, which made `calls` calls to this worker in it."""
        with self._lock:
            refused = self._refused.pop((context_id, caller), 0)
            if refused and refused >= calls and context_id not in self._alive:
                return  # no call was served
        context = self.enter(context_id, caller, check)
        if context is None or context.owner == self._worker:
            return
        with context.lock:
            if refused:
                context.served[caller] = context.served.get(caller, 0) + refused
            context.cleanups[caller] = calls
            due = self._is_due(context)
        if due:
            self.release(context)

    def _is_due(self, context: DistAutogradContext) -> bool:
        """Return whether the context has ended here: a worker that called us in it says so, and all its calls have
        been replied to. In registered mode: its owner says so, or all workers that called us in it.
        """
        ended = 0
        for caller, calls in context.cleanups.items():
            if context.served.get(caller, 0) >= calls:
                if self._random_id is None or caller == context.owner:
                    return True
                ended += caller in context.callers
        return 0 < ended == len(context.callers)

    def adopt(self, context_id: int, worker: int) -> bool:
        """Tell `worker`, too, when a context of this worker ends. Returns False if it has ended."""
        context = self._alive.get(context_id)
        if context is None:
            return False
        with context.lock:
            if not context.released:
                context.adopted.add(worker)
            return not context.released

    def worker_lost(self, worker: int) -> None:
        """Drop the contexts of a lost worker, and ask the owners of those it called us in to tell us their end."""
        for context in self.all():
            self.caller_lost(context, worker)

    def caller_lost(self, context: DistAutogradContext, worker: int) -> None:
        """Do what `worker_lost` does, for one context.

        The context is kept even if all its callers are lost: its owner may be alive, need its gradients, and call this
        worker itself.
        """
        with context.lock:
            # A context that is just being made has no caller yet, and is about to get one.
            known = worker in context.callers
            context.callers.discard(worker)
            context.served.pop(worker, None)
            over = context.cleanups.pop(worker, None) is not None or context.owner == worker
            context.made.pop(worker, None)  # if it comes back, it does not know the context
            # The owner, if it called us, will tell us the end. Otherwise the lost worker may have been the only one to.
            unsure = known and context.owner not in (self._worker, *context.callers) and not context.released
        if over:
            self.release(context)
        elif unsure:
            self._ask_owner(context)

    def all(self) -> list[DistAutogradContext]:
        """Return the contexts that are alive here."""
        with self._lock:
            return list(self._alive.values())


keep_uncompiled(__name__)
