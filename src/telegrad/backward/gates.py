"""Gates: nodes at which the engine waits for gradients inside a running island."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.backward.nodes import ONE, record
from telegrad.torch_private import set_sequence_number


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wait: Callable[[], None], *after: torch.Tensor) -> torch.Tensor:
        ctx.wait, ctx.after = wait, len(after)
        ctx.materialize_grads = False  # as set_materialize_grads does, which is a Python function
        return ONE.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.wait()
        return (None, *(ONE for _ in range(ctx.after)))


def chain_gates(waits: Sequence[tuple[Callable[[], None], Sequence[torch.Tensor]]]) -> torch.Tensor:
    """Make one gate per send, in record order. The last opens first, and each opens its tokens and the gate before it.

    They have the engine's lowest priority, so it does all that it can before it waits.
    """
    before: list[torch.Tensor] = []
    for wait, tokens in waits:
        gate: torch.Tensor = record(_Gate, wait, *tokens, *before)
        assert gate.grad_fn is not None
        set_sequence_number(gate.grad_fn, 0)
        before = [gate]
    return before[0]
