"""The names of an agent's own services as workers call them, and as people know them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that show names do not need torch
    from telegrad.wire.messages import RRefAccess

PREFIX = "@telegrad."
GATHER = "@telegrad.gather"
FETCH = "@telegrad.to_here"
METHOD = "@telegrad.method"

COLLECTIVE = "a collective"
"""What a call of `GATHER` is to people."""
_READABLE = {GATHER: COLLECTIVE, FETCH: "to_here()", METHOD: "a method of a remote object"}


def is_service(function: str) -> bool:
    """Return whether a call is an agent's own. Those of methods of remote objects run functions of the program.

    >>> is_service("@telegrad.gather"), is_service("@telegrad.method"), is_service("@name_of_the_program")
    (True, False, False)
    """
    return function.startswith(PREFIX) and function != METHOD


def readable_name(function: str, access: RRefAccess | None = None) -> str:
    """Return the name of a service as people know it, and the names of other functions as they are.

    >>> readable_name("@telegrad.gather"), readable_name("@telegrad.to_here"), readable_name("os:getpid")
    ('a collective', 'to_here()', 'os:getpid')
    """
    if function == METHOD and access is not None and isinstance(access.method, str) and access.method:
        return f"{access.method}() of a remote object"
    return _READABLE.get(function, function)
