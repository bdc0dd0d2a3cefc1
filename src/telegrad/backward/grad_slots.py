"""Who may use ``.grad`` of a leaf: one thread at a time has the gradient of its context there.

Post-accumulate hooks and optimizers look at ``.grad``, and gradients of passes are kept in contexts, several of which
may have one for the same leaf. So a gradient is installed in ``.grad`` for the time of a hook or of a step. The rules:

1. A leaf has one *slot*. A thread that installs a gradient has the slot; others wait for it, through the executor.
2. A thread that waits has no slot. Before it waits for anything, a call say, its gradients go back to their contexts,
   ``.grad`` is what it was, and its slots are free. Afterwards it takes them again, all at once.

By rule 2 nobody who has a slot waits for anything, so threads cannot wait in a circle: a hook may call a function that
steps the same leaf, or one that runs a pass on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import torch

from telegrad.errors import NotInitialized
from telegrad.execution.executor import Executor
from telegrad.waiting import Event, Runtime

Wait = Callable[[Event], None]
"""Waits for an event through the executor. Raises if there is no point in it any more: a deadline, a failed pass."""


class Table(Protocol):
    """The gradients of a context."""

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a leaf."""

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Set it."""


class Part(Protocol):
    """Gradients of some leaves that a thread installs together. `Slots` sees to their slots."""

    @property
    def table(self) -> Table | None:
        """Where they come from."""

    def leaf_ids(self) -> Collection[int]:
        """The ids of the leaves."""

    def install(self) -> None:
        """Set ``.grad``."""

    def put_back(self) -> None:
        """Take the gradients out of ``.grad``, which gets back what it had; nothing, if they are not there."""


class _Request:
    """A thread that waits for slots."""

    __slots__ = ("event", "granted", "keys")

    def __init__(self, keys: Collection[int], event: Event) -> None:
        self.keys = keys
        self.event = event
        self.granted = False


class Slots:
    """The slots of the leaves on one worker."""

    def __init__(self, runtime: Runtime, executor: Executor, name: str) -> None:
        self._runtime = runtime
        self.executor = executor
        self._name = name
        self._holders: dict[int, _Holder] = {}  # by thread, which is the only one to use its entry
        self._lock = threading.Lock()  # protects everything below
        self._taken: set[int] = set()  # ids of leaves
        self._requests: list[_Request] = []
        self._closed = False

    def close(self) -> None:
        """The worker shuts down: nobody may wait any longer."""
        with self._lock:
            self._closed = True
            for request in self._requests:
                request.event.set()

    def waiting(self) -> int:
        """How many threads wait for slots."""
        with self._lock:
            return len(self._requests)

    # -- what the current thread has --------------------------------------------------------------------------------

    def add(self, part: Part, wait: Wait) -> None:
        """Take the slots of a part for the current thread, and install it."""
        thread = threading.get_ident()
        holder = self._holders.get(thread) or _Holder(self, wait)
        holder.add(part)
        if len(holder.parts) == 1:
            self._holders[thread] = holder
            self.executor.hold(holder)

    def remove(self, part: Part) -> None:
        """End what `add` began, on the same thread."""
        thread = threading.get_ident()
        holder = self._holders[thread]
        try:
            holder.remove(part)
        finally:
            if not holder.parts:
                del self._holders[thread]
                self.executor.hold(None)

    def extend(self, keys: Collection[int]) -> bool:
        """Take slots for more leaves of a part of the current thread's, if that needs no waiting."""
        if not self.try_take(keys):
            return False
        self._holders[threading.get_ident()].keys.update(keys)
        return True

    def shrink(self, keys: Collection[int]) -> None:
        """Leaves of the current thread's parts have died."""
        self._holders[threading.get_ident()].keys.difference_update(keys)
        self.give_back(keys)

    def has(self, leaf: torch.Tensor, table: Table) -> bool:
        """Whether the current thread has installed this table's gradient of a leaf."""
        holder = self._holders.get(threading.get_ident())
        return holder is not None and any(part.table is table and id(leaf) in part.leaf_ids() for part in holder.parts)

    # -- slots --------------------------------------------------------------------------------------------------------

    def try_take(self, keys: Collection[int]) -> bool:
        """Take these slots if that needs no waiting."""
        with self._lock:
            if self._requests or not self._taken.isdisjoint(keys):
                return False
            self._taken.update(keys)
            return True

    def take(self, keys: Collection[int], wait: Wait) -> None:
        """Take these slots, all at once, in the order of asking."""
        if self.try_take(keys):
            return
        with self._lock:
            request = _Request(keys, self._runtime.event())
            self._requests.append(request)
            self._grant()
            if self._closed:
                request.event.set()
        try:
            wait(request.event)
            if not request.granted:
                raise NotInitialized(f"worker {self._name!r} shut down while a thread waited for .grad of a leaf")
        except BaseException:
            with self._lock:
                if request.granted:
                    self._taken.difference_update(keys)
                else:
                    self._requests.remove(request)
                self._grant()
            raise

    def give_back(self, keys: Iterable[int]) -> None:
        """Let others take these slots."""
        with self._lock:
            self._taken.difference_update(keys)
            if self._requests:
                self._grant()

    def _grant(self) -> None:
        """Give what is free to those that wait, in their order. Called with the lock held."""
        claimed = set(self._taken)
        for request in list(self._requests):
            if claimed.isdisjoint(request.keys):
                self._requests.remove(request)
                self._taken.update(request.keys)
                request.granted = True
                request.event.set()
            claimed.update(request.keys)  # a request that waits on must not be overtaken for ever


