"""What one context holds on one worker, and which contexts there are.

A context has the same id on every worker that takes part. It ends along the edges of calls: whoever leaves it tells
those that it called itself, and how many calls it made to each; they leave when they have answered so many. So a
cleanup never overtakes a call, and needs no answer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from telegrad.autograd.functions import Recv, SendRpcBackward
from telegrad.autograd.gradients import Gradients
from telegrad.errors import TelegradError

if TYPE_CHECKING:
    from telegrad.autograd.passes import PassRun

_COUNTER_BITS = 48
_COUNTER = (1 << _COUNTER_BITS) - 1
_ENDED, _ORPHANED = "ended", "orphaned"
_REMEMBERED = 16384  # contexts that ended, so that what comes late does not bring them back


class DistAutogradContext:
    """One context on one worker."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.lock = threading.Lock()  # protects everything below
        self.sends: dict[int, SendRpcBackward] = {}
        self.recvs: dict[int, Recv] = {}
        self.made: dict[int, int] = {}
        """Calls made in it, by callee."""
        self.served: dict[int, int] = {}
        """Calls answered in it, by caller."""
        self.callers: set[int] = set()
        self.cleanups: dict[int, int] = {}
        """Callers that have left it because it ended, and how many calls they made to us."""
        self.quits: dict[int, int] = {}
        """Callers that have left it because their own callers are lost, and how many calls they made to us."""
        self.passes: dict[int, PassRun] = {}
        self.stepped: set[int] = set()
        """Optimizers whose steps were done in passes that began here."""
        self.released = False
        self.gradients = Gradients()

    @property
    def owner(self) -> int:
        """The worker that made it."""
        return self.id >> _COUNTER_BITS

    def workers(self) -> set[int]:
        """Those that this worker exchanges messages with in it."""
        with self.lock:
            return (
                {send.target for send in self.sends.values()}
                | {recv.source for recv in self.recvs.values()}
                | set(self.made)
                | self.callers
            )

    # PyTorch's names

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


current: ContextVar[DistAutogradContext | None] = ContextVar("telegrad_context", default=None)
"""The context that the current thread or task works in."""


class Contexts:
    """The contexts that one worker takes part in."""

    def __init__(self, worker: int, first: int, on_release: Callable[[DistAutogradContext, bool], None]) -> None:
        self._worker = worker
        self._ids = itertools.count(first)
        self._messages = itertools.count(first)
        self.orders = itertools.count(1)
        self._on_release = on_release
        self._lock = threading.Lock()  # protects the two below
        self._alive: dict[int, DistAutogradContext] = {}
        self.get: Callable[[int], DistAutogradContext | None] = self._alive.get
        """The context of that id, if it is alive here."""
        self._ended: dict[int, None] = {}

    def new_message(self) -> int:
        """An id that no message had before."""
        return self._worker << _COUNTER_BITS | next(self._messages) & _COUNTER

    def new(self) -> DistAutogradContext:
        """A context that begins here."""
        context = DistAutogradContext(self._worker << _COUNTER_BITS | next(self._ids) & _COUNTER)
        with self._lock:
            self._alive[context.id] = context
        return context

    def has_ended(self, context_id: int) -> bool:
        """Whether the context of that id was left."""
        with self._lock:
            return context_id in self._ended or (
                context_id >> _COUNTER_BITS == self._worker and context_id not in self._alive
            )

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """The context of that id; an error if there is none."""
        context = self._alive.get(context_id)
        if context is None:
            raise TelegradError(
                f"Could not find autograd context with id: {int(context_id)}. It was never made on this worker, or has "
                "been left already; use it inside its `with telegrad.autograd.context()` block"
            )
        return context

    def enter(self, context_id: int) -> DistAutogradContext | None:
        """The context of that id, which another worker named, made if need be; None if it has ended."""
        with self._lock:
            context = self._alive.get(context_id)
            if context is None and context_id not in self._ended and context_id >> _COUNTER_BITS != self._worker:
                context = self._alive[context_id] = DistAutogradContext(context_id)
            return context

    def ended(self, context_id: int) -> DistAutogradContext:
        """What stands for a context that has ended, where a call that was made in it is still to be answered."""
        context = DistAutogradContext(context_id)
        context.released = True
        return context

    def release(self, context: DistAutogradContext, *, orphaned: bool = False) -> None:
        """Leave a context, and tell those that this worker called in it.

        It has ended; or, if `orphaned`, only for this worker: then others may call it in the same one anew.
        """
        with self._lock:
            if self._alive.get(context.id) is not context:
                return
            del self._alive[context.id]
            if not orphaned:
                self._ended[context.id] = None
                while len(self._ended) > _REMEMBERED:
                    del self._ended[next(iter(self._ended))]
        self._on_release(context, orphaned)

    def served(self, context: DistAutogradContext, caller: int) -> None:
        """A call that `caller` made in the context was answered."""
        with context.lock:
            context.served[caller] = context.served.get(caller, 0) + 1
            ends = self._ends(context) if context.cleanups or context.quits else ""
        if ends:
            self.release(context, orphaned=ends == _ORPHANED)

    def cleanup(self, context_id: int, caller: int, calls: int, *, orphaned: bool = False) -> None:
        """`caller` has left the context, in which it made so many calls to us. See `release`."""
        context = self.enter(context_id)
        if context is None or context.owner == self._worker:
            return
        with context.lock:
            (context.quits if orphaned else context.cleanups)[caller] = calls
            ends = self._ends(context)
        if ends:
            self.release(context, orphaned=ends == _ORPHANED)

    def worker_lost(self, worker: int) -> None:
        """Drop what only a lost worker could end: its own contexts, and those that nobody else called us in."""
        for context in self.all():
            with context.lock:
                # One without any is just being made, and about to get its first caller.
                known = worker in context.callers or worker in context.cleanups or worker in context.quits
                context.callers.discard(worker)
                orphaned = known and context.owner != self._worker and not context.callers
            if context.owner == worker:
                self.release(context)
            elif orphaned:
                self.release(context, orphaned=True)

    def _ends(self, context: DistAutogradContext) -> str:
        """Whether it ends now, and how. Called with the lock of the context held."""
        for caller, calls in context.cleanups.items():
            if context.served.get(caller, 0) >= calls:
                return _ENDED
        gone = [caller for caller, calls in context.quits.items() if context.served.get(caller, 0) >= calls]
        for caller in gone:
            context.callers.discard(caller)
            context.served[caller] = context.served.get(caller, 0) - context.quits.pop(caller)
        return _ORPHANED if gone and not context.callers and context.owner != self._worker else ""

    def all(self) -> list[DistAutogradContext]:
        """Those that are alive."""
        with self._lock:
            return list(self._alive.values())
