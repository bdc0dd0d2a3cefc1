"""Who profiles in this process: the profilers of the program, and the recordings that serve other workers.

A *session* is one of these, from its start to its end. Calls that are made in a session ask their callees for a
profile, which ends up in the session. Threads and tasks have a session of their own, as torch's profilers watch one
thread.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import torch

from telegrad.torch_private_profiler import is_watched
from telegrad.wire.profiles import MOST_BYTES

MOST_HELD = 256 << 20
"""Most bytes of profiles of other workers in one session. Later ones are counted and dropped."""

NameOf = Callable[[int], str]
"""Returns the name of a worker from its id."""


class RemoteProfile(msgspec.Struct, eq=False, frozen=True):
    """A profile that came from another worker, not decoded yet."""

    data: bytes
    name_of: NameOf
    window: tuple[int, int] | None = None
    """When the call began and ended here, in nanoseconds of Unix time: what the callee recorded lies in between."""
    clock_offset: int = 0
    """Without a window: how far this worker's clock is ahead of the other one's, in nanoseconds."""
    prefix: str = ""
    """In front of the names of events, as in torch; empty for telegrad's own names."""
    call: CallRecord | None = None
    """The call that it is of."""


class CallRecord(msgspec.Struct, eq=False):
    """A call that was made in a session."""

    marker: str
    """The name of an event that marks its place in the profiler of this worker."""
    key: str
    """The name of the event that replaces it."""
    is_async: bool
    sent: int
    """Unix time in nanoseconds."""
    marked: int
    """When the marker was complete."""
    received: int = 0
    """0 until it has ended."""
    on_end: Callable[[], None] | None = None
    """Called when it has ended. Short."""
    lead: int = 0
    """How far the clock of the profiler is ahead of the system's, in nanoseconds."""

    def end(self) -> None:
        """Note that the call has ended, and that its profile has been kept."""
        self.received = time.time_ns()
        if self.on_end is not None:
            self.on_end()

    def begins_at(self, start: int) -> None:
        """Note when it began by the profiler's clock: torch keeps its own, and the system's may be adjusted.

        If they agree, that was before `marked`.
        """
        self.lead = max(0, start - self.marked)

    def when_ended(self, action: Callable[[], None]) -> None:
        """Call a short function when the call has ended, perhaps twice."""
        self.on_end = action
        if self.received:
            action()


class CallName(msgspec.Struct, eq=False):
    """A name that a call was given."""

    key: str
    record: CallRecord | None = None
    """Set when the call has been made in a session."""


class Session:
    """What one profiler learns of other workers."""

    def __init__(self, options: int, all_threads: bool = False) -> None:
        self.options = options
        self.all_threads = all_threads
        self.began = time.time_ns()
        self.users = 0
        """How many have begun it and not ended it. `Sessions` changes it."""
        self.worker: int | None = None
        """The id of this worker, once it has called another."""
        self._lock = threading.Lock()  # protects the four below
        self._calls: list[CallRecord] = []
        self._profiles: list[RemoteProfile] = []
        self._held = 0
        self._dropped = 0

    def begin_call(self, worker: int, key: str, is_async: bool) -> CallRecord:
        """Note that a call leaves this thread, and mark the place in the profiler that watches the thread."""
        marker, sent = f"{key} call {next(_numbers)}", time.time_ns()
        if is_watched():
            with torch.autograd.profiler.record_function(marker):
                pass
        record = CallRecord(marker, key, is_async, sent, time.time_ns())
        with self._lock:
            self.worker = worker
            self._calls.append(record)
        return record

    def add(self, profile: RemoteProfile, most: int = MOST_BYTES) -> None:
        """Keep the profile of another worker, if it has at most this size."""
        with self._lock:
            if len(profile.data) > most or self._held + len(profile.data) > MOST_HELD:
                self._dropped += 1
                return
            self._held += len(profile.data)
            self._profiles.append(profile)

    def calls(self) -> list[CallRecord]:
        """Return the calls that were made in it."""
        with self._lock:
            return list(self._calls)

    def profiles(self) -> tuple[list[RemoteProfile], int]:
        """Return the profiles of other workers, and how many were dropped."""
        with self._lock:
            return list(self._profiles), self._dropped


_numbers = itertools.count(1)
_current: ContextVar[Session | None] = ContextVar("telegrad_profiling", default=None)
_name: ContextVar[CallName | None] = ContextVar("telegrad_profiling_name", default=None)


class Sessions:
    """The sessions of this process, and the agents that act while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the two below, and `Session.users`
        self._open: set[Session] = set()
        self._switches: weakref.WeakSet[Any] = weakref.WeakSet()

    def attach(self, agent: Any) -> None:
        """Call ``agent.switch(is_on)`` when the first session begins, and when the last one ends."""
        with self._lock:
            self._switches.add(agent)
            if self._open:
                agent.switch(True)

    def begin(self, session: Session) -> None:
        """Note that somebody uses a session."""
        with self._lock:
            session.users += 1
            is_first = not self._open
            self._open.add(session)
            if is_first:
                for agent in self._switches:
                    agent.switch(True)

    def end(self, session: Session) -> None:
        """Undo `begin`."""
        with self._lock:
            session.users -= 1
            if not session.users:
                self._open.discard(session)
                if not self._open:
                    for agent in self._switches:
                        agent.switch(False)

    def current(self) -> Session | None:
        """Return the session of this thread or task, or else one that watches all threads."""
        session = _current.get()
        if session is not None and session.users:
            return session
        with self._lock:
            return next((each for each in self._open if each.all_threads), None)


sessions = Sessions()
"""Torch's profilers belong to the process, so these do, too."""


def enter(session: Session | None) -> Session | None:
    """Make a session that of this thread or task. Returns the one before."""
    before = _current.get()
    _current.set(session)
    return before


@contextmanager
def naming(key: str) -> Iterator[CallName]:
    """Name the call that is made in this block as torch does: events on the callee are ``key#remote_op: name``."""
    name = CallName(key)
    token = _name.set(name)
    try:
        yield name
    finally:
        _name.reset(token)


def name_next_call(key: str) -> bool:
    """Name the next call of this thread or task, as `naming` does. Returns False if it has a name."""
    if _name.get() is not None:
        return False
    _name.set(CallName(key))
    return True


def take_name() -> CallName | None:
    """Return the name that the next call of this thread or task was given, and forget it."""
    name = _name.get()
    if name is not None:
        _name.set(None)
    return name
