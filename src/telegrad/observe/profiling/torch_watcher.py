"""Connects torch's profilers with sessions: each is a session while it watches a thread, and shows what came of it."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec

from telegrad.observe.profiling import merging, sessions
from telegrad.observe.profiling.process_profile import process_profiler
from telegrad.observe.profiling.recording import Block, block_here
from telegrad.observe.profiling.sessions import Session
from telegrad.torch_private_profiler import trace_start, watch_profilers, watches_all_threads
from telegrad.wire.profiling_messages import FLOPS, MEMORY, SHAPES, STACKS


class _Started(msgspec.Struct, eq=False):
    """A profiler that was started."""

    session: Session
    before: Session | None
    is_running: bool = True


class TorchWatcher:
    """Makes a session of each profiler of torch's."""

    def __init__(self) -> None:
        self._started: weakref.WeakKeyDictionary[Any, _Started] = weakref.WeakKeyDictionary()
        self._paused: weakref.WeakKeyDictionary[Any, Block] = weakref.WeakKeyDictionary()

    def preparing(self, profile: Any) -> None:
        """Make room for a profiler in this process."""
        if _uses_kineto(profile):
            process_profiler.program_starts(profile)

    def starting(self, profile: Any) -> None:
        """Make room for a profiler on this thread."""
        self.preparing(profile)
        block = block_here()
        if block is not None:
            block.pause()
            self._paused[profile] = block

    def started(self, profile: Any) -> None:
        """Begin its session."""
        session = Session(_options(profile), watches_all_threads(profile))
        self._started[profile] = _Started(session, sessions.enter(session))
        sessions.sessions.begin(session)

    def stopped(self, profile: Any) -> None:
        """End its session."""
        started = self._started.get(profile)
        if started is not None and started.is_running:
            started.is_running = False
            sessions.sessions.end(started.session)
            sessions.enter(started.before)
        process_profiler.program_stopped(profile)
        block = self._paused.pop(profile, None)
        if block is not None and block is block_here():
            block.resume()

    def add_events(self, profile: Any, events: list[Any]) -> None:
        """Add the events of other workers to those of a profiler."""
        started = self._started.get(profile)
        if started is not None:
            zero = trace_start(profile) if _uses_kineto(profile) else None
            merging.add_events(started.session, events, zero)

    def add_to_trace(self, profile: Any, path: str) -> None:
        """Add the events of other workers to the trace that a profiler has written."""
        started = self._started.get(profile)
        if started is not None:
            merging.add_to_trace(started.session, path)


def _uses_kineto(profile: Any) -> bool:
    return hasattr(profile, "kineto_results")


def _options(profile: Any) -> int:
    pairs = (("record_shapes", SHAPES), ("profile_memory", MEMORY), ("with_flops", FLOPS), ("with_stack", STACKS))
    return sum(option for name, option in pairs if getattr(profile, name, False))


_watchers: list[TorchWatcher] = []


def watch_torch() -> None:
    """Watch torch's profilers, for the rest of the process."""
    if not _watchers:
        _watchers.append(TorchWatcher())
        watch_profilers(_watchers[0])
