"""Gradients of gradients across workers equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.one_process import Group, all_gradients, assert_equal, gradients_on, leaf, locally, remotely
from torch import nn
from torch.autograd.function import once_differentiable

from telegrad import autograd
from telegrad.errors import BackwardError

modules: dict[str, nn.Module] = {}
Grad = Any


@pytest.fixture(autouse=True)
def mlp() -> None:
    torch.manual_seed(0)
    modules.update(
        a=nn.Sequential(nn.Linear(4, 6), nn.Tanh()),
        b=nn.Sequential(nn.Linear(6, 6), nn.Softplus()),
        c=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)),
    )
    for module in modules.values():
        module.double()


def forward(name: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = modules[name](x)
    return result


def run(call: Any, x: torch.Tensor) -> torch.Tensor:
    return call("c", forward, "c", call("b", forward, "b", modules["a"](x)))


def parameters() -> list[nn.Parameter]:
    return [parameter for name in "abc" for parameter in modules[name].parameters()]


def local_grad(context: int | None, *args: Any, **kwargs: Any) -> Any:
    return torch.autograd.grad(*args, **kwargs)


def penalty(call: Any, grad: Grad, context: int | None, x: torch.Tensor) -> torch.Tensor:
    """Return a loss with a penalty on the squared norm of the input's gradient."""
    out = run(call, x)
    (slope,) = grad(context, out.sum(), [x], create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


def test_a_gradient_penalty_of_an_mlp_over_three_workers_equals_one_process(group: Group) -> None:
    x = leaf(7, 4)
    wanted = torch.autograd.grad(penalty(locally, local_grad, None, x), [x, *parameters()], allow_unused=True)
    with autograd.context() as context:
        context.backward(penalty(remotely, autograd.grad, context, x))
        got = all_gradients(group, context)
        assert set(gradients_on(group["c"], context)) <= set(modules["c"].parameters())
        assert len(gradients_on(group["b"], context)) == 2
    for tensor, want in zip([x, *parameters()], wanted, strict=True):
        if want is None:
            assert tensor not in got or not got[tensor].any()
        else:
            torch.testing.assert_close(got[tensor], want, rtol=1e-12, atol=1e-15)


def test_a_hessian_vector_product_of_an_mlp_over_three_workers_equals_one_process(group: Group) -> None:
    x = leaf(7, 4)
    own = list(modules["a"].parameters())
    vectors = [torch.randn_like(parameter) for parameter in own]

    def product(call: Any, grad: Grad, context: int | None) -> Any:
        loss = run(call, x).square().mean()
        grads = grad(context, loss, own, create_graph=True)
        return grad(context, sum((g * v).sum() for g, v in zip(grads, vectors, strict=True)), own)

    wanted = product(locally, local_grad, None)
    with autograd.context() as context:
        got = product(remotely, autograd.grad, context)
        for one, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, want, rtol=1e-12, atol=1e-15)
        assert all_gradients(group, context) == {}


def test_the_third_derivative_of_a_remote_pow(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        slope = remotely("b", torch.pow, x, 4)
        for want in (4 * x**3, 12 * x**2, 24 * x):
            (slope,) = autograd.grad(context, slope.sum(), [x], create_graph=True)
            assert_equal(slope.detach(), want.detach())


def test_the_third_derivative_through_two_workers(group: Group) -> None:
    x = leaf(3)

    def derive(call: Any, grad: Grad, context: int | None) -> torch.Tensor:
        slope = call("c", torch.exp, call("b", torch.sin, x)) * x
        for _ in range(3):
            (slope,) = grad(context, slope.sum(), [x], create_graph=True)
        return slope.detach()

    want = derive(locally, local_grad, None)
    with autograd.context() as context:
        torch.testing.assert_close(derive(remotely, autograd.grad, context), want, rtol=1e-11, atol=1e-14)


def test_backward_with_create_graph_leaves_gradients_that_can_be_differentiated(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.pow, x, 3).sum(), create_graph=True)
        first = context.gradients[x]
        assert_equal(first.detach(), 3 * x.detach() ** 2)
        (second,) = autograd.grad(context, first.sum(), [x])
        assert_equal(second, 6 * x.detach())


def test_gradients_of_gradients_with_respect_to_grad_outputs(group: Group) -> None:
    x, v = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        (product,) = autograd.grad(context, remotely("b", torch.exp, x), [x], [v], create_graph=True)
        assert_all(autograd.grad(context, product.sum(), [v, x]), [x.exp(), v * x.exp()])


def assert_all(got: Any, wanted: list[torch.Tensor]) -> None:
    for one, want in zip(got, wanted, strict=True):
        assert_equal(one, want.detach())


class Once(torch.autograd.Function):
    """A function that can be differentiated only once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def once(x: torch.Tensor) -> torch.Tensor:
    return Once.apply(x.sin())


def test_a_function_that_cannot_be_differentiated_twice_says_so_across_workers(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", once, x * x)
        (slope,) = autograd.grad(context, y.square().sum(), [x], create_graph=True)
        with pytest.raises(BackwardError, match=r"Error on Node 1: trying to differentiate twice"):
            context.backward(slope.sum())
