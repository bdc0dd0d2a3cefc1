"""grad() and backward(inputs=) run the nodes that lead from the roots to the inputs, on all workers, and no others."""

from __future__ import annotations

import pytest
import torch
from tests.support.one_process import assert_equal, leaf, locally, remotely

from telegrad import autograd
from telegrad.errors import BackwardError

calls: list[str] = []
kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    calls.clear()
    kept.clear()


def noted(tensor, name, factor=1):
    tensor.register_hook(lambda grad: (calls.append(name), grad * factor)[1])
    return tensor


def source():
    kept.append(leaf(3, seed=5))
    return kept[-1] * 1


def mixed(call, x):
    """Return a branch that leads to x, and one that leads to a leaf of another worker."""
    kept.append(noted(call("c", source).exp(), "other branch"))
    return noted(x.sin(), "branch") * 2 + kept[-1]


def mixed_remotely(x):
    return mixed(remotely, x)


def test_branches_of_other_workers_that_do_not_lead_to_an_input_do_not_run(group):
    x = leaf(3)
    with autograd.context() as context:
        autograd.grad(context, remotely("b", mixed_remotely, x).sum(), x)
        assert calls == ["branch"]
        remotely("b", backward_over_the_other_branch, int(context))  # its buffers were not freed
    assert calls == ["branch", "other branch"]


def backward_over_the_other_branch(context):
    autograd.backward(context, [kept[-1].sum()])


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("not this way")


def refusing(x):
    return Refuses.apply(remotely("c", source)) + x * 2


def test_an_error_in_a_branch_that_does_not_lead_to_an_input_does_not_matter(group):
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", refusing, x)
        (got,) = autograd.grad(context, y.sum(), x, retain_graph=True)
        assert_equal(got, torch.full((3,), 2.0, dtype=torch.double))
        with pytest.raises(BackwardError, match="not this way"):
            autograd.backward(context, [y.sum()])


def test_a_result_of_a_call_that_does_not_lead_to_an_input_is_left_alone(group):
    x, z = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        other = noted(remotely("b", torch.exp, z).sin(), "other")
        y = remotely("c", torch.sin, x)
        autograd.grad(context, (other * y).sum(), x)
        assert calls == []
        autograd.backward(context, [other.sum()])
    assert calls == ["other"]


def through(x):
    return remotely("c", torch.sin, x) * 2


def test_inputs_that_are_reached_through_several_workers_only(group):
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", through, x * 3)
        (got,) = autograd.grad(context, y.sum(), x)
    assert_equal(got, (6 * (3 * x).cos()).detach())


def test_an_input_that_is_returned_twice_and_used_locally(group):
    x = leaf(3)

    def program(call):
        h = x * 2
        y = call("b", torch.sin, h) + h
        return (call("b", torch.exp, call("c", torch.cos, y)) * y).sum(), h

    loss, h = program(locally)
    want = torch.autograd.grad(loss, [h, x])
    with autograd.context() as context:
        loss, h = program(remotely)
        got = autograd.grad(context, loss, [h, x])
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.parametrize("roots", ["one", "several"])
def test_hooks_of_a_single_root_run_though_it_leads_to_no_input(group, roots):
    """As in torch: hooks of several roots run only where they lead to an input."""

    def run(find):
        calls.clear()
        x, z = leaf(3), leaf(3, seed=1)
        inner = noted(x * 2, "inner")
        find([noted(inner.sum(), "root")] if roots == "one" else [noted(inner.sum(), "root"), (z * 3).sum()], [z])
        return list(calls)

    want = run(lambda roots, inputs: torch.autograd.grad(roots, inputs, allow_unused=True))
    with autograd.context() as context:
        assert run(lambda roots, inputs: autograd.grad(context, roots, inputs, allow_unused=True)) == want
    with autograd.context() as context:
        assert run(lambda roots, inputs: context.backward(roots, inputs=inputs)) == want


def hooked(call):
    x, z = leaf(3), leaf(3, seed=1)
    u = call("b", torch.sin, z)
    y = noted(call("b", torch.mul, x, torch.tensor(2.0)), "y", 10)
    v = noted(y * 3, "v", 100)
    return {"x": x, "z": z, "y": y, "v": v}, (v + u).sum()


def wanted_in_one_process(names, kind):
    tensors, loss = hooked(locally)
    inputs = [tensors[name] for name in names]
    if kind == "grad":
        return torch.autograd.grad(loss, inputs)
    loss.backward(inputs=inputs)
    return [tensor.grad for tensor in inputs]


SETS = ["y z", "v z", "y", "v", "y x", "v y", "v y x z", "x z"]


