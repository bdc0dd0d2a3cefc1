"""A tensor with a history keeps it when it is sent, or a pass that needs it fails. It never becomes a leaf silently."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_as_in_one_process, assert_equal, gradients_on, leaf, remotely

from telegrad import autograd, rpc
from telegrad.backward.contexts import current
from telegrad.errors import BackwardError
from telegrad.rpc.functions import async_execution

X, W = leaf(3, seed=1), leaf(3, seed=2)


@pytest.fixture(autouse=True)
def fresh() -> None:
    X.grad = W.grad = None
    W.requires_grad_()


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def times_own(x: torch.Tensor) -> torch.Tensor:
    return x * W


def own(_: torch.Tensor) -> torch.Tensor:
    return W


def times_own_with_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * W


def leaves_grad_mode_off(x: torch.Tensor) -> torch.Tensor:
    y = x * W
    torch.set_grad_enabled(False)
    return y


@pytest.mark.parametrize("function", [same, own, times_own_with_grad])
def test_sending_under_no_grad_keeps_history(group: Group, function: Any) -> None:
    def program(call: Any) -> torch.Tensor:
        with torch.no_grad():
            y = call("b", function, X)
        assert y.requires_grad
        return (y * X * W).sum()

    assert_as_in_one_process(group, program, [X, W])


def test_a_grad_mode_that_a_function_leaves_set_does_not_drop_history(group: Group) -> None:
    with autograd.context() as context:
        y = remotely("b", leaves_grad_mode_off, X)
        context.backward(y.sum())
        assert_equal(context.gradients[X], W.detach())
        assert torch.is_grad_enabled()


@async_execution
def answered_under_no_grad(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    y = x * W

    def answer() -> None:
        with torch.no_grad():
            future.set_result(y)

    threading.Thread(target=answer).start()
    return future


def test_the_grad_mode_of_the_thread_that_replies_does_not_drop_history(group: Group) -> None:
    with autograd.context() as context:
        context.backward(remotely("b", answered_under_no_grad, X).sum())
        assert_equal(context.gradients[X], W.detach())


# -- coroutines -----------------------------------------------------------------------------------------------------


class Gate:
    """Lets coroutines on b wait for each other."""

    inside: asyncio.Event
    go_on: asyncio.Event


async def make_gate() -> None:
    Gate.inside, Gate.go_on = asyncio.Event(), asyncio.Event()


async def hold_no_grad() -> bool:
    with torch.no_grad():
        Gate.inside.set()
        await Gate.go_on.wait()
        return torch.is_grad_enabled()


async def times_own_meanwhile(x: torch.Tensor) -> torch.Tensor:
    await Gate.inside.wait()
    y = x * W
    Gate.go_on.set()
    await asyncio.sleep(0)
    return y * 1


async def times_own_later(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return x * W


async def fails_later() -> None:
    await asyncio.sleep(0)
    raise KeyError("as it is")


def test_each_coroutine_has_its_own_grad_mode(group: Group) -> None:
    rpc.rpc_sync("b", make_gate)
    holding = rpc.rpc_async("b", hold_no_grad)
    with autograd.context() as context:
        context.backward(remotely("b", times_own_meanwhile, X).sum())
        assert_equal(context.gradients[X], W.detach())
    assert holding.wait(30) is False


def test_a_coroutine_that_is_called_under_no_grad_runs_without_grad_mode(group: Group) -> None:
    with autograd.context():
        with torch.no_grad():
            assert not remotely("b", times_own_later, X).requires_grad
        assert remotely("b", times_own_later, X).requires_grad
        with pytest.raises(KeyError, match="as it is"):
            rpc.rpc_sync("b", fails_later)


# -- gradients ------------------------------------------------------------------------------------------------------


def sum_and_double(u: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return u + v + s


@pytest.mark.parametrize("accumulate", ["grad", "context"])
def test_gradients_that_were_one_tensor_at_the_sender_are_separate(group: Group, accumulate: str) -> None:
    u, v, s = (torch.zeros(2, requires_grad=True) for _ in range(3))
    with autograd.context() as context:
        loss = (remotely("b", sum_and_double, u, v, s) + remotely("b", torch.mul, s, 2)).sum()
        for _ in range(2):
            context.backward(loss, retain_graph=True, accumulate=accumulate)
        found = [x.grad for x in (u, v, s)] if accumulate == "grad" else [context.gradients[x] for x in (u, v, s)]
        assert [grad.tolist() for grad in found if grad is not None] == [[2.0, 2.0], [2.0, 2.0], [6.0, 6.0]]


def test_a_leaf_that_was_frozen_since_gets_no_gradient(group: Group) -> None:
    with autograd.context() as context:
        loss = (remotely("b", times_own, X) + remotely("b", own, X)).sum()
        W.requires_grad_(requires_grad=False)
        context.backward(loss)
        assert gradients_on(group["b"], context) == {}
        assert_equal(context.gradients[X], W)


def test_a_tensor_of_another_context_is_an_error_for_grad_and_inputs_too(group: Group) -> None:
    with autograd.context():
        y = remotely("b", times_own, X)
    with autograd.context() as context:
        with pytest.raises(BackwardError, match="no longer valid"):
            autograd.grad(context, [(y * X).sum()], [X])
        with pytest.raises(BackwardError, match="no longer valid"):
            context.backward((y * X).sum(), inputs=[X])


# -- calls beside the context -----------------------------------------------------------------------------------------


def test_a_call_in_a_context_that_has_ended_returns_no_leaf(group: Group) -> None:
    with autograd.context():
        ended = current.get()
    token = current.set(ended)  # as in a thread or a task that outlives the block
    try:
        y = remotely("b", times_own, X)
    finally:
        current.reset(token)
    assert not y.is_leaf
    with autograd.context() as context, pytest.raises(BackwardError, match="no longer valid"):
        context.backward(y.sum())


def make_linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:an nn.Module was sent whole")
def test_a_module_that_arrives_after_its_context_has_ended_is_an_ordinary_one(group: Group) -> None:
    with autograd.context():
        ended = current.get()
    token = current.set(ended)
    try:
        module = remotely("b", make_linear)
    finally:
        current.reset(token)
    torch.optim.SGD(module.parameters(), lr=0.1)
    assert all(parameter.is_leaf for parameter in module.parameters())


def test_callbacks_of_torchs_own_futures_are_in_the_context(group: Group) -> None:
    def call_again(done: Any) -> torch.Tensor:
        (first,) = done.value()
        result: torch.Tensor = remotely("b", torch.mul, first.value(), 2)
        return result

    with autograd.context() as context:
        both = torch.futures.collect_all([rpc.rpc_async("b", times_own, (X,))])
        context.backward(both.then(call_again).wait().sum())
        assert_equal(context.gradients[X], 2 * W.detach())


def raise_with_tensor(x: torch.Tensor) -> None:
    raise ValueError(x * W)


def test_tensors_in_errors_have_no_history(group: Group) -> None:
    with autograd.context(), pytest.raises(ValueError, match="tensor") as caught:
        rpc.rpc_sync("b", raise_with_tensor, (X,))
    assert not caught.value.args[0].requires_grad


class Scaled(torch.nn.Module):
    """A module with a parameter and a computed buffer."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.double))
        self.register_buffer("scale", x * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.scale * x


def call_module(module: torch.nn.Module, x: torch.Tensor) -> Any:
    return module(x)


@pytest.mark.filterwarnings("ignore:an nn.Module was sent whole")
def test_a_buffer_with_a_history_keeps_it_where_its_module_is_sent_whole(group: Group) -> None:
    assert_as_in_one_process(group, lambda call: call("b", call_module, Scaled(X), W).sum(), [X, W])
