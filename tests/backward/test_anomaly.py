"""Anomaly mode of the worker that calls backward() holds on every worker of the pass."""

from __future__ import annotations

import traceback

import pytest
import torch

import telegrad
from telegrad import autograd, launch
from telegrad.backward.anomaly import RecordOrigins, origin_of, watched
from telegrad.errors import BackwardError


def root_of_zero(x: torch.Tensor) -> torch.Tensor:
    return (x * 0).sqrt() * 0


def run_in_anomaly_mode() -> list[str]:
    """Return, on worker 0, how passes that make NaN on worker 1 end, in anomaly mode and without."""
    if telegrad.get_worker_info().id:
        return []
    ends = []
    for check_nan in (True, False, None):
        with torch.autograd.set_detect_anomaly(check_nan is not None, bool(check_nan)), autograd.context() as context:
            x = torch.ones(2, requires_grad=True)
            y = telegrad.rpc_sync(1, root_of_zero, (x,))
            try:
                context.backward(y.sum())
                ends.append(str(context.gradients[x].isnan().all().item()))
            except BackwardError as error:
                ends.append("".join(traceback.format_exception(error)))
    return ends


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_nan_that_another_worker_makes_is_an_error_there():
    first, *others = launch.local(run_in_anomaly_mode, 2, timeout=100)[0]
    assert "Error on Node 1: Function 'SqrtBackward0' returned nan values in its 0th output." in first
    assert "Traceback of the forward call that made 'SqrtBackward0':\n  File " in first
    assert "in root_of_zero\n    return (x * 0).sqrt() * 0\n" in first
    assert "telegrad/calls" not in first
    assert "frames of telegrad]\nRuntimeError: Function 'SqrtBackward0' returned nan values" in first
    assert others == ["True", "True"]


def start_of(tensor: torch.Tensor):
    return tensor.grad_fn, tensor.output_nr


def test_checked_nodes_raise_and_others_do_not():
    x = torch.zeros(2, requires_grad=True)
    y = x.sqrt() * 0
    with (
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values") as caught,
        watched([start_of(y)], check_nan=True),
    ):
        y.sum().backward(retain_graph=True)
    assert "To see where 'SqrtBackward0' was made" in origin_of(caught.value)
    y.sum().backward()
    assert x.grad.isnan().all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_error_shows_where_the_node_was_made_if_that_was_recorded():
    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.detect_anomaly():
        y = x.sqrt() * 0
    with pytest.raises(RuntimeError, match="nan values") as caught, watched([start_of(y)], check_nan=True):
        y.sum().backward()
    assert "y = x.sqrt() * 0" in origin_of(caught.value)


def test_sparse_gradients_are_checked():
    weight = torch.ones(3, 2, requires_grad=True)
    y = torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True)
    with pytest.raises(RuntimeError, match="EmbeddingBackward0"), watched([start_of(y)], check_nan=True):
        y.backward(torch.full_like(y, torch.nan))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("as it should")


def failing_node(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x * 2)


def calls_failing_node(x: torch.Tensor) -> torch.Tensor:
    return telegrad.rpc_sync(2, failing_node, (x,)) + 1


def fail_on_worker_two() -> list[str]:
    """Return, on worker 0, how passes that fail on worker 2 end, and which workers are in anomaly mode afterwards."""
    if telegrad.get_worker_info().id:
        return []
    ends = []
    for is_on in (True, False):
        with torch.autograd.set_detect_anomaly(is_on, check_nan=False), autograd.context() as context:
            x = torch.ones(2, requires_grad=True)
            try:
                context.backward(telegrad.rpc_sync(1, calls_failing_node, (x,)).sum())
            except BackwardError as error:
                ends.append(str(error))
    return [*ends, *(str(telegrad.rpc_sync(worker, torch.is_anomaly_enabled)) for worker in (1, 2))]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_an_error_on_another_worker_shows_the_forward_call_there():
    on, off, *modes = launch.local(fail_on_worker_two, 3, timeout=100)[0]
    assert "Error on Node 2: 'as it should'" in on
    assert "Traceback of the forward call that made 'FailsBackward':" in on
    assert "in failing_node\n    return Fails.apply(x * 2)\n" in on
    assert "Error on Node 2: 'as it should'" in off
    assert "Traceback of the forward call" not in off
    assert modes == ["False", "False"]


def test_the_mode_of_the_program_is_left_as_it_is():
    origins = RecordOrigins()
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        origins.enter()
        origins.leave()
        assert torch.is_anomaly_enabled()
    origins.enter()
    origins.enter()
    origins.leave()
    assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(True, True)  # by the program
    origins.leave()
    assert torch.is_anomaly_enabled()
    torch.set_anomaly_enabled(False, True)
    origins.enter()
    origins.leave()
    assert not torch.is_anomaly_enabled()
    assert torch.is_anomaly_check_nan_enabled()
