"""Recurrent layers on a simulated device compute what they compute on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_first_and_second_derivatives_equal_the_cpu(kind: type[nn.RNNBase], bias: bool) -> None:
    layer, x = kind(3, 4, num_layers=2, bias=bias).double(), torch.randn(5, 2, 3, dtype=torch.float64)

    def derivatives(layer: nn.RNNBase, device: str) -> list[torch.Tensor]:
        output, state = layer(x.to(device))
        loss = output.square().sum() + sum(part.sum() for part in (state if isinstance(state, tuple) else [state]))
        first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)  # by the fused operator
        graph = torch.autograd.grad(loss, list(layer.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in graph), list(layer.parameters()))
        assert {grad.device for grad in (*first, *second)} == {torch.device(device)}
        return [output.detach().cpu(), *(grad.cpu() for grad in (*first, *second))]

    torch.testing.assert_close(derivatives(copy.deepcopy(layer).to("sim:1"), "sim:1"), derivatives(layer, "cpu"))


@pytest.mark.usefixtures("sim")
def test_only_one_output_of_a_cell_may_be_used() -> None:
    cell, x, state = nn.LSTMCell(2, 2), torch.randn(1, 2), (torch.randn(1, 2), torch.randn(1, 2))
    for which in (0, 1):
        grads = []
        for device in ("cpu", "sim:0"):
            cell.to(device)
            out = cell(x.to(device), tuple(part.to(device) for part in state))[which]
            grads.append([grad.cpu() for grad in torch.autograd.grad(out.sum(), list(cell.parameters()))])
        torch.testing.assert_close(grads[0], grads[1])
        cell.to("cpu")
