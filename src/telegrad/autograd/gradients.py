"""The gradients of leaves that one context holds.

They are summed here and never in ``.grad``, because passes of other contexts may run on the same parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad.autograd.torch_private import (
    has_post_accumulate_hooks,
    nobody_else_holds,
    run_post_accumulate_hooks,
)
from telegrad.errors import TelegradError


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
        if ours and grad._is_view() and not grad.requires_grad:
            grad = grad.detach()  # as AccumulateGrad does: what is kept is no view
        with self._lock:
            if ours and id(leaf) not in self._grads:
                self._grads[id(leaf)] = leaf, grad
                return
        # Whatever mode the thread is in: with create_graph a gradient has a graph, which copy and sum must not lose.
        with torch.enable_grad():
            if not ours:
                grad = grad.clone() if grad.layout != torch.strided else _clone_like(grad, leaf)
            with self._lock:
                there = self._grads.get(id(leaf))
                self._grads[id(leaf)] = leaf, grad if there is None else _sum(there[1], grad)

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


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch knows dense + sparse, and not the other way
    return one + other


def run_hooks_on_context(gradients: Gradients, leaf: torch.Tensor) -> None:
    """Run post-accumulate hooks of a leaf, which see the context's gradient as ``.grad``."""
    if has_post_accumulate_hooks(leaf):
        own, leaf.grad = leaf.grad, gradients.get(leaf)
        try:
            run_post_accumulate_hooks(leaf)
            gradients.replace(leaf, leaf.grad)
        finally:
            leaf.grad = own


class AccumulateThrough:
    """Lets the engine execute AccumulateGrad into a context, with all hooks that it has.

    A pair of hooks on that one node swaps ``.grad`` for the context's gradient and back, under a lock of the leaf.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects _locks
        # By identity: a WeakKeyDictionary would compare leaves with ==, which torch does element by element.
        self._locks: MutableMapping[torch.Tensor, threading.Lock] = WeakTensorKeyDictionary()
        self.finished_later: Callable[[torch.Tensor], bool] = lambda leaf: False
        """Which leaves have a gradient that somebody finishes after AccumulateGrad, as DistributedDataParallel does."""
        self._placed: MutableMapping[torch.Tensor, Gradients] = WeakTensorKeyDictionary()
        self.copies_shared = False
        """Copy a gradient that several leaves get for each of them, as torch.distributed.autograd does; the engine
        gives it itself to the last one."""

    @contextmanager
    def into(self, gradients: Gradients, nodes: Sequence[Any]) -> Iterator[None]:
        """While this is open, AccumulateGrad of these nodes, run by this thread, adds to `gradients`."""
        given: set[int] | None = set() if self.copies_shared else None
        swaps = []
        for node in nodes:
            if self.finished_later(node.variable):
                self._place(node.variable, gradients)
            else:
                swaps.append(_Swap(node, gradients, self.lock_of(node.variable), given))
        try:
            yield
        finally:
            for swap in swaps:
                swap.end()

    def _place(self, leaf: torch.Tensor, gradients: Gradients) -> None:
        with self._lock:
            before = self._placed.get(leaf)
            self._placed[leaf] = gradients
        if before is not None and before is not gradients:
            before.take_back(leaf)  # of a context that has not heard yet that it has ended
        gradients.place(leaf)

    def lock_of(self, leaf: torch.Tensor) -> threading.Lock:
        """Held by whoever has swapped the leaf's ``.grad`` for another."""
        with self._lock:
            return self._locks.setdefault(leaf, threading.Lock())


class _Swap:
    """The hooks on one AccumulateGrad node, for one run of the engine."""

    def __init__(self, node: Any, gradients: Gradients, lock: threading.Lock, given: set[int] | None) -> None:
        self._leaf: torch.Tensor = node.variable
        self._gradients = gradients
        self._given = given
        """Where the gradients lie that leaves got in this run."""
        self._shared = 0
        self._lock = lock
        self._thread = threading.get_ident()
        self._swapped = False
        self._own: torch.Tensor | None = None
        self._handles = [node.register_prehook(self._before), node.register_hook(self._after)]

    def _before(self, grads: Any) -> None:
        if threading.get_ident() == self._thread:  # else it is a pass of another context
            self._lock.acquire()
            self._own, self._swapped = self._leaf.grad, True
            self._leaf.grad = self._gradients.get(self._leaf)
            if self._given is not None and grads[0] is not None and grads[0].layout == torch.strided:
                place = grads[0].untyped_storage().data_ptr()
                self._shared = place if place in self._given else 0
                self._given.add(place)

    def _after(self, inputs: Any, outputs: Any) -> None:
        if threading.get_ident() == self._thread and self._swapped:
            grad = self._leaf.grad
            if self._shared and grad is not None and grad.untyped_storage().data_ptr() == self._shared:
                grad = grad.clone()
            self._gradients.replace(self._leaf, grad)
            self._back()

    def _back(self) -> None:
        self._leaf.grad, self._own, self._swapped = self._own, None, False
        self._lock.release()

    def end(self) -> None:
        """Remove the hooks; what an error left swapped is put back."""
        for handle in self._handles:
            handle.remove()
        if self._swapped:
            self._back()