class _Holder:
    """What one thread has installed. The executor suspends it while the thread waits."""

    def __init__(self, slots: Slots, wait: Wait) -> None:
        self._slots = slots
        self._wait = wait
        self.parts: list[Part] = []
        self.keys: set[int] = set()  # the slots that the thread has now

    def add(self, part: Part) -> None:
        fresh = set(part.leaf_ids()) - self.keys
        if self._slots.try_take(fresh):
            self.keys |= fresh
        else:
            self._slots.executor.hold(None)
            try:
                self.suspend()
                self._take(fresh)
            finally:
                if self.parts:
                    self._slots.executor.hold(self)
        try:
            part.install()
        except BaseException:
            self._free_all_but(self.parts)
            raise
        self.parts.append(part)

    def remove(self, part: Part) -> None:
        self.parts.remove(part)
        try:
            part.put_back()
        finally:
            self._free_all_but(self.parts)

    def _free_all_but(self, parts: Sequence[Part]) -> None:
        needed = {key for part in parts for key in part.leaf_ids()}
        self._slots.give_back(self.keys - needed)
        self.keys &= needed

    def _take(self, more: Iterable[int] = ()) -> None:
        keys = {key for part in self.parts for key in part.leaf_ids()}.union(more)
        self._slots.take(keys, self._wait)
        self.keys = keys
        for part in self.parts:
            part.install()

    def suspend(self) -> None:
        """Put everything back, and let others have it."""
        try:
            for part in reversed(self.parts):
                part.put_back()
        finally:
            keys, self.keys = self.keys, set()
            self._slots.give_back(keys)

    def resume(self) -> None:
        """Take it again."""
        self._take()


class Installed:
    """A part whose leaves stay alive; with no table, ``.grad`` is left as it is, and only the slots are taken."""

    __slots__ = ("_ids", "_leaves", "_lent", "_own", "changes_table", "table")

    def __init__(self, leaves: Sequence[torch.Tensor], table: Table | None) -> None:
        self._leaves = leaves
        self._ids = [id(leaf) for leaf in leaves]
        self.table = table
        self.changes_table = True
        """What is set in ``.grad`` meanwhile is the context's gradient afterwards."""
        self._own: list[torch.Tensor | None] = []
        self._lent: list[torch.Tensor | None] = []

    def leaf_ids(self) -> Collection[int]:
        """See `Part`."""
        return self._ids

    def install(self) -> None:
        """See `Part`."""
        if self.table is None:
            return
        try:
            for leaf in self._leaves:
                grad = self.table.get(leaf)
                self._own.append(leaf.grad)
                self._lent.append(grad)
                leaf.grad = grad
        except BaseException:
            self._restore(self._own)
            raise

    def put_back(self) -> None:
        """See `Part`."""
        if self.table is None:
            return
        own = self._own
        for leaf, grad, _ in zip(self._leaves, self._lent, own, strict=False):
            if leaf.grad is not grad and self.changes_table:
                self.table.replace(leaf, leaf.grad)
        self._restore(own)

    def _restore(self, own: Sequence[torch.Tensor | None]) -> None:
        self._own, self._lent = [], []
        for leaf, grad in zip(self._leaves, own, strict=False):
            leaf.grad = grad
