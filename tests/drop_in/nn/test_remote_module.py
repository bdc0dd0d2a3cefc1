"""The drop-in's RemoteModule does what torch's does, where programs depend on it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.fx

from telegrad import rpc
from telegrad.agent.agent import Agent
from telegrad.drop_in.nn.remote_module import RemoteModule

Group = dict[str, Agent]

pytestmark = pytest.mark.usefixtures("group")


class Leaves(torch.fx.Tracer):
    """As fairscale traces."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, RemoteModule)


def nodes(graph: torch.fx.Graph) -> list[tuple[str, Any]]:
    return [(node.op, node.target) for node in graph.nodes]


def test_fx_traces_a_call_as_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named_modules", "named_children"):  # which a RemoteModule refuses, so fairscale gives it others
        monkeypatch.setattr(RemoteModule, name, getattr(torch.nn.Module, name))
    model = torch.nn.Sequential(RemoteModule("b/cpu", torch.nn.Linear, (2, 2)))
    want = [("placeholder", "input"), ("call_module", "0"), ("output", "output")]
    assert nodes(Leaves().trace(model)) == want
    assert nodes(torch.fx.symbolic_trace(model).graph) == want


def test_assigned_attributes_stay_on_this_worker(group: Group) -> None:
    module = RemoteModule("b", torch.nn.Dropout, (0.5,))
    module.lock = threading.Lock()  # torch takes anything
    module.p = 0.0
    module.layer = torch.nn.Linear(1, 1)
    assert module.p == 0.0
    assert rpc.rpc_sync("b", probability, (module.module_rref,)) == 0.5
    del module.p
    assert module.p == 0.5


def probability(rref: Any) -> float:
    return float(rref.local_value().p)


def test_the_training_mode_is_set_on_the_owner() -> None:
    module = RemoteModule("b", torch.nn.Dropout, (1.0,))
    assert module.training
    assert module.eval().training is False
    assert torch.equal(module(torch.ones(2)), torch.ones(2))
    module.train()
    assert not module(torch.ones(2)).any()


def apply_twice(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = module(module.forward(x))
    return y.detach()


def test_a_received_module_can_be_called(group: Group) -> None:
    module = RemoteModule("b", torch.nn.Linear, (2, 2))
    want = module(module(torch.ones(2))).detach()
    torch.testing.assert_close(rpc.rpc_sync("c", apply_twice, (module, torch.ones(2))), want)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_another_module(copied: Any) -> None:
    module = RemoteModule("b", torch.nn.Linear, (2, 2))
    other = copied(module)
    assert type(other) is RemoteModule
    torch.testing.assert_close(other(torch.ones(2)), module(torch.ones(2)))
