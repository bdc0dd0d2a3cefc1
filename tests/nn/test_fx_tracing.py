"""torch.fx sees a RemoteModule as one node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from telegrad import autograd, nn, rpc
from telegrad.errors import PayloadError
from telegrad.nn import RemoteModule, split

pytestmark = pytest.mark.usefixtures("group")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.pair = torch.nn.Bilinear(2, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.pair(self.first(x), input2=x * 2) + 1
        return y


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, RemoteModule) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, Leaves])
def test_a_split_model_can_be_traced_and_the_graph_trains(tracer: Any) -> None:
    model, x = Model(), torch.randn(3, 2)
    model(x).sum().backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    split(model, {"first": "b", "pair": "c"})
    traced = torch.fx.GraphModule(model, tracer().trace(model))
    called = [
        (node.target, len(node.args), list(node.kwargs)) for node in traced.graph.nodes if node.op == "call_module"
    ]
    assert called == [("first", 1, []), ("pair", 1, ["input2"])]
    assert traced.first is model.first
    with autograd.context() as context:
        context.backward(traced(x).sum())
        torch.testing.assert_close(nn.gradients(traced, context), want)


class Calls(torch.nn.Module):
    """Makes an rpc call, or uses another method of a RemoteModule."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.part = RemoteModule("b", torch.nn.Linear, (2, 2))
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self, x)


@pytest.mark.parametrize(
    "how",
    [
        lambda self, x: rpc.rpc_sync("b", torch.sin, (x,)),
        lambda self, x: rpc.rpc_sync("b", torch.stack, ([x, x],)),
        lambda self, x: self.part.forward_async(x).wait(),
        lambda self, x: self.part.reset_parameters(x),
    ],
)
def test_other_calls_raise_when_traced(how: Any) -> None:
    with pytest.raises(PayloadError, match=r"torch\.fx is tracing this code, and Proxy\(\w+\) is a placeholder"):
        torch.fx.symbolic_trace(Calls(how))
