"""The plan knows which recv the engine executes last, so that a reply can be sent with its gradient."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from telegrad import autograd
from telegrad.backward.islands import Island, plan
from telegrad.backward.nodes import Recv, receive
from telegrad.calls.oneway import OneWay
from telegrad.default_agent import acting_as
from telegrad.testing.simulation import Simulation
from telegrad.wire.messages import PropagateGradientsReq, PropagateGradientsResp


def received(message: int) -> torch.Tensor:
    return receive(Recv(None, 1, message, 0, "b"), lambda *_: None, [torch.ones(2)])[0]


def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def planned(*tensors: torch.Tensor) -> list[Island]:
    return plan({number: [(x.grad_fn, x.output_nr)] for number, x in enumerate(tensors) if x.grad_fn is not None})


def test_a_recv_that_was_made_before_all_else_comes_last() -> None:
    (island,) = planned(torch.sin(received(7) * leaf()) + leaf())
    assert island.last == 7


def test_the_engine_executes_that_recv_last() -> None:
    order: list[str] = []
    x = receive(Recv(None, 1, 7, 0, "b"), lambda *_: order.append("recv"), [torch.ones(2)])[0]
    branch = torch.sin(x) * leaf()
    y = (branch + torch.cos(leaf() * 2)).sum()
    for node in (branch.grad_fn, y.grad_fn):
        assert node is not None
        node.register_hook(lambda *_: order.append("other"))
    assert planned(y)[0].last == 7
    y.backward()
    assert order == ["other", "other", "recv"]


def test_a_recv_with_an_older_node_beside_it_may_not_come_last() -> None:
    older = torch.exp(leaf())
    (island,) = planned(older * received(7))
    assert island.last == 0


def test_a_recv_beside_a_leaf_with_hooks_does_not_count_as_last() -> None:
    weight = leaf()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    (island,) = planned(received(7) * weight)
    assert island.last == 0


def test_of_two_recvs_none_counts_as_last() -> None:
    (island,) = planned(received(7) * received(8))
    assert island.last == 0


@pytest.mark.parametrize("grow", [lambda x: torch.sin(x), lambda x: x * leaf()])
def test_gradients_of_a_large_island_are_sent_while_it_runs(grow: Any) -> None:
    x = received(7)
    for _ in range(40):
        x = grow(x)
    assert planned(x)[0].last == 0


def test_in_an_island_of_two_entries_none_counts_as_last() -> None:
    x = torch.sin(received(7))
    (island,) = planned(x * 2, x * 3)
    assert island.last == 0


@pytest.mark.parametrize(("function", "kinds"), [("small", [True]), ("large", [False, None])])
def test_the_reply_is_sent_with_the_last_gradient_of_a_small_island(
    function: str, kinds: list[bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(1, ["a", "b"])
    x = leaf()
    sent: list[bool | None] = []
    send, tell = OneWay.send_gradients, OneWay.tell

    def watched(self: OneWay, to: int, make_head: Any, *args: Any, **options: Any) -> Any:
        head = make_head(())
        if to == 0 and isinstance(head, PropagateGradientsReq):
            sent.append(head.response is not None)
        return send(self, to, make_head, *args, **options)

    def watched_too(self: OneWay, to: int, head: Any, *args: Any, **options: Any) -> None:
        if to == 0 and isinstance(head, PropagateGradientsResp):
            sent.append(None)
        tell(self, to, head, *args, **options)

    def large(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = torch.sin(x)
        return x

    def main() -> torch.Tensor:
        sim["b"].register("large", large)
        with acting_as(sim["a"]), autograd.context() as context_id:
            y = sim["a"].call("b", "@large", (x,)) if function == "large" else sim["a"].call("b", operator.mul, (x, 2))
            autograd.backward(context_id, [y.sum()])
            return autograd.get_gradients(context_id)[x]

    monkeypatch.setattr(OneWay, "send_gradients", watched)
    monkeypatch.setattr(OneWay, "tell", watched_too)
    with sim:
        found = sim.run(main)
    expected = torch.autograd.grad((large(x) if function == "large" else x * 2).sum(), [x])[0]
    assert torch.equal(found, expected)
    assert sent == kinds
