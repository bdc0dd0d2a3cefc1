"""Which entries of a worker's graph belong together: the plan of a pass.

Entries that reach a common node form an island, because the engine must run that node once, with the sum of what
flows into it. A leaf is no common node, since gradients of leaves can be summed afterwards, unless it has hooks, which
must see the whole gradient once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.autograd.graph import Node

from telegrad.autograd.functions import RECV_NODE
from telegrad.autograd.torch_private import has_post_accumulate_hooks, has_tensor_hooks

Start = tuple[Node, int]
"""A node, and which of its outputs."""


@dataclass
class Island:
    """Entries, and what they lead to."""

    entries: list[Hashable] = field(default_factory=list)
    leaves: dict[Node, None] = field(default_factory=dict)
    """The AccumulateGrad nodes."""
    reached: dict[Any, set[int]] = field(default_factory=dict)
    """The recv nodes, and which of their outputs."""
    wanted: set[int] = field(default_factory=set)
    """Which of the tensors that the caller asked for lie in it."""


def plan(
    starts: Mapping[Hashable, Sequence[Start]],
    *,
    leaves_are_common: bool = False,
    wanted: Mapping[Node, Sequence[int]] | None = None,
) -> list[Island]:
    """The islands of these entries. Every node is looked at once: about a microsecond each."""
    parent: dict[Hashable, Hashable] = {}
    owner: dict[Node, Hashable] = {}
    parts: dict[Hashable, Island] = {}

    def find(entry: Hashable) -> Hashable:
        while parent[entry] != entry:
            parent[entry] = entry = parent[parent[entry]]
        return entry

    for entry, begin in starts.items():
        parent[entry] = entry
        part = parts[entry] = Island([entry])
        stack: list[Node] = []
        leaves, reached = part.leaves, part.reached
        edges: Iterable[tuple[Node | None, int]] = begin
        while True:
            for node, index in edges:
                if node is None or node in leaves:
                    continue
                is_recv = type(node) is RECV_NODE
                if is_recv:
                    reached.setdefault(node, set()).add(index)
                holder = owner.get(node)
                if holder is not None:
                    if holder != entry:
                        parent[find(holder)] = find(entry)
                    continue
                if not is_recv:
                    if node.next_functions:
                        stack.append(node)
                    else:
                        leaves[node] = None
                        if not leaves_are_common and not _has_hooks(node):
                            continue
                owner[node] = entry
            if not stack:
                break
            edges = stack.pop().next_functions
    islands: dict[Hashable, Island] = {}
    for entry, part in parts.items():
        island = islands.setdefault(find(entry), Island())
        island.entries.append(entry)
        island.leaves.update(part.leaves)
        for node, indices in part.reached.items():
            island.reached.setdefault(node, set()).update(indices)
        if wanted is not None:
            for node, numbers in wanted.items():
                if node in part.leaves or (node in owner and find(owner[node]) == find(entry)):
                    island.wanted.update(numbers)
    return list(islands.values())


def _has_hooks(node: Node) -> bool:
    leaf = getattr(node, "variable", None)
    return leaf is not None and (has_tensor_hooks(leaf) or has_post_accumulate_hooks(leaf))


def reach(starts: Iterable[Start], seen: set[Node]) -> dict[Any, set[int]]:
    """The recv nodes that can be reached from these, and which of their outputs. `seen` gets the nodes on the way."""
    reached: dict[Any, set[int]] = {}
    stack: list[tuple[Node | None, int]] = list(starts)
    while stack:
        node, index = stack.pop()
        if node is None:
            continue
        if type(node) is RECV_NODE:
            reached.setdefault(node, set()).add(index)
        elif node not in seen:
            seen.add(node)
            stack.extend(node.next_functions)
    return reached


def meets(starts: Iterable[Start], wanted: set[Node]) -> bool:
    """Whether one of these nodes can be reached."""
    seen: set[Node] = set()
    stack: list[tuple[Node | None, int]] = list(starts)
    while stack:
        node, _ = stack.pop()
        if node in wanted:
            return True
        if node is not None and node not in seen and type(node) is not RECV_NODE:
            seen.add(node)
            stack.extend(node.next_functions)
    return False
