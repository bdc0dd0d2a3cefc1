"""What torch's RPC profiles, and what of it telegrad can: the caller's part of a call.

Torch also brings the events of a function that runs elsewhere into the profiler of its caller, profiles all calls that
a worker serves, and measures how long calls wait for Python's interpreter lock. Telegrad does none of this, so whatever
asks for it is an error that says so, and what to do instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

_REMEDY = "Run torch.profiler inside the functions that are called, and return or save what it found"


def _is_missing(what: str, remedy: str = _REMEDY) -> NoReturn:
    raise RuntimeError(f"telegrad does not {what}. {remedy}")


class RemoteProfilerManager:
    """Names the events of the next call in torch's profiler, on the worker that it runs on."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Refused: no events come from other workers that could be named."""
        _is_missing(f"bring the profiler's events of a call to its caller, so {key!r} cannot name them")


def _enable_server_process_global_profiler(new_config: Any) -> None:
    """Refused: see the module."""
    _is_missing("profile all calls that a worker serves")


def _disable_server_process_global_profiler() -> Any:
    """Refused: it was never enabled."""
    _is_missing("profile all calls that a worker serves")


def _set_profiler_node_id(default_node_id: int) -> None:
    """Refused: the id says on which worker an event happened, and all events are of this one."""
    _is_missing("number the profiler's events by worker: those of this worker are all there are")


def enable_gil_profiling(flag: bool) -> None:
    """Accepts False. True is refused: telegrad's threads are Python's, and Python does not tell them when they ask."""
    if flag:
        _is_missing("measure how long calls wait for Python's interpreter lock", "py-spy and perf do")
