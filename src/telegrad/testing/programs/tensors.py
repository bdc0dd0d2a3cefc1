"""Unusual tensors: subclasses, other dtypes, and views that share memory in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.torch_private import disabled_torch_function, make_wrapper_subclass

CASTS = {"float": torch.float32, "complex": torch.complex128, "narrow complex": torch.complex64}


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Own(Plain):
    """A subclass whose `__reduce_ex__` calls torch's, as in fastai."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch has no types for it


class Wrapper(torch.Tensor):
    """A wrapper subclass: it has no storage, and its operations act on the wrapped tensor."""

    wrapped: torch.Tensor
    __torch_function__: Any = disabled_torch_function  # allows mixing with other subclasses

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = make_wrapper_subclass(  # documented by torch under this name
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.wrapped = inner

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # mypy sees two classes
        return f"{type(self).__name__}({self.wrapped})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> Wrapper:
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch's own subclasses have it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _mapped(lambda x: x.wrapped if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return _mapped(cls, func(*args, **kwargs))


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to all tensors of a value."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, each) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return value


class OwnWrapper(Wrapper):
    """A wrapper that pickles as its wrapped tensor, and stays connected to the graph."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return wrap_in_own, (unwrap(self),)


class Unlinked(Wrapper):
    """A wrapper that pickles as a plain value, which loses its history."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unlinked, (self.wrapped,)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: type[Wrapper], x: torch.Tensor) -> torch.Tensor:
        return kind(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad.wrapped if isinstance(grad, Wrapper) else grad


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Wrapper) -> torch.Tensor:
        ctx.kind = type(x)
        return x.wrapped.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.kind(grad)


def wrap(kind: type[Wrapper], x: torch.Tensor) -> torch.Tensor:
    """Wrap a tensor, differentiably."""
    made: torch.Tensor = _Wrap.apply(kind, x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return made


def wrap_in_own(x: torch.Tensor) -> torch.Tensor:
    """Rebuild an `OwnWrapper` when it is unpickled."""
    return wrap(OwnWrapper, x)


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """Unwrap a tensor, differentiably."""
    made: torch.Tensor = _Unwrap.apply(x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return made


WRAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain subclass": lambda x: (x * 2).as_subclass(Plain),
    "own reduce": lambda x: (x * 2).as_subclass(Own),
    "wrapper": lambda x: wrap(Wrapper, x),
    "own wrapper": lambda x: wrap(OwnWrapper, x),
    "unlinked wrapper": lambda x: wrap(Unlinked, x),
}


def values_of(x: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of any subclass as a plain tensor without history."""
    x = x.detach()
    return x.wrapped if isinstance(x, Wrapper) else x.as_subclass(torch.Tensor)


def normal(x: torch.Tensor) -> torch.Tensor:
    """Convert any tensor of a program to three doubles, differentiably."""
    if type(x) is not torch.Tensor:
        if isinstance(x, Wrapper):
            x = unwrap(x)
        x = x.as_subclass(torch.Tensor)
    if x.is_complex():
        x = x.real + 0.5 * x.imag
    if x.dtype is not torch.double:
        x = x.double()
    if x.shape != (3,):
        x = x.reshape(-1)
        x = x[torch.arange(3, device=x.device) % len(x)]
    return x


# -- a tensor and its views in one message ------------------------------------------------------------------------


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "base": lambda t: t,
    "head": lambda t: t[:2],
    "tail": lambda t: t[1:],
    "whole": lambda t: t.view(4),
    "rows": lambda t: t.view(2, 2),
    "complex": lambda t: torch.view_as_complex(t.view(2, 2)),
    "bits": lambda t: t.view(torch.int64) if not t.requires_grad else t.view(4),
}


def make_views(x: torch.Tensor, kinds: Sequence[str], with_history: bool) -> list[torch.Tensor]:
    """Return a new tensor computed from `x`, and views of it."""
    x = normal(x)
    base = torch.cat([x, x[:1] * 2])
    if not with_history:
        base = base.detach()
    return [VIEWS[kind](base) for kind in kinds]


def use_views(x: torch.Tensor, views: Sequence[torch.Tensor], actions: Sequence[tuple[str, int]]) -> torch.Tensor:
    """Compute with `x` and views, and modify views in place in between."""
    result = normal(x) * 1  # never `x` itself: a message would copy it
    for action, number in actions:
        view = views[number % len(views)]
        match action:
            case "use" if view.dtype is not torch.int64:
                result = result + normal(view * view).to(result.device)
            case "scale" if view.dtype is not torch.int64:
                # Saves the view for backward, so modifying it later is an error in the pass.
                result = result + normal(normal(x).sum().to(view.device) * view).to(result.device)
            case "mul_" if view.dtype is not torch.int64:
                view.mul_(2)
            case "zero_":
                view.zero_()
            case _:
                pass
    return result
