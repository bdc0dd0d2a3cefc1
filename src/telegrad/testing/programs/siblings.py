"""Finds the nodes that telegrad runs and one process does not, because a message is one node with several outputs.

In a pass with inputs, torch runs the nodes that lead to an input. It runs a node with several outputs for all of them,
together with everything between the roots and any of these outputs. The oracle copies each tensor of a message with a
separate node, so it runs fewer nodes. `extra_nodes` returns the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge


def node_of(tensor: torch.Tensor) -> Node:
    """Return the node that produces a tensor, or accumulates its gradient."""
    return get_gradient_edge(tensor).node


def extra_nodes(
    roots: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], messages: Sequence[set[Node]]
) -> set[Node]:
    """Return the nodes that run only because they lead to siblings of needed tensors."""
    order = _children_first([node_of(root) for root in roots])
    strict = _leading_to({node_of(tensor) for tensor in wanted}, order)
    joined, before = set(strict), -1
    while len(joined) != before:
        before = len(joined)
        ends = set(joined)
        for message in messages:
            if not message.isdisjoint(joined):
                ends.update(message)
        joined = _leading_to(ends, order)
    return joined - strict


def _leading_to(ends: set[Node], order: Sequence[Node]) -> set[Node]:
    """Return the nodes in `order` that are ends or lead to one."""
    found: set[Node] = set()
    for node in order:
        if node in ends or any(child in found for child, _ in node.next_functions if child is not None):
            found.add(node)
    return found


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes, each after the nodes that it sends gradients to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
