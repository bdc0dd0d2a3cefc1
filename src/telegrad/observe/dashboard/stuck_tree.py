"""What is stuck, in the form in which the page draws it: a tree of waits over workers, and its cycles."""

from __future__ import annotations

import msgspec

from telegrad.observe.model import CallKey, Frame
from telegrad.observe.stuck import CycleStep, StuckNode, StuckReport

MOST_NODES = 300


class Step(msgspec.Struct, frozen=True):
    """One wait of a cycle."""

    worker: str
    function: str
    text: str
    where: str = ""


class Cycle(msgspec.Struct, frozen=True):
    """Waits of which each is for the next, and the last for the first."""

    steps: tuple[Step, ...]


class TreeNode(msgspec.Struct, frozen=True):
    """A call, a pass or a wait that is old, and below it what it waits for."""

    worker: str
    kind: str
    title: str
    age: float
    text: str = ""
    where: str = ""
    stack: tuple[Frame, ...] = ()
    children: tuple[TreeNode, ...] = ()
    in_cycle: bool = False
    expected: bool = False
    """Whether it is what workers do whose program is over: they wait in ``shutdown()`` for the others."""


class StuckTree(msgspec.Struct, frozen=True):
    """All that has waited for more than `seconds`."""

    seconds: float
    cycles: tuple[Cycle, ...] = ()
    roots: tuple[TreeNode, ...] = ()
    left_out: int = 0
    """Roots that are not shown, because there are too many."""


def stuck_tree(report: StuckReport) -> StuckTree:
    """Return what the page shows of a report."""
    keys = {step.key for cycle in report.cycles for step in cycle}
    roots = [_node(node, keys) for node in report.roots[:MOST_NODES]]
    return StuckTree(
        report.older,
        tuple(Cycle(tuple(_step(step) for step in cycle)) for cycle in report.cycles),
        tuple(sorted(roots, key=lambda node: (node.expected, not node.in_cycle))),
        len(report.roots) - len(roots),
    )


def _step(step: CycleStep) -> Step:
    return Step(step.worker, step.function, f"waits for {step.waits_for}", step.where)


def _node(node: StuckNode, cycle: set[CallKey]) -> TreeNode:
    title, texts = node.title, list(node.waits)
    if node.kind == "call" and node.key is not None:
        title = node.function
        caller, number = node.key
        texts.insert(0, f"call {number} of worker {caller!r}, {node.state}")
    if node.repeated:
        texts.append("shown above")
    return TreeNode(
        node.worker,
        node.kind,
        title,
        round(node.age, 3),
        "\n".join(texts),
        node.where,
        node.stack,
        tuple(_node(child, cycle) for child in node.children),
        node.key in cycle,
        node.key not in cycle and node.expected,
    )
