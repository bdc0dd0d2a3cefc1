"""Decorators for functions that other workers call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from telegrad.calls.server import DEFERRED

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(function: F) -> F:
    """Mark a function that returns a future. The caller gets the result of that future.

    The thread that ran the function is free until the future is done. ``async def`` functions need no decorator.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, DEFERRED, True)
    return wrapper  # type: ignore[return-value]  # same signature
