"""A pass that reaches tensors of a worker that was replaced since raises WorkerLost, and is never wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.backward import probe
from telegrad.default_agent import acting_as
from telegrad.errors import TelegradError, WorkerLost
from telegrad.testing.simulation import Simulation


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def through(name: str, x: torch.Tensor) -> Any:
    return rpc.rpc_sync(name, square, (x,))


def run_backward(context: int, loss: torch.Tensor, x: torch.Tensor) -> None:
    autograd.backward(context, [loss])


def run_grad(context: int, loss: torch.Tensor, x: torch.Tensor) -> None:
    autograd.grad(context, [loss], [x])


def pass_after_replacement(run: Callable[[int, torch.Tensor, torch.Tensor], None], *, again: bool) -> None:
    """Run a pass over a chain a, b, c whose last worker was replaced; with `again`, the new one is called, too."""
    with Simulation(1, ["a", "b", "c"]) as sim:

        def program() -> None:
            x = torch.ones(2, requires_grad=True)
            with acting_as(sim["a"]), autograd.context() as context:
                loss = rpc.rpc_sync("b", through, ("c", x)).sum()
                sim.kill("c")
                sim.sleep(5)
                sim.restart("c")
                rpc.wait_for_worker("c", 60)
                sim.sleep(5)
                if again:
                    loss = loss + rpc.rpc_sync("b", through, ("c", x)).sum()
                run(context, loss, x)

        sim.run(program)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("run", [run_backward, run_grad])
def test_a_pass_that_needs_a_replaced_worker_says_so(run: Any, again: bool) -> None:
    with pytest.raises(WorkerLost, match=r"worker 'c' was lost and replaced since .* run the step again") as caught:
        pass_after_replacement(run, again=again)
    assert caught.value.worker == "c"
    assert caught.value.context is not None


def test_a_replacement_refuses_a_probe_of_what_it_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "lost_sender", lambda run, recv: None)  # as if it was replaced a moment later
    with pytest.raises(TelegradError, match=r"worker 'b' asked for tensors of message .* which worker 'c' never sent"):
        pass_after_replacement(run_grad, again=True)
