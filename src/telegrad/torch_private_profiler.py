"""Every private name of torch's profilers that telegrad uses, checked at import, as in `torch_private`.

Torch has two profilers. `torch.profiler` and `torch.autograd.profiler` use the one called Kineto, which only one thread
of a process can use at a time. The older one (`torch.autograd.profiler_legacy`) records one thread, and any number of
threads at the same time, so it records what a worker does for others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import _C
from torch.autograd import profiler, profiler_legacy, profiler_util

_NEEDED: Sequence[tuple[str, object, Sequence[str]]] = (
    (
        "torch._C._autograd",
        _C._autograd,
        ("_enable_profiler_legacy", "_disable_profiler_legacy", "ProfilerEvent", "_profiler_enabled", "DeviceType"),
    ),
    ("torch._C._profiler", _C._profiler, ("ProfilerConfig", "ProfilerState", "_ExperimentalConfig")),
    (
        "torch.autograd.profiler.profile",
        profiler.profile,
        ("_prepare_trace", "_start_trace", "_ensure_function_events", "export_chrome_trace"),
    ),
    ("torch.autograd.profiler_legacy.profile", profiler_legacy.profile, ("_start_trace",)),
    ("torch.autograd.profiler_util", profiler_util, ("_filter_name", "_filter_stack_entry", "_rewrite_name")),
    ("torch.autograd.profiler_util.EventList", profiler_util.EventList, ("_build_tree",)),
)
_missing = [f"{where}.{name}" for where, owner, names in _NEEDED for name in names if not hasattr(owner, name)]
if _missing:
    raise ImportError(
        f"torch {torch.__version__} lacks {', '.join(_missing)}, which telegrad needs; "
        "install a release of telegrad that supports this release of torch"
    )

_kineto: Any = profiler.profile  # torch has no types here
_EventList: Any = profiler_util.EventList

Record = Any
"""What the older profiler records: the beginning or end of an event, or an allocation."""

stop_recording: Callable[[], list[list[Record]]] = _C._autograd._disable_profiler_legacy
"""Ends the recording of this thread, and returns its records: a list for each thread that it was passed on to."""
is_watched: Callable[[], bool] = _C._autograd._profiler_enabled
"""Returns whether a profiler watches this thread."""
is_hidden: Callable[[str], bool] = profiler_util._filter_name
"""Returns whether torch leaves events of this name out."""
is_shown_line: Callable[[str], bool] = profiler_util._filter_stack_entry
"""Returns whether torch shows this line of a stack."""
shown_name: Callable[..., str] = profiler_util._rewrite_name


def start_recording(shapes: bool, memory: bool, flops: bool, stacks: bool) -> None:
    """Record this thread, on which no profiler is active, with the older profiler."""
    kind = _C._profiler.ProfilerState.CPU
    config = _C._profiler.ProfilerConfig(
        kind, shapes or flops, memory, stacks, flops, False, _C._profiler._ExperimentalConfig()
    )
    _C._autograd._enable_profiler_legacy(config)


def record_all_threads(shapes: bool, memory: bool, flops: bool, stacks: bool) -> Any:
    """Return a profiler of the whole process. It can be started and stopped on different threads."""
    config = _C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profiler.profile(
        record_shapes=shapes,
        profile_memory=memory,
        with_flops=flops,
        with_stack=stacks,
        use_kineto=True,
        experimental_config=config,
    )


def watches_all_threads(profile: Any) -> bool:
    """Whether one of torch's profilers watches the whole process."""
    return bool(getattr(getattr(profile, "experimental_config", None), "profile_all_threads", False))


def is_on_cpu(event: Any) -> bool:
    """Whether an event of a profiler happened on the CPU."""
    return bool(event.device_type == _C._autograd.DeviceType.CPU)


def trace_start(profile: Any) -> int | None:
    """Return when a profiler that uses Kineto began, in nanoseconds of Unix time. None if it has recorded nothing."""
    return None if profile.kineto_results is None else int(profile.kineto_results.trace_start_ns())


def empty_event_list(memory: bool, flops: bool) -> Any:
    """Return a list of no events, to which whole trees of events can be added."""
    events = _EventList([], profile_memory=memory, with_flops=flops)
    events._build_tree()
    return events


def with_tree(events: Iterable[profiler_util.FunctionEvent]) -> list[profiler_util.FunctionEvent]:
    """Relate events of one thread to those inside them, and leave out those that repeat the one around them."""
    found = _EventList(list(events))
    found._build_tree()
    return list(found)


_LEFT_ALONE = "telegrad_leaves_alone"


def leave_alone(profile: Any) -> Any:
    """Have the `Watcher` not learn of a profiler. Returns it."""
    setattr(profile, _LEFT_ALONE, True)
    return profile


class Watcher(Protocol):
    """Learns of the profilers that the program uses."""

    def preparing(self, profile: Any) -> None:
        """A profiler will watch this thread soon."""

    def starting(self, profile: Any) -> None:
        """A profiler is about to watch this thread, and none may do so already."""

    def started(self, profile: Any) -> None:
        """It does."""

    def stopped(self, profile: Any) -> None:
        """It no longer does, or has failed to."""

    def add_events(self, profile: Any, events: list[Any]) -> None:
        """Add to the events that a profiler shows."""

    def add_to_trace(self, profile: Any, path: str) -> None:
        """Add to the trace file that a profiler has written."""


def watch_profilers(watcher: Watcher) -> None:
    """Tell `watcher` of torch's profilers, for the rest of the process."""
    for cls in (profiler.profile, profiler_legacy.profile):
        _tell_of_start_and_stop(cls, watcher)
    prepare = _kineto._prepare_trace

    @functools.wraps(prepare)
    def prepare_watched(self: Any) -> None:
        if not hasattr(self, _LEFT_ALONE):
            watcher.preparing(self)
        prepare(self)

    _kineto._prepare_trace = prepare_watched
    ensure_events, write_trace = _kineto._ensure_function_events, _kineto.export_chrome_trace

    @functools.wraps(ensure_events)
    def ensure_all_events(self: Any) -> None:
        before = self._function_events
        ensure_events(self)
        if self._function_events is not before and self._function_events is not None:
            watcher.add_events(self, self._function_events)

    @functools.wraps(write_trace)
    def write_whole_trace(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        result = write_trace(self, path, *args, **kwargs)
        watcher.add_to_trace(self, path)
        return result

    _kineto._ensure_function_events, _kineto.export_chrome_trace = ensure_all_events, write_whole_trace


def _tell_of_start_and_stop(cls: Any, watcher: Watcher) -> None:
    start, leave = cls._start_trace, cls.__exit__
    legacy = cls is profiler_legacy.profile

    @functools.wraps(start)
    def start_watched(self: Any) -> None:
        if hasattr(self, _LEFT_ALONE):
            start(self)
            return
        watcher.starting(self)
        try:
            start(self)
        except BaseException:
            watcher.stopped(self)
            raise
        watcher.started(self)

    @functools.wraps(leave)
    def leave_watched(self: Any, *error: Any) -> Any:
        if not self.enabled or hasattr(self, _LEFT_ALONE):
            return leave(self, *error)
        try:
            result = leave(self, *error)
        finally:
            watcher.stopped(self)
        if legacy:
            watcher.add_events(self, self.function_events)
        return result

    cls._start_trace = start_watched
    cls.__exit__ = leave_watched
