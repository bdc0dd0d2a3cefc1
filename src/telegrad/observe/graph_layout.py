"""Places the nodes of a graph: columns in the order of the backward pass, and a lane for each worker.

As Sugiyama does it: longest paths give the columns, edges that skip columns get a point in each, barycenters order what
is in one column of a lane, and rows are moved towards their neighbours. Everything is deterministic.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import msgspec

from telegrad.observe.graph import ContextGraph, GraphEdge

_SWEEPS = 8


class Place(msgspec.Struct):
    """Where a node, or a bend of an edge, is."""

    lane: int
    column: int
    row: float = 0.0
    """Counted from the top of its lane."""


class Layout(msgspec.Struct, frozen=True):
    """Places of all nodes, and of the bends of each edge, in its direction."""

    columns: int
    rows: tuple[int, ...]
    """How many rows each lane has."""
    nodes: dict[str, Place]
    bends: list[list[Place]]
    """In the order of the graph's edges."""


def arrange(graph: ContextGraph) -> Layout:
    """Return where everything is."""
    columns = columns_of(graph)
    lanes = {worker: number for number, worker in enumerate(graph.workers)}
    places = {node.key: Place(lanes[node.worker], columns[node.key]) for node in graph.nodes}
    links: list[tuple[Place, Place]] = []
    bends: list[list[Place]] = []
    for edge in graph.edges:
        source, target = places[edge.source], places[edge.target]
        path = [Place(source.lane, column) for column in range(source.column + 1, target.column)]
        bends.append(path)
        points = [source, *path, target]
        links += pairwise(points)
    cells: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for place in [*places.values(), *(bend for path in bends for bend in path)]:
        cells[place.lane, place.column].append(place)
    rows = [1] * len(graph.workers)
    for (lane, _), cell in cells.items():
        rows[lane] = max(rows[lane], len(cell))
        for number, place in enumerate(cell):
            place.row = float(number)
    _order(cells, links, rows)
    return Layout(1 + max(columns.values(), default=0), tuple(rows), places, bends)


def columns_of(graph: ContextGraph) -> dict[str, int]:
    """Return the column of each node: behind all that lead to it. Edges that would close a cycle are ignored."""
    following: dict[str, list[str]] = {node.key: [] for node in graph.nodes}
    missing = dict.fromkeys(following, 0)
    for edge in _without_cycles(graph):
        following[edge.source].append(edge.target)
        missing[edge.target] += 1
    columns = dict.fromkeys(following, 0)
    ready = [key for key, count in missing.items() if not count]
    order = []
    while ready:
        key = ready.pop()
        order.append(key)
        for target in following[key]:
            columns[target] = max(columns[target], columns[key] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    has_source = {edge.target for edge in graph.edges}
    for key in order:  # what nothing leads to is as near as it can be to what it leads to
        if key not in has_source and following[key]:
            columns[key] = min(columns[target] for target in following[key]) - 1
    return columns


def _without_cycles(graph: ContextGraph) -> list[GraphEdge]:
    """Return the edges but those that lead back. A view that was taken while the graph grew may have some."""
    following: dict[str, list[GraphEdge]] = {node.key: [] for node in graph.nodes}
    for edge in graph.edges:
        following[edge.source].append(edge)
    kept: list[GraphEdge] = []
    state: dict[str, int] = {}  # 1: being visited, 2: done
    for start in following:
        stack = [(start, iter(following[start]))] if start not in state else []
        state.setdefault(start, 1)
        while stack:
            key, edges = stack[-1]
            step = next(edges, None)
            if step is None:
                state[key] = 2
                stack.pop()
            elif state.get(step.target) != 1:
                kept.append(step)
                if step.target not in state:
                    state[step.target] = 1
                    stack.append((step.target, iter(following[step.target])))
    return kept


def _order(cells: dict[tuple[int, int], list[Place]], links: list[tuple[Place, Place]], rows: list[int]) -> None:
    """Move what is in each column of a lane towards its neighbours."""
    tops = [sum(rows[:lane]) + lane for lane in range(len(rows))]
    neighbours: dict[int, list[Place]] = defaultdict(list)
    for source, target in links:
        neighbours[id(source)].append(target)
        neighbours[id(target)].append(source)

    def wanted(place: Place, side: int) -> float:
        """Return the mean row of the neighbours: of those before it, of those behind it, or of all."""
        beside = [
            other.row + tops[other.lane] - tops[place.lane]
            for other in neighbours[id(place)]
            if not side or (other.column - place.column) * side > 0
        ]
        return sum(beside) / len(beside) if beside else place.row

    for sweep in range(_SWEEPS):
        side = (-1, 1, 0)[sweep % 3] if sweep < _SWEEPS - 1 else 0
        for key in sorted(cells, key=lambda key: key[1], reverse=side > 0):
            cell = cells[key]
            goals = {id(place): wanted(place, side) for place in cell}
            cell.sort(key=lambda place: goals[id(place)])
            _spread(cell, [goals[id(place)] for place in cell], rows[key[0]])


def _spread(cell: list[Place], goals: list[float], rows: int) -> None:
    """Give the places of a column rows near their goals, in their order, at least one row apart."""
    row = float(-1)
    for place, goal in zip(cell, goals, strict=True):
        row = place.row = max(row + 1, min(max(goal, 0.0), rows - 1.0))
    limit = float(rows)
    for place in reversed(cell):
        limit = place.row = min(place.row, limit - 1)
