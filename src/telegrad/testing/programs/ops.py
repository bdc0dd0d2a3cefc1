"""The operations of random programs, including those that run a backward inside a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from telegrad.testing.programs.tensors import normal

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "user": lambda x, y: _user_mul(x, y),
    "sin": lambda x, y: (x * 0.5).sin() * y,
    "tanh": lambda x, y: x - y.tanh(),
    "first": lambda x, y: torch.cat([x, y]).view(2, 3).unbind(0)[0],
    "second": lambda x, y: torch.cat([x, y]).view(2, 3).unbind(0)[1],
    "detach": lambda x, y: x.detach() + y,
}


def compute(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run the operation of that name."""
    x = normal(x)
    return OPS[name](x, normal(y).to(x.device))


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply in the dtype of autocast. No narrow tensor is used twice: its summed gradient would depend on order."""
    x = normal(x)
    product = torch.mm(x.float().view(3, 1), normal(y).to(x.device).float().view(1, 3))
    return product.double().sum(0)


class UserMul(torch.autograd.Function):
    """A user-written product. It materializes missing gradients as zeros, torch's default."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


def _user_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = UserMul.apply(x, y)  # type: ignore[no-untyped-call]  # torch has no types for it
    return product


# -- a backward inside a backward ---------------------------------------------------------------------------------


class Recompute(torch.autograd.Function):
    """A hand-written checkpoint: its backward runs the forward again, and a nested backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def _recompute(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Recompute.apply(run, x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


REENTRANT: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], Any]] = {
    "by hand": _recompute,
    "checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=True, preserve_rng_state=False),
    "saved checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False, preserve_rng_state=False),
}


def run_again_in_backward(kind: str, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Compute with `x` and a leaf, in a Function that shows only `x` to the graph."""
    x = normal(x)

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * normal(leaf).to(x.device)).tanh()

    if not (x.requires_grad and torch.is_grad_enabled()):
        return run(x)  # torch warns about checkpoints without gradients
    result: torch.Tensor = REENTRANT[kind](run, x)
    return result


# -- modes --------------------------------------------------------------------------------------------------------


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
}


@contextmanager
def entered(modes: Sequence[str]) -> Iterator[None]:
    """Enter these modes of torch."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(MODES[mode]())
        yield
