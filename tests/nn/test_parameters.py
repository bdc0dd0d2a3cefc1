"""Parameters and gradients of a model on all workers."""

from __future__ import annotations

import threading

import pytest
import torch

from telegrad import autograd, nn
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as

Group = dict[str, Agent]


def test_a_local_model_has_its_own_parameters(group: Group) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[1].weight = model[0].weight
    named = nn.named_parameter_rrefs(model)
    assert [name for name, _ in named] == ["0.weight", "0.bias", "1.bias"]
    assert all(rref.local_value() is parameter for (_, rref), parameter in zip(named, model.parameters(), strict=True))
    with autograd.context() as context:
        context.backward(model(torch.ones(1, 1)))
        assert nn.gradients(model, context).keys() == {"0.weight", "0.bias", "1.bias"}


def test_a_remote_module_alone_has_its_parameters(group: Group) -> None:
    module = nn.RemoteModule("b", torch.nn.Linear, (1, 1))
    assert [(name, rref.owner_name()) for name, rref in nn.named_parameter_rrefs(module)] == [
        ("weight", "b"),
        ("bias", "b"),
    ]
    assert dict(nn.remote_modules(module)) == {"": module}


def test_a_worker_that_the_context_never_reached_has_no_gradients(group: Group) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    nn.split(model, {"0": "b", "1": "c"})
    with autograd.context() as context:
        context.backward(model[0](torch.ones(1, 1)))
        found = []

        def ask() -> None:  # in a thread without a context
            with acting_as(group["a"]):
                found.append(nn.gradients(model, context))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found[0].keys() == {"0.weight", "0.bias"}


def test_asking_for_gradients_of_a_finished_context_raises(group: Group) -> None:
    model = nn.RemoteModule("b", torch.nn.Linear, (1, 1))
    with autograd.context() as context:
        context.backward(model(torch.ones(1, 1)))
    with pytest.raises(RuntimeError, match="context"):
        nn.gradients(model, context)
