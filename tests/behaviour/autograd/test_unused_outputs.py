"""A backward pass returns with correct gradients when outputs of calls are unused, where PyTorch's hangs for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from tests.support.stalls import Stalls

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.testing.group import local_group
from telegrad.testing.programs import UserMul

Group = dict[str, Agent]

hook_calls: list[torch.Tensor] = []


@pytest.fixture(params=["unix", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    hook_calls.clear()
    with local_group(["a", "b", "c", "d"], transport=request.param) as agents:
        with acting_as(agents["a"]):
            yield agents


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.randn(3, dtype=torch.double, requires_grad=True) for _ in range(count)]


def quickly_backward(context: autograd.ContextId, root: torch.Tensor) -> None:
    with Stalls() as stalls:
        begin = time.monotonic()
        context.backward(root, timeout=20)
        took = time.monotonic() - begin
    assert took < 1.0 + stalls.seconds


def equal(got: dict[torch.Tensor, torch.Tensor], loss: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Compare with the gradients of `loss` in one process, with the same leaves."""
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    for leaf, want in zip(leaves, wanted, strict=True):
        assert (leaf in got) == (want is not None)
        assert want is None or torch.allclose(got[leaf], want)


def test_backward_returns_when_an_output_is_unused(group: Group) -> None:
    a, b, c = tensors(3)
    with autograd.context() as context:
        d = rpc.rpc_sync("b", torch.add, (a, b))
        e = rpc.rpc_sync("b", torch.mul, (b, c))
        assert e.requires_grad
        quickly_backward(context, d.sum())
        equal(context.gradients, (a + b).sum(), [a, b, c])


def far(way: list[str], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two outputs of the last worker. Workers on the way use only the first."""
    if not way:
        return x * 2, x.exp()
    used, unused = rpc.rpc_sync(way[0], far, (way[1:], x * 3))
    return used + 1, unused


def test_an_output_unused_deep_in_a_chain_of_four_workers(group: Group) -> None:
    (x,) = tensors(1)
    with autograd.context() as context:
        used, unused = far(["b", "c", "d"], x)
        assert unused.requires_grad
        quickly_backward(context, used.sum())
        equal(context.gradients, (x * 3 * 3 * 3 * 2).sum(), [x])


kept: list[torch.Tensor] = []


def keep_and_return(x: torch.Tensor) -> torch.Tensor:
    kept.append(x.sin())
    return kept[0] * 2


def use_what_was_kept() -> torch.Tensor:
    return kept.pop().cos()


def test_an_unused_output_that_shares_its_subgraph_with_a_used_one(group: Group) -> None:
    (x,) = tensors(1)
    with autograd.context() as context:
        used = rpc.rpc_sync("b", keep_and_return, (x,))
        unused = rpc.rpc_sync("b", use_what_was_kept)
        assert unused.requires_grad
        quickly_backward(context, used.sum())
        equal(context.gradients, (x.sin() * 2).sum(), [x])


def two_outputs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    behind = UserMul.apply(y, y)
    behind.register_hook(hook_calls.append)
    return x * 2, behind


def test_one_tensor_of_a_tuple_unused_with_a_user_function_and_a_hook_behind_it(group: Group) -> None:
    x, y = tensors(2)
    with autograd.context() as context:
        used, unused = rpc.rpc_sync("b", two_outputs, (x, y))
        assert unused.requires_grad
        quickly_backward(context, used.sum())
        # One process would not run the branch behind `unused`: no zeros for y, and no call of the hook.
        assert set(context.gradients) == {x}
        assert hook_calls == []
        equal(context.gradients, (x * 2).sum(), [x, y])


def test_a_skip_connection_around_a_remote_call(group: Group) -> None:
    (x,) = tensors(1)
    with autograd.context() as context:
        h = x.tanh()
        y = rpc.rpc_sync("b", torch.sin, (h,)) + h
        z = rpc.rpc_sync("c", torch.exp, (y,)) + y + h
        quickly_backward(context, z.sum())
        h2 = x.tanh()
        y2 = h2.sin() + h2
        equal(context.gradients, (y2.exp() + y2 + h2).sum(), [x])


def test_nothing_is_probed_when_everything_is_used(group: Group) -> None:
    x, y = tensors(2)
    with autograd.context() as context:
        z = rpc.rpc_sync("b", torch.mul, (x, y))
        w = rpc.rpc_sync("c", torch.add, (z, y))
        context.backward(w.sum())
        equal(context.gradients, (x * y + y).sum(), [x, y])
    assert "probes" not in group["a"].autograd.debug_info()
