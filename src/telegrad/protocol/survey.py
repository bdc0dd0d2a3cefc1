"""Which nodes of one worker's graph a pass with inputs needs: those that the roots reach and that lead to an input.

Inputs are on the worker that begins the pass, and the way to them may lead through any number of others. So before such
a pass begins, its workers find out together what is needed:

1. A worker walks its graph from the roots, and from every sent tensor that it is asked about. When the walk meets a
   received tensor, the worker asks the sender about it.
2. A node is needed if it is an input or leads to a needed node. When a sent tensor that was asked about turns out to
   lead to a needed node, its receiver is told. There, the received tensor is needed.

Every node is walked once, every received tensor asked about once, and every sent tensor told of once, so this ends. The
end is found as that of the probe is (see `backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable

Received = tuple[int, int]
"""A received tensor: its message, and its place in it."""
Place = Hashable
"""A node of the graph, or a received tensor, which is where this worker's graph ends."""
Origin = Hashable
"""A root, or a sent tensor."""


class Survey:
    """One worker's part.

    >>> graph = {"loss": ["y", (7, 0)], "y": ["x"], "x": []}
    >>> survey = Survey(graph.__getitem__, wanted={"z"})
    >>> survey.walk([("root", "loss")])   # asks the sender of message 7
    ([(7, 0)], [])
    >>> survey.lead([(7, 0)])             # it leads to an input
    ['root']
    >>> "y" in survey.needed
    False
    """

    def __init__(self, below: Callable[[Place], Iterable[Place]], wanted: Collection[Place] = ()) -> None:
        self._below = below
        self._wanted = wanted
        self._seen: set[Place] = set()
        self._above: dict[Place, list[Place]] = {}
        self._origins: dict[Place, list[Origin]] = {}
        self.needed: set[Place] = set()
        self.onward: set[Place] = set()
        """Received tensors that are needed because their senders say so."""

    def walk(self, starts: Iterable[tuple[Origin, Place]]) -> tuple[list[Received], list[Origin]]:
        """Walk from these; returns the received tensors to ask about, and origins that turn out to be needed."""
        asked: list[Received] = []
        told: list[Origin] = []
        needed: list[Place] = []
        stack: list[Place] = []
        for origin, place in starts:
            self._origins.setdefault(place, []).append(origin)
            if place in self.needed:
                told.append(origin)
            stack.append(place)
        while stack:
            place = stack.pop()
            if place in self._seen:
                continue
            self._seen.add(place)
            if place in self._wanted:
                needed.append(place)
            if isinstance(place, tuple):
                asked.append(place)
                continue
            for below in self._below(place):
                self._above.setdefault(below, []).append(place)
                if below in self.needed:
                    needed.append(place)
                stack.append(below)
        return asked, told + self._need(needed)

    def lead(self, received: Iterable[Received]) -> list[Origin]:
        """These received tensors lead to an input, their sender says; returns origins that turn out to be needed."""
        places: list[Place] = list(received)
        self.onward.update(places)
        return self._need(places)

    def _need(self, places: list[Place]) -> list[Origin]:
        told: list[Origin] = []
        while places:
            place = places.pop()
            if place not in self.needed:
                self.needed.add(place)
                told += self._origins.get(place, ())
                places += self._above.get(place, ())
        return told
