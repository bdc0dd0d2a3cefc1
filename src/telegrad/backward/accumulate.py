"""The gradients of leaves that one context holds, and how the engine accumulates into them.

They are summed here and not in ``.grad``, because passes of other contexts may run on the same parameters.
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
from telegrad.torch_private import is_view, post_accumulate_hooks, run_post_accumulate_hooks
from telegrad.torch_private_ownership import nobody_else_holds

_STRIDED = torch.strided


class Gradients:
    """The gradients of one context on one worker, by leaf."""

    def __init__(self) -> None:
        # Protects the two below. Held while ``.grad`` of a leaf is read or set, but not while tensors are summed.
        self._lock = threading.Lock()
        # By id, since hashing a tensor calls a Python function: the leaf, which this keeps alive, and its gradient.
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Leaves of `hold_in_grad`, each with what it had in .grad before.
        self._in_grad: dict[torch.Tensor, torch.Tensor | None] = {}

    def add(self, leaf: torch.Tensor, captured: Sequence[torch.Tensor | None], index: int) -> None:
        """Add a gradient that the engine captured, as AccumulateGrad would: without a copy if nobody else holds it."""
        grad = captured[index]
        if grad is None:
            return
        if not grad.is_nested and grad.shape != leaf.shape:
            raise TelegradError(
                f"the gradient of a leaf has shape {list(grad.shape)}, and the leaf {list(leaf.shape)}: its data was "
                "replaced after the forward pass had used it. Replace it before the forward pass, or after the backward"
            )
        owned = _is_owned(grad, leaf)
        if owned and is_view(grad) and not grad.requires_grad:
            grad = grad.detach()  # as AccumulateGrad does, which keeps no views
        with self._lock:
            if owned and id(leaf) not in self._grads:
                self._grads[id(leaf)] = leaf, grad
                return
        if not owned:
            # With create_graph a gradient has a graph, which copies and sums must keep in any mode of the thread.
            with torch.enable_grad():
                grad = grad.clone() if grad.layout != torch.strided else _clone_like(grad, leaf)
        self.add_owned(leaf, grad)

    def add_all(
        self, leaves: Sequence[torch.Tensor], captured: Sequence[torch.Tensor | None], indices: Sequence[int]
    ) -> None:
        """Add the gradients at these indices, each to its leaf. Does what `add` does, and most of it at once."""
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        others: list[tuple[torch.Tensor, int]] = []
        for leaf, index in zip(leaves, indices, strict=True):
            grad = captured[index]
            if (
                type(grad) is torch.Tensor
                and grad.layout is _STRIDED
                and grad.shape == leaf.shape
                and not is_view(grad)
                and not grad.is_nested
                and grad.is_contiguous()
                and leaf.layout is _STRIDED
                and leaf.is_contiguous()
                and id(leaf) not in kept
                and nobody_else_holds(grad, 2)  # but `captured`, and `grad` here
            ):
                kept[id(leaf)] = leaf, grad
            elif grad is not None:
                others.append((leaf, index))
        grad = None  # or `add` would see that somebody else holds it, and copy
        with self._lock:
            first = self._grads.keys().isdisjoint(kept)
            if first:
                self._grads.update(kept)
        if not first:
            for leaf, added in kept.values():
                self.add_owned(leaf, added)
        for leaf, index in others:
            self.add(leaf, captured, index)

    def pop(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Remove and return a gradient. The caller may change it, and add it again with `add_owned`."""
        with self._lock:
            _, grad = self._grads.pop(id(leaf), (leaf, None))
            return grad

    def add_owned(self, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a gradient that belongs to the caller alone, without a copy."""
        while True:
            with self._lock:
                other = self._grads.pop(id(leaf), None)
                if other is None:
                    self._grads[id(leaf)] = leaf, grad
                    return
            # Without the lock: gradients may be of a class whose sum runs user code.
            with torch.enable_grad():
                grad = add_up(other[1], grad)

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Set the gradient of a leaf; None removes it."""
        with self._lock:
            if grad is None:
                self._grads.pop(id(leaf), None)
            else:
                self._grads[id(leaf)] = leaf, grad

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a leaf, if there is one."""
        with self._lock:
            if self._in_grad and leaf in self._in_grad:
                return leaf.grad
            found = self._grads.get(id(leaf))
            return None if found is None else found[1]

    def as_dict(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return all gradients by leaf, not copied."""
        with self._lock:
            in_grad = {leaf: leaf.grad for leaf in self._in_grad}
            return {
                **dict(self._grads.values()),
                **{leaf: grad for leaf, grad in in_grad.items() if grad is not None},
            }

    def hold_in_grad(self, leaf: torch.Tensor) -> None:
        """Keep the gradient of a leaf in its ``.grad``, where somebody writes after the engine has run."""
        with self._lock:
            if leaf not in self._in_grad:
                self._in_grad[leaf] = leaf.grad
                _, leaf.grad = self._grads.pop(id(leaf), (leaf, None))

    def release_grad(self, leaf: torch.Tensor) -> None:
        """End `hold_in_grad`, and restore what the leaf had in ``.grad``."""
        with self._lock:
            if leaf in self._in_grad:
                own, grad = self._in_grad.pop(leaf), leaf.grad
                leaf.grad = own
                if grad is not None:
                    self._grads[id(leaf)] = leaf, grad

    def clear(self) -> None:
        """Remove all gradients."""
        for leaf in list(self._in_grad):
            self.release_grad(leaf)
        with self._lock:
            grads, self._grads = self._grads, {}
        del grads  # without the lock, since finalizers of the user may run


def _is_owned(grad: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether nobody else holds a gradient or its memory, and AccumulateGrad would keep its strides. Says no for
    tensors that are not strided."""
    # Held by: the tuple that the engine returned, `grad` in the caller, and the argument here.
    return grad.layout is _STRIDED and _has_strides_for(leaf, grad) and nobody_else_holds(grad, 3)


def _has_strides_for(leaf: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether a gradient has the strides that torch promises: those of a dense leaf, else contiguous ones."""
    if leaf.layout is not _STRIDED or leaf.is_nested:
        return grad.is_contiguous()
    if leaf.is_contiguous() or not _is_dense(leaf):
        return grad.is_contiguous()
    return all(own == wanted for own, wanted, n in zip(grad.stride(), leaf.stride(), leaf.shape, strict=True) if n != 1)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether its elements fill their memory without gaps and without overlap."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _clone_like(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return a copy with the leaf's strides where that is possible, as AccumulateGrad does."""
    if leaf.layout == torch.strided and _is_dense(leaf) and grad.shape == leaf.shape:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
    return grad.clone(memory_format=torch.contiguous_format)


def add_up(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, of which one may be sparse."""
    if one.is_sparse and not other.is_sparse:
        return other + one  # torch supports dense + sparse only
    return one + other


class AccumulateThrough:
    """Makes the engine execute AccumulateGrad, with all its hooks, into a context.

    A pair of hooks on that node installs the context's gradient in ``.grad`` and removes it again (see `grad_slots`).
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._lock = threading.Lock()  # protects _in_grad
        self.finished_later: Callable[[torch.Tensor], bool] = lambda leaf: False
        """Says whether somebody changes the gradient of a leaf after AccumulateGrad, as DistributedDataParallel."""
        # By identity: a WeakKeyDictionary would compare leaves with ==, which torch does element by element.
        self._in_grad: MutableMapping[torch.Tensor, Gradients] = WeakTensorKeyDictionary()
        self.copies_shared = False
        """Whether each of several leaves that get one gradient gets a copy, as in torch.distributed.autograd. Otherwise
        the last one gets the gradient itself."""
        self.inner: set[int] = set()
        """Threads that run a backward inside a backward whose gradients go into ``.grad``. Without a lock: each thread
        adds and removes itself."""

    @contextmanager
    def into(self, gradients: Gradients, nodes: Sequence[Any], wait: Wait) -> Iterator[None]:
        """Make AccumulateGrad of these nodes, if this thread executes it in the block, add to `gradients`."""
        given: set[int] | None = set() if self.copies_shared else None
        swaps = []
        for node in nodes:
            if self.finished_later(node.variable):
                self._hold_in_grad(node.variable, gradients)
            else:
                swaps.append(_Swap(node, gradients, self, wait, given))
        try:
            yield
        finally:
            with ExitStack() as ends:  # ends all of them, even if one raises
                for swap in swaps:
                    ends.callback(swap.end)

    def _hold_in_grad(self, leaf: torch.Tensor, gradients: Gradients) -> None:
        with self._lock:
            before = self._in_grad.get(leaf)
            self._in_grad[leaf] = gradients
        if before is not None and before is not gradients:
            before.release_grad(leaf)  # of a context that has ended, but this worker has not been told yet
        gradients.hold_in_grad(leaf)

    def run_hooks(self, gradients: Gradients, leaf: torch.Tensor, wait: Wait) -> None:
        """Run post-accumulate hooks of a leaf with the context's gradient in ``.grad``."""
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
        """Addresses of gradients that leaves got in this run."""
        self._shared = 0
        """The address of this leaf's gradient, if another leaf got the same."""
        self._through = through
        self._wait = wait
        self._thread = threading.get_ident()
        self._installed: Installed | None = None
        self._depth = 0  # a hook may run a backward that executes the node again
        self._handles = [node.register_prehook(self._before), node.register_hook(self._after)]

    def _is_mine(self) -> bool:
        """Whether the node is executed for this run: not for another context, nor for an inner run into ``.grad``."""
        thread = threading.get_ident()
        return thread == self._thread and thread not in self._through.inner

    def _before(self, grads: Any) -> None:
        if self._is_mine():
            self._depth += 1
            # A backward inside this one may have installed it already.
            if self._depth == 1 and not self._through.slots.has(self._leaf, self._gradients):
                installed = Installed([self._leaf], self._gradients)
                self._through.slots.add(installed, self._wait)
                self._installed = installed
            if self._given is not None and grads[0] is not None and grads[0].layout == torch.strided:
                address = grads[0].untyped_storage().data_ptr()
                self._shared = address if address in self._given else 0
                self._given.add(address)

    def _after(self, inputs: Any, outputs: Any) -> None:
        if self._is_mine():
            grad = self._leaf.grad
            if self._shared and grad is not None and grad.untyped_storage().data_ptr() == self._shared:
                self._leaf.grad = grad.clone()
            self._depth -= 1
            if not self._depth:
                self._uninstall()

    def _uninstall(self) -> None:
        installed, self._installed = self._installed, None
        if installed is not None:
            self._through.slots.remove(installed)

    def end(self) -> None:
        """Remove the hooks, and the gradient if an error left it installed."""
        for handle in self._handles:
            handle.remove()
        if self._installed is not None:
            self._installed.changes_table = False
            self._uninstall()
