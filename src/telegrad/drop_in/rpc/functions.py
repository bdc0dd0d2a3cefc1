"""Decorators for functions that others call, as torch.distributed.rpc.functions has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from telegrad.calls.server import DEFERRED
from telegrad.drop_in.rpc.texts import WRONG_ASYNC
from telegrad.torch_private import FutureBase

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """The function returns a future, and the caller gets what that future becomes."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not isinstance(result, FutureBase):
            if isinstance(fn, torch.jit.ScriptFunction):
                raise RuntimeError(
                    f"Async functions must return an IValue of Future type, but got {type(result).__name__}"
                )
            raise RuntimeError(f"{WRONG_ASYNC}{type(result)}")
        return result

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]  # where torch's own layer looks for it
    setattr(wrapper, DEFERRED, True)
    return wrapper  # type: ignore[return-value]  # same signature
