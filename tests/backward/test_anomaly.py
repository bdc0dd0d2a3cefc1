"""Anomaly mode of the worker that calls backward() holds on every worker of the pass."""

from __future__ import annotations

import pytest
import torch

import telegrad
from telegrad import autograd, launch
from telegrad.backward.anomaly import nan_checked
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
                ends.append(str(error))
    return ends


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_nan_that_another_worker_makes_is_an_error_there():
    first, *others = launch.local(run_in_anomaly_mode, 2, timeout=100)[0]
    assert "Error on Node 1: Function 'SqrtBackward0' returned nan values in its 0th output." in first
    assert "detect_anomaly() on this worker" in first
    assert others == ["True", "True"]


def start_of(tensor: torch.Tensor):
    return tensor.grad_fn, tensor.output_nr


def test_checked_nodes_raise_and_others_do_not():
    x = torch.zeros(2, requires_grad=True)
    y = x.sqrt() * 0
    with nan_checked([start_of(y)]), pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert x.grad.isnan().all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_error_shows_where_the_node_was_made_if_that_was_recorded():
    x = torch.zeros(2, requires_grad=True)
    with torch.autograd.detect_anomaly():
        y = x.sqrt() * 0
    with nan_checked([start_of(y)]), pytest.raises(RuntimeError, match=r"y = x\.sqrt\(\) \* 0"):
        y.sum().backward()


def test_sparse_gradients_are_checked():
    weight = torch.ones(3, 2, requires_grad=True)
    y = torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True)
    with nan_checked([start_of(y)]), pytest.raises(RuntimeError, match="EmbeddingBackward0"):
        y.backward(torch.full_like(y, torch.nan))
