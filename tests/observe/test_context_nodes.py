from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.observed_group import open_context

from telegrad.observe.context_nodes import nodes_of
from telegrad.observe.model import Node
from telegrad.testing.group import local_group

WEIGHT = torch.full((2, 3), 0.5, requires_grad=True)


def remote(x: torch.Tensor) -> torch.Tensor:
    return (x * WEIGHT).tanh()


@pytest.fixture
def seen() -> Iterator[Callable[[str, int], tuple[Node, ...]]]:
    """Run a call and a pass of it, and return what each worker shows: before, during and after the pass."""
    found: dict[tuple[str, int], tuple[Node, ...]] = {}
    with local_group(["a", "b"]) as group, open_context(group["a"]) as context:

        def look(when: int) -> None:
            for name, agent in group.items():
                there = agent.autograd.contexts.get(context.id)
                assert there is not None
                found[name, when] = nodes_of(there)

        x = torch.ones(2, 3, requires_grad=True)
        sent = x * 2
        loss = group["a"].call("b", remote, (sent,)).sum()
        look(0)
        sent.register_hook(lambda grad: look(1))
        group["a"].autograd.backward(context.id, [loss])
        look(2)
        yield lambda name, when: found[name, when]


def by_name(nodes: tuple[Node, ...]) -> dict[str, Node]:
    return {node.name: node for node in nodes}


def test_the_graph_between_messages_and_leaves_is_shown(seen: Callable[[str, int], tuple[Node, ...]]) -> None:
    nodes = by_name(seen("b", 0))
    assert nodes.keys() == {"SendRpcBackward", "TanhBackward0", "MulBackward0", "AccumulateGrad", "RecvRpcBackward"}
    assert nodes["SendRpcBackward"].inputs == (nodes["TanhBackward0"].id,)
    assert nodes["TanhBackward0"].inputs == (nodes["MulBackward0"].id,)
    assert set(nodes["MulBackward0"].inputs) == {nodes["AccumulateGrad"].id, nodes["RecvRpcBackward"].id}
    assert nodes["AccumulateGrad"].leaf == "float32[2, 3]"
    here = by_name(seen("a", 0))
    assert here["SendRpcBackward"].sends == nodes["RecvRpcBackward"].receives > 0
    assert here["RecvRpcBackward"].receives == nodes["SendRpcBackward"].sends > 0
    assert {node.state for node in (*nodes.values(), *here.values())} == {""}


def test_during_a_pass_its_roots_and_states_are_shown(seen: Callable[[str, int], tuple[Node, ...]]) -> None:
    here, there = by_name(seen("a", 1)), by_name(seen("b", 1))
    assert here["backward()"].state == "done"
    assert here["SumBackward0"].state == here["RecvRpcBackward"].state == "done"
    assert here["SendRpcBackward"].state == here["MulBackward0"].state == "runs"
    assert {node.state for node in there.values()} <= {"runs", "done"}  # b may not have noted the end of its island


def test_after_a_pass_its_driver_has_forgotten_it_and_others_show_what_was_done(
    seen: Callable[[str, int], tuple[Node, ...]],
) -> None:
    assert {node.state for node in seen("a", 2)} == {""}
    assert {node.state for node in seen("b", 2)} == {"done"}


def test_a_send_that_the_pass_does_not_reach_is_skipped() -> None:
    with local_group(["a", "b"]) as group, open_context(group["a"]) as context:
        x = torch.ones(2, 3, requires_grad=True)
        used, _ = (group["a"].call("b", remote, (x,)) for _ in range(2))
        group["a"].autograd.backward(context.id, [used.sum()])
        there = group["b"].autograd.contexts.get(context.id)
        assert there is not None
        sends = [node.state for node in nodes_of(there) if node.sends]
        assert sorted(sends) == ["done", "skipped"]


def test_the_walk_is_bounded() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x + 1
        return x

    with local_group(["a", "b"]) as group, open_context(group["a"]) as context:
        x = deep(torch.ones(2, 3, requires_grad=True))
        group["a"].call("b", remote, (x,))
        assert len(nodes_of(context)) > 100
        nodes = nodes_of(context, 10)
        assert len(nodes) == 11
        rest = by_name(nodes)["..."]
        assert any(rest.id in node.inputs for node in nodes)
        known = {node.id for node in nodes}
        assert all(set(node.inputs) <= known for node in nodes)
