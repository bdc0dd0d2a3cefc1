"""Decorators for functions that other workers call, as in torch.distributed.rpc.functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from telegrad.calls.server import DEFERRED
from telegrad.drop_in.rpc.torch_errors import WRONG_ASYNC, WRONG_SCRIPT
from telegrad.torch_private import FutureBase

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a future. The caller gets the result of that future."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not isinstance(result, FutureBase):
            if isinstance(fn, torch.jit.ScriptFunction):
                raise RuntimeError(f"{WRONG_SCRIPT}{type(result).__name__}")
            raise RuntimeError(f"{WRONG_ASYNC}{type(result)}")
        return result

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]  # torch looks for it there
    setattr(wrapper, DEFERRED, True)
    return wrapper  # type: ignore[return-value]  # same signature
