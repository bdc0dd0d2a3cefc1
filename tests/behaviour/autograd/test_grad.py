"""``backward(inputs=...)`` and ``grad`` do what they do in torch.autograd, with every kind of root and input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.one_process import Group, all_gradients, assert_equal, gradients_on, leaf, locally, remotely

from telegrad import autograd
from telegrad.errors import TelegradError

weights: dict[str, torch.Tensor] = {}
seen: list[str] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    weights.update(w=leaf(3, seed=9))
    seen.clear()


def times(x: torch.Tensor, name: str = "w") -> torch.Tensor:
    return x * weights[name]


def loop(call: Any, x: torch.Tensor) -> torch.Tensor:
    """Call b, c and b again, with a skip connection."""
    y = call("b", times, x)
    z = call("c", torch.exp, y)
    return call("b", times, z) + y


def assert_all_equal(got: Any, wanted: Any) -> None:
    assert len(got) == len(wanted)
    for grad, want in zip(got, wanted, strict=True):
        assert_equal(grad, want)


# -- grad ---------------------------------------------------------------------------------------------------------


def test_grad_of_a_leaf_behind_a_remote_loop(group: Group) -> None:
    x = leaf(3)
    wanted = torch.autograd.grad(loop(locally, x).sum(), [x])
    with autograd.context() as context:
        assert_all_equal(autograd.grad(context, loop(remotely, x).sum(), [x]), wanted)
        assert all_gradients(group, context) == {}
    assert x.grad is None
    assert weights["w"].grad is None


def test_grad_of_inputs_in_between_before_and_behind_calls(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        before = x.sin()
        result = call("b", times, before)
        after = result.cos()
        far = call("c", torch.exp, after)
        return [far, after, result, before, x], (far * after + before).sum()

    inputs, loss = program(locally)
    wanted = torch.autograd.grad(loss, inputs)
    with autograd.context() as context:
        inputs, loss = program(remotely)
        assert_all_equal(autograd.grad(context, loss, inputs), wanted)


def test_grad_of_an_input_used_here_and_by_two_workers(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.sin()
        return inner, (call("b", times, inner) * call("c", torch.exp, inner) + inner).sum()

    inner, loss = program(locally)
    wanted = torch.autograd.grad(loss, [inner, x])
    with autograd.context() as context:
        inner, loss = program(remotely)
        assert_all_equal(autograd.grad(context, loss, [inner, x]), wanted)


def test_grad_of_one_input_twice(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        got = autograd.grad(context, remotely("b", torch.exp, x).sum(), [x, x])
        assert_all_equal(got, [x.exp().detach()] * 2)


def test_grad_takes_single_tensors(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        assert_all_equal(autograd.grad(context, remotely("b", torch.exp, x).sum(), x), [x.exp().detach()])
        got = autograd.grad(context, remotely("b", torch.exp, x), x, torch.full_like(x, 2))
        assert_all_equal(got, [2 * x.exp().detach()])


def test_grad_of_an_unused_input_is_none_where_that_is_allowed_and_else_an_error(group: Group) -> None:
    x, unused = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        remotely("b", torch.exp, unused)
        got = autograd.grad(context, loss, [x, unused], retain_graph=True, allow_unused=True)
        assert_all_equal(got, [x.exp().detach(), None])
        with pytest.raises(TelegradError, match="appears to not have been used in the graph"):
            autograd.grad(context, loss, [x, unused])


def test_grad_frees_the_graph_unless_told_otherwise(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        first = autograd.grad(context, loss, x, retain_graph=True)
        assert_all_equal(autograd.grad(context, loss, x), first)
        with pytest.raises(TelegradError, match="backward through the graph a second time"):
            autograd.grad(context, loss, x)


def test_create_graph_retains_the_graph_unless_told_otherwise(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        (first,) = autograd.grad(context, loss, x, create_graph=True)
        (second,) = autograd.grad(context, loss, x)
        assert first.requires_grad
        assert not second.requires_grad
        assert_equal(first.detach(), second)


def test_grad_outputs_weigh_the_outputs(group: Group) -> None:
    x, weight = leaf(3), torch.tensor([1.0, -2.0, 3.0], dtype=torch.double)
    wanted = torch.autograd.grad([x.exp(), x.sin().sum()], [x], [weight, None])
    with autograd.context() as context:
        outputs = [remotely("b", torch.exp, x), remotely("c", torch.sin, x).sum()]
        assert_all_equal(autograd.grad(context, outputs, [x], [weight, None]), wanted)


# -- inputs of backward -------------------------------------------------------------------------------------------


def test_inputs_of_backward_are_all_that_gets_a_gradient(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    (want,) = torch.autograd.grad((loop(locally, x) * y).sum(), [x])
    with autograd.context() as context:
        context.backward((loop(remotely, x) * y).sum(), inputs=[x])
        assert set(all_gradients(group, context)) == {x}
        assert_equal(context.gradients[x], want)


def test_inputs_of_backward_accumulate_in_the_context(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        context.backward(loss, retain_graph=True)
        context.backward(loss, inputs=[x])
        assert_equal(context.gradients[x], 2 * x.exp().detach())


def test_inputs_of_backward_accumulate_in_grad(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    x.grad = torch.ones(3, dtype=torch.double)
    with autograd.context() as context:
        context.backward(remotely("b", torch.mul, x, y).sum(), inputs=[x], accumulate="grad")
        assert all_gradients(group, context) == {}
    assert_equal(x.grad, (1 + y).detach())
    assert y.grad is None


def test_an_input_of_backward_that_is_no_leaf(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        inner = x.sin()
        context.backward(remotely("b", torch.exp, inner).sum(), inputs=[inner])
        assert set(all_gradients(group, context)) == {inner}
        assert_equal(context.gradients[inner], inner.exp().detach())


# -- roots --------------------------------------------------------------------------------------------------------


def test_a_root_that_is_directly_the_result_of_a_call(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.sum, x))
        assert_equal(context.gradients[x], torch.ones(3, dtype=torch.double))


def test_a_root_that_is_not_a_scalar(group: Group) -> None:
    x, weight = leaf(3), torch.tensor([1.0, -2.0, 3.0], dtype=torch.double)
    with autograd.context() as context:
        context.backward([remotely("b", torch.exp, x)], grad_tensors=[weight])
        assert_equal(context.gradients[x], x.exp().detach() * weight)


def test_a_gradient_of_another_type_is_converted_as_in_one_process(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x), grad_tensors=[torch.ones(3, dtype=torch.float32)])
        assert_equal(context.gradients[x], x.exp().detach())


def test_grad_tensors_may_be_one_tensor_for_one_root(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        autograd.backward(context, remotely("b", torch.exp, x), grad_tensors=torch.ones_like(x))
        assert_equal(context.gradients[x], x.exp().detach())


def test_a_root_with_one_element_and_some_dimensions_needs_no_gradient(group: Group) -> None:
    x = leaf(1, 1)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x))
        assert_equal(context.gradients[x], x.exp().detach())


def test_a_root_that_is_a_leaf(group: Group) -> None:
    x = leaf()
    with autograd.context() as context:
        context.backward(x)
        context.backward([x, remotely("b", torch.exp, x)])
        assert_equal(context.gradients[x], (2 + x.exp()).detach())


def test_several_roots_some_of_them_before_others(group: Group) -> None:
    x = leaf(3)

    def roots(call: Any) -> list[torch.Tensor]:
        y = call("b", times, x)
        z = call("c", torch.exp, y)
        return [y.sum(), z.sum(), (y * z).sum(), x.sum()]

    torch.autograd.backward(roots(locally))
    wanted, x.grad = x.grad, None
    wanted_w, weights["w"].grad = weights["w"].grad, None
    with autograd.context() as context:
        context.backward(roots(remotely))
        assert_equal(context.gradients[x], wanted)
        assert_equal(gradients_on(group["b"], context)[weights["w"]], wanted_w)


def test_the_same_root_twice_counts_twice(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        context.backward([loss, loss])
        assert_equal(context.gradients[x], 2 * x.exp().detach())
        result = remotely("b", torch.sum, x)
        context.backward([result, result, result])
        assert_equal(context.gradients[x], (2 * x.exp() + 3).detach())


def test_a_pass_that_reaches_no_other_worker(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(x.exp().sum())
        assert_equal(context.gradients[x], x.exp().detach())


def sums(x: torch.Tensor, context_id: int) -> torch.Tensor:
    """Run a pass of the caller's context on the callee."""
    autograd.backward(context_id, [times(x).sum()])
    return autograd.get_gradients(context_id)[weights["w"]]


