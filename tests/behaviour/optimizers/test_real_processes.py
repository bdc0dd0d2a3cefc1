"""Training in separate processes, over real sockets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.trained_model import Local, fresh_parameters, layer, layers
from torch import optim

import telegrad
from telegrad import autograd, launch
from telegrad.optim import DistributedOptimizer

STEPS = 5
LAYER_WORKERS = ("worker1", "worker2", "worker0", "worker1")


def own_layers() -> list[telegrad.RRef[Any]]:
    """Create this worker's layers, with the same values in every process, and return references to their parameters."""
    me = telegrad.get_worker_info().name
    given = fresh_parameters()
    rrefs = []
    for number, worker in enumerate(LAYER_WORKERS):
        if worker == me:
            layers[number] = given[2 * number : 2 * number + 2]
            rrefs += [telegrad.RRef(tensor) for tensor in layers[number]]
    return rrefs


def forward(number: int, x: torch.Tensor) -> torch.Tensor:
    return layer(x, *layers[number])


def train(in_backward: bool) -> tuple[list[float], dict[str, Any]] | None:
    if telegrad.get_worker_info().name != "worker0":
        return None
    rrefs = [rref for worker in ("worker0", "worker1", "worker2") for rref in telegrad.rpc_sync(worker, own_layers)]
    optimizer = DistributedOptimizer(optim.AdamW, rrefs, lr=0.05, step_in_backward=in_backward)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses = []
    for step in range(STEPS):
        with autograd.context() as context:
            x = torch.randn(5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(100 + step))
            for number, worker in enumerate(LAYER_WORKERS):
                x = telegrad.rpc_sync(worker, forward, (number, x))
            loss = x.square().sum()
            context.backward(loss)
            if not in_backward:
                optimizer.clip_grad_norm_(context, 0.5)
            optimizer.step(context)
        schedule.step()
        losses.append(loss.item())
    return losses, optimizer.state_dict()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "in_backward"), [("unix", False), ("tcp", False), ("unix", True)])
def test_several_processes_train_like_one(transport: str, in_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    losses, state = launch.local(train, 3, (in_backward,), timeout=90)[0]
    local = Local()
    numbers = [
        number for worker in ("worker0", "worker1", "worker2") for number in range(4) if LAYER_WORKERS[number] == worker
    ]
    order = [local.tensors[2 * number + which] for number in numbers for which in (0, 1)]
    here = optim.AdamW(order, lr=0.05)
    schedule = optim.lr_scheduler.ExponentialLR(here, 0.8)
    wanted = []
    for step in range(STEPS):
        clip = None if in_backward else lambda: torch.nn.utils.clip_grad_norm_(order, 0.5)
        wanted += local.train(here, [step], clip)
        schedule.step()
    assert losses == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(state["state"], here.state_dict()["state"], rtol=1e-9, atol=1e-9)
