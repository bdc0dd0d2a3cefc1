"""Post-accumulate hooks that step, clip and clear gradients, including those of their own leaf."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.trained_model import Group
from torch import optim

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import BackwardError
from telegrad.optim import DistributedOptimizer, clip_grad_norm_

LIMIT = 20.0
"""Seconds for a pass, which takes milliseconds unless it hangs."""

on_b: dict[str, torch.Tensor] = {}


def parameter(seed: int) -> torch.Tensor:
    return torch.randn(3, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def times(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * on_b["q"].exp()


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + on_b["q"]


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    """Return a parameter of worker a and one of worker b."""
    on_b["q"] = parameter(2)
    return {"a": parameter(1), "b": on_b["q"]}


def hooked_in_one_process(
    worker: str, parameters: dict[str, torch.Tensor], hook: Callable[[torch.Tensor], None]
) -> dict[str, torch.Tensor]:
    """Run the pass in one process, with `hook` on one of the parameters."""
    twins = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
    twins[worker].register_post_accumulate_grad_hook(lambda tensor: hook(tensor))
    (twins["a"].sin() * twins["b"].exp()).sum().backward()
    return twins


def run(group: Group, parameters: dict[str, torch.Tensor], **options: Any) -> list[dict[torch.Tensor, torch.Tensor]]:
    """Run one pass, and return the gradients of the context on both workers."""
    with autograd.context() as context:
        contexts.append(context)
        context.backward(rpc.rpc_sync("b", times, (parameters["a"],)).sum(), timeout=LIMIT, **options)
        found = []
        for name in "ab":
            with acting_as(group[name]):
                found.append(autograd.get_gradients(context))
        return found


contexts: list[int] = []


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_hook_that_steps_with_the_context_works_as_in_one_process(
    group: Group, parameters: dict[str, torch.Tensor], worker: str
) -> None:
    twins = hooked_in_one_process(worker, parameters, lambda tensor: optim.SGD([tensor], lr=0.1).step())
    with acting_as(group[worker]):
        optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(parameters[worker])], lr=0.1)
    parameters[worker].register_post_accumulate_grad_hook(lambda _: optimizer.step(contexts[-1]))
    run(group, parameters)
    for name in "ab":
        assert torch.equal(parameters[name].detach(), twins[name].detach())
        assert parameters[name].grad is None


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_hook_that_clips_works_as_in_one_process(
    group: Group, parameters: dict[str, torch.Tensor], worker: str
) -> None:
    twins = hooked_in_one_process(worker, parameters, lambda tensor: clip_locally([tensor]))
    with acting_as(group[worker]):
        rref = rpc.RRef(parameters[worker])
    seen = []

    def hook(tensor: torch.Tensor) -> None:
        clip_grad_norm_(contexts[-1], [rref], 0.5)
        seen.append(tensor.grad.clone() if tensor.grad is not None else None)

    parameters[worker].register_post_accumulate_grad_hook(hook)
    found = run(group, parameters)
    torch.testing.assert_close(found["ab".index(worker)][parameters[worker]], twins[worker].grad)
    torch.testing.assert_close(seen[0], twins[worker].grad)


def clip_locally(tensors: list[torch.Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(tensors, 0.5)


def test_a_hook_that_clears_the_gradient_leaves_none_in_the_context(
    group: Group, parameters: dict[str, torch.Tensor]
) -> None:
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(parameters["a"])], lr=0.1)
    parameters["a"].register_post_accumulate_grad_hook(lambda _: optimizer.zero_grad(context_id=contexts[-1]))
    found = run(group, parameters)
    assert found[0] == {}
    assert found[1].keys() == {parameters["b"]}


def test_a_step_without_a_context_in_a_hook_raises(group: Group, parameters: dict[str, torch.Tensor]) -> None:
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(parameters["a"])], lr=0.1)
    parameters["a"].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = parameters["a"].detach().clone()
    with pytest.raises(BackwardError, match=r"step\(\) found no .grad on any worker: pass the id of the context"):
        run(group, parameters)
    assert torch.equal(parameters["a"].detach(), before)


def test_a_step_without_a_context_in_a_hook_works_in_a_pass_into_grad(
    group: Group, parameters: dict[str, torch.Tensor]
) -> None:
    twins = hooked_in_one_process("a", parameters, lambda tensor: optim.SGD([tensor], lr=0.1).step())
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(parameters["a"])], lr=0.1)
    parameters["a"].register_post_accumulate_grad_hook(lambda _: optimizer.step())
    run(group, parameters, accumulate="grad")
    assert torch.equal(parameters["a"].detach(), twins["a"].detach())


def test_concurrent_contexts_whose_hooks_step_on_two_workers_do_not_deadlock(
    group: Group, parameters: dict[str, torch.Tensor]
) -> None:
    optimizers = {}
    by_worker.update(parameters)
    for name, other in (("a", "b"), ("b", "a")):
        with acting_as(group[name]):
            rrefs = [rpc.RRef(parameters[name]), rpc.rpc_sync(other, reference_to, (other,))]
            optimizers[name] = DistributedOptimizer(optim.SGD, rrefs, lr=0.1)

    context_of: dict[float, int] = {}

    def hook(name: str) -> Callable[[torch.Tensor], None]:
        def step(tensor: torch.Tensor) -> None:
            assert tensor.grad is not None
            factor = tensor.grad[0].item()
            optimizers[name].step(context_of[factor])
            assert tensor.grad[0].item() == factor  # not replaced by another context's

        return step

    for name, tensor in parameters.items():
        tensor.register_post_accumulate_grad_hook(hook(name))
    ended: dict[int, object] = {}

    def train(number: int) -> None:
        try:
            with acting_as(group["a"]):
                for repeat in range(3):
                    factor = 1.0 + number * 10 + repeat
                    with autograd.context() as context:
                        context_of[factor] = context
                        loss = rpc.rpc_sync("b", plus, (parameters["a"],)).sum() * factor
                        context.backward(loss, timeout=LIMIT)
            ended[number] = True
        except Exception as error:  # noqa: BLE001 - checked below
            ended[number] = error

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * LIMIT)
    assert ended == dict.fromkeys(range(6), True)
    assert all(tensor.grad is None for tensor in parameters.values())


by_worker: dict[str, torch.Tensor] = {}


def reference_to(name: str) -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(by_worker[name])
