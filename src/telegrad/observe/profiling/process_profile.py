"""Records all threads of this process, with Kineto, for the profile of a whole group."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from telegrad.errors import TelegradError
from telegrad.torch_private_profiler import is_on_cpu, leave_alone, record_all_threads, trace_start
from telegrad.wire.profiles import ASYNC, NameTable, Profile, ProfiledEvent
from telegrad.wire.profiling_messages import FLOPS, MEMORY, SHAPES, STACKS


class ProcessProfiler:
    """What is recorded of this process. Kineto records one profile at a time, and crashes if two overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects what follows, and starts and stops Kineto
        self._number = 0  # of the profile of a group that is running, or has been cut short
        self._workers: set[int] = set()  # those of this process that take part in it
        self._running: Any = None
        self._ended: Any = None
        self._programs: weakref.WeakSet[Any] = weakref.WeakSet()  # profilers of the program that use Kineto

    def start(self, number: int, options: int, worker: int) -> None:
        """Start recording for the profile of a group, unless another worker in this process has done so."""
        with self._lock:
            if self._running is not None and self._number == number:
                self._workers.add(worker)
                return
            if self._programs or self._running is not None:
                raise TelegradError("it is being profiled already; stop that profiler first")
            profile = leave_alone(
                record_all_threads(
                    bool(options & SHAPES), bool(options & MEMORY), bool(options & FLOPS), bool(options & STACKS)
                )
            )
            profile.__enter__()
            self._number, self._running, self._ended, self._workers = number, profile, None, {worker}

    def stop(self, number: int, worker: int) -> Profile | None:
        """Stop, and return what was recorded. None if another worker in this process has got it."""
        with self._lock:
            if self._number != number:
                return None
            self._stop()
            profile, self._ended, self._number = self._ended, None, 0
        return None if profile is None else _profile_of(profile, worker)

    def drop(self, number: int, worker: int) -> None:
        """Stop, and forget what was recorded, unless another worker in this process takes part, too."""
        with self._lock:
            if self._number == number:
                self._workers.discard(worker)
                if not self._workers:
                    self._stop()
                    self._ended, self._number = None, 0

    def program_starts(self, profile: Any) -> None:
        """The program prepares or starts a profiler of its own: the profile of a group ends."""
        with self._lock:
            self._programs.add(profile)
            self._stop()

    def program_stopped(self, profile: Any) -> None:
        """A profiler of the program has stopped."""
        with self._lock:
            self._programs.discard(profile)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running, self._ended = None, self._running


process_profiler = ProcessProfiler()
"""Kineto belongs to the process, so this does, too."""


def _profile_of(profile: Any, worker: int) -> Profile:
    table, events = NameTable(), []
    for event in profile.function_events:
        if is_on_cpu(event):
            events.append(
                ProfiledEvent(
                    table.index(event.name),
                    worker,
                    event.thread,
                    round(event.time_range.start * 1000),
                    max(0, round(event.time_range.elapsed_us() * 1000)),
                    ASYNC if event.is_async else 0,
                    event.scope,
                    event.sequence_nr,
                    event.fwd_thread or 0,
                    event.cpu_memory_usage,
                    event.device_memory_usage,
                    event.flops or 0,
                    [[size for size in shape if isinstance(size, int)] for shape in event.input_shapes or ()],
                    table.indices(list(event.stack or ())),
                )
            )
    began = trace_start(profile) or 0
    ended = began + max((event.start + event.duration for event in events), default=0)
    return Profile(began, ended, table.names, events)
