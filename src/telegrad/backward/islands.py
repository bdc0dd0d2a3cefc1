"""Plans islands: which entries of a worker's graph must be run together.

Entries that reach a common node form an island, because the engine must run that node once, with the sum of all
gradients that flow into it. A leaf is not a common node, since gradients of leaves can be summed afterwards, unless it
has hooks, which must see the whole gradient once. Entries that reach tensors of one multi-grad hook also form an
island: torch keeps the state of such a hook per run of the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec
from torch.autograd.graph import Node

from telegrad.backward.nodes import RECV_NODE
from telegrad.torch_private import Tie, backward_hooks, post_accumulate_hooks, sequence_number, ties, ties_of

Start = tuple[Node, int]
"""A node, and which of its outputs."""
_FEW_NODES, _FEW_LEAVES = 32, 8  # so many take no longer than a message


class Island(msgspec.Struct, eq=False):
    """Entries that are run together, and what they lead to."""

    entries: list[Hashable]
    begin: Sequence[Start]
    """The edges of its entry, if it has only one."""
    leaves: dict[Node, None] = msgspec.field(default_factory=dict)
    """The AccumulateGrad nodes."""
    reached: dict[Any, set[int]] = msgspec.field(default_factory=dict)
    """The recv nodes, and which of their outputs."""
    wanted: set[int] = msgspec.field(default_factory=set)
    """Which of the pass's inputs are in it."""
    direct: bool = True
    """Whether it consists of leaves only: each edge of its entry leads to another leaf without hooks."""
    tied: bool = False
    """Whether some tensor in it has a multi-grad hook."""
    last: int = 0
    """The message of its only recv, if the engine is sure to execute that last, and soon; else 0."""

    def merge(self, other: Island) -> None:
        """Add all of another island to this one."""
        self.entries += other.entries
        self.leaves.update(other.leaves)
        for node, indices in other.reached.items():
            self.reached.setdefault(node, set()).update(indices)
        self.wanted |= other.wanted
        self.direct = False
        self.tied = self.tied or other.tied
        self.last = 0


def plan(
    starts: Mapping[Hashable, Sequence[Start]],
    *,
    leaves_are_common: bool = False,
    wanted: Mapping[Node, Sequence[int]] | None = None,
    needed: Set[Node] | None = None,
) -> list[Island]:
    """Return the islands of these entries, of needed nodes only. Visits each node once, in about a microsecond."""
    parent: dict[Hashable, Hashable] = {}
    owner: dict[Node, Hashable] = {}
    parts: dict[Hashable, Island] = {}
    tied_by: dict[Tie, Hashable] = {}
    united = False

    def find(entry: Hashable) -> Hashable:
        while parent[entry] != entry:
            parent[entry] = entry = parent[parent[entry]]
        return entry

    for entry, begin in starts.items():
        parent[entry] = entry
        part = parts[entry] = Island([entry], begin)
        before = len(owner)
        stack: list[Iterable[tuple[Node | None, int]]] = []
        leaves, reached = part.leaves, part.reached
        edges: Iterable[tuple[Node | None, int]] = begin
        while True:
            for node, index in edges:
                if node is None or node in leaves or (needed is not None and node not in needed):
                    continue
                holder = owner.get(node)
                if holder is None:
                    if type(node) is RECV_NODE:
                        reached[node] = {index}
                    else:
                        following = node.next_functions
                        if following:
                            stack.append(following)
                        else:
                            leaves[node] = None
                            if not leaves_are_common:
                                leaf = getattr(node, "variable", None)
                                if leaf is None or not (backward_hooks(leaf) or post_accumulate_hooks(leaf)):
                                    continue
                            part.direct = False
                    owner[node] = entry
                    if ties:
                        for tie in ties_of(node):
                            part.tied = True
                            holder = tied_by.setdefault(tie, entry)
                            if holder is not entry:
                                united = True
                                parent[find(holder)] = find(entry)
                else:
                    if holder is not entry:
                        united = True
                        parent[find(holder)] = find(entry)
                    if type(node) is RECV_NODE:
                        reached.setdefault(node, set()).add(index)
            if not stack:
                break
            edges = stack.pop()
        visited, found = len(owner) - before, len(leaves)
        part.direct = part.direct and not visited and len(begin) == found
        if visited <= _FEW_NODES and found <= _FEW_LEAVES and not part.tied and len(reached) == 1:
            # From the end: a walk to `before` would visit the nodes of all other entries.
            part.last = _last(reached, itertools.islice(reversed(owner), visited))
    if wanted is not None:
        for part in parts.values():
            for node in part.leaves.keys() & wanted.keys():  # visits the shorter one
                part.wanted.update(wanted[node])
        for node, numbers in wanted.items():
            if node in owner:
                parts[owner[node]].wanted.update(numbers)
    if not united:
        return list(parts.values())
    islands: dict[Hashable, Island] = {}
    for entry, part in parts.items():
        first = find(entry)
        if first in islands:
            islands[first].merge(part)
        else:
            islands[first] = part
    return list(islands.values())


def _last(reached: Iterable[Any], nodes: Iterable[Any]) -> int:
    """Return the message of the only recv, if all other nodes were made later: the engine runs them first."""
    (recv,) = reached
    priority: int = sequence_number(recv)
    for node in nodes:
        # A leaf that is among them has hooks. They may queue a callback for the end of the run, which may wait for
        # another worker that waits for this gradient.
        if (sequence_number(node) <= priority and node is not recv) or not node.next_functions:
            return 0
    message: int = recv.recv.message
    return message


def reach(starts: Iterable[Start], seen: set[Node]) -> dict[Any, set[int]]:
    """Return the recv nodes that these reach, and which of their outputs. Adds the nodes on the way to `seen`."""
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
