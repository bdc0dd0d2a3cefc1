"""Cycles of waits, in graphs that were made by hand."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.model import CallKey
from telegrad.observe.wait_cycles import find_cycles

nodes = st.tuples(st.sampled_from("abc"), st.integers(1, 6))
graphs = st.dictionaries(nodes, st.lists(nodes, max_size=3), max_size=12)


def is_cyclic(edges: dict[CallKey, list[CallKey]]) -> bool:
    """Whether anything is left when all that waits for nothing is removed, again and again."""
    left = {key: set(to) for key, to in edges.items()}
    while True:
        free = {key for key in left if not left[key] & set(left)}
        if not free:
            return bool(left)
        left = {key: to for key, to in left.items() if key not in free}


@given(graphs)
def test_every_cycle_that_is_named_exists(edges: dict[CallKey, list[CallKey]]) -> None:
    for cycle in find_cycles(edges):
        assert len(set(cycle)) == len(cycle)
        for key, to in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            assert to in edges[key]


@given(graphs)
def test_a_cycle_is_named_if_and_only_if_there_is_one(edges: dict[CallKey, list[CallKey]]) -> None:
    assert bool(find_cycles(edges)) == is_cyclic(edges)


def test_a_long_chain_takes_little_time_and_no_stack() -> None:
    """Functions that call each other without end make such chains. Looking at one must not take minutes."""
    length = 20_000
    edges: dict[CallKey, list[CallKey]] = {("a", number): [("a", number + 1)] for number in range(1, length)}
    steps = 0

    class Counting(dict[CallKey, list[CallKey]]):
        def get(self, key: CallKey, default: object = None) -> object:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().get(key, default)  # type: ignore[arg-type]

    assert find_cycles(Counting(edges)) == []
    assert steps <= 3 * length
    edges["a", length] = [("a", 1)]
    (cycle,) = find_cycles(edges)
    assert len(cycle) == length > sys.getrecursionlimit()


def test_cycles_of_one_knot_that_share_a_call_are_named_once() -> None:
    edges: dict[CallKey, list[CallKey]] = {("a", 1): [("a", 2), ("a", 3)], ("a", 2): [("a", 1)], ("a", 3): [("a", 1)]}
    assert find_cycles(edges) == [[("a", 1), ("a", 2)]]
