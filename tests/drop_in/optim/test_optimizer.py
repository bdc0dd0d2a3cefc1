"""The parts from which programs build their own distributed optimizers."""

from __future__ import annotations

import threading

import pytest
import torch

from telegrad.drop_in import autograd, rpc
from telegrad.drop_in.optim.optimizer import (
    _local_optimizer_step,
    _LocalOptimizer,
    _new_local_optimizer,
    _wait_for_all,
)
from telegrad.errors import TelegradError


@pytest.mark.usefixtures("agents")
def test_a_local_optimizer_steps_on_the_gradients_of_a_context() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.full((2,), 100.0)
    optimizer = _new_local_optimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.1)
    assert isinstance(optimizer.local_value(), _LocalOptimizer)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("b", torch.mul, (weight, 3)).sum()])
        _local_optimizer_step(optimizer, context_id)
    assert weight.tolist() == pytest.approx([0.7, 0.7])
    assert weight.grad.tolist() == [100, 100]


def test_wait_for_all_waits_for_every_future_before_it_raises_the_first_error() -> None:
    failed, late, done = (torch.futures.Future[int]() for _ in range(3))
    failed.set_exception(TelegradError("first"))
    done.set_result(1)
    raised = threading.Event()

    def wait() -> None:
        with pytest.raises(TelegradError, match="first"):
            _wait_for_all([failed, late, done])
        raised.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not raised.wait(0.05)
    late.set_exception(TelegradError("second"))
    assert raised.wait(30)
    thread.join()
    assert _wait_for_all([done]) == [1]
