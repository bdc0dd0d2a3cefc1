"""The gradients of leaves that one context holds.

They are summed here and never in ``.grad``, because passes of other contexts may run on the same parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad.backward.grad_slots import Installed, Slots, Wait
from telegrad.errors import TelegradError
from telegrad.torch_private import (
    is_view,
    nobody_else_holds,
    post_accumulate_hooks,
    run_post_accumulate_hooks,
)


class Gradients:
    """Leaf -> gradient."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the two below
        # By the leaf's id, since to hash a tensor is a Python function: the leaf, which that keeps alive, and its grad.
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._placed: dict[torch.Tensor, torch.Tensor | None] = {}  # see `place`; with what the leaf had there before

    def add(self, leaf: torch.Tensor, captured: Sequence[torch.Tensor | None], index: int) -> None:
        """Take a gradient that the engine captured, as AccumulateGrad would: as it is if nobody else has it."""
        grad = captured[index]
        if grad is None:
            return
        if not grad.is_nested and grad.shape != leaf.shape:
            raise TelegradError(
                f"the gradient of a leaf has shape {list(grad.shape)}, and the leaf {list(leaf.shape)}: its data was "
                "replaced after the forward pass had used it. Replace it before the forward pass, or after the backward"
            )
        ours = _is_ours(grad)
        if ours and is_view(grad) and not grad.requires_grad:
            grad = grad.detach()  # as AccumulateGrad does: what is kept is no view
        with self._lock:
            if ours and id(leaf) not in self._grads:
                self._grads[id(leaf)] = leaf, grad
                return
        if not ours:
            # Whatever mode the thread is in: with create_graph a gradient has a graph, which copies and sums must keep.
            with torch.enable_grad():
                grad = grad.clone() if grad.layout != torch.strided else _clone_like(grad, leaf)
        self.add_back(leaf, grad)

    def take_out(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Remove a gradient: whoever has it may change it, until `add_back`."""
        with self._lock:
            _, grad = self._grads.pop(id(leaf), (leaf, None))
            return grad

    def add_back(self, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a gradient that belongs to the caller alone."""
        while True:
            with self._lock:
                there = self._grads.pop(id(leaf), None)
                if there is None:
                    self._grads[id(leaf)] = leaf, grad
                    return
            # Without the lock: gradients may be of a class whose sum runs code of the user's.
            with torch.enable_grad():
                grad = add_up(there[1], grad)

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Set what AccumulateGrad made of it."""
        with self._lock:
            if grad is None:
                self._grads.pop(id(leaf), None)
            else:
                self._grads[id(leaf)] = leaf, grad

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        with self._lock:
            if self._placed and leaf in self._placed:
                return leaf.grad
            there = self._grads.get(id(leaf))
            return None if there is None else there[1]

    def as_dict(self) -> dict[torch.Tensor, torch.Tensor]:
        """A copy of the table, with the tensors themselves."""
        with self._lock:
            placed = {leaf: leaf.grad for leaf in self._placed}
            return {
                **dict(self._grads.values()),
                **{leaf: grad for leaf, grad in placed.items() if grad is not None},
            }

    def place(self, leaf: torch.Tensor) -> None:
        """Let ``.grad`` of the leaf be our gradient until `take_back`: for who writes there when the engine is done."""
        with self._lock:
            if leaf not in self._placed:
                self._placed[leaf] = leaf.grad
                _, leaf.grad = self._grads.pop(id(leaf), (leaf, None))

    def take_back(self, leaf: torch.Tensor) -> None:
        """End that, and give the leaf back what it had there."""
        with self._lock:
            if leaf in self._placed:
                own, grad = self._placed.pop(leaf), leaf.grad
                leaf.grad = own
                if grad is not None:
                    self._grads[id(leaf)] = leaf, grad

    def clear(self) -> None:
        for leaf in list(self._placed):
            self.take_back(leaf)
        with self._lock:
            self._grads.clear()


def _is_ours(grad: torch.Tensor) -> bool:
    # Held by: the tuple that the engine returned, `grad` in the caller, and the argument here. A tensor that is not
    # strided has no memory of its own to ask about.
    if grad.layout != torch.strided:
        return False
    return (grad.is_contiguous() or _is_dense(grad)) and nobody_else_holds(grad, 3)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether its elements fill their memory without gaps and without overlap."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _clone_like(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """A copy with the leaf's strides where that is possible, as AccumulateGrad makes it."""
    if leaf.layout == torch.strided and _is_dense(leaf) and grad.shape == leaf.shape:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


def add_up(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of which one may be sparse."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch knows dense + sparse, and not the other way
    return one + other


class AccumulateThrough:
    """Lets the engine execute AccumulateGrad into a context, with all hooks that it has.

    A pair of hooks on that one node installs the context's gradient in ``.grad`` and puts it back (see `slots`).
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._lock = threading.Lock()  # protects _placed
        self.finished_later: Callable[[torch.Tensor], bool] = lambda leaf: False
        """Which leaves have a gradient that somebody finishes after AccumulateGrad, as DistributedDataParallel does."""
        # By identity: a WeakKeyDictionary would compare leaves with ==, which torch does element by element.
        self._placed: MutableMapping[torch.Tensor, Gradients] = WeakTensorKeyDictionary()
        self.copies_shared = False
        """Copy a gradient that several leaves get for each of them, as torch.distributed.autograd does; the engine
        gives it itself to the last one."""
        self.inner: set[int] = set()
        """Threads that run a backward inside a backward whose gradients go into ``.grad``. Without a lock: each thread
        adds and removes itself."""

    @contextmanager
    def into(self, gradients: Gradients, nodes: Sequence[Any], wait: Wait) -> Iterator[None]:
        """While this is open, AccumulateGrad of these nodes, run by this thread, adds to `gradients`."""
        given: set[int] | None = set() if self.copies_shared else None
        swaps = []
        for node in nodes:
            if self.finished_later(node.variable):
                self._place(node.variable, gradients)
            else:
                swaps.append(_Swap(node, gradients, self, wait, given))
        try:
            yield
        finally:
            with ExitStack() as ends:  # all of them, whatever one raises
                for swap in swaps:
                    ends.callback(swap.end)

    def _place(self, leaf: torch.Tensor, gradients: Gradients) -> None:
        with self._lock:
            before = self._placed.get(leaf)
            self._placed[leaf] = gradients
        if before is not None and before is not gradients:
            before.take_back(leaf)  # of a context that has not heard yet that it has ended
        gradients.place(leaf)

    def run_hooks(self, gradients: Gradients, leaf: torch.Tensor, wait: Wait) -> None:
        """Run post-accumulate hooks of a leaf, which see the context's gradient as ``.grad``."""
        if post_accumulate_hooks(leaf):
            installed = Installed([leaf], gradients)
            self.slots.add(installed, wait)
            try:
                run_post_accumulate_hooks(leaf)
            finally:
                self.slots.remove(installed)


class _Swap:
    """The hooks on one AccumulateGrad node, for one run of the engine."""

    def __init__(
        self, node: Any, gradients: Gradients, through: AccumulateThrough, wait: Wait, given: set[int] | None
    ) -> None:
        self._leaf: torch.Tensor = node.variable
        self._gradients = gradients
        self._given = given
        """Where the gradients lie that leaves got in this run."""
        self._shared = 0
        self._through = through
        self._wait = wait
        self._thread = threading.get_ident()
        self._installed: Installed | None = None
        self._depth = 0  # a hook may run a backward that comes here again
        self._handles = [node.register_prehook(self._before), node.register_hook(self._after)]

    def _is_mine(self) -> bool:
        """Whether this is the run, and neither one of another context nor one inside this that goes into ``.grad``."""
        thread = threading.get_ident()
        return thread == self._thread and thread not in self._through.inner

    def _before(self, grads: Any) -> None:
        if self._is_mine():
            self._depth += 1
            # A backward inside this one may have it there already.
            if self._depth == 1 and not self._through.slots.has(self._leaf, self._gradients):
                installed = Installed([self._leaf], self._gradients)
                self._through.slots.add(installed, self._wait)
                self._installed = installed
            if self._given is not None and grads[0] is not None and grads[0].layout == torch.strided:
                place = grads[0].untyped_storage().data_ptr()
                self._shared = place if place in self._given else 0
                self._given.add(place)

    def _after(self, inputs: Any, outputs: Any) -> None:
        if self._is_mine():
            grad = self._leaf.grad
            if self._shared and grad is not None and grad.untyped_storage().data_ptr() == self._shared:
                self._leaf.grad = grad.clone()
            self._depth -= 1
            if not self._depth:
                self._put_back()

    def _put_back(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            self._through.slots.remove(installed)

    def end(self) -> None:
        """Remove the hooks; what an error left installed is put back."""
        for handle in self._handles:
            handle.remove()
        if self._installed is not None:
            self._installed.changes_table = False
            self._put_back()
