"""Which function each member of a collective has called: they must all have called the same one.

Collectives are matched by their numbers alone. So a member that skips one, or calls them in another order, would get
the values of another function. Each value therefore travels with the name of the function. A barrier has no values, and
says so by None: its outcome is empty then, however many members it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from telegrad.errors import PayloadError, ProtocolError
from telegrad.waiting_report import workers

BARRIER = "barrier()"
_PATH = "args[3][1]"  # of a value in the arguments of the call that carries it


def tagged(what: str, value: object) -> tuple[str, object] | None:
    """Return what a member sends for its value: see `untagged`."""
    return None if what == BARRIER else (what, value)


def function_of(sent: object) -> str:
    """Return the function that the member has called that sent this, for errors.

    >>> function_of(tagged("all_gather()", 1)), function_of(tagged("barrier()", None))
    ('all_gather()', 'barrier()')
    """
    if sent is None:
        return BARRIER
    return sent[0] if type(sent) is tuple and sent and type(sent[0]) is str else "the collective"


def untagged(what: str, sent: object, names: Iterable[str], collector: str) -> dict[str, Any]:
    """Return the values of all members, by name. Raises a ValueError if some of them have called another function.

    >>> untagged("all_gather()", {"a": tagged("all_gather()", 1), "b": tagged("all_gather()", None)}, "ab", "a")
    {'a': 1, 'b': None}
    >>> untagged("barrier()", {}, "ab", "a")
    {'a': None, 'b': None}
    """
    malformed = ProtocolError(f"worker {collector!r} did not send the values of all workers of a collective")
    members = list(names)
    if type(sent) is not dict or (sent and not sent.keys() >= set(members)):
        raise malformed
    values: dict[str, Any] = {}
    callers: dict[str, list[str]] = {}
    for name in members:
        pair = sent.get(name)
        if pair is None:
            pair = (BARRIER, None)
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not str:
            raise malformed
        callers.setdefault(pair[0], []).append(name)
        values[name] = pair[1]
    if callers.keys() != {what}:
        each = ", and ".join(f"{workers(those)} called {function}" for function, those in callers.items())
        raise ValueError(
            f"{each}, as the same collective: all workers must call the same collectives in the same order"
        )
    return values


def name_value(error: BaseException) -> None:
    """Let the error of a value that cannot be sent name the value, not the arguments of the call that carries it."""
    if isinstance(error, PayloadError) and error.args and type(error.args[0]) is str:
        error.args = (error.args[0].replace(_PATH, "the value", 1), *error.args[1:])
