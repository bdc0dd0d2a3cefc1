"""What users do with torch's engine works across workers: reentrant passes, checkpoints, autocast, anomaly mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_as_in_one_process, assert_equal, leaf, remotely
from torch import nn
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, rpc
from telegrad.errors import BackwardError, TelegradError

weights: dict[str, torch.Tensor] = {}
runs: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    weights.update(w=leaf(3, seed=9))
    runs.clear()


# -- reentrant passes ---------------------------------------------------------------------------------------------


class SineByAutograd(torch.autograd.Function):
    """A function whose backward differentiates another graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            x = saved.detach().requires_grad_()
            (inner,) = torch.autograd.grad(x.sin().sum(), x)
        runs.append("reentrant")
        return grad * inner


def reentrant(x: torch.Tensor) -> torch.Tensor:
    return SineByAutograd.apply(x) * weights["w"]


def test_a_function_whose_backward_runs_autograd(group: Group) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group, lambda call: reentrant(call("b", reentrant, call("c", torch.exp, x))).sum(), [x, weights["w"]]
    )
    assert len(runs) == 4


class SendsInBackward(torch.autograd.Function):
    """A function whose backward calls another worker."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.agent = rpc.default_agent()
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        tripled: torch.Tensor = ctx.agent.call("c", torch.mul, (grad, 3))
        return tripled


def asks_in_backward(x: torch.Tensor) -> torch.Tensor:
    return SendsInBackward.apply(x.sin())


def test_a_function_whose_backward_makes_a_call(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(asks_in_backward(remotely("b", asks_in_backward, x)).sum(), timeout=60)
        assert_equal(context.gradients[x], (3 * (3 * x.sin()).cos() * 3 * x.cos()).detach())


class DistributedInBackward(torch.autograd.Function):
    """A function whose backward runs a pass of another context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        with torch.enable_grad(), autograd.context() as context:
            x = saved.detach().requires_grad_()
            (inner,) = autograd.grad(context, rpc.rpc_sync("c", torch.sin, (x,)).sum(), x)
        assert inner is not None
        return grad * inner


def test_a_pass_of_another_context_inside_a_plain_backward(group: Group) -> None:
    x = leaf(3)
    DistributedInBackward.apply(x * 2).sum().backward()
    assert_equal(x.grad, 2 * (2 * x).cos().detach())


def test_a_context_cannot_be_opened_inside_a_pass_of_another(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, DistributedInBackward.apply(x)).sum()
        with pytest.raises(BackwardError, match="Error on Node 0: Already have an autograd context id"):
            context.backward(loss)


def test_a_pass_inside_a_pass_of_the_same_context_is_refused(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        other = remotely("b", torch.sin, x).sum()
        y = x.exp()
        y.register_hook(lambda grad: context.backward(other))
        with pytest.raises(BackwardError, match="is running on this worker already") as caught:
            context.backward(remotely("b", torch.exp, y).sum())
        assert isinstance(caught.value.__cause__, TelegradError)


# -- checkpoints --------------------------------------------------------------------------------------------------


def block(x: torch.Tensor) -> torch.Tensor:
    runs.append("block")
    return (x * weights["w"]).sin().exp()


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(block, x, use_reentrant=False)
    return result


def test_a_checkpoint_on_the_callee(group: Group) -> None:
    x = leaf(3)
    assert_as_in_one_process(group, lambda call: call("b", checkpointed, x).sum(), [x, weights["w"]])
    assert len(runs) == 4


def test_a_checkpoint_on_the_caller_between_calls(group: Group) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group, lambda call: call("c", torch.exp, checkpointed(call("b", torch.sin, x))).sum(), [x, weights["w"]]
    )
    assert len(runs) == 4


def test_a_checkpoint_on_the_caller_around_a_call(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        def around(x: torch.Tensor) -> torch.Tensor:
            return call("b", block, x.sin()).cos() * x

        return checkpoint(around, x, use_reentrant=False).sum()

    assert_as_in_one_process(group, program, [x, weights["w"]])
    # Twice in one process. Here the caller's part is two islands, and torch recomputes once for each run of its engine.
    assert len(runs) == 2 + 3


# -- modes --------------------------------------------------------------------------------------------------------


def test_autocast_on_the_caller(group: Group) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    x = leaf(3, 4, dtype=torch.float32)

    def program(call: Any) -> torch.Tensor:
        # Torch has one cache of casts for all threads, and so for all workers of this test.
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            inner = linear(x)
            assert inner.dtype == torch.bfloat16
            y = call("b", torch.tanh, inner)
            assert y.dtype == torch.bfloat16
            return linear(y).float().sum()

    assert_as_in_one_process(group, program, [x, linear.weight, linear.bias])


def test_anomaly_mode_on_the_caller_sees_its_part_of_the_pass(group: Group) -> None:
    x = leaf(3)
    with torch.autograd.set_detect_anomaly(True), autograd.context() as context:
        y = remotely("b", torch.exp, x)
        context.backward(y.sum(), retain_graph=True)
        assert_equal(context.gradients[x], x.exp().detach())
        bad = (remotely("b", torch.sub, x, x.detach()).sqrt() * 0).sum()
        with (
            pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
            pytest.raises(BackwardError, match="Error on Node 0: Function 'SqrtBackward0' returned nan values"),
        ):
            context.backward(bad)


def test_saved_tensor_hooks_of_the_caller_see_its_part(group: Group) -> None:
    x = leaf(3)
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autograd.context() as context:
        context.backward(remotely("b", torch.neg, x.exp()).sum())
        assert_equal(context.gradients[x], -x.exp().detach())
    assert packed[0] == torch.Size([3])


def test_multithreading_of_the_engine_may_be_off(group: Group) -> None:
    x = leaf(3)
    with torch.autograd.set_multithreading_enabled(False):
        assert_as_in_one_process(group, lambda call: (call("b", block, x) + x).sum(), [x, weights["w"]])


def test_a_profiler_on_the_caller_sees_its_part_of_the_pass(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.neg, x.exp()).sin().sum()
        with torch.autograd.profiler.profile() as profile:
            context.backward(loss)
    names = {event.name for event in profile.function_events}
    assert any("SinBackward0" in name for name in names)
    assert any("ExpBackward0" in name for name in names)
    assert any("RecvRpcBackward" in name for name in names)


def test_a_skip_connection_with_a_reentrant_function_and_a_checkpoint_on_it(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        inner = checkpointed(reentrant(x))
        return (call("b", reentrant, inner) * inner + call("c", checkpointed, inner)).sum()

    assert_as_in_one_process(group, program, [x, weights["w"]])
