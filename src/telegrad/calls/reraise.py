"""An exception that is kept to be raised more than once must not be raised itself.

It would collect the frames of all who see it, and with them all that their variables refer to. If one of those leads
back to the place where the exception is kept, neither ever dies: torch's futures, and values on other workers, are
beyond the reach of Python's garbage collector.
"""

from __future__ import annotations

import copy
from typing import Any


def another(error: Exception) -> Exception:
    """The same exception once more, without its traceback."""
    try:
        other = _copy(error)
    except Exception:  # noqa: BLE001 - the user's class; then all get the same exception
        other = error
    other.__cause__, other.__context__ = error.__cause__, None
    return other.with_traceback(None)


def _copy(error: Exception) -> Exception:
    cls: Any = type(error)
    base: Any = next(each for each in cls.__mro__ if each.__module__ == "builtins")
    own_way = cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not base.__reduce__
    if own_way or cls.__init__ is base.__init__:
        return copy.copy(error)
    # Its __init__ may take other arguments than those that the exception shows, or change them once more.
    _, args, *state = base.__reduce__(error)
    other: Exception = cls.__new__(cls, *args)
    base.__init__(other, *args)
    other.__dict__.update(state[0] if state and state[0] else {})
    return other
