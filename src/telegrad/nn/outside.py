"""Results of calls outside of an autograd context: a backward pass that reaches one raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from telegrad.backward.contexts import current
from telegrad.errors import TelegradError
from telegrad.nn.placement import mapped


class OutsideContext(torch.autograd.Function):
    """Stands where the graph of a call would go on, had the call been made in an autograd context."""

    @staticmethod
    def forward(ctx: Any, value: list[torch.Tensor], source: str, *sources: torch.Tensor) -> torch.Tensor:
        ctx.source = source
        return value[0]  # not an argument itself: it would come back as a view, which cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise TelegradError(
            f"a backward pass reached {ctx.source}, which was called outside of an autograd context, so its gradients "
            "cannot be computed. Run forward and backward inside `with telegrad.autograd.context() as context_id:`, "
            "and call telegrad.autograd.backward(context_id, [loss]). What is only evaluated belongs in torch.no_grad()"
        )


def in_a_context() -> bool:
    """Whether what comes now is recorded."""
    context = current.get()
    return context is not None and not context.released


def guarded(value: Any, source: str, *args: Any) -> Any:
    """What came from a call outside of a context, so that a backward pass into it is an error and no wrong gradient.

    `source` names what was called. The graph leads on to the arguments: torch runs only what leads to wanted gradients.
    """
    if not torch.is_grad_enabled():
        return mapped(value, torch.Tensor.detach)
    guard: Callable[..., Any] = OutsideContext.apply  # torch gives it no types
    sources = [torch.empty(0, requires_grad=True)]

    def collect(x: torch.Tensor) -> torch.Tensor:
        sources.append(x)
        return x

    mapped(args, collect)
    return mapped(value, lambda x: guard([x.detach()], source, *sources) if x.requires_grad else x)
