"""Leaves that were sent themselves get the same gradients, without the engine."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import Group, remotely

from telegrad import autograd
from telegrad.backward import engine_call
from telegrad.errors import TelegradError


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets a number for every run of torch's engine."""
    made: list[int] = []
    run_backward = engine_call.run_backward

    def count(*args: object) -> object:
        made.append(len(made))
        return run_backward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_call, "run_backward", count)
    return made


def test_a_leaf_that_was_sent_gets_its_gradient_without_the_engine(group: Group, runs: list[int]) -> None:
    x = leaf(1.0, 2.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, 3))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]
    assert len(runs) == 2  # from the roots, and on b


def test_its_gradient_is_added_to_the_one_in_the_context(group: Group) -> None:
    x = leaf(1.0, 2.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, 3))
        z = group["a"].call("c", torch.mul, (x, 5))
        autograd.backward(context_id, [(y + z + x).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [9.0, 9.0]


def test_the_same_leaf_twice_in_a_message_gets_the_sum(group: Group) -> None:
    x = leaf(2.0, 3.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, x))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [4.0, 6.0]


def first_doubled(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first * 2


def test_of_two_leaves_that_were_sent_the_one_that_was_used_gets_its_gradient_without_the_engine(
    group: Group, runs: list[int]
) -> None:
    x, unused = leaf(1.0, 2.0), leaf(3.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", first_doubled, (x, unused))
        autograd.backward(context_id, [y.sum()])
        gradients = autograd.get_gradients(context_id)
        assert gradients.keys() == {x}
        assert gradients[x].tolist() == [2.0, 2.0]
    assert len(runs) == 2


def test_hooks_of_a_sent_leaf_run(group: Group, runs: list[int]) -> None:
    x = leaf(1.0, 2.0)
    x.register_hook(lambda grad: grad * 10)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, 3))
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [30.0, 30.0]
    assert len(runs) == 3


def test_a_hook_that_is_registered_during_the_pass_runs(group: Group) -> None:
    x = leaf(1.0, 2.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, 3))
        loss = y.sum()
        y.register_hook(lambda grad: x.register_hook(lambda inner: inner * 10) and None)
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [30.0, 30.0]


def test_a_profiler_sees_the_nodes_of_both_halves(group: Group) -> None:
    x = leaf(1.0, 2.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.mul, (x, 3))
        loss = y.sum()
        with torch.autograd.profiler.profile() as profile:
            autograd.backward(context_id, [loss])
    names = [event.name for event in profile.function_events]
    assert any("SendRpcBackward" in name for name in names), names
    assert any("RecvRpcBackward" in name for name in names), names


def test_into_grad_the_gradient_has_the_dtype_that_torch_gives_it(group: Group) -> None:
    x = leaf(1.0, 2.0)
    with autograd.context() as context_id:
        for _ in range(2):
            y = group["a"].call("b", torch.mul, (x, 3))
            autograd.backward(context_id, [y.sum()], accumulate="grad")
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]


def test_with_create_graph_the_gradient_can_be_differentiated(group: Group) -> None:
    x = leaf(2.0)
    with autograd.context() as context_id:
        y = group["a"].call("b", torch.pow, (x, 3))
        autograd.backward(context_id, [y.sum()], create_graph=True)
        first = autograd.get_gradients(context_id)[x]
        (second,) = autograd.grad(context_id, [first.sum()], [x])
    assert first.item() == 12.0
    assert second is not None
    assert second.item() == 12.0


@pytest.mark.parametrize("shape", [(5,), (1,), (3, 3)])
@pytest.mark.parametrize("how", ["sent as it is", "with a hook", "used first", "wanted"])
def test_a_leaf_whose_data_got_another_shape_after_it_was_sent_is_an_error(
    group: Group, shape: tuple[int, ...], how: str
) -> None:
    x = leaf(1.0, 2.0, 3.0)
    if how == "with a hook":
        x.register_hook(lambda grad: grad * 2)
    with autograd.context() as context:
        y = remotely("b", torch.sin, x * 2 if how == "used first" else x)
        x.data = torch.ones(shape)
        with pytest.raises(TelegradError, match=r"the gradient of a leaf has shape \[3\], and the leaf"):
            context.backward(y.sum(), inputs=[x] if how == "wanted" else None)
