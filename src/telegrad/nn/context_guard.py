"""Guards results of calls outside an autograd context: a backward pass that reaches one raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from telegrad.backward.contexts import current
from telegrad.errors import TelegradError
from telegrad.nn.nested_tensors import map_tensors


class OutsideContext(torch.autograd.Function):
    """Takes the place of the remote part of the graph, which only calls in an autograd context have."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], source: str, *sources: torch.Tensor) -> torch.Tensor:
        ctx.source = source
        return value[0]  # in a list: a direct argument would be returned as a view, which cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise TelegradError(
            f"a backward pass reached {ctx.source}, which was called outside of an autograd context, so its gradients "
            "cannot be computed. Run forward and backward inside `with telegrad.autograd.context() as context_id:`, "
            "and call telegrad.autograd.backward(context_id, [loss]). For evaluation, use torch.no_grad()"
        )


def in_context() -> bool:
    """Return whether calls of this thread are recorded in an autograd context."""
    context = current.get()
    return context is not None and not context.released


def guard_result(value: Any, source: str, *args: Any) -> Any:
    """Return the result of a call outside a context such that a backward pass into it raises an error.

    `source` names what was called. The guard's graph leads on to the arguments, because torch runs only nodes that lead
    to requested gradients.
    """
    if not torch.is_grad_enabled():
        return map_tensors(value, torch.Tensor.detach)
    guard: Callable[..., Any] = OutsideContext.apply  # untyped in torch
    sources = [torch.empty(0, requires_grad=True)]

    def collect(x: torch.Tensor) -> torch.Tensor:
        sources.append(x)
        return x

    map_tensors(args, collect)
    return map_tensors(value, lambda x: guard([x.detach()], source, *sources) if x.requires_grad else x)
