"""Hooks of every kind run once per pass, with the whole gradient, and may change it: as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.one_process import (
    Group,
    all_gradients,
    assert_as_in_one_process,
    assert_equal,
    gradients_on,
    leaf,
    locally,
    remotely,
    wanted_gradients,
)

from telegrad import autograd, rpc
from telegrad.errors import BackwardError

weights: dict[str, torch.Tensor] = {}
seen: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    seen.clear()


def times(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * weights[name]


def note_and_double(grad: torch.Tensor) -> torch.Tensor:
    seen.append(grad.detach().clone())
    return grad * 2


def noted(run: Callable[[], object]) -> list[torch.Tensor]:
    """Return the gradients that the hooks saw in a run."""
    seen.clear()
    run()
    return list(seen)


def noted_as_in_one_process(group: Group, program: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> None:
    wanted = noted(lambda: wanted_gradients(program, leaves))
    got = noted(lambda: assert_as_in_one_process(group, program, leaves))[len(wanted) :]
    assert len(got) == len(wanted) > 0
    for grad, want in zip(got, wanted, strict=True):
        assert_equal(grad, want)


# -- tensor hooks -------------------------------------------------------------------------------------------------


def test_a_hook_on_a_leaf_of_the_caller_sees_the_sum_of_two_calls_and_of_local_use_once(group: Group) -> None:
    x = leaf(3)
    weights.update(one=leaf(3, seed=1), two=leaf(3, seed=2))
    x.register_hook(note_and_double)
    noted_as_in_one_process(
        group,
        lambda call: (call("b", times, x, "one") + call("c", times, x, "two") + x.sin()).sum(),
        [x, *weights.values()],
    )


def test_a_hook_on_a_leaf_of_the_callee_sees_the_sum_of_two_calls_once(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    weights.update(shared=leaf(3, seed=2))
    weights["shared"].register_hook(note_and_double)
    noted_as_in_one_process(
        group,
        lambda call: (call("b", times, x, "shared") * call("b", times, y, "shared")).sum(),
        [x, y, *weights.values()],
    )


def hooked_inside(x: torch.Tensor) -> torch.Tensor:
    inner = x.exp()
    inner.register_hook(note_and_double)
    return inner * inner


def test_a_hook_on_a_tensor_inside_the_callee_changes_what_flows_back(group: Group) -> None:
    x = leaf(3)
    noted_as_in_one_process(group, lambda call: call("b", hooked_inside, x * 3).sum(), [x])


def test_a_hook_on_a_tensor_that_is_sent_to_two_workers_sees_the_sum_once(group: Group) -> None:
    x = leaf(3)
    weights.update(one=leaf(3, seed=1), two=leaf(3, seed=2))

    def program(call: Any) -> torch.Tensor:
        inner = x.exp()
        inner.register_hook(note_and_double)
        return (call("b", times, inner, "one") + call("c", times, inner, "two") + inner).sum()

    noted_as_in_one_process(group, program, [x, *weights.values()])


def test_a_hook_on_the_result_of_a_call_sees_its_whole_gradient_once(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        y = call("b", torch.exp, x)
        y.register_hook(note_and_double)
        return (y * y + y.sin()).sum()

    noted_as_in_one_process(group, program, [x])


def hooked_argument(x: torch.Tensor) -> torch.Tensor:
    x = x * 1  # in one process the argument is the caller's tensor, with its hooks
    x.register_hook(note_and_double)
    return x.sin()


def test_hooks_on_a_loop_through_two_workers_run_in_the_order_of_one_process(group: Group) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        y = x
        for worker in ("b", "c", "b"):
            y = call(worker, hooked_argument, y)
        return y.sum()

    noted_as_in_one_process(group, program, [x])


def test_a_hook_on_an_unused_output_does_not_run(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    y.register_hook(note_and_double)
    with autograd.context() as context:
        used, _unused = remotely("b", torch.exp, x), remotely("b", torch.exp, y)
        context.backward(used.sum())
        assert set(context.gradients) == {x}
    assert seen == []


def test_hooks_run_again_in_a_second_pass(group: Group) -> None:
    x = leaf(3)
    x.register_hook(note_and_double)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        context.backward(loss, retain_graph=True)
        context.backward(loss)
        assert_equal(context.gradients[x], 4 * x.exp().detach())
    assert len(seen) == 2


def test_an_error_in_a_hook_is_raised_by_backward_with_the_name_of_the_worker(group: Group) -> None:
    def refuse(grad: torch.Tensor) -> None:
        raise ValueError("this hook refuses")

    weights.update(w=leaf(3))
    weights["w"].register_hook(refuse)
    with autograd.context() as context:
        loss = remotely("b", times, torch.ones(3, dtype=torch.double), "w").sum()
        with pytest.raises(
            BackwardError, match=r"Error on Node 1: this hook refuses\n\(worker 'b', ValueError\)"
        ) as caught:
            context.backward(loss)
    assert "this hook refuses" in str(caught.value.__cause__)
    assert "in refuse" in str(caught.value.__cause__)


def test_a_hook_on_an_input_of_grad_sees_the_sum_of_two_calls_and_of_local_use_once(group: Group) -> None:
    x = leaf(3)
    weights.update(w=leaf(3, seed=1))
    x.register_hook(note_and_double)

    def program(call: Any) -> torch.Tensor:
        return (call("b", times, x, "w") + call("c", torch.exp, x) + x.sin()).sum()

    (want,) = torch.autograd.grad(program(locally), [x])
    with autograd.context() as context:
        (got,) = autograd.grad(context, program(remotely), [x])
    assert_equal(got, want)
    assert len(seen) == 2
    assert_equal(seen[1], seen[0])


def test_hooks_on_leaves_that_are_no_inputs_of_grad_do_not_run(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=2)
    weights.update(w=leaf(3, seed=1))
    for tensor in (y, weights["w"]):
        tensor.register_hook(note_and_double)
    with autograd.context() as context:
        autograd.grad(context, remotely("b", times, x * y, "w").sum(), [x])
    assert seen == []


# -- retain_grad --------------------------------------------------------------------------------------------------


def test_retain_grad_keeps_the_gradient_of_a_received_tensor_and_of_one_in_between(group: Group) -> None:
    x = leaf(3)
    weights.update(w=leaf(3, seed=1))

    def program(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inner = x.sin()
        y = call("b", times, inner, "w")
        inner.retain_grad()
        y.retain_grad()
        return inner, y, (y * y + inner).sum()

    inner_wanted, y_wanted, loss = program(locally)
    loss.backward()
    x.grad = weights["w"].grad = None
    with autograd.context() as context:
        inner, y, loss = program(remotely)
        context.backward(loss)
    assert_equal(inner.grad, inner_wanted.grad)
    assert_equal(y.grad, y_wanted.grad)
    assert x.grad is None


# -- post-accumulate hooks ----------------------------------------------------------------------------------------


def grads_seen_after_accumulation(tensor: torch.Tensor) -> None:
    assert tensor.grad is not None
    seen.append(tensor.grad.clone())


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_post_accumulate_hook_runs_once_with_the_contexts_gradient_and_leaves_grad_alone(
    group: Group, worker: str
) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    weights.update(shared=leaf(3, seed=2))
    hooked = x if worker == "a" else weights["shared"]
    own = torch.full((3,), 7.0, dtype=torch.double)
    hooked.grad = own
    hooked.register_post_accumulate_grad_hook(grads_seen_after_accumulation)

    def program(call: Any) -> torch.Tensor:
        return (call("b", times, x, "shared") * call("b", times, y, "shared") + x).sum()

    wanted = wanted_gradients(program, [x, y, weights["shared"]])
    seen.clear()
    with autograd.context() as context:
        context.backward(program(remotely))
        got = all_gradients(group, context)
    for tensor, want in zip([x, y, weights["shared"]], wanted, strict=True):
        assert_equal(got[tensor], want)
    assert len(seen) == 1
    assert_equal(seen[0], got[hooked])
    assert hooked.grad is own
    assert_equal(own, torch.full((3,), 7.0, dtype=torch.double))


def test_a_post_accumulate_hook_sees_the_sum_of_all_passes_of_a_context(group: Group) -> None:
    x = leaf(3)
    x.register_post_accumulate_grad_hook(grads_seen_after_accumulation)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        context.backward(loss, retain_graph=True)
        context.backward(loss)
    want = x.exp().detach()
    assert len(seen) == 2
    assert_equal(seen[0], want)
    assert_equal(seen[1], 2 * want)
    assert x.grad is None


def test_a_post_accumulate_hook_runs_once_where_a_skip_connection_needs_a_gate(group: Group) -> None:
    x = leaf(3)
    weights.update(w=leaf(3, seed=1))
    x.register_post_accumulate_grad_hook(grads_seen_after_accumulation)

    def program(call: Any) -> torch.Tensor:
        inner = x * 2
        return (call("b", times, inner, "w") * inner + x).sum()

    noted_as_in_one_process(group, program, [x, weights["w"]])
    assert group["a"].autograd.debug_info()["probes"] == 1


def test_a_post_accumulate_hook_may_step_an_optimizer_and_drop_the_gradient(group: Group) -> None:
    weights.update(w=leaf(3))
    start = weights["w"].detach().clone()
    optimizer = torch.optim.SGD([weights["w"]], lr=0.5)

    def step(tensor: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    weights["w"].register_post_accumulate_grad_hook(step)
    with autograd.context() as context:
        context.backward(remotely("b", times, torch.ones(3, dtype=torch.double), "w").sum())
        assert gradients_on(group["b"], context) == {}
    assert_equal(weights["w"].detach(), start - 0.5)
    assert weights["w"].grad is None


def test_a_post_accumulate_hook_that_raises_leaves_grad_as_it_was(group: Group) -> None:
    def refuse(tensor: torch.Tensor) -> None:
        raise ValueError("no")

    x = leaf(3)
    own = x.grad = torch.ones(3, dtype=torch.double)
    handle = x.register_post_accumulate_grad_hook(refuse)
    with autograd.context() as context:
        loss = remotely("b", torch.exp, x).sum()
        with pytest.raises(BackwardError, match="Error on Node 0: no"):
            context.backward(loss, retain_graph=True)
        assert x.grad is own
        handle.remove()
        context.backward(loss)
        assert_equal(context.gradients[x], x.exp().detach())
    assert x.grad is own


# -- hooks that are called after a node ---------------------------------------------------------------------------


def zero_what_was_used(x: torch.Tensor) -> torch.Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda inputs, outputs: zero(outputs[0]))
    return x * 3


def zero_what_was_kept(x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    x.register_hook(kept.append)
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda inputs, outputs: zero(kept.pop()))
    return x * 3


def zero(gradient: torch.Tensor) -> None:
    gradient.zero_()


@pytest.mark.parametrize("function", [zero_what_was_used, zero_what_was_kept])
def test_a_hook_after_a_node_cannot_change_what_the_node_was_given(
    group: Group, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = leaf(3)
    assert_as_in_one_process(group, lambda call: (call("b", function, x * 2) * 5).sum(), [x])


# -- hooks on AccumulateGrad --------------------------------------------------------------------------------------


def hook_accumulate_nodes(tensor: torch.Tensor) -> list[Any]:
    """Register hooks before and after AccumulateGrad of a leaf. They live as long as the node that this returns."""
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    node.register_prehook(lambda grads: (grads[0] * 3,))
    node.register_hook(lambda inputs, outputs: seen.append(outputs[0].clone()))
    return [node]


def test_with_grad_hooks_on_accumulategrad_run_on_every_worker(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    weights.update(shared=leaf(3, seed=2))
    nodes = [hook_accumulate_nodes(tensor) for tensor in (x, weights["shared"])]

    def program(call: Any) -> torch.Tensor:
        return (call("b", times, x, "shared") * call("b", times, y, "shared") + x).sum()

    leaves = [x, y, weights["shared"]]
    wanted = wanted_gradients(program, leaves)
    assert len(seen) == 2
    with autograd.context() as context:
        context.backward(program(remotely), accumulate="grad")
        assert all_gradients(group, context) == {}
    assert len(seen) == 4
    for tensor, want in zip(leaves, wanted, strict=True):
        assert_equal(tensor.grad, want)
    assert len(nodes) == 2


def test_hooks_on_accumulategrad_run_in_passes_into_a_context_where_asked_for(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    weights.update(shared=leaf(3, seed=2))
    nodes = [hook_accumulate_nodes(tensor) for tensor in (x, weights["shared"])]
    for agent in group.values():
        agent.autograd.messaging.accumulate_hooks = True

    def program(call: Any) -> torch.Tensor:
        return (call("b", times, x, "shared") * call("b", times, y, "shared") + x).sum()

    for repeat in (1, 2, 3):
        assert_as_in_one_process(group, program, [x, y, weights["shared"]])
        assert len(seen) == 4 * repeat
    assert x.grad is None
    assert weights["shared"].grad is None
    assert len(nodes) == 2


def test_hooks_on_accumulategrad_do_not_run_in_passes_into_a_context_otherwise(group: Group) -> None:
    x = leaf(3)
    nodes = hook_accumulate_nodes(x)
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, x).sum())
        assert_equal(context.gradients[x], x.exp().detach())
    assert seen == []
    assert len(nodes) == 1


# -- calls inside hooks -------------------------------------------------------------------------------------------


def test_a_hook_may_make_calls(group: Group) -> None:
    x = leaf(3)
    y = x.sin()
    y.register_hook(lambda grad: rpc.rpc_sync("c", torch.mul, (grad, 2)))
    with autograd.context() as context:
        context.backward(remotely("b", torch.exp, y).sum(), timeout=30)
        assert_equal(context.gradients[x], (2 * y.exp() * x.cos()).detach())


def calls_in_a_hook(x: torch.Tensor) -> torch.Tensor:
    x, agent = x.sin(), rpc.default_agent()
    x.register_hook(lambda grad: agent.call("a", torch.mul, (grad, 2)))
    return x.exp()


def test_a_hook_on_the_callee_may_call_the_worker_that_waits_in_backward(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", calls_in_a_hook, x).sum(), timeout=30)
        assert_equal(context.gradients[x], (2 * x.sin().exp() * x.cos()).detach())
