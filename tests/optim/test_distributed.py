"""DistributedOptimizer does on many workers what an ordinary optimizer does in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from support.trained_model import Group, Local, Remote, assert_same, layers
from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError, WorkersFailed
from telegrad.optim import DistributedOptimizer

STEPS = range(5)
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.05}),
    "momentum": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.05}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Adadelta": (optim.Adadelta, {"rho": 0.95}),
    "Rprop": (optim.Rprop, {"lr": 0.05}),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)]
    ),
}


@pytest.fixture(params=[False, True], ids=["step", "in backward"])
def folded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# -- the same as one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_in_one_process(group: Group, name: str, folded: bool) -> None:
    optimizer_class, arguments = OPTIMIZERS[name]
    remote, local = Remote(), Local()
    there = DistributedOptimizer(optimizer_class, remote.rrefs, step_in_backward=folded, **arguments)
    losses = remote.train(there, STEPS)
    wanted = local.train(optimizer_class(local.tensors, **arguments), STEPS)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert_same(remote, local)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_groups_of_all_workers(group: Group, name: str, folded: bool) -> None:
    make = SCHEDULERS[name]
    remote, local = Remote(), Local()
    there = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1, momentum=0.9, step_in_backward=folded)
    here = optim.SGD(local.tensors, lr=0.1, momentum=0.9)
    schedule_there, schedule_here = make(there), make(here)
    for step in STEPS:
        remote.train(there, [step])
        schedule_there.step()
        local.train(here, [step])
        schedule_here.step()
    assert schedule_there.get_last_lr() == schedule_here.get_last_lr()
    assert_same(remote, local)


def test_a_plateau_lowers_the_rate_everywhere(group: Group, folded: bool) -> None:
    remote, local = Remote(), Local()
    there = DistributedOptimizer(optim.Adam, remote.rrefs, lr=0.1, step_in_backward=folded)
    here = optim.Adam(local.tensors, lr=0.1)
    schedules = [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0) for optimizer in (there, here)]
    for step in STEPS:
        remote.train(there, [step])
        local.train(here, [step])
        for schedule in schedules:
            schedule.step(1.0)
    assert there.param_groups[0]["lr"] == here.param_groups[0]["lr"] < 0.001
    assert_same(remote, local)


def test_groups_have_hyperparameters_of_their_own(group: Group, folded: bool) -> None:
    remote, local = Remote(), Local()

    def groups(parameters: list[Any]) -> list[dict[str, Any]]:
        return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.2, "momentum": 0.5}]

    there = DistributedOptimizer(optim.SGD, groups(remote.rrefs), lr=0.01, step_in_backward=folded)
    here = optim.SGD(groups(local.tensors), lr=0.01)
    for step in STEPS:
        remote.train(there, [step])
        local.train(here, [step])
        for optimizer in (there, here):
            optimizer.param_groups[1]["lr"] *= 0.7
    assert [group["lr"] for group in there.param_groups] == [group["lr"] for group in here.param_groups]
    assert_same(remote, local)


def test_a_rate_that_is_a_tensor_is_scheduled_too(group: Group, folded: bool) -> None:
    remote, local = Remote(), Local()
    there = DistributedOptimizer(
        optim.Adam, remote.rrefs, lr=torch.tensor(0.1), foreach=False, capturable=False, step_in_backward=folded
    )
    here = optim.Adam(local.tensors, lr=0.1, foreach=False)
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (there, here)]
    for step in STEPS:
        remote.train(there, [step])
        local.train(here, [step])
        for schedule in schedules:
            schedule.step()
    assert_same(remote, local, tolerance=1e-6)  # 0.1 in single precision


def test_gradients_in_grad_are_stepped_on_without_a_context(group: Group) -> None:
    remote, local = Remote(), Local()
    there = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    here = optim.SGD(local.tensors, lr=0.05)
    for pair in ((0, 1), (2, 3)):
        there.zero_grad()
        here.zero_grad()
        for step in pair:
            with autograd.context() as context:
                context.backward(remote.loss(step), accumulate="grad")
            local.loss(step).backward()
        there.step()
        here.step()
    assert_same(remote, local)
    there.zero_grad()
    assert all(tensor.grad is None for tensor in remote.tensors)
    with pytest.raises(TelegradError, match=r"found no \.grad on any worker"):
        there.step()


def test_zero_grad_in_a_context_begins_a_second_step(group: Group) -> None:
    remote, local = Remote(), Local()
    there = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    with autograd.context() as context:
        for step in (0, 1):
            there.zero_grad(context_id=context)
            context.backward(remote.loss(step))
            there.step(context)
        there.zero_grad(set_to_none=False, context_id=context)
        with acting_as(group["b"]):
            grads = autograd.get_gradients(context)
        assert grads
        assert all(not grad.any() for grad in grads.values())
    local.train(optim.SGD(local.tensors, lr=0.05), (0, 1))
    assert_same(remote, local)


# -- whose gradients --------------------------------------------------------------------------------------------------


def test_a_step_leaves_grad_and_the_gradients_of_the_context_alone(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    own = [torch.full_like(tensor, 7.0) for tensor in remote.tensors]
    for tensor, grad in zip(remote.tensors, own, strict=True):
        tensor.grad = grad
    with autograd.context() as context:
        context.backward(remote.loss(0))
        before = {tensor: grad.clone() for tensor, grad in context.gradients.items()}
        optimizer.step(context)
        assert context.gradients.keys() == before.keys() != set()
        assert all(torch.equal(context.gradients[tensor], grad) for tensor, grad in before.items())
    for tensor, grad in zip(remote.tensors, own, strict=True):
        assert tensor.grad is grad
        assert torch.equal(grad, torch.full_like(tensor, 7.0))


def test_two_contexts_at_once_do_not_mix(group: Group) -> None:
    remote, local = Remote(), Local()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    arrived, turn = threading.Event(), threading.Event()

    def other() -> None:
        with acting_as(group["a"]), autograd.context() as context:
            context.backward(remote.loss(1))
            arrived.set()
            turn.wait(20)
            optimizer.step(context)

    thread = threading.Thread(target=other)
    thread.start()
    assert arrived.wait(20)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        optimizer.step(context)
    turn.set()
    thread.join()
    here = optim.SGD(local.tensors, lr=0.05)
    losses = [local.loss(0), local.loss(1)]
    grads = [torch.autograd.grad(loss, local.tensors[:-1]) for loss in losses]
    for some in grads:
        for tensor, grad in zip(local.tensors, some, strict=False):
            tensor.grad = grad
        here.step()
    assert_same(remote, local)


def test_a_parameter_without_a_gradient_is_left_alone(group: Group) -> None:
    remote = Remote()
    before = remote.tensors[-1].detach().clone()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05, weight_decay=0.5)
    remote.tensors[-1].grad = torch.ones(4, dtype=torch.double)  # from elsewhere: not this context's
    remote.train(optimizer, STEPS)
    assert torch.equal(remote.tensors[-1], before)


def test_a_worker_that_took_no_part_in_the_context_is_left_alone(group: Group) -> None:
    remote = Remote()
    before = [tensor.detach().clone() for tensor in remote.tensors]
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05, weight_decay=0.5)
    with autograd.context() as context:
        x = torch.ones(4, dtype=torch.double)
        context.backward((layers[2][0] @ x).sum())  # of worker a alone
        optimizer.step(context)
    changed = [not torch.equal(tensor, was) for tensor, was in zip(remote.tensors, before, strict=True)]
    assert [number for number, flag in enumerate(changed) if flag] == [4]


def test_parameters_without_requires_grad_are_left_alone(group: Group) -> None:
    remote = Remote()
    layers[0][0].requires_grad_(False)
    before = layers[0][0].clone()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05)
    remote.train(optimizer, STEPS)
    assert torch.equal(layers[0][0], before)


def test_trainers_with_optimizers_of_their_own_step_one_at_a_time_on_the_same_parameters(group: Group) -> None:
    """Each step is an addition: were two of them to mix their gradients, the sum would not be that of all."""
    weight = torch.zeros(1000, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]
    steps = 20
    failures: list[BaseException] = []

    def train(worker: str) -> None:
        factor = "abc".index(worker) + 1
        try:
            with acting_as(group[worker]):
                optimizer = DistributedOptimizer(optim.SGD, [rpc.remote("b", first_weight)], lr=1.0, maximize=True)
                for _ in range(steps):
                    with autograd.context() as context:
                        context.backward(rpc.rpc_sync("b", times_weight, (factor,)))
                        optimizer.step(context)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(worker,)) for worker in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert torch.equal(weight, torch.full_like(weight, steps * 6.0))
    assert weight.grad is None


def first_weight() -> torch.Tensor:
    return layers[0][0]


def times_weight(factor: int) -> torch.Tensor:
    return (layers[0][0] * factor).sum()


# -- bad input --------------------------------------------------------------------------------------------------------


class FailingOptimizer(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise ValueError("Error running optimizer.")


class OptimizerFailingOnConstructor(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        raise ValueError("Error creating optimizer.")


class FailingOnOne(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if rpc.get_worker_info().name == "b":
            raise KeyError("only here")
        super().step()


def test_errors_of_several_workers_are_told_together(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(FailingOptimizer, remote.rrefs)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        with pytest.raises(WorkersFailed, match=r"step\(\) failed on 3 of 3 workers") as caught:
            optimizer.step(context)
    for worker in "abc":
        assert f"worker '{worker}': ValueError: Error running optimizer." in str(caught.value)
    assert {type(error) for error in caught.value.errors.values()} == {ValueError}


def test_the_error_of_one_worker_keeps_its_type_and_the_others_have_stepped(group: Group) -> None:
    remote = Remote()
    before = [tensor.detach().clone() for tensor in remote.tensors]
    optimizer = DistributedOptimizer(FailingOnOne, remote.rrefs, lr=0.1)
    with autograd.context() as context:
        context.backward(remote.loss(0))
        with pytest.raises(KeyError, match="only here") as caught:
            optimizer.step(context)
    assert "(step(), on worker 'b')" in caught.value.__notes__
    changed = [not torch.equal(tensor, was) for tensor, was in zip(remote.tensors, before, strict=True)]
    assert changed == [False, False, True, True, True, True, False, False, False]
    assert all(tensor.grad is None for tensor in remote.tensors)


def test_an_optimizer_that_cannot_be_made_is_an_error_at_once(group: Group) -> None:
    remote = Remote()
    with pytest.raises(WorkersFailed, match="Error creating optimizer") as caught:
        DistributedOptimizer(OptimizerFailingOnConstructor, remote.rrefs)
    assert sorted(caught.value.errors) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="Invalid learning rate") as one:
        DistributedOptimizer(optim.SGD, remote.rrefs[:1], lr=-1.0)
    assert "worker 'b'" in one.value.__notes__[-1]


def a_string() -> str:
    return "no tensor"


def computed() -> torch.Tensor:
    return layers[0][0] * 2


def failing() -> torch.Tensor:
    raise LookupError("there is none")


def test_what_is_no_parameter_is_refused_and_named(group: Group) -> None:
    remote = Remote()
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(ValueError, match=r"empty parameter list: params_rref\[0\]\['params'\]"):
        DistributedOptimizer(optim.SGD, [{"params": []}], lr=0.1)
    with pytest.raises(ValueError, match=r"params_rref\[0\] has no 'params'"):
        DistributedOptimizer(optim.SGD, [{"lr": 1}], lr=0.1)
    with pytest.raises(TypeError, match="not a single RRef"):
        DistributedOptimizer(optim.SGD, remote.rrefs[0], lr=0.1)
    with pytest.raises(TypeError, match=r"params_rref\[1\] is a Tensor, not an RRef: wrap .* telegrad.RRef"):
        DistributedOptimizer(optim.SGD, [remote.rrefs[0], layers[2][0]], lr=0.1)
    with pytest.raises(TypeError, match=r"RRef\(.* on worker 'b'\) is a str"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", a_string)], lr=0.1)
    with pytest.raises(ValueError, match=r"non-leaf Tensor: RRef\(.* on worker 'b'\)"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", computed)], lr=0.1)
    with pytest.raises(LookupError, match="there is none"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", failing)], lr=0.1)
    with pytest.raises(ValueError, match=r"more than once: params_rref\[0\] and params_rref\[1\]"):
        DistributedOptimizer(optim.SGD, [remote.rrefs[0], remote.rrefs[0]], lr=0.1)
    with pytest.raises(ValueError, match=r"more than once: .* name the same tensor"):
        DistributedOptimizer(optim.SGD, [rpc.remote("b", first_weight), rpc.remote("b", first_weight)], lr=0.1)
    with pytest.raises(TypeError, match="must be an optimizer class, not a float"):
        DistributedOptimizer(0.1, remote.rrefs)
    with pytest.raises(TypeError, match=r"made a list, which is not a torch\.optim\.Optimizer"):
        DistributedOptimizer(list, remote.rrefs[:1])
    with (
        acting_as(group["c"]),
        pytest.raises(ValueError, match="is held by worker 'a', but used on worker 'c'"),
    ):
        DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1)


def test_a_context_that_was_left_is_refused(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.1)
    with autograd.context() as context:
        pass
    for act in (
        optimizer.step,
        lambda c: optimizer.clip_grad_norm_(c, 1.0),
        lambda c: optimizer.zero_grad(context_id=c),
    ):
        with pytest.raises(TelegradError, match="Could not find autograd context"):
            act(context)


def test_what_an_ordinary_optimizer_can_and_this_one_cannot_is_said(group: Group) -> None:
    remote = Remote()
    optimizer = DistributedOptimizer(optim.SGD, remote.rrefs[:2], lr=0.1)
    with pytest.raises(TelegradError, match="create another one"):
        optimizer.add_param_group({"params": remote.rrefs[2:]})
    assert "lr: 0.1" in repr(optimizer)