@pytest.mark.parametrize("names", SETS)
@pytest.mark.parametrize("kind", ["grad", "context", ".grad"])
def test_hooks_of_inputs_change_the_result_as_in_one_process(group, names, kind):
    want = wanted_in_one_process(names.split(), kind)
    called = sorted(calls)
    calls.clear()
    with autograd.context() as context:
        tensors, loss = hooked(remotely)
        inputs = [tensors[name] for name in names.split()]
        if kind == "grad":
            got = autograd.grad(context, loss, inputs)
        else:
            context.backward(loss, inputs=inputs, accumulate="context" if kind == "context" else "grad")
            got = [tensor.grad if kind == ".grad" else context.gradients[tensor] for tensor in inputs]
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)
    assert sorted(calls) == called


def test_a_hook_on_an_input_counts_though_a_sibling_of_the_same_message_leads_to_another_input(group):
    def program(call):
        x, z = leaf(3), leaf(3, seed=1)
        first, second = call("b", both, x, z)
        v = noted(second * 3, "v", 100)
        return x, v, (first + v).sum()

    x, v, loss = program(locally)
    want = torch.autograd.grad(loss, [v, x])
    with autograd.context() as context:
        x, v, loss = program(remotely)
        got = autograd.grad(context, loss, [v, x])
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)


def both(x, z):
    return x.sin(), z.exp()


def retaining(call):
    x, z = leaf(3), leaf(3, seed=1)
    sent = noted(x * 2, "sent", 10)
    came = noted(call("b", torch.sin, sent), "came", 10)
    inner = noted(came * 3, "inner", 10)
    for tensor in (sent, came, inner):
        tensor.retain_grad()
    return (sent, came, inner), x, z, (inner * call("c", torch.exp, z)).sum()


@pytest.mark.parametrize("wanted", ["x", "z", "sent", "came x"])
def test_retained_gradients_of_a_pass_with_inputs_are_those_of_one_process(group, wanted):
    def run(program_call, find):
        (sent, came, inner), x, z, loss = retaining(program_call)
        named = {"x": x, "z": z, "sent": sent, "came": came}
        found = find(loss, [named[name] for name in wanted.split()])
        return [*found, sent.grad, came.grad, inner.grad]

    want = run(locally, torch.autograd.grad)
    with autograd.context() as context:
        got = run(remotely, lambda loss, inputs: autograd.grad(context, loss, inputs))
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs)


def test_with_grad_all_hooks_of_an_input_that_is_a_leaf_run(group):
    x = leaf(3)
    node = torch.autograd.graph.get_gradient_edge(x).node
    handles = [
        node.register_prehook(lambda _: calls.append("before")),
        node.register_hook(lambda *_: calls.append("after")),
    ]
    with autograd.context() as context:
        loss = (remotely("b", torch.exp, x) + remotely("c", torch.sin, x)).sum()
        context.backward(loss, inputs=[x], accumulate="grad")
    for handle in handles:
        handle.remove()
    assert calls == ["before", "after"]
    assert_equal(x.grad, (x.exp() + x.cos()).detach())


def test_the_nodes_of_inputs_are_executed_by_backward_and_not_by_grad(group):
    """As in torch: the node that made an input is executed, and nodes behind it are not."""
    for accumulate in ("context", "grad"):
        with autograd.context() as context:
            h = leaf(3).exp()
            h.grad_fn.register_hook(lambda *_: calls.append("executed"))
            loss = remotely("b", torch.sin, h).sum()
            autograd.grad(context, loss, h, retain_graph=True)
            assert calls == []
            context.backward(loss, inputs=[h], accumulate=accumulate)
            assert calls == ["executed"]
            calls.clear()


def test_gradients_of_gradients_need_only_what_leads_to_the_inputs(group):
    def program(call, find):
        x, z = leaf(3), leaf(3, seed=1)
        y = call("b", torch.sin, x) * noted(call("c", torch.exp, z), "z's")
        (first,) = find((y**2).sum(), [x], create_graph=True)
        return find(first.sum(), [x])

    want = program(locally, torch.autograd.grad)
    called = list(calls)
    calls.clear()
    with autograd.context() as context:
        got = program(remotely, lambda loss, inputs, **options: autograd.grad(context, loss, inputs, **options))
    assert_equal(got[0], want[0])
    assert calls == called


def keep(x):
    kept.append(x)


def use():
    return kept[-1] * 2


def test_a_path_to_an_input_through_another_context_is_an_error_and_not_none(group):
    x = leaf(3)
    with autograd.context():
        remotely("b", keep, x)
    with autograd.context() as context, pytest.raises(BackwardError, match="context no longer valid"):
        autograd.grad(context, remotely("b", use).sum(), x, allow_unused=True)


def test_a_pass_whose_inputs_came_last_asks_no_other_worker(group):
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        autograd.grad(context, (y * y).sum(), y)
        assert not group["b"].autograd.contexts.get(int(context)).passes
