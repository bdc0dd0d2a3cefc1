"""Checks arguments of calls, where the usual mistake is one value, or one worker, instead of several."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from telegrad.worker_info import WorkerInfo


def positional(args: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a call as a tuple. Raises a TypeError for a value that is not several.

    >>> positional(None), positional([1, 2])
    ((), (1, 2))
    >>> positional("abc")
    Traceback (most recent call last):
    ...
    TypeError: args must be a tuple of the function's arguments, not a str: write ('abc',) to pass it as the only one
    """
    if args is None:
        return ()
    # Tensors, strings and dicts can be iterated over, and would become several arguments without a word.
    if isinstance(args, Sequence | Iterator) and not isinstance(args, str | bytes | bytearray | memoryview):
        return tuple(args)
    shown = reprlib.repr(args) if isinstance(args, str | bytes | int | float | bool) else "x"
    raise TypeError(
        f"args must be a tuple of the function's arguments, not {_a(args)}: write ({shown},) to pass it as the only one"
        + (", or kwargs=x to pass its items by name" if isinstance(args, Mapping) else "")
    )


def keyword(kwargs: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call. Raises a TypeError for anything but a mapping.

    >>> keyword(5)
    Traceback (most recent call last):
    ...
    TypeError: kwargs must be a dict of the function's keyword arguments, not an int: pass further arguments in args
    """
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    raise TypeError(
        f"kwargs must be a dict of the function's keyword arguments, not {_a(kwargs)}: pass further arguments in args"
    )


def several(workers: Any) -> Any:
    """Return the workers of a group function. Raises a TypeError for the name of one, which is not a list of names.

    >>> several("worker1")
    Traceback (most recent call last):
    ...
    TypeError: workers must be a list of workers, not a str: write ['worker1'] for one
    """
    if isinstance(workers, Iterable) and not isinstance(workers, str | WorkerInfo):
        return workers
    shown = reprlib.repr(workers) if isinstance(workers, str | int | WorkerInfo) else "x"
    raise TypeError(f"workers must be a list of workers, not {_a(workers)}: write [{shown}] for one")


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
