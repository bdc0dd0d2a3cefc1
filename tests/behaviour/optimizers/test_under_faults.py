"""Training on a faulty network and with killed workers, over many seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.trained_model import Local, Remote, assert_same, layers
from torch import optim

from telegrad import autograd, rpc
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError, WorkerLost, WorkersFailed
from telegrad.optim import DistributedOptimizer
from telegrad.testing.simulation import Faults, Simulation

FAULTS = Faults(longest_delay=0.02, drop=0.01, duplicate=0.02, cut=0.01)


@pytest.mark.parametrize("seed", range(12))
def test_training_on_a_faulty_network_equals_one_process(seed: int) -> None:
    in_backward = seed % 2 == 1
    sim = Simulation(seed, ["a", "b", "c"], faults=FAULTS)
    local = Local()

    def program() -> Remote:
        with acting_as(sim["a"]):
            remote = Remote()
            optimizer = DistributedOptimizer(optim.Adam, remote.rrefs, lr=0.05, step_in_backward=in_backward)
            schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            for step in range(4):
                remote.train(optimizer, [step], None if in_backward else lambda context: clip(optimizer, context))
                schedule.step()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            remote.train(optimizer, [4])
            return remote

    with sim:
        remote = sim.run(program)
    here = optim.Adam(local.tensors, lr=0.05)
    schedule = optim.lr_scheduler.ExponentialLR(here, 0.8)
    for step in range(5):
        clips = None if in_backward or step == 4 else lambda: torch.nn.utils.clip_grad_norm_(local.tensors, 0.5)
        local.train(here, [step], clips)
        schedule.step()
    assert_same(remote, local)


def clip(optimizer: DistributedOptimizer, context: int) -> None:
    optimizer.clip_grad_norm_(context, 0.5)


def first() -> torch.Tensor:
    return layers[0][0]


def linear(factor: int) -> torch.Tensor:
    return (layers[0][0] * factor).sum()


class Slow(optim.SGD):
    """Calls another worker during a step, so that other threads run meanwhile."""

    def step(self, closure: Any = None) -> Any:
        (parameter,) = self.param_groups[0]["params"]
        grad = parameter.grad
        rpc.rpc_sync("a", abs, (-1,))
        assert parameter.grad is grad, "another step changed .grad during this one"
        super().step()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("optimizer_class", [optim.SGD, Slow])
def test_steps_of_several_trainers_do_not_mix(seed: int, optimizer_class: type[optim.SGD]) -> None:
    sim = Simulation(seed, ["a", "b", "c", "d"], faults=FAULTS)
    weight = torch.zeros(3, dtype=torch.double, requires_grad=True)
    layers[0] = [weight]

    def train(factor: int) -> None:
        optimizer = DistributedOptimizer(optimizer_class, [rpc.remote("b", first)], lr=1.0, maximize=True)
        for _ in range(3):
            with autograd.context() as context:
                context.backward(rpc.rpc_sync("b", linear, (factor,)))
                optimizer.step(context)

    def program() -> None:
        threads = [sim.spawn(worker, lambda f=factor: train(f)) for worker, factor in (("a", 1), ("c", 10), ("d", 100))]
        for thread in threads:
            assert thread.join(sim.scheduler.now + 600), sim.scheduler.stacks()

    with sim:
        sim.run(program)
    assert torch.equal(weight, torch.full_like(weight, 333.0))
    assert weight.grad is None


@pytest.mark.parametrize("seed", range(20))
def test_the_trainer_gets_worker_lost_when_an_owner_dies(seed: int) -> None:
    sim = Simulation(seed, ["a", "b", "c"], faults=Faults(longest_delay=0.02))
    in_backward = seed % 2 == 1

    def train() -> str:
        remote = Remote()
        optimizer = DistributedOptimizer(optim.SGD, remote.rrefs, lr=0.05, step_in_backward=in_backward)
        while True:
            remote.train(optimizer, [0])

    outcome: list[BaseException] = []

    def run() -> None:
        try:
            train()
        except TelegradError as error:
            outcome.append(error)

    def program() -> None:
        thread = sim.spawn("a", run)
        sim.sleep(sim.random.uniform(0.0, 0.5))
        sim.kill("c")
        assert thread.join(sim.scheduler.now + 600), sim.scheduler.stacks()

    with sim:
        sim.run(program)
    (error,) = outcome
    lost = error.errors["c"] if isinstance(error, WorkersFailed) else error
    assert isinstance(lost, WorkerLost)
    assert lost.worker == "c"
