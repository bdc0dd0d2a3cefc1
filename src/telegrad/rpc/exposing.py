"""`expose` marks what other workers may call in registered mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from telegrad.calls.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])

default_registry = Registry()
"""What this process exposes. `init_rpc` gives it to the agent."""


@overload
def expose(target: F, /) -> F: ...
@overload
def expose(*, name: str | None = None, methods: Iterable[str] = (), allow: Iterable[str] = ()) -> Callable[[F], F]: ...
def expose(
    target: F | None = None,
    /,
    *,
    name: str | None = None,
    methods: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> F | Callable[[F], F]:
    """Let other workers call a function or class in registered mode (``Options(accept="registered")``).

    Of a class, other workers may create instances with `remote`, and call the listed `methods` through RRefs. `name` is
    what callers say; the default is ``module:qualname``. `allow` limits the callers: patterns of worker names, as in
    ``["trainer*"]``.

    >>> @telegrad.expose(name="double", allow=["trainer*"])
    ... def double(x):
    ...     return 2 * x
    """

    def add(target: F) -> F:
        default_registry.expose(target, name=name, methods=methods, allow=allow)
        return target

    return add if target is None else add(target)
