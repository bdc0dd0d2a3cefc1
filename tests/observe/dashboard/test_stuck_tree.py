from __future__ import annotations

from telegrad.observe.dashboard.stuck_tree import MOST_NODES, stuck_tree
from telegrad.observe.model import GroupView, LiveCall, Wait, WorkerView
from telegrad.observe.stuck import StuckNode, StuckReport, analyze


def worker(name: str, **fields: object) -> WorkerView:
    return WorkerView(name, 0, 1, 0, "host", 1, (), 100.0, 0.0, 0.0, **fields)  # type: ignore[arg-type]


def test_two_functions_that_wait_for_each_other_are_a_cycle() -> None:
    def call(number: int, caller: str, callee: str) -> LiveCall:
        return LiveCall(number, caller, callee, f"to_{callee}", 39.0 + number, state="running", where=f"p.py:{number}")

    one, other = call(1, "a", "b"), call(2, "b", "a")
    view = GroupView(
        (
            worker("a", made=(one,), served=(other,), waits=(Wait("reply", ("b",), 40.0, "x", 0, ("a", 1), ("b", 2)),)),
            worker("b", made=(other,), served=(one,), waits=(Wait("reply", ("a",), 40.0, "y", 0, ("b", 2), ("a", 1)),)),
        )
    )
    tree = stuck_tree(analyze(view, 5.0))
    (cycle,) = tree.cycles
    assert {(step.worker, step.function, step.text) for step in cycle.steps} == {
        ("b", "to_b", "waits for the reply to to_a on worker 'a' (call 2)"),
        ("a", "to_a", "waits for the reply to to_b on worker 'b' (call 1)"),
    }
    (root,) = tree.roots
    assert root.in_cycle
    assert root.age == 60.0
    assert root.children[0].in_cycle
    assert "call 1 of worker 'a', running" in root.text


def test_workers_in_shutdown_come_last_and_are_expected() -> None:
    waiting = StuckNode("call", "t", "a", 9.0, ("b", 1), "a collective", expected=True)
    tree = stuck_tree(StuckReport(1.0, (waiting, StuckNode("call", "t", "a", 5.0, ("b", 2), "f"))))
    assert [(node.title, node.expected) for node in tree.roots] == [("f", False), ("a collective", True)]


def test_it_is_bounded() -> None:
    nodes = tuple(StuckNode("call", "t", "a", 1.0, ("b", number), "f") for number in range(MOST_NODES + 7))
    tree = stuck_tree(StuckReport(1.0, nodes))
    assert (len(tree.roots), tree.left_out) == (MOST_NODES, 7)
