"""Post-accumulate hooks may wait for calls, and no pass blocks a leaf for others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.one_process import Group, assert_equal, gradients_on, leaf, remotely, wait_until

from telegrad import autograd, rpc
from telegrad.backward.grad_slots import Installed
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError, DeadlineExceeded, NotInitialized, WorkerLost
from telegrad.testing.group import local_group

weights: dict[str, torch.Tensor] = {}
seen: list[Any] = []
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def fresh() -> None:
    weights.clear()
    seen.clear()


def times(x: torch.Tensor, name: str) -> torch.Tensor:
    return x * weights[name]


def noop() -> int:
    return 1


def call_back() -> int:
    result: int = rpc.rpc_sync("b", noop)
    return result


def in_threads(group: Group, worker: str, bodies: list[Callable[[], object]]) -> list[object]:
    """Run each of these on a new thread of a worker. Returns their results and errors."""
    outcomes: list[object] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            with acting_as(group[worker]):
                outcomes[number] = bodies[number]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return outcomes


def one_pass(number: int) -> object:
    x = torch.full((3,), number + 1.0)
    with autograd.context() as context:
        context.backward(remotely("b", times, x, "w").sum(), timeout=20)
        return remotely("b", first_gradient_there, context)


def first_gradient_there(context: int) -> float:
    return autograd.get_gradients(context)[weights["w"]][0].item()


def test_forty_contexts_on_a_parameter_whose_hook_makes_a_call_that_calls_back(group: Group) -> None:
    weights["w"] = torch.ones(3, requires_grad=True)
    weights["w"].register_post_accumulate_grad_hook(lambda _: seen.append(rpc.rpc_sync("a", call_back)))
    got = in_threads(group, "a", [lambda n=number: one_pass(n) for number in range(40)])
    assert got == [number + 1.0 for number in range(40)]
    assert seen == [1] * 40
    assert weights["w"].grad is None


def run_elsewhere(number: int) -> object:
    """Run a pass of another context on the same parameter, from a thread that is in no context."""
    agent = rpc.default_agent()
    (outcome,) = in_threads({agent.me.name: agent}, agent.me.name, [lambda: one_pass(number)])
    return outcome


def test_the_call_of_a_hook_may_run_a_pass_on_the_same_parameter(group: Group) -> None:
    w = weights["w"] = torch.ones(3, requires_grad=True)
    w.grad = own = torch.full((3,), 7.0)

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        before = parameter.grad[0].item()
        inner = rpc.rpc_sync("a", run_elsewhere, (4,)) if before == 1.0 else None
        seen.append((before, inner, parameter.grad[0].item()))

    w.register_post_accumulate_grad_hook(hook)
    with autograd.context() as context:
        context.backward(remotely("b", times, torch.ones(3), "w").sum(), timeout=20)
        assert_equal(gradients_on(group["b"], context)[w], torch.ones(3))
    assert seen == [(5.0, None, 5.0), (1.0, 5.0, 1.0)]
    assert w.grad is own


def test_what_a_hook_sets_in_grad_before_and_after_its_call_is_the_contexts_gradient(group: Group) -> None:
    w = weights["w"] = torch.ones(3, requires_grad=True)

    def hook(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad * 2
        rpc.rpc_sync("a", noop)
        seen.append(parameter.grad.clone())
        parameter.grad = parameter.grad * 5

    w.register_post_accumulate_grad_hook(hook)
    with autograd.context() as context:
        context.backward(remotely("b", times, torch.ones(3), "w").sum(), timeout=20)
        assert_equal(gradients_on(group["b"], context)[w], torch.full((3,), 10.0))
    assert_equal(seen[0], torch.full((3,), 2.0))
    assert w.grad is None


def test_a_hook_may_run_a_backward_on_its_own_leaf_as_in_one_process(group: Group) -> None:
    def hooked(tensor: torch.Tensor) -> torch.Tensor:
        entered: list[int] = []

        def hook(parameter: torch.Tensor) -> None:
            if not entered:
                entered.append(1)
                with torch.enable_grad():
                    inner = (parameter * 3).sum()
                inner.backward()

        tensor.register_post_accumulate_grad_hook(hook)
        return tensor

    x, y = hooked(leaf(3)), hooked(leaf(3))
    (y * 2).sum().backward()
    with autograd.context() as context:
        context.backward(remotely("b", torch.mul, x, 2).sum(), timeout=20)
        assert_equal(context.gradients[x], y.grad)
    assert x.grad is None


# -- waits end ------------------------------------------------------------------------------------------------------


@contextmanager
def in_use(group: Group, worker: str, tensor: torch.Tensor) -> Iterator[None]:
    """Use ``.grad`` of the leaf on a thread of this worker, like a hook that computes for a long time."""
    slots = group[worker].autograd.messaging.slots
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        part = Installed([tensor], None)
        slots.add(part, lambda event: None)
        held.set()
        over.wait()
        slots.remove(part)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        held.wait()
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_pass_that_waits_for_a_leaf_ends_at_its_deadline_and_the_next_one_works(group: Group, worker: str) -> None:
    x = leaf(3)
    w = weights["w"] = leaf(3, seed=1)
    tensor = x if worker == "a" else w
    tensor.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    with autograd.context() as context:
        loss = remotely("b", times, x, "w").sum()
        with in_use(group, worker, tensor):
            with pytest.raises(DeadlineExceeded, match="did not end before its deadline"):
                context.backward(loss, retain_graph=True, timeout=0.1)
            wait_until(lambda: not group[worker].autograd.messaging.slots.waiting())
    assert seen == []
    with autograd.context() as context:
        context.backward(remotely("b", times, x, "w").sum(), timeout=20)
    assert len(seen) == 1
    assert tensor.grad is None


def refuse(grad: torch.Tensor) -> None:
    raise ValueError("this hook refuses")


def test_a_pass_that_fails_elsewhere_ends_the_wait_for_a_leaf(group: Group) -> None:
    w = weights["w"] = leaf(3, seed=1)
    w.register_post_accumulate_grad_hook(lambda parameter: None)
    slots = group["b"].autograd.messaging.slots

    def fail_when_b_waits(grad: torch.Tensor) -> None:
        wait_until(slots.waiting)
        refuse(grad)

    x = leaf(3)
    y = x.sin()
    y.register_hook(fail_when_b_waits)
    with autograd.context() as context:
        loss = remotely("b", times, torch.ones(3, dtype=torch.double), "w").sum() + y.sum()
        with in_use(group, "b", w), pytest.raises(BackwardError, match="this hook refuses"):
            context.backward(loss)
        wait_until(lambda: not slots.waiting())


def test_a_worker_that_shuts_down_ends_the_wait_for_a_leaf() -> None:
    with local_group(["a", "b"]) as group:
        w = weights["w"] = leaf(3)
        w.register_post_accumulate_grad_hook(lambda parameter: None)
        slots = group["b"].autograd.messaging.slots
        outcomes: list[object] = []

        def run() -> None:
            outcomes.extend(in_threads(group, "a", [lambda: one_pass(1)]))

        thread = threading.Thread(target=run)
        with in_use(group, "b", w):
            thread.start()
            wait_until(slots.waiting)
            group["b"].close()
            wait_until(lambda: not slots.waiting())
            thread.join(PATIENCE)
        assert isinstance(outcomes[0], WorkerLost | BackwardError | NotInitialized), outcomes
