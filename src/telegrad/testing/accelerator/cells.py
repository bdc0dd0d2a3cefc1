"""The cells of recurrent layers, for which torch calls fused operators on every device but the CPU.

The formulas are those of `nn.LSTMCell` and `nn.GRUCell`. Torch derives second derivatives from operators of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's class
"""Its registrations last as long as it does."""


def register() -> None:
    """Implement the operators on the simulated devices."""
    for operator in (lstm_cell, lstm_cell_backward, gru_cell, gru_cell_backward):
        _library.impl(_NAMES[operator.__name__], operator, "PrivateUse1")


_NAMES = {
    "lstm_cell": "_thnn_fused_lstm_cell",
    "lstm_cell_backward": "_thnn_fused_lstm_cell_backward_impl",
    "gru_cell": "_thnn_fused_gru_cell",
    "gru_cell_backward": "_thnn_fused_gru_cell_backward",
}


def _plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next hidden state and cell, and what the derivative needs."""
    i, f, g, o = (_plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the gates, the cell and the bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    tanh = cy.tanh()
    grad_c = grad_h * o * (1 - tanh * tanh)
    if grad_cy is not None:
        grad_c = grad_c + grad_cy
    parts = (grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_h * tanh * o * (1 - o))
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the next hidden state, and what the derivative needs."""
    input_r, input_z, input_n = _plus(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _plus(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of the input's and the hidden gates, of the hidden state and of the two biases."""
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_n * r * (1 - r)
    of_input, of_hidden = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases
