"""Decorators for functions that others call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from telegrad.calls.server import DEFERRED

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(function: F) -> F:
    """The function returns a future, and the caller gets what that future becomes.

    The thread that ran the function is free meanwhile. ``async def`` functions need no decorator.
    """

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(wrapper, DEFERRED, True)
    return wrapper  # type: ignore[return-value]  # same signature
