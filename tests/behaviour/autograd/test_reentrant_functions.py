"""Gradients of a backward inside a pass belong to the pass, as those of one process belong to ``.grad``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
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
    remotely,
    wanted_gradients,
)
from torch.utils.checkpoint import CheckpointFunction

from telegrad import autograd, rpc
from telegrad.backward.contexts import current
from telegrad.backward.pass_run import running
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError
from telegrad.testing.group import local_group

weights: dict[str, torch.Tensor] = {}
made: list[weakref.ref[torch.Tensor]] = []
during: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    made.clear()
    during.clear()


class Recompute(torch.autograd.Function):
    """A checkpoint made by hand."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        made.append(weakref.ref(x))
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grads[0])
        for action in during:
            action()
        return None, x.grad


def by_hand(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Recompute.apply(run, x)  # type: ignore[no-untyped-call]
    return result


def by_torch(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    # What checkpoint(run, x, use_reentrant=True) does, which imports torch's compiler first.
    result: torch.Tensor = CheckpointFunction.apply(run, True, x)  # type: ignore[no-untyped-call]
    return result


WAYS = {"by hand": by_hand, "by torch": by_torch}


def times(x: torch.Tensor, name: str = "w") -> torch.Tensor:
    return x * weights[name]


def twice(x: torch.Tensor, name: str = "w") -> torch.Tensor:
    return by_hand(partial(times, name=name), by_hand(partial(times, name=name), x))


def block(x: torch.Tensor, way: str, name: str = "w") -> torch.Tensor:
    return WAYS[way](partial(times, name=name), x)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def w() -> torch.Tensor:
    weights["w"] = leaf(3, seed=1)
    return weights["w"]


@pytest.fixture
def v() -> torch.Tensor:
    """Copy a value for another worker, which in reality shares no tensors."""
    weights["v"] = leaf(3, seed=5)
    return weights["v"]


# -- into the context -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["a", "b"])
def test_gradients_are_those_of_one_process_and_in_the_context(
    group: Group, w: torch.Tensor, way: str, worker: str
) -> None:
    x = leaf(3)
    w.grad = own = torch.ones(3, dtype=torch.double)

    def program(call: Any) -> torch.Tensor:
        return call("c", torch.sin, call(worker, block, x, way)).sum()

    assert_as_in_one_process(group, program, [x, w])
    assert w.grad is own
    assert_equal(own, torch.ones(3, dtype=torch.double))
    assert x.grad is None


def test_a_leaf_that_the_pass_also_reaches_itself_has_the_sum(group: Group, w: torch.Tensor, way: str) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group,
        lambda call: (call("b", block, x, way) + call("b", times, x) + call("c", torch.sin, x)).sum(),
        [x, w],
    )


def test_blocks_inside_blocks_and_one_after_the_other_share_a_parameter(
    group: Group, w: torch.Tensor, v: torch.Tensor
) -> None:
    x = leaf(3)
    assert_as_in_one_process(
        group,
        lambda call: call("b", torch.sin, by_torch(partial(twice, name="v"), call("b", twice, x))).sum(),
        [x, w, v],
    )


def test_blocks_of_two_islands_that_share_a_parameter(group: Group, w: torch.Tensor, way: str) -> None:
    x, y = leaf(3), leaf(3, seed=2)
    assert_as_in_one_process(
        group, lambda call: (call("b", block, x, way).sin() * call("b", block, y, way)).sum(), [x, y, w]
    )


def test_a_block_around_a_skip_connection_which_needs_a_gate(
    group: Group, w: torch.Tensor, v: torch.Tensor, way: str
) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        inner = block(x * 2, way, "v")
        return (call("b", block, inner, way) * inner + block(x, way, "v")).sum()

    assert_as_in_one_process(group, program, [x, w, v])


def test_passes_add_up(group: Group, w: torch.Tensor, way: str) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.sin, block(x, way)).sum()
        context.backward(loss, retain_graph=True)
        once = context.gradients[w].clone()
        context.backward(loss)
        assert_equal(context.gradients[w], 2 * once)


def test_leaves_that_the_function_made_are_not_kept_alive_or_in_the_context(group: Group, w: torch.Tensor) -> None:
    x = leaf(3)
    with autograd.context() as context:
        context.backward(remotely("b", torch.sin, by_hand(times, by_hand(times, x))).sum())
        assert context.gradients.keys() == {x, w}
        assert [local() for local in made] == [None, None]


def test_a_leaf_that_the_function_made_and_somebody_keeps_has_its_gradient_in_the_context(
    group: Group, w: torch.Tensor
) -> None:
    x, kept = leaf(3), []
    during.append(lambda: kept.append(made[-1]()))
    with autograd.context() as context:
        context.backward(remotely("b", torch.sin, by_hand(times, x)).sum())
        assert_equal(context.gradients[kept[0]], context.gradients[x])
        assert kept[0].grad is None


def test_a_function_that_makes_a_call_after_its_backward_finds_its_gradients_again(
    group: Group, w: torch.Tensor
) -> None:
    x, seen = leaf(3), []

    def look() -> None:
        before = w.grad
        rpc.rpc_sync("b", torch.neg, (torch.ones(1),))
        seen.append((before, w.grad))

    program = lambda call: call("b", torch.sin, by_hand(times, x)).sum()  # noqa: E731 - used twice below
    wanted = wanted_gradients(program, [x, w])
    during.append(look)
    with autograd.context() as context:
        context.backward(program(remotely), timeout=30)
        assert_equal(context.gradients[x], wanted[0])
        assert_equal(context.gradients[w], wanted[1])
    assert seen[0][0] is seen[0][1]
    assert_equal(seen[0][0], wanted[1])
    assert w.grad is None


