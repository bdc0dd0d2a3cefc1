"""What a worker of a launcher does: a function, its arguments, and the options of `init_rpc`, pickled once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import cloudpickle

from telegrad.errors import PayloadError


def dump_work(fn: Callable[..., Any], args: Sequence[Any], init_options: Mapping[str, Any] | None) -> bytes:
    """Return the work as bytes. Raises a PayloadError if it cannot be pickled, and a TypeError for other types.

    >>> run_work(dump_work(lambda x: x + 1, (41,), None), "worker0", init=False)
    42
    """
    if not callable(fn):
        raise TypeError(f"the function of the workers must be callable, but it is of type {type(fn).__name__}")
    # A tensor or a string can be iterated over, and would become several arguments without a word.
    if not isinstance(args, Sequence | Iterator) or isinstance(args, str | bytes):
        kind = type(args).__name__
        raise TypeError(f"args must be a tuple of the function's arguments, not of type {kind}: write (x,) to pass one")
    if not isinstance(init_options, Mapping | None):
        kind = type(init_options).__name__
        raise TypeError(f"init_options must be a dict of keyword arguments of init_rpc, not of type {kind}")
    try:
        return bytes(cloudpickle.dumps((fn, tuple(args), dict(init_options or {}))))
    except Exception as error:
        raise PayloadError(
            f"cannot pickle the function or its arguments to send them to the workers: {_unpicklable(fn, args)}{error}"
        ) from error


def _unpicklable(fn: Callable[..., Any], args: Any) -> str:
    """Return which part cannot be pickled, as in "function's global 'lock': "; empty for arguments that are gone."""
    if isinstance(args, Iterator):
        return ""
    from telegrad.wire.unpicklable import find_unpicklable  # it needs torch, which a launcher does not

    return f"{find_unpicklable((fn, args), ('function', 'args'), cloudpickle.dumps)}: "


def run_work(work: bytes, name: str, *, init: bool, joined: Callable[[], None] = lambda: None) -> object:
    """Do the work on worker `name`, and return what the function returns.

    With `init`, the worker joins the group before, and `joined` is called then.
    """
    function, arguments, options = cloudpickle.loads(work)
    if not init:
        return _result_of(function, arguments)
    from telegrad import rpc

    rpc.init_rpc(name, **options)
    joined()
    value = _result_of(function, arguments)
    rpc.shutdown()
    return value


def _result_of(function: Callable[..., Any], arguments: Sequence[Any]) -> object:
    """Call the function. One that exits with code 0 has finished, as a script has, and has no result."""
    try:
        return function(*arguments)
    except SystemExit as end:
        if end.code is not None and end.code != 0:
            raise
        return None


def without_frames_of(error: BaseException, files: Sequence[str]) -> BaseException:
    """Make the traceback begin at the user's code: leave out its first frames that are in these files."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (*files, __file__):
        trace = trace.tb_next
    return error.with_traceback(trace)
