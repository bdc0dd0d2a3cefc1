"""Callbacks that user code queues in the engine run after the island's gradients were sent, and may wait for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_equal, leaf, remotely
from torch.autograd import Variable

from telegrad import autograd, rpc

arrived = threading.Event()
found: list[object] = []
PATIENCE = 10.0


@pytest.fixture(autouse=True)
def fresh() -> None:
    arrived.clear()
    found.clear()


def wait_for_event() -> bool:
    return arrived.wait(PATIENCE)


def wait() -> None:
    found.append(wait_for_event())


def wait_in_a_call() -> None:
    found.append(rpc.rpc_sync("a", wait_for_event))


CALLBACKS = {"by itself": wait, "in a call": wait_in_a_call}


def queue(callback: str) -> None:
    Variable._execution_engine.queue_callback(CALLBACKS[callback])


def hooked(x: torch.Tensor, callback: str) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda grad: queue(callback))
    return y


class Queueing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, callback: str) -> torch.Tensor:
        ctx.callback = callback
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        queue(ctx.callback)
        return grads[0] * 2, None


def custom(x: torch.Tensor, callback: str) -> torch.Tensor:
    result: torch.Tensor = Queueing.apply(x, callback)  # type: ignore[no-untyped-call]
    return result


def hooked_argument(x: torch.Tensor, callback: str) -> torch.Tensor:
    x.register_hook(lambda grad: queue(callback))
    return x * 2


@pytest.mark.parametrize("function", [hooked, custom, hooked_argument])
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_may_wait_for_a_result_of_the_islands_gradient(group: Group, function: Any, callback: str) -> None:
    x = leaf(3)
    x.register_hook(lambda grad: arrived.set())
    with autograd.context() as context:
        context.backward(remotely("b", function, x, callback).sum(), timeout=3 * PATIENCE)
        assert_equal(context.gradients[x], torch.full((3,), 2.0, dtype=torch.double))
    assert found == [True]


def notify(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    y.register_hook(lambda grad: arrived.set())
    return y


@pytest.mark.parametrize("callback", CALLBACKS)
def test_where_the_pass_begins(group: Group, callback: str) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(hooked(remotely("b", notify, x), callback).sum(), timeout=3 * PATIENCE)
    assert found == [True]


@pytest.mark.parametrize("callback", CALLBACKS)
def test_in_an_island_that_waits_in_a_gate(group: Group, callback: str) -> None:
    x = leaf(3)
    x.register_hook(lambda grad: arrived.set())
    with autograd.context() as context:
        loss = remotely("b", with_a_skip_connection, x, callback).sum()
        context.backward(loss, timeout=3 * PATIENCE)
        assert_equal(context.gradients[x], 2 + 2 * (2 * x).cos().detach())
    assert found == [True]


def with_a_skip_connection(x: torch.Tensor, callback: str) -> torch.Tensor:
    inner = hooked(x, callback)
    return inner + remotely("c", torch.sin, inner)


def test_callbacks_run_in_order_and_an_error_in_one_is_raised(group: Group) -> None:
    x = leaf(3)

    def refuse() -> None:
        raise ValueError("this callback refuses")

    def several(grad: torch.Tensor) -> None:
        for callback in (lambda: found.append(1), lambda: found.append(2), refuse):
            Variable._execution_engine.queue_callback(callback)

    y = x * 2
    y.register_hook(several)
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="this callback refuses"):
            context.backward(remotely("b", torch.sin, y).sum())
    assert found == [1, 2]
    (x * 2).sum().backward()  # outside of passes the engine works as before
    assert_equal(x.grad, torch.full((3,), 2.0, dtype=torch.double))
