"""Backward passes through calls outside an autograd context."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from tests.support.remote_nets import Group, module_on

from telegrad import autograd
from telegrad.errors import TelegradError
from telegrad.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("group")


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    note: str = ""


class Fields(UserDict[str, Any]):
    """A mapping of a program's own."""


class Records(torch.nn.Module):
    """Returns what programs make of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, kind: str) -> Any:
        y = x * self.weight
        return Output(y, "kept") if kind == "dataclass" else Fields(logits=y, note="kept")


@pytest.mark.parametrize("kind", ["dataclass", "mapping"])
@pytest.mark.parametrize("way", ["backward", "grad", "inputs"])
def test_every_kind_of_backward_pass_raises_for_nested_results(group: Group, kind: str, way: str) -> None:
    module, x = RemoteModule("b", Records), torch.ones(2, requires_grad=True)
    result = module(x, kind)
    logits = result.logits if kind == "dataclass" else result["logits"]
    assert (result.note if kind == "dataclass" else result["note"]) == "kept"
    loss = (logits * x).sum()  # a way around the call
    ways: dict[str, Any] = {
        "backward": loss.backward,
        "grad": lambda: torch.autograd.grad(loss, [x]),
        "inputs": lambda: loss.backward(inputs=[x]),
    }
    with pytest.raises(TelegradError, match="outside of an autograd context"):
        ways[way]()


def test_a_backward_pass_through_a_call_outside_a_context_raises(net: RemoteModule) -> None:
    x = torch.randn(5, 2)
    for y in (net(x)[0], net.forward_async(x).wait()[0], net.norm(2), net.scale):
        assert y.requires_grad
        y.add_(1)  # it is an ordinary tensor in all other respects
        with pytest.raises(TelegradError, match=r"Net on 'b'.*outside of an autograd context"):
            y.sum().backward()


def test_no_grad_applies_on_both_sides(group: Group, net: RemoteModule) -> None:
    seen = []
    net(torch.randn(5, 2))
    module_on(group["b"], net).register_forward_hook(lambda module, args, out: seen.append(out[0].requires_grad))
    with torch.no_grad():
        assert not net(torch.randn(5, 2))[0].requires_grad
        assert not net.forward_async(torch.randn(5, 2)).wait()[0].requires_grad
        assert not net.scale.requires_grad
        with autograd.context():
            assert not net(torch.randn(5, 2))[0].requires_grad
    assert seen == [False] * 3
