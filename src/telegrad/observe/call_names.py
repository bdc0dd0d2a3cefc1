"""The names of called functions, from both sides of a call: its caller knows no method, and no function by value."""

from __future__ import annotations

from collections.abc import Iterable

from telegrad.calls.service_names import METHOD, readable_name
from telegrad.observe.model import CallKey, Kind, WorkerView

BY_VALUE = "a function by value"


def names_of_callees(views: Iterable[WorkerView]) -> dict[CallKey, str]:
    """Return the functions of the calls that these workers served, as they name them."""
    served = (event for view in views for event in view.events if event.kind is Kind.SERVE)
    return {(event.peer, event.id): event.what for event in served}


def call_name(function: str, of_callee: str = "") -> str:
    """Return what people call the function of a call, from the name in its event, and perhaps that of the callee.

    >>> call_name("@telegrad.method", "Actor.ping"), call_name("", "f.<locals>.<lambda>"), call_name("")
    ('Actor.ping', 'f.<locals>.<lambda>', 'a function by value')
    >>> call_name("@telegrad.to_here"), call_name("torch:add", "anything")
    ('to_here()', 'torch:add')
    """
    if function in ("", METHOD):
        function = of_callee or function
    return readable_name(function) or BY_VALUE
