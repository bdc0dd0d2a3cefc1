"""Finds the nodes that a pass with inputs needs: those on a path from the roots to an input.

Inputs belong to the worker that starts the pass, and a path to them may cross any number of other workers. So before
such a pass starts, its workers search together:

1. A worker walks its graph from the roots, and from every sent tensor that it is asked about. When the walk reaches a
   received tensor, the worker asks its sender about it.
2. A node is needed if it is an input or leads to a needed node. When a sent tensor that was asked about turns out to
   lead to a needed node, its receiver is told. There, the received tensor is needed.

Every node is walked once, every received tensor asked about once, and every sent tensor reported once, so the search
ends. The end is detected in the same way as that of the probe (see `backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable

ReceivedTensor = tuple[int, int]
"""The message that carried the tensor, and its index in the message."""
Vertex = Hashable
"""A node of the graph, or a received tensor, where this worker's graph ends."""
Origin = Hashable
"""A root, or a sent tensor."""


class InputPaths:
    """One worker's part of the search.

    >>> graph = {"loss": ["y", (7, 0)], "y": ["x"], "x": []}
    >>> paths = InputPaths(graph.__getitem__, inputs={"z"})
    >>> paths.walk([("root", "loss")])        # asks the sender of message 7
    ([(7, 0)], [])
    >>> paths.mark_leading([(7, 0)])          # it leads to an input
    ['root']
    >>> "y" in paths.needed
    False
    """

    def __init__(self, successors: Callable[[Vertex], Iterable[Vertex]], inputs: Collection[Vertex] = ()) -> None:
        self._successors = successors
        self._inputs = inputs
        self._seen: set[Vertex] = set()
        self._predecessors: dict[Vertex, list[Vertex]] = {}
        self._origins: dict[Vertex, list[Origin]] = {}
        self.needed: set[Vertex] = set()
        self.leading: set[Vertex] = set()
        """Received tensors that lead to an input on another worker, as their senders reported."""

    def walk(self, starts: Iterable[tuple[Origin, Vertex]]) -> tuple[list[ReceivedTensor], list[Origin]]:
        """Walk from these vertices. Return the received tensors to ask about, and the origins found to be needed."""
        reached: list[ReceivedTensor] = []
        found: list[Origin] = []
        needed: list[Vertex] = []
        stack: list[Vertex] = []
        for origin, vertex in starts:
            self._origins.setdefault(vertex, []).append(origin)
            if vertex in self.needed:
                found.append(origin)
            stack.append(vertex)
        while stack:
            vertex = stack.pop()
            if vertex in self._seen:
                continue
            self._seen.add(vertex)
            if vertex in self._inputs:
                needed.append(vertex)
            if isinstance(vertex, tuple):
                reached.append(vertex)
                continue
            for successor in self._successors(vertex):
                self._predecessors.setdefault(successor, []).append(vertex)
                if successor in self.needed:
                    needed.append(vertex)
                stack.append(successor)
        return reached, found + self._mark_needed(needed)

    def mark_leading(self, received: Iterable[ReceivedTensor]) -> list[Origin]:
        """Record that these received tensors lead to an input. Return the origins found to be needed."""
        vertices: list[Vertex] = list(received)
        self.leading.update(vertices)
        return self._mark_needed(vertices)

    def _mark_needed(self, vertices: list[Vertex]) -> list[Origin]:
        found: list[Origin] = []
        while vertices:
            vertex = vertices.pop()
            if vertex not in self.needed:
                self.needed.add(vertex)
                found += self._origins.get(vertex, ())
                vertices += self._predecessors.get(vertex, ())
        return found