def test_a_backward_in_a_hook_belongs_to_the_pass(group: Group, w: torch.Tensor) -> None:
    x = leaf(3)

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            loss = (grad * w).sum()
        loss.backward()

    def program(call: Any) -> torch.Tensor:
        y = x.sin()
        y.register_hook(hook)
        return call("b", torch.exp, y).sum()

    assert_as_in_one_process(group, program, [x, w])


@pytest.mark.parametrize("hooked", ["post", "tensor"])
def test_hooks_of_the_parameter_see_what_they_see_in_one_process(
    group: Group, w: torch.Tensor, way: str, hooked: str
) -> None:
    x = leaf(3)
    seen: list[torch.Tensor] = []
    if hooked == "post":
        w.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))  # type: ignore[union-attr]
    else:
        w.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)  # type: ignore[func-returns-value]

    def program(call: Any) -> torch.Tensor:
        return call("c", torch.sin, call("b", block, x, way)).sum()

    wanted_gradients(program, [x, w])
    wanted = list(seen)
    seen.clear()
    assert_as_in_one_process(group, program, [x, w])
    assert len(seen) == 2 * len(wanted) > 0  # one process again, and the workers
    for got, want in zip(seen, wanted * 2, strict=True):
        assert_equal(got, want)


def test_contexts_at_once_do_not_mix(group: Group, w: torch.Tensor, way: str) -> None:
    outcomes: dict[int, object] = {}

    def run(number: int) -> None:
        try:
            with acting_as(group["a"]):
                for repeat in range(5):
                    x = leaf(3, seed=100 * number + repeat)
                    with autograd.context() as context:
                        loss = remotely("c", torch.sin, remotely("b", block, x, way)).sum()
                        context.backward(loss, timeout=60)
                        there = gradients_on(group["b"], context)[w]
                    v = w.detach()
                    assert_equal(there, ((x * v).cos() * x).detach())
            outcomes[number] = "equal"
        except BaseException as error:  # noqa: BLE001 - shown below
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes == dict.fromkeys(range(6), "equal")
    assert w.grad is None


def test_a_function_that_fails_after_its_backward_leaves_grad_as_it_was(group: Group, w: torch.Tensor) -> None:
    x = leaf(3)
    w.grad = own = torch.ones(3, dtype=torch.double)

    def refuse() -> None:
        raise ValueError("this Function refuses")

    during.append(refuse)
    with autograd.context() as context:
        loss = remotely("b", torch.sin, by_hand(times, x)).sum()
        with pytest.raises(BackwardError, match="this Function refuses"):
            context.backward(loss)
    assert w.grad is own
    assert_equal(own, torch.ones(3, dtype=torch.double))
    assert group["a"].autograd.messaging.slots.try_acquire([id(w)])  # it is free again


# -- elsewhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["a", "b"])
def test_in_a_pass_into_grad_inner_gradients_are_in_grad(group: Group, w: torch.Tensor, way: str, worker: str) -> None:
    x = leaf(3)

    def program(call: Any) -> torch.Tensor:
        return call("c", torch.sin, call(worker, block, x, way)).sum()

    wanted = wanted_gradients(program, [x, w])
    with autograd.context() as context:
        context.backward(program(remotely), accumulate="grad")
        assert all_gradients(group, context) == {}
    assert_equal(x.grad, wanted[0])
    assert_equal(w.grad, wanted[1])


def test_with_inputs_a_checkpoint_of_torch_is_refused_in_its_own_words(group: Group, w: torch.Tensor) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.sin, by_torch(times, x)).sum()
        with pytest.raises(BackwardError, match=r"incompatible with .grad\(\)"):
            autograd.grad(context, loss, [x])


def test_outside_of_a_pass_nothing_changes(group: Group, w: torch.Tensor, way: str) -> None:
    x = leaf(3)
    with autograd.context() as context:
        block(x, way).sum().backward()
        assert context.gradients == {}
    assert_equal(w.grad, x.detach())
    assert_equal(x.grad, w.detach())


def test_as_in_torch_inner_gradients_go_into_grad_and_those_of_the_pass_into_the_context(
    group: Group, w: torch.Tensor
) -> None:
    for agent in group.values():
        agent.autograd.messaging.inner_into_grad = agent.autograd.messaging.accumulate_hooks = True
    x = leaf(3)
    with autograd.context() as context:
        loss = remotely("b", torch.neg, by_hand(times, x) + x * w).sum()
        context.backward(loss)
        assert_equal(context.gradients[w], -x.detach())
        assert_equal(context.gradients[x], -2 * w.detach())
    assert_equal(w.grad, -x.detach())
    assert x.grad is None


class Breaks(torch.autograd.Function):
    """A function that runs a backward, and changes the leaf so that its gradient cannot be uninstalled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            (weights["w"] * 3).sum().backward()
        weights["w"].data = torch.ones(4)
        return grads[0]


def test_gradients_that_cannot_be_uninstalled_fail_the_pass_and_leave_nothing_on_its_thread() -> None:
    weights["w"] = torch.ones(3, requires_grad=True)
    weights["w"].grad = torch.zeros(3)
    with local_group() as group:
        service = group["a"].autograd
        context = service.contexts.new()
        with pytest.raises(RuntimeError):
            service.backward(context.id, [Breaks.apply(leaf()).sum()])
        assert running.get() is None
        assert current.get() is None
        service.contexts.release(context)
