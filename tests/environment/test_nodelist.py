"""Slurm's lists of nodes."""

from __future__ import annotations

import pytest

from telegrad.environment.nodelist import expand, first, tasks_of_node
from telegrad.errors import RendezvousError


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010]", ["n008", "n009", "n010"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("gpu-a[1,3-4]-ib,login", ["gpu-a1-ib", "gpu-a3-ib", "gpu-a4-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_nodes_are_listed_in_order(nodelist: str, nodes: list[str]) -> None:
    assert expand(nodelist) == nodes
    assert first(nodelist) == nodes[0]


@pytest.mark.parametrize("nodelist", ["", "n[1-", "n]1[", "n[a-b]", "n[3-1]", "n1,,n2", "n[[1]]", "n[1-99999999999]"])
def test_what_is_no_list_is_refused(nodelist: str) -> None:
    with pytest.raises(RendezvousError, match="cannot be read"):
        expand(nodelist)


def test_the_first_node_of_a_huge_list_is_found_at_once() -> None:
    assert first("n[1-1000000]") == "n1"


@pytest.mark.parametrize(
    ("tasks", "node", "count"), [("2", 0, 2), ("2", 1, None), ("2(x2),1", 2, 1), ("x", 0, None), ("", 0, None)]
)
def test_tasks_of_a_node(tasks: str, node: int, count: int | None) -> None:
    assert tasks_of_node(tasks, node) == count
