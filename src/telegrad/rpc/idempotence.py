"""`idempotent` marks functions whose calls are made again if the callee is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, overload

from telegrad.agent.agent import Agent

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__telegrad_idempotent__"
"""The attribute of marked functions."""
DEFAULT_RETRIES = 3
DEFAULT_BACKOFF = 0.5
_MAX_BACKOFF = 60.0  # seconds; longer delays are of no use


class Mark(NamedTuple):
    """What `idempotent` says about a function."""

    function: Callable[..., Any]
    """The function itself. A wrapper that copied its attributes is not marked."""
    retries: int
    backoff: float


class RetryPolicy(NamedTuple):
    """How often and after which delays a call is made again."""

    retries: int
    backoff: float

    def delay(self, retry: int, jitter: float) -> float:
        """Return the seconds before a retry (the first is 1). `jitter` is a random number from 0 to 1."""
        return min(_MAX_BACKOFF, self.backoff * 2.0 ** min(retry - 1, 60)) * (0.5 + jitter)


@overload
def idempotent(function: F, /) -> F: ...
@overload
def idempotent(*, retries: int = DEFAULT_RETRIES, backoff: float = DEFAULT_BACKOFF) -> Callable[[F], F]: ...
def idempotent(
    function: F | None = None, /, *, retries: int = DEFAULT_RETRIES, backoff: float = DEFAULT_BACKOFF
) -> F | Callable[[F], F]:
    """Mark a function that may run twice without harm, so that its calls are made again if the callee is lost.

    `rpc_sync` and `rpc_async` then wait for the replacement of the lost worker, and call the function there, up to
    `retries` times within the deadline of the call. Before the first retry they wait for about `backoff` seconds, and
    before each further one twice as long. Put the decorator above all others.

    >>> @telegrad.idempotent(retries=5)
    ... def load(path):
    ...     return torch.load(path)
    """
    _check_retries(retries)
    if not (isinstance(backoff, int | float) and math.isfinite(backoff) and backoff >= 0):
        raise ValueError(f"backoff must be a number of seconds, at least 0, not {backoff!r}")

    def mark(function: F) -> F:
        if type(function) is not FunctionType:
            raise TypeError(
                f"{function!r} cannot be marked as idempotent, because it is not a function written in Python: write "
                "one that calls it"
            )
        setattr(function, MARK, Mark(function, retries, float(backoff)))
        return function

    return mark if function is None else mark(function)


def _check_retries(retries: object) -> None:
    if type(retries) is not int or retries < 0:
        raise ValueError(f"retries must be an integer, at least 0, not {retries!r}")


def retry_policy(agent: Agent, function: Callable[..., Any] | str, retries: int | None) -> RetryPolicy | None:
    """Return how calls of a function are made again; None if they are not.

    `retries` is what the call says, None if nothing. Raises a ValueError if it may not say that.
    """
    mark = _mark_of(agent, function)
    if retries is None:
        return RetryPolicy(mark.retries, mark.backoff) if mark is not None and mark.retries else None
    _check_retries(retries)
    if mark is None and retries:
        raise ValueError(_reason(function))
    return RetryPolicy(retries, mark.backoff) if mark is not None and retries else None


def _mark_of(agent: Agent, function: Callable[..., Any] | str) -> Mark | None:
    target: object = function
    if isinstance(function, str):
        target = agent.registry.target(function) if agent.registry is not None else None
    if type(target) is not FunctionType:
        return None
    mark = target.__dict__.get(MARK)
    return mark if isinstance(mark, Mark) and mark.function is target else None


def _reason(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return (
            f"calls of {function!r} cannot be made again, because a name does not say whether its function may run "
            "twice: pass the function, marked with @telegrad.idempotent"
        )
    name = getattr(function, "__qualname__", None) or repr(function)
    return (
        f"calls of {name} cannot be made again after a worker is lost, because it might run twice: if that does no "
        "harm, mark the function with @telegrad.idempotent"
    )
