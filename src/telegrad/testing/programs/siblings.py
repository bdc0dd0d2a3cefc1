"""What telegrad may run beyond what one process runs, because the tensors of one message are outputs of one node.

In a pass with inputs, torch runs the nodes that lead to one. It runs a node with several outputs for all of them, with
all that lies between the roots and any of its outputs. The oracle copies each tensor of a message by a node of its own,
so it runs less. `extra_nodes` says what the difference is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge


def node_of(tensor: torch.Tensor) -> Node:
    """The node that makes the gradient of a tensor."""
    return get_gradient_edge(tensor).node


def extra_nodes(
    roots: Iterable[torch.Tensor], wanted: Iterable[torch.Tensor], messages: Sequence[set[Node]]
) -> set[Node]:
    """The nodes that lead to siblings of what is needed, and to nothing else that is."""
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
    """Those from which one of the ends can be reached, and the ends that are there."""
    found: set[Node] = set()
    for node in order:
        if node in ends or any(child in found for child, _ in node.next_functions if child is not None):
            found.add(node)
    return found


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes, each after those that its gradients go to."""
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