def test_a_pass_may_begin_on_the_callee(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        assert_equal(remotely("b", sums, x, context), x.detach())
        assert_equal(context.gradients[x], weights["w"].detach())
        assert_equal(gradients_on(group["b"], context)[weights["w"]], x.detach())


class Plain(torch.Tensor):
    """A subclass without changes."""


@pytest.mark.parametrize("kind", [Plain, torch.nn.Parameter])
def test_a_leaf_of_a_subclass_is_an_input_like_any_other(group: Group, kind: type[torch.Tensor]) -> None:
    def make() -> torch.Tensor:
        x = torch.arange(3.0).as_subclass(Plain)
        return torch.nn.Parameter(x) if kind is torch.nn.Parameter else x.requires_grad_()

    with autograd.context() as context:
        x = make()
        (got,) = autograd.grad(context, (remotely("b", torch.sin, x) + x * 2).sum(), [x])
        assert_equal(got.as_subclass(torch.Tensor), torch.arange(3.0).cos() + 2)
    with autograd.context() as context:
        x = make()
        autograd.backward(context, [remotely("b", torch.sin, x).sum()], inputs=[x])
        assert_equal(autograd.get_gradients(context)[x].as_subclass(torch.Tensor), torch.arange(3.0).cos())
    with autograd.context() as context:
        x = make()
        autograd.backward(context, [remotely("b", torch.sin, x).sum()], inputs=[x], accumulate="grad")
        assert x.grad is not None
        assert_equal(x.grad.as_subclass(torch.Tensor), torch.arange(3.0).cos())


def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, y * 3


def test_the_hook_of_an_input_counts_although_it_was_computed_from_a_sibling_of_another_input(group: Group) -> None:
    # To the engine, `used` leads to `received`, since both tensors of the reply are outputs of one node.
    def program(call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        received, sibling = call("b", pair, leaf(3), leaf(3, seed=1))
        used = sibling.exp()
        used.register_hook(lambda gradient: gradient / 2)
        return [received.sum(), used.sum()], [received, used]

    wanted = torch.autograd.grad(*program(locally))
    with autograd.context() as context:
        assert_all_equal(autograd.grad(context, *program(remotely)), wanted)


@pytest.mark.parametrize("order", ["the input first", "the hook first"])
def test_an_engine_run_in_a_hook_through_an_input_does_not_change_its_gradient(group: Group, order: str) -> None:
    def program(call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        def again(_: object) -> None:
            with torch.enable_grad():
                torch.autograd.grad((used * 7).sum(), [base], retain_graph=True)

        base, early = leaf(3, seed=2), leaf(3, seed=3).cos()  # the engine executes nodes that were made later first
        received, sibling = call("b", pair, leaf(3), leaf(3, seed=1))
        used = sibling.exp() * base
        late = used * early
        (early if order == "the input first" else late).register_hook(again)
        return [received.sum(), late.sum()], [received, used, early]

    wanted = torch.autograd.grad(*program(locally), retain_graph=True)
    with autograd.context() as context:
        assert_all_equal(autograd.grad(context, *program(remotely), retain_graph=True), wanted)
    with autograd.context() as context:
        roots, inputs = program(remotely)
        context.backward(roots, retain_graph=True, inputs=inputs)
        assert_all_equal([context.gradients[tensor] for tensor in inputs], wanted)
