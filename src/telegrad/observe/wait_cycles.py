"""Finds calls that wait for each other in a circle, in time that grows with the number of waits.

Only calls of a *knot*, from each of which all others of it can be reached, are on a circle (Tarjan, 1972).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from telegrad.observe.model import CallKey

_MOST_STARTS = 50
"""Calls of one knot from which a circle is looked for."""


def find_cycles(edges: Mapping[CallKey, Sequence[CallKey]]) -> list[list[CallKey]]:
    """Return shortest cycles that have no call in common, at least one through each set of calls that wait for each
    other.

    >>> find_cycles({("a", 1): [("a", 2)], ("a", 2): [("a", 1)], ("a", 3): [("a", 1)]})
    [[('a', 1), ('a', 2)]]
    """
    cycles = []
    for knot in sorted(map(sorted, _knots(edges))):
        done: set[CallKey] = set()
        inside = set(knot)
        within = {key: [to for to in edges[key] if to in inside] for key in knot}
        for start in knot[:_MOST_STARTS]:
            if start not in done:
                cycle = _shortest_cycle(within, start)
                if done.isdisjoint(cycle):
                    cycles.append(cycle)
                done.update(cycle)
    return sorted(cycles)


def _knots(edges: Mapping[CallKey, Sequence[CallKey]]) -> list[list[CallKey]]:
    """Return the strongly connected sets of more than one call, and calls that wait for themselves."""
    numbers: dict[CallKey, int] = {}
    lowest: dict[CallKey, int] = {}
    path: list[CallKey] = []
    on_path: set[CallKey] = set()
    knots: list[list[CallKey]] = []
    for root in edges:
        if root in numbers:
            continue
        work: list[tuple[CallKey, Iterator[CallKey]]] = []
        following: CallKey | None = root
        while following is not None or work:
            if following is not None:  # go down
                key = following
                numbers[key] = lowest[key] = len(numbers)
                path.append(key)
                on_path.add(key)
                work.append((key, iter(edges.get(key, ()))))
            key, rest = work[-1]
            following = None
            for to in rest:
                if to not in numbers:
                    following = to
                    break
                if to in on_path:
                    lowest[key] = min(lowest[key], numbers[to])
            if following is not None:
                continue
            work.pop()
            if work:
                above = work[-1][0]
                lowest[above] = min(lowest[above], lowest[key])
            if lowest[key] == numbers[key]:
                knot = [path.pop()]
                while knot[-1] != key:
                    knot.append(path.pop())
                on_path.difference_update(knot)
                if len(knot) > 1 or key in edges.get(key, ()):
                    knots.append(knot)
    return knots


def _shortest_cycle(edges: Mapping[CallKey, Sequence[CallKey]], start: CallKey) -> list[CallKey]:
    """Return a shortest cycle through a call of a knot."""
    before: dict[CallKey, CallKey] = {}
    level = [start]
    while True:  # ends: from every call of a knot there is a way back
        following: list[CallKey] = []
        for key in level:
            for to in edges[key]:
                if to == start:
                    path = [key]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return path[::-1]
                if to not in before:
                    before[to] = key
                    following.append(to)
        level = following
