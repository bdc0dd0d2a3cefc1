"""Remote functions and backward passes run in the caller's autocast, however they are called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group

Group = dict[str, Agent]
weight = torch.full((2, 2), 1.2345, requires_grad=True)


@pytest.fixture
def group() -> Iterator[Group]:
    with local_group(["a", "b", "c"]) as agents, acting_as(agents["a"]):
        yield agents


class Multiplier:
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    async def multiply_later(self, x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return x @ weight


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x @ weight


async def multiply_in_a_coroutine(x: torch.Tensor) -> torch.Tensor:
    first = x @ weight
    await asyncio.sleep(0)
    assert first.dtype == (x @ weight).dtype
    return x @ weight


@rpc.functions.async_execution
def multiply_in_a_future(x: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(x @ weight)
    return future


def multiply_elsewhere(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("c", multiply, (x,))
    return result


def on_an_actor(x: torch.Tensor) -> Any:
    actor = rpc.remote("b", Multiplier, ordered=True)
    return [actor.rpc_async().multiply(x) for _ in range(3)][-1].wait()


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rpc_sync": lambda x: rpc.rpc_sync("b", multiply, (x,)),
    "rpc_async": lambda x: rpc.rpc_async("b", multiply, (x,)).wait(),
    "a function by value": lambda x: rpc.rpc_sync("b", lambda y: y @ y, (x,)),
    "remote": lambda x: rpc.remote("b", multiply, (x,)).to_here(),
    "a method": lambda x: rpc.remote("b", Multiplier).rpc_sync().multiply(x),
    "a method, asynchronously": lambda x: rpc.remote("b", Multiplier).rpc_async().multiply(x).wait(),
    "a method, remotely": lambda x: rpc.remote("b", Multiplier).remote().multiply(x).to_here(),
    "a method that is a coroutine": lambda x: rpc.remote("b", Multiplier).rpc_sync().multiply_later(x),
    "a method of an actor": on_an_actor,
    "a coroutine": lambda x: rpc.rpc_sync("b", multiply_in_a_coroutine, (x,)),
    "a future": lambda x: rpc.rpc_sync("b", multiply_in_a_future, (x,)),
    "a nested call": lambda x: rpc.rpc_sync("b", multiply_elsewhere, (x,)),
    "itself": lambda x: rpc.rpc_sync("a", multiply, (x,)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_remote_functions_run_in_the_callers_autocast_and_later_ones_do_not(
    group: Group, call: str, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype):
        assert CALLS[call](x).dtype == dtype
    assert CALLS[call](x).dtype == torch.float32
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert CALLS[call](x).dtype == torch.float32


@pytest.mark.parametrize("call", [call for call in CALLS if call != "a function by value"])
def test_gradients_equal_those_of_a_single_process(group: Group, call: str) -> None:
    x = torch.full((2, 2), 0.777, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        multiply(x).float().square().sum().backward()
    wanted, x.grad = (x.grad, weight.grad), None
    weight.grad = None
    with autograd.context() as context:
        with torch.autocast("cpu", torch.bfloat16):
            y = CALLS[call](x)
        context.backward(y.float().square().sum())
        got = dict(context.gradients)
        for name in ("b", "c"):
            with acting_as(group[name]):
                if group[name].autograd.contexts.get(context) is not None:
                    got |= autograd.get_gradients(context)
    assert wanted[0] is not None
    assert torch.equal(got[x], wanted[0])
    assert wanted[1] is not None
    assert torch.equal(got[weight], wanted[1])


def test_a_backward_pass_runs_in_the_autocast_of_its_caller(group: Group) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, requires_grad=True)

    def program(call: Any) -> torch.Tensor:
        result: torch.Tensor = (call(multiply, (call(multiply, (x,)),)) * torch.arange(4.0).view(2, 2)).sum()
        return result

    loss = program(lambda function, args: function(*args))
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward(inputs=[x])
    wanted, x.grad = x.grad, None
    with autograd.context() as context:
        loss = program(lambda function, args: rpc.rpc_sync("b", function, args))
        with torch.autocast("cpu", torch.bfloat16):
            context.backward(loss, retain_graph=True)
        got = context.gradients[x].clone()
        (outside,) = autograd.grad(context, loss, [x])
    assert wanted is not None
    assert torch.equal(got, wanted)
    assert not torch.equal(got, outside)


def test_autocast_is_not_propagated_if_the_agent_disables_it(group: Group) -> None:
    group["a"].client.carries_autocast = False
    with torch.autocast("cpu", torch.bfloat16):
        assert rpc.rpc_sync("b", multiply, (torch.ones(2, 2),)).dtype == torch.float32
