"""Passes through workers whose tensors are on devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_as_in_one_process, gradients_on, leaf, nothing_left, remotely
from torch import nn

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as, default_agent
from telegrad.testing.group import local_group

pytestmark = pytest.mark.usefixtures("asynchronous_sim")
modules: dict[str, nn.Module] = {}


@pytest.fixture
def group() -> Iterator[Group]:
    """Start workers a, b and c, with a layer each: on the CPU, sim:0 and sim:1. The test acts as a."""
    torch.manual_seed(0)
    for name, device in {"a": "cpu", "b": "sim:0", "c": "sim:1"}.items():
        modules[name] = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().to(device)
    with local_group(["a", "b", "c"]) as agents:
        with acting_as(agents["a"]):
            yield agents
        nothing_left(agents)


def forward(name: str, x: torch.Tensor) -> torch.Tensor:
    """Run a layer on its device, and leave the result there."""
    device = next(modules[name].parameters()).device
    result: torch.Tensor = modules[name](x.to(device))
    return result


def parameters() -> list[torch.Tensor]:
    return [parameter for module in modules.values() for parameter in module.parameters()]


def test_a_model_over_three_devices_has_the_gradients_of_one_process(group: Group) -> None:
    x = leaf(7, 4)

    def program(call: Any) -> torch.Tensor:
        y = call("b", forward, "b", forward("a", x))
        z = call("c", forward, "c", y)
        result: torch.Tensor = (z.cpu() + y.cpu()).square().sum()
        return result

    assert_as_in_one_process(group, program, [x, *parameters()])


def test_every_gradient_is_on_the_device_of_its_leaf(group: Group) -> None:
    with autograd.context() as context:
        context.backward(remotely("c", forward, "c", remotely("b", forward, "b", leaf(3, 4))).sum())
        for name in "bc":
            found = gradients_on(group[name], context)
            assert len(found) == 2
            assert all(grad.device == parameter.device for parameter, grad in found.items())


def test_a_gradient_penalty_over_devices_equals_one_process(group: Group) -> None:
    x = leaf(5, 4)

    def run(call: Any, grad: Any) -> torch.Tensor:
        y = call("c", forward, "c", call("b", forward, "b", x)).sum()
        (slope,) = grad(y, [x])
        result: torch.Tensor = y.cpu() + slope.square().sum()
        return result

    wanted = torch.autograd.grad(
        run(lambda _, function, *args: function(*args), lambda y, xs: torch.autograd.grad(y, xs, create_graph=True)),
        [x, *modules["b"].parameters()],
    )
    with autograd.context() as context:
        context.backward(run(remotely, lambda y, xs: autograd.grad(context, y, xs, create_graph=True)))
        got = [autograd.get_gradients(context)[x]]
        there = gradients_on(group["b"], context)
        got += [there[parameter] for parameter in modules["b"].parameters()]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.device == theirs.device
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-12, atol=1e-15)


class PassInside(torch.autograd.Function):
    """Its backward waits for a pass over another worker, on the same device, and uses what that finds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with ThreadPoolExecutor() as pool:  # contexts cannot be nested in one thread
            return grad * pool.submit(pass_over_c, default_agent(), grad.device).result(20.0)


def pass_over_c(agent: Agent, device: torch.device) -> torch.Tensor:
    x = torch.ones(2, device=device, requires_grad=True)
    with acting_as(agent), autograd.context() as context:
        context.backward(rpc.rpc_sync("c", scale, (x,)).sum(), timeout=20.0)
        return autograd.get_gradients(context)[x].sum()


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def pass_inside(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = PassInside.apply(x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


def test_a_pass_inside_a_pass_on_the_same_device_does_not_wait_for_itself(group: Group) -> None:
    x = torch.ones(2, device="sim:0", requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("b", pass_inside, (x,))
        context.backward(rpc.rpc_sync("c", scale, (y,)).sum(), timeout=30.0)
        assert autograd.get_gradients(context)[x].tolist() == [18, 18]


def test_hooks_that_wait_for_passes_on_their_own_device_do_not_wait_for_ever(group: Group) -> None:
    meeting = threading.Barrier(2)

    def wait_for_the_other(grad: torch.Tensor) -> None:
        meeting.wait(20.0)

    def one_pass() -> None:
        with acting_as(group["a"]), autograd.context() as context:
            x = torch.ones(2, device="sim:0", requires_grad=True)
            y = rpc.rpc_sync("b", scale, (x,))
            y.register_hook(wait_for_the_other)
            context.backward(y.sum(), timeout=20.0)

    threads = [threading.Thread(target=one_pass) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not meeting.broken
    assert not any(thread.is_alive() for thread in threads)


def test_torch_uses_its_threads_again_after_a_pass(group: Group) -> None:
    with autograd.context() as context:
        context.backward(remotely("b", forward, "b", leaf(3, 4)).sum())
    ran_on = []
    x = torch.ones(2, device="sim:0", requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: ran_on.append(threading.get_ident()))
    y.sum().backward()
    assert ran_on != [threading.get_ident()]
