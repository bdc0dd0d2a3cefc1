"""Optimizers, clipping and checkpoints of parameters on simulated devices do what they do on the CPU."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group
from torch import optim

from telegrad import autograd
from telegrad.default_agent import acting_as
from telegrad.nn import parameter_rrefs, split
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group

PLACES = {"0": "b/sim:0", "2": "b/sim:1", "4": "c/sim:1"}
STEPS = 4
KINDS = [
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Adagrad),
    *(optim.ASGD, optim.RMSprop, optim.Rprop),
]


@pytest.fixture(params=[(), (("cpu", "sim:1"),), (("sim:0", "cpu"), ("sim:1", "sim:0"))], ids=str)
def group(sim: None, request: pytest.FixtureRequest) -> Iterator[Group]:
    """Workers a, b and c; the test acts as a, with these device maps."""
    settings = AgentSettings(device_maps=dict.fromkeys("bc", request.param) if request.param else {})
    with local_group(["a", "b", "c"], settings=settings) as agents, acting_as(agents["a"]):
        yield agents


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    linear = torch.nn.Linear
    return torch.nn.Sequential(
        linear(3, 4), torch.nn.Tanh(), linear(4, 4), torch.nn.Tanh(), linear(4, 4), torch.nn.Tanh(), linear(4, 1)
    ).double()


def data(step: int) -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.double, generator=torch.Generator().manual_seed(step))


def loss_of(net: torch.nn.Module, step: int) -> torch.Tensor:
    x = data(step)
    for number, layer in enumerate(net):
        # With a map, results may be on a device, and the layers without parameters run where their inputs are.
        x = layer(x.cpu() if number == 6 else x)
    return x.square().mean()


def train(
    net: torch.nn.Module, optimizer: DistributedOptimizer, steps: range, clip: float | None = None
) -> list[float]:
    found = []
    for step in steps:
        with autograd.context() as context:
            loss = loss_of(net, step)
            context.backward(loss)
            if clip is not None:
                found.append(float(optimizer.clip_grad_norm_(context, clip)))
            optimizer.step(context)
        found.append(loss.item())
    return found


def train_locally(
    net: torch.nn.Module, optimizer: optim.Optimizer, steps: range, clip: float | None = None
) -> list[float]:
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        if clip is not None:
            found.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), clip)))
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_optimizer_of_each_kind_steps_as_in_one_process(group: Group, kind: Any, in_backward: bool) -> None:
    net, local = split(model(), PLACES), model()
    options = {"lr": 0.05, "foreach": True}  # torch's default for accelerators, which rounds differently
    optimizer = DistributedOptimizer(kind, parameter_rrefs(net), step_in_backward=in_backward, **options)
    losses = train(net, optimizer, range(STEPS))
    wanted = train_locally(local, kind(local.parameters(), **options), range(STEPS))
    assert losses == pytest.approx(wanted, rel=1e-9)


def test_norms_of_gradients_on_several_devices_and_workers_are_combined(group: Group) -> None:
    net, local = split(model(), PLACES), model()
    optimizer = DistributedOptimizer(optim.SGD, parameter_rrefs(net), lr=0.5)
    found = train(net, optimizer, range(STEPS), clip=0.01)
    assert found == pytest.approx(
        train_locally(local, optim.SGD(local.parameters(), lr=0.5), range(STEPS), clip=0.01), rel=1e-9
    )
    with autograd.context() as context:
        context.backward(loss_of(net, 0))
        norm = clip_grad_norm_(context, parameter_rrefs(net), 1e9)
        assert norm.device.type == "cpu"
        assert float(norm) == pytest.approx(float(optimizer.clip_grad_norm_(context, 1e9)))


def test_zero_grad_and_steps_on_grad(group: Group) -> None:
    net, local = split(model(), PLACES), model()
    optimizer = DistributedOptimizer(optim.SGD, parameter_rrefs(net), lr=0.05)
    for step in range(2):  # summed in .grad
        with autograd.context() as context:
            autograd.backward(context, [loss_of(net, step)], accumulate="grad")
        loss_of(local, step).backward()
    optimizer.step()
    optim.SGD(local.parameters(), lr=0.05).step()
    optimizer.zero_grad()
    assert float(optimizer.clip_grad_norm_(None, 1.0)) == 0.0
    assert loss_of(net, 3).item() == pytest.approx(loss_of(local, 3).item(), rel=1e-9)


@pytest.mark.parametrize("kind", [optim.Adam, optim.ASGD, optim.Adagrad], ids=lambda kind: kind.__name__)
def test_a_checkpoint_is_on_the_cpu_and_continues_on_any_devices(group: Group, kind: Any) -> None:
    net, local = split(model(), PLACES), model()
    options = {"lr": 0.05, "foreach": True}
    optimizer = DistributedOptimizer(kind, parameter_rrefs(net), **options)
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    values = [value for one in state["state"].values() for value in one.values() if isinstance(value, torch.Tensor)]
    assert {str(tensor.device) for tensor in [*weights.values(), *values]} == {"cpu"}

    local.load_state_dict(weights)
    ordinary = kind(local.parameters(), **options)
    ordinary.load_state_dict(state)
    elsewhere = split(model(), {"0": "c", "2": "c/sim:0", "4": "b/sim:0"})
    elsewhere.load_state_dict(weights)
    moved = DistributedOptimizer(kind, parameter_rrefs(elsewhere), **options)
    # As loaded with map_location, on a device that the owners need not have.
    state["state"] = {
        number: {key: x.to("sim:1") if isinstance(x, torch.Tensor) else x for key, x in one.items()}
        for number, one in state["state"].items()
    }
    moved.load_state_dict(state)
    expected = train_locally(local, ordinary, range(3, 6))
    assert train(elsewhere, moved, range(3, 6)) == pytest.approx(expected, rel=1e-9)
    assert train(net, optimizer, range(3, 6)) == pytest.approx(expected, rel=1e-9)


def test_a_tensor_hyperparameter_may_be_on_a_device(group: Group) -> None:
    net, local = split(model(), PLACES), model()
    rate = torch.tensor(0.05, device="sim:0")
    optimizer = DistributedOptimizer(optim.SGD, parameter_rrefs(net), lr=rate, foreach=False)
    losses = train(net, optimizer, range(2))
    rate.mul_(2)
    losses += train(net, optimizer, range(2, 4))
    reference = optim.SGD(local.parameters(), lr=float(torch.tensor(0.05)))
    wanted = train_locally(local, reference, range(2))
    reference.param_groups[0]["lr"] *= 2
    assert losses == pytest.approx([*wanted, *train_locally(local, reference, range(2, 4))], rel=1e-9)
    assert optimizer.state_dict()["param_groups"][0]["lr"].device.type == "cpu"


def test_get_gradients_returns_each_gradient_on_the_device_of_its_leaf(group: Group) -> None:
    net = split(model(), PLACES)
    with autograd.context() as context:
        context.backward(loss_of(net, 0))
        for worker in "abc":
            held = group[worker].autograd.contexts.retrieve(int(context)).gradients.as_dict()
            assert held
            assert all(gradient.device == leaf.device for leaf, gradient in held.items())
