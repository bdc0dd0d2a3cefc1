"""Gradients of every kind of leaf go into the context or into ``.grad``."""

from __future__ import annotations

import threading
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
from torch import nn

from telegrad import autograd
from telegrad.backward.accumulate import Gradients, add_up
from telegrad.default_agent import acting_as
from telegrad.torch_private import run_backward

weights: dict[str, torch.Tensor] = {}
modules: dict[str, nn.Module] = {}


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    modules.clear()


def times(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * weights[name]


def forward(name: str, *args: torch.Tensor) -> Any:
    return modules[name](*args)


# -- accumulate ---------------------------------------------------------------------------------------------------


def test_into_the_context_leaves_grad_alone_on_every_worker(group: Group) -> None:
    x = leaf(3)
    weights.update(w=leaf(3, seed=1))
    x.grad = own = torch.ones(3, dtype=torch.double)
    with autograd.context() as context:
        context.backward(remotely("b", times, x, "w").sum())
        assert set(context.gradients) == {x}
        assert set(gradients_on(group["b"], context)) == {weights["w"]}
    assert x.grad is own
    assert_equal(own, torch.ones(3, dtype=torch.double))
    assert weights["w"].grad is None


def test_gradients_of_two_passes_of_a_context_are_summed(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        y = remotely("b", torch.exp, x)
        context.backward(y.sum(), retain_graph=True)
        first = context.gradients[x].clone()
        context.backward((y * y).sum())
        assert_equal(first, x.exp().detach())
        assert_equal(context.gradients[x], (x.exp() + 2 * (2 * x).exp()).detach())


def test_into_grad_accumulates_over_passes_and_contexts_on_every_worker(group: Group) -> None:
    x = leaf(3)
    weights.update(w=leaf(3, seed=1))
    for passes in (1, 2, 3):
        with autograd.context() as context:
            context.backward(remotely("b", times, x, "w").sum(), accumulate="grad")
            assert all_gradients(group, context) == {}
        assert_equal(x.grad, passes * weights["w"].detach())
        assert_equal(weights["w"].grad, passes * x.detach())


def make_model() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 1)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_ordinary_optimizers_on_each_worker_train_as_in_one_process(
    group: Group, optimizer: type[torch.optim.Optimizer]
) -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

    def train(call: Any, parts: tuple[nn.Module, ...]) -> list[float]:
        modules.update(b=parts[1], c=parts[2])
        optimizers = [optimizer(part.parameters(), lr=0.05) for part in parts]
        losses = []
        for _ in range(5):
            for one in optimizers:
                one.zero_grad()
            if call is locally:
                loss = call("c", forward, "c", call("b", forward, "b", parts[0](data))).square().mean()
                loss.backward()
            else:
                with autograd.context() as context:
                    loss = call("c", forward, "c", call("b", forward, "b", parts[0](data))).square().mean()
                    context.backward(loss, accumulate="grad")
            for one in optimizers:
                one.step()
            losses.append(loss.item())
        return losses

    wanted = train(locally, make_model())
    got = train(remotely, make_model())
    assert got == pytest.approx(wanted, rel=1e-5)
    assert got[-1] < got[0]


def test_an_unknown_kind_of_accumulation_is_refused(group: Group) -> None:
    with autograd.context() as context:
        with pytest.raises(ValueError, match="accumulate is 'context' or 'grad', not 'there'"):
            context.backward(leaf(3).sum(), accumulate="there")


# -- contexts side by side ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [False, True])
def test_contexts_of_several_threads_on_the_same_parameters_do_not_mix(group: Group, hooks: bool) -> None:
    weights.update(w=leaf(3, seed=1))
    calls: list[int] = []
    if hooks:
        weights["w"].register_post_accumulate_grad_hook(lambda tensor: calls.append(1))
    outcomes: dict[int, str] = {}

    def work(number: int) -> None:
        with acting_as(group["a" if number % 2 else "c"]):
            for repeat in range(10):
                x = (leaf(3, seed=number * 100 + repeat) * 1).detach().requires_grad_()
                with autograd.context() as context:
                    y = remotely("b", times, x, "w")
                    z = remotely("b", times, y, "w")
                    context.backward(z.sum(), timeout=60)
                    mine = context.gradients[x]
                    theirs = gradients_on(group["b"], context)[weights["w"]]
                w = weights["w"].detach()
                torch.testing.assert_close(mine, w * w)
                torch.testing.assert_close(theirs, 2 * w * x.detach())
        outcomes[number] = "equal"

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == dict.fromkeys(range(4), "equal")
    assert weights["w"].grad is None
    assert len(calls) == (40 if hooks else 0)


def test_two_contexts_of_two_workers_hold_their_own_gradients_at_one_time(group: Group) -> None:
    weights.update(w=leaf(3, seed=1))
    one, two = leaf(3, seed=2), leaf(3, seed=3)
    with autograd.context() as first:
        context = group["c"].autograd.contexts
        loss = remotely("b", times, one, "w").sum()

        def other() -> None:
            with acting_as(group["c"]), autograd.context() as second:
                second.backward(remotely("b", times, two, "w").sum())
                assert_equal(gradients_on(group["b"], second)[weights["w"]], two.detach())
                first.backward(loss)
                assert_equal(gradients_on(group["b"], first)[weights["w"]], one.detach())
                assert_equal(gradients_on(group["b"], second)[weights["w"]], two.detach())
                done.append(second)

        done: list[int] = []
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
        assert done
        assert context.get(done[0]) is None


# -- kinds of gradients -------------------------------------------------------------------------------------------


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def embedding(sparse: bool = True) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(10, 3, sparse=sparse, dtype=torch.double)


def test_the_gradient_of_a_sparse_embedding_stays_sparse(group: Group) -> None:
    modules["e"] = embedding()
    weight = modules["e"].weight

    def program(call: Any) -> torch.Tensor:
        return call("b", forward, "e", indices(1, 4, 1)).square().sum()

    (want,) = wanted_gradients(program, [weight])
    with autograd.context() as context:
        context.backward(program(remotely))
        got = gradients_on(group["b"], context)[weight]
    assert got.is_sparse
    assert want is not None
    assert_equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("order", [("e", "w"), ("w", "e")])
def test_sparse_and_dense_gradients_of_one_weight_are_summed(group: Group, order: tuple[str, str]) -> None:
    modules["e"] = embedding()
    weight = weights["w"] = modules["e"].weight

    def program(call: Any) -> torch.Tensor:
        parts = {
            "e": lambda: call("b", forward, "e", indices(1, 4, 1)).square().sum(),
            "w": lambda: call("b", times, torch.ones(10, 3, dtype=torch.double), "w").sin().sum(),
        }
        return parts[order[0]]() + parts[order[1]]()

    assert_as_in_one_process(group, program, [weight])


def test_sparse_gradients_of_two_passes_and_a_dense_one_are_summed(group: Group) -> None:
    modules["e"] = embedding()
    weight = weights["w"] = modules["e"].weight
    with autograd.context() as context:
        sparse = remotely("b", forward, "e", indices(1, 4, 1)).sum()
        context.backward(sparse, retain_graph=True)
        context.backward(sparse)
        got = gradients_on(group["b"], context)[weight]
        assert got.is_sparse
        context.backward(remotely("b", times, torch.ones(10, 3, dtype=torch.double), "w").sum())
        got = gradients_on(group["b"], context)[weight]
    counts = torch.ones(10, 3, dtype=torch.double)
    counts[1] += 4
    counts[4] += 2
    assert_equal(got, counts)


def test_a_sparse_gradient_travels_sparse_to_the_caller(group: Group) -> None:
    x = leaf(10, 3)

    def program(call: Any) -> torch.Tensor:
        return call("b", sparse_lookup, x).sum()

    (want,) = wanted_gradients(program, [x])
    assert want is not None
    assert want.is_sparse
    with autograd.context() as context:
        context.backward(program(remotely))
        got = context.gradients[x]
    assert got.is_sparse
    assert_equal(got.to_dense(), want.to_dense())


def sparse_lookup(weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(indices(1, 4, 1), weight, sparse=True) * 3


def test_complex_leaves(group: Group) -> None:
    z = leaf(3, dtype=torch.complex128)
    weights.update(w=leaf(3, dtype=torch.complex128, seed=1))
    assert_as_in_one_process(
        group, lambda call: call("b", torch.sin, call("b", times, z, "w")).abs().sum(), [z, weights["w"]]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_floats(group: Group, dtype: torch.dtype) -> None:
    x = leaf(4, 4, dtype=dtype)
    weights.update(w=leaf(4, 4, dtype=dtype, seed=1))
    assert_as_in_one_process(group, lambda call: call("b", times, x, "w").float().sin().sum(), [x, weights["w"]])


def test_mixed_types_of_one_computation(group: Group) -> None:
    x = leaf(3, dtype=torch.float32)
    weights.update(w=leaf(3, dtype=torch.double))
    assert_as_in_one_process(group, lambda call: call("b", times, x, "w").sum(), [x, weights["w"]])


def test_an_empty_leaf_and_a_leaf_of_no_dimension(group: Group) -> None:
    empty, scalar = leaf(0, 3), leaf()
    assert_as_in_one_process(
        group, lambda call: call("b", torch.exp, empty).sum() + call("b", torch.exp, scalar), [empty, scalar]
    )


def transposed_times(x: torch.Tensor, name: str) -> torch.Tensor:
    return x @ weights[name].t()


def test_a_gradient_has_the_strides_of_its_leaf(group: Group) -> None:
    x = leaf(4, 5)
    weights.update(w=leaf(5, 6).detach().t().requires_grad_())
    program = lambda call: call("b", transposed_times, x.expand(4, 5), "w").sum()  # noqa: E731 - used twice below
    assert weights["w"].shape == (6, 5)
    (want,) = wanted_gradients(program, [weights["w"]])
    assert want is not None
    with autograd.context() as context:
        context.backward(program(remotely))
        got = gradients_on(group["b"], context)[weights["w"]]
    assert_equal(got, want)
    assert got.stride() == want.stride()


DENSE_LEAVES = {
    "contiguous": lambda: leaf(4, 6),
    "transposed": lambda: leaf(6, 4).detach().t().requires_grad_(),
    "channels last": lambda: leaf(2, 3, 4, 5).detach().to(memory_format=torch.channels_last).requires_grad_(),
    "with a dimension of size 1": lambda: leaf(4, 1, 6),
}
LAYOUTS_OF_GRADIENTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "as the leaf": lambda call, x: call("b", torch.exp, x),
    "transposed": lambda call, x: call("b", torch.exp, x.transpose(0, 1)),
    "transposed elsewhere": lambda call, x: call("b", torch.clone, x).transpose(0, 1),
    "transposed here": lambda call, x: x.transpose(0, 1) * call("b", torch.exp, torch.ones(())),
    "expanded": lambda call, x: call("b", torch.clone, x).sum() * torch.ones(x.transpose(0, 1).shape),
}


@pytest.mark.parametrize("make", DENSE_LEAVES.values(), ids=DENSE_LEAVES)
@pytest.mark.parametrize("use", LAYOUTS_OF_GRADIENTS.values(), ids=LAYOUTS_OF_GRADIENTS)
def test_a_gradient_that_nobody_else_holds_has_the_strides_of_its_leaf(
    group: Group, make: Callable[[], torch.Tensor], use: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    x = make()
    factor = torch.arange(x.numel(), dtype=torch.double).reshape(x.transpose(0, 1).shape)

    def program(call: Any) -> torch.Tensor:
        y = use(call, x)
        return (y * (factor if y.shape == factor.shape else factor.transpose(0, 1))).sum()

    (want,) = wanted_gradients(program, [x])
    assert want is not None
    with autograd.context() as context:
        context.backward(program(remotely))
        got = context.gradients[x]
    assert_equal(got, want)
    assert got.stride() == want.stride()


def test_a_gradient_is_no_alias_of_anything_that_the_user_holds(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    given = torch.ones(3, dtype=torch.double)
    with autograd.context() as context:
        z = x + y
        context.backward([z, remotely("b", torch.exp, x)], grad_tensors=[given, given])
        got = context.gradients
        got[y].mul_(10)
        assert_equal(given, torch.ones(3, dtype=torch.double))
        assert_equal(got[x], (1 + x.exp()).detach())


def test_with_create_graph_a_gradient_is_no_alias_either(group: Group) -> None:
    x, given = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        context.backward([x], grad_tensors=[given], create_graph=True)
        got = context.gradients[x]
        assert got.data_ptr() != given.data_ptr()
        assert_equal(torch.autograd.grad(got.sum(), given)[0], torch.ones(3, dtype=torch.double))


def test_gradients_keep_their_graph_when_a_pass_with_create_graph_is_run_under_no_grad(group: Group) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = (remotely("b", torch.exp, x) + remotely("c", torch.exp, x) + x.exp()).sum()
        with torch.no_grad():
            context.backward(loss, create_graph=True)
        (second,) = autograd.grad(context, context.gradients[x].sum(), [x])
        assert_equal(second, 3 * x.exp().detach())


def sparse_leaf(shift: float) -> torch.Tensor:
    values = torch.tensor([3.0, 4.0, 5.0], dtype=torch.double) + shift
    return torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3), check_invariants=True).requires_grad_()


def test_sparse_tensors_as_arguments(group: Group) -> None:
    one, two = sparse_leaf(0), sparse_leaf(1)

    def program(call: Any) -> torch.Tensor:
        return torch.sparse.sum(call("b", torch.add, one, two) * one.detach())

    wanted = wanted_gradients(program, [one, two])
    with autograd.context() as context:
        context.backward(program(remotely))
        for tensor, want in zip((one, two), wanted, strict=True):
            got = context.gradients[tensor]
            assert want is not None
            assert got.layout == want.layout
            assert_equal(got.to_dense(), want.to_dense())


class Both(torch.autograd.Function):
    """A function that returns the same gradient for both inputs, and remembers its address."""

    place = 0

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        Both.place = grads[0].data_ptr()
        return grads[0], grads[0]


@pytest.mark.parametrize("copies", [False, True])
def test_a_gradient_that_two_leaves_get_is_copied_for_both_only_where_that_is_asked_for(
    group: Group, copies: bool
) -> None:
    messaging = group["a"].autograd.messaging
    messaging.accumulate_hooks, messaging.accumulate_through.copies_shared = True, copies
    one, other = leaf(3), leaf(3, seed=1)
    with autograd.context() as context:
        context.backward(Both.apply(one, other).exp().sum())  # type: ignore[no-untyped-call]
        places = {context.gradients[x].data_ptr() for x in (one, other)}
        assert len(places) == 2
        assert (Both.place in places) is not copies
        assert_equal(context.gradients[one], context.gradients[other])


def test_a_gradient_that_is_changed_after_the_pass_stays_in_grad_until_the_context_ends(group: Group) -> None:
    x, y = leaf(3), leaf(3, seed=1)
    x.grad = own = torch.ones(3, dtype=torch.double)
    messaging = group["a"].autograd.messaging
    messaging.accumulate_hooks = True
    messaging.accumulate_through.finished_later = lambda tensor: tensor is x
    with autograd.context() as context:
        context.backward((x * y).sum())
        assert_equal(x.grad, y.detach())
        x.grad.mul_(2)  # as DistributedDataParallel does, when it has the gradients of all its parameters
        assert_equal(context.gradients[x], 2 * y.detach())
        assert_equal(context.gradients[y], x.detach())
        assert y.grad is None
        context.backward((x * y).sum())
        assert_equal(context.gradients[x], 3 * y.detach())
    assert x.grad is own
    assert_equal(own, torch.ones(3, dtype=torch.double))


def test_a_new_context_takes_over_a_leaf_from_one_that_has_not_ended(group: Group) -> None:
    x = leaf(3)
    messaging = group["a"].autograd.messaging
    messaging.accumulate_hooks = True
    messaging.accumulate_through.finished_later = lambda tensor: True
    contexts = [group["a"].autograd.contexts.new() for _ in range(2)]
    for number, context in enumerate(contexts, 1):
        group["a"].autograd.backward(context.id, [(x * number).sum()])
    assert_equal(contexts[0].gradients.get(x), torch.ones(3, dtype=torch.double))
    assert_equal(contexts[1].gradients.get(x), torch.full((3,), 2.0, dtype=torch.double))
    for context in contexts:
        group["a"].autograd.contexts.release(context)
    assert x.grad is None


def test_a_gradient_that_is_a_view_of_what_nobody_holds_is_kept_without_a_copy() -> None:
    layer, gradients = torch.nn.Linear(3, 4), Gradients()
    edges = [torch.autograd.graph.get_gradient_edge(parameter) for parameter in layer.parameters()]
    captured = run_backward((layer(torch.rand(2, 3)),), (torch.ones(2, 4),), False, False, tuple(edges), True, False)
    assert all(grad is not None and grad._is_view() for grad in captured)
    places = [grad.data_ptr() for grad in captured if grad is not None]
    for index, parameter in enumerate(layer.parameters()):
        gradients.add(parameter, captured, index)
    kept = [gradients.get(parameter) for parameter in layer.parameters()]
    assert [grad.data_ptr() for grad in kept if grad is not None] == places
    assert not any(grad is None or grad._is_view() for grad in kept)


@pytest.mark.parametrize("held", ["base", "another view", "the view", "an alias"])
def test_a_gradient_that_is_a_view_of_what_others_hold_is_copied(held: str) -> None:
    leaf, gradients = torch.ones(2, 3, requires_grad=True), Gradients()
    with torch.no_grad():
        base = torch.rand(3, 2)
        captured = [base.t()]
        others = {"base": base, "another view": base[0], "the view": captured[0], "an alias": base.detach()}
    other = others.pop(held)
    others.clear()
    del base
    place = captured[0].data_ptr()
    gradients.add(leaf, captured, 0)
    kept = gradients.get(leaf)
    assert kept is not None
    assert kept.data_ptr() != place
    assert torch.equal(kept, captured[0])
    assert other is not None


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_sparse_and_a_dense_gradient_add_up_in_either_order(sparse_first: bool) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True)
    dense = torch.ones(4, 3)
    total = add_up(sparse, dense) if sparse_first else add_up(dense, sparse)
    assert torch.equal(total, sparse.to_dense() + dense)
