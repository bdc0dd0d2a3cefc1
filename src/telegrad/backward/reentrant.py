"""A backward inside a pass: a Function or a hook of the user calls ``torch.autograd.backward`` itself.

Checkpointing with ``use_reentrant=True`` and reversible blocks do so. Which leaves such a run reaches is known only
when it begins. Their gradients belong to the pass. If that leaves gradients in its context, they are installed in
``.grad`` (see `grad_slots`) from the first such run of an island to the island's end. So the Function can read them
there, in particular those of inputs that it detached, and they add up as in one process. When the island ends,
gradients of leaves that are still alive go into the context. A leaf that the Function made has died with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.weak import TensorWeakRef

from telegrad.backward.accumulate import Gradients
from telegrad.backward.grad_slots import Slots, Wait
from telegrad.backward.nodes import ANCHOR_NODE
from telegrad.torch_private import gradient_edge

_ACCUMULATE = type(ANCHOR_NODE)


class InnerLeaves:
    """The leaves that runs inside one island have reached, as a `Part` that its thread installs.

    Gradients are removed from the context's table meanwhile, since other islands of the pass may add to it.
    """

    def __init__(self, slots: Slots, gradients: Gradients, wait: Wait) -> None:
        self._slots = slots
        self._wait = wait
        self.table = gradients
        self._leaves: dict[int, TensorWeakRef] = {}
        self._own: dict[int, torch.Tensor | None] = {}  # what was in .grad of leaves that are installed
        self._added = False

    def add(self, leaves: Iterable[torch.Tensor]) -> None:
        """Install the context's gradients of these in ``.grad``, until `end`."""
        if self._added:
            self._forget_dead()
        fresh = {id(leaf): TensorWeakRef(leaf) for leaf in leaves if not self._slots.has(leaf, self.table)}
        if self._added and self._slots.extend(fresh):
            self._leaves.update(fresh)
            self._install(fresh)
        elif fresh:
            self.end()
            self._leaves.update(fresh)
            self._slots.add(self, self._wait)
            self._added = True

    def end(self) -> None:
        """Uninstall all gradients, because the island has ended."""
        if self._added:
            self._added = False
            self._slots.remove(self)

    def _forget_dead(self) -> None:
        dead = [key for key, leaf in self._leaves.items() if leaf() is None]
        for key in dead:
            del self._leaves[key]
            self._own.pop(key, None)
        self._slots.shrink(dead)

    # -- see `telegrad.backward.grad_slots.Part` ----------------------------------------------------------------

    def leaf_ids(self) -> Collection[int]:
        return self._leaves.keys()

    def install(self) -> None:
        self._install(self._leaves)

    def _install(self, leaves: Mapping[int, TensorWeakRef]) -> None:
        for key, leaf in _alive(leaves):
            self._own[key] = leaf.grad
            leaf.grad = self.table.pop(leaf)

    def uninstall(self) -> None:
        for key, leaf in _alive(self._leaves):
            if key in self._own:
                grad, leaf.grad = leaf.grad, self._own[key]
                if grad is not None:
                    self.table.add_owned(leaf, grad)
        self._own.clear()


def _alive(leaves: Mapping[int, TensorWeakRef]) -> list[tuple[int, torch.Tensor]]:
    found = [(key, leaf()) for key, leaf in leaves.items()]
    return [(key, leaf) for key, leaf in found if leaf is not None]


def reached_leaves(
    outputs: Sequence[torch.Tensor | GradientEdge], inputs: Sequence[torch.Tensor | GradientEdge]
) -> list[torch.Tensor]:
    """Return the leaves whose ``.grad`` a run of the engine will set."""
    nodes: list[Node | None] = [_node(end) for end in (inputs or outputs)]
    seen: set[Node] = {ANCHOR_NODE}
    leaves = []
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) is _ACCUMULATE:
            leaves.append(node.variable)  # type: ignore[attr-defined]  # AccumulateGrad has it
        elif not inputs:
            nodes += [following for following, _ in node.next_functions]
    return leaves


def _node(end: torch.Tensor | GradientEdge) -> Node | None:
    if isinstance(end, torch.Tensor):
        if not end.requires_grad:
            return None  # the engine raises
        return end.grad_fn or gradient_edge(end).node
    return end.node
