"""Raising a stored exception more than once: each time a copy of it.

The exception itself would collect the frames of everybody who sees it, and with them everything that their variables
refer to. If one of those leads back to where the exception is stored, neither is ever freed: Python's garbage collector
does not see torch's futures and values on other workers.
"""

from __future__ import annotations

import copy
from typing import Any


def another(error: Exception) -> Exception:
    """Return a copy of an exception, without its traceback."""
    try:
        other = _copy(error)
    except Exception:  # noqa: BLE001 - a class of the user's; then the same exception is raised again
        other = error
    other.__cause__, other.__context__ = error.__cause__, None
    return other.with_traceback(None)


def _copy(error: Exception) -> Exception:
    cls: Any = type(error)
    base: Any = next(each for each in cls.__mro__ if each.__module__ == "builtins")
    own_way = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not base.__reduce__
    if own_way or cls.__init__ is base.__init__:
        return copy.copy(error)
    # Its __init__ may take other arguments than the exception has in args, or change them again.
    _, args, *state = base.__reduce__(error)
    other: Exception = cls.__new__(cls, *args)
    base.__init__(other, *args)
    other.__dict__.update(state[0] if state and state[0] else {})
    return other
