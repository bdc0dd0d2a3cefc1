"""Decides which thread may use ``.grad`` of a leaf: one at a time has the gradient of its context there.

Post-accumulate hooks and optimizers use ``.grad``, but gradients of passes are in contexts, and several contexts may
have one for the same leaf. So a gradient is installed in ``.grad`` only during a hook or a step. The rules:

1. A leaf has one *slot*. The thread that installs a gradient holds the slot. Others wait for it, through the executor.
2. A thread that waits holds no slot. Before it waits for anything, such as a call, its gradients go back to their
   contexts, ``.grad`` is restored, and its slots are released. Afterwards it acquires them again, all at once.

By rule 2 no thread that holds a slot waits for anything, so there are no deadlocks: a hook may call a function that
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
"""Waits for an event through the executor. Raises if waiting is pointless: a deadline has passed, or a pass failed."""


class Table(Protocol):
    """The gradients of a context."""

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a leaf."""

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Set the gradient of a leaf."""


class Part(Protocol):
    """Gradients of some leaves that a thread installs together. `Slots` acquires their slots."""

    @property
    def table(self) -> Table | None:
        """Return the gradients that these are part of."""

    def leaf_ids(self) -> Collection[int]:
        """Return the ids of the leaves."""

    def install(self) -> None:
        """Set ``.grad``."""

    def uninstall(self) -> None:
        """Move the gradients from ``.grad`` back to the table, and restore ``.grad``. May be called twice."""


class _Request:
    """A request of a thread that waits for slots."""

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
        """Wake all threads that wait, because the worker shuts down."""
        with self._lock:
            self._closed = True
            for request in self._requests:
                request.event.set()

    def waiting(self) -> int:
        """Return how many threads wait for slots."""
        with self._lock:
            return len(self._requests)

    # -- parts of the current thread ----------------------------------------------------------------------------

    def add(self, part: Part, wait: Wait) -> None:
        """Acquire the slots of a part for the current thread, and install it."""
        thread = threading.get_ident()
        holder = self._holders.get(thread) or _Holder(self, wait)
        holder.add(part)
        if len(holder.parts) == 1:
            self._holders[thread] = holder
            self.executor.hold(holder)

    def remove(self, part: Part) -> None:
        """Uninstall a part, on the thread that added it, and release its slots."""
        thread = threading.get_ident()
        holder = self._holders[thread]
        try:
            holder.remove(part)
        finally:
            if not holder.parts:
                del self._holders[thread]
                self.executor.hold(None)

    def extend(self, keys: Collection[int]) -> bool:
        """Acquire slots for more leaves of the current thread's parts. Returns False if that would have to wait."""
        if not self.try_acquire(keys):
            return False
        self._holders[threading.get_ident()].keys.update(keys)
        return True

    def shrink(self, keys: Collection[int]) -> None:
        """Release slots of leaves of the current thread's parts that have died."""
        self._holders[threading.get_ident()].keys.difference_update(keys)
        self.release(keys)

    def has(self, leaf: torch.Tensor, table: Table) -> bool:
        """Whether the current thread has installed this table's gradient of a leaf."""
        holder = self._holders.get(threading.get_ident())
        return holder is not None and any(part.table is table and id(leaf) in part.leaf_ids() for part in holder.parts)

    # -- slots --------------------------------------------------------------------------------------------------

    def try_acquire(self, keys: Collection[int]) -> bool:
        """Acquire these slots. Returns False if that would have to wait."""
        with self._lock:
            if self._requests or not self._taken.isdisjoint(keys):
                return False
            self._taken.update(keys)
            return True

    def acquire(self, keys: Collection[int], wait: Wait) -> None:
        """Acquire these slots, all at once, in the order of asking."""
        if self.try_acquire(keys):
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

    def release(self, keys: Iterable[int]) -> None:
        """Release these slots."""
        with self._lock:
            self._taken.difference_update(keys)
            if self._requests:
                self._grant()

    def _grant(self) -> None:
        """Grant free slots to requests, in their order. Called with the lock held."""
        claimed = set(self._taken)
        for request in list(self._requests):
            if claimed.isdisjoint(request.keys):
                self._requests.remove(request)
                self._taken.update(request.keys)
                request.granted = True
                request.event.set()
            claimed.update(request.keys)  # or later requests could overtake this one for ever


class _Holder:
    """The parts that one thread has installed. The executor suspends it while the thread waits."""

    def __init__(self, slots: Slots, wait: Wait) -> None:
        self._slots = slots
        self._wait = wait
        self.parts: list[Part] = []
        self.keys: set[int] = set()  # the slots that the thread holds now

    def add(self, part: Part) -> None:
        fresh = set(part.leaf_ids()) - self.keys
        if self._slots.try_acquire(fresh):
            self.keys |= fresh
        else:
            self._slots.executor.hold(None)
            try:
                self.suspend()
                self._acquire(fresh)
            finally:
                if self.parts:
                    self._slots.executor.hold(self)
        try:
            part.install()
        except BaseException:
            self._release_all_but(self.parts)
            raise
        self.parts.append(part)

    def remove(self, part: Part) -> None:
        self.parts.remove(part)
        try:
            part.uninstall()
        finally:
            self._release_all_but(self.parts)

    def _release_all_but(self, parts: Sequence[Part]) -> None:
        needed = {key for part in parts for key in part.leaf_ids()}
        self._slots.release(self.keys - needed)
        self.keys &= needed

    def _acquire(self, more: Iterable[int] = ()) -> None:
        keys = {key for part in self.parts for key in part.leaf_ids()}.union(more)
        self._slots.acquire(keys, self._wait)
        self.keys = keys
        for part in self.parts:
            part.install()

    def suspend(self) -> None:
        """Uninstall all parts, and release their slots."""
        try:
            for part in reversed(self.parts):
                part.uninstall()
        finally:
            keys, self.keys = self.keys, set()
            self._slots.release(keys)

    def resume(self) -> None:
        """Acquire the slots again, and install the parts."""
        self._acquire()


class Installed:
    """A part that keeps its leaves alive. Without a table it holds the slots and leaves ``.grad`` alone."""

    __slots__ = ("_ids", "_installed", "_leaves", "_own", "changes_table", "table")

    def __init__(self, leaves: Sequence[torch.Tensor], table: Table | None) -> None:
        self._leaves = leaves
        self._ids = [id(leaf) for leaf in leaves]
        self.table = table
        self.changes_table = True
        """Whether ``.grad`` becomes the context's gradient when this is uninstalled."""
        self._own: list[torch.Tensor | None] = []
        self._installed: list[torch.Tensor | None] = []

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
                self._installed.append(grad)
                leaf.grad = grad
        except BaseException:
            self._restore(self._own)
            raise

    def uninstall(self) -> None:
        """See `Part`."""
        if self.table is None:
            return
        own = self._own
        for leaf, grad, _ in zip(self._leaves, self._installed, own, strict=False):
            if leaf.grad is not grad and self.changes_table:
                self.table.replace(leaf, leaf.grad)
        self._restore(own)

    def _restore(self, own: Sequence[torch.Tensor | None]) -> None:
        self._own, self._installed = [], []
        for leaf, grad in zip(self._leaves, own, strict=False):
            leaf.grad = grad
