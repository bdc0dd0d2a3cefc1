"""Profiles the function of a call for its caller: records it, and what its nested calls bring, and packs both."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import CoroutineType
from typing import Any

from telegrad.interrupts import interruptible
from telegrad.observe.profiling import sessions
from telegrad.observe.profiling.merging import placed_events
from telegrad.observe.profiling.recording import Recording, RecordReader
from telegrad.observe.profiling.sessions import Session
from telegrad.wire.messages import Failure, Reply
from telegrad.wire.profiles import ASYNC, MOST_BYTES, REMOTE, NameTable, Profile, ProfiledEvent, encode_profile
from telegrad.wire.profiling_messages import with_profile


class ServedProfile:
    """The profile of one served call, or of what this worker does in one pass."""

    def __init__(self, worker: int, options: int) -> None:
        self._worker = worker
        self.recording = Recording(options)
        self.session = Session(options)
        self._packed: bytes | None = None

    def add_to(self, head: Reply | Failure) -> Reply | Failure:
        """Return the head of the response, with the profile."""
        return with_profile(head, self.pack())

    def pack(self) -> bytes:
        """Return the profile as bytes. What is recorded later is not in it."""
        if self._packed is None:
            self._packed = encode_profile(self._profile(), MOST_BYTES)
        return self._packed

    def open(self) -> None:
        """Have calls of the functions that are recorded profiled, too."""
        sessions.sessions.begin(self.session)

    def close(self) -> None:
        """Undo `open`."""
        sessions.sessions.end(self.session)

    def _profile(self) -> Profile:
        began, table = self.session.began, NameTable()
        reader = RecordReader(began, self._worker, table)
        reader.read(self.recording.segments())
        events = reader.events
        self._finish_calls(events, table)
        for placed in placed_events(self.session):
            event = placed.event
            event.name = table.index(placed.name)
            event.stack = table.indices(placed.stack)
            event.start = placed.start - began
            event.flags |= REMOTE
            events.append(event)
        return Profile(began, time.time_ns(), table.names, events, reader.left_out)

    def _finish_calls(self, events: list[ProfiledEvent], table: NameTable) -> None:
        """Turn the marker of each call into an event that lasts as long as the call."""
        markers = {table.index(call.marker): call for call in self.session.calls()}
        for event in events:
            call = markers.get(event.name)
            if call is not None:
                event.name = table.index(call.key)
                event.flags |= ASYNC if call.is_async else 0
                if call.received:
                    event.duration = max(0, call.received - self.session.began - event.start)


def profiled(profile: ServedProfile, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, and is recorded. If it returns a coroutine, so are its steps."""
    return partial(_run, profile, function)


@interruptible
def _run(profile: ServedProfile, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before = sessions.enter(profile.session)
    try:
        with profile.recording.on_this_thread():
            result = function(*args, **kwargs)
    finally:
        sessions.enter(before)
    return _in_steps(profile, result) if type(result) is CoroutineType else result


def _in_steps(profile: ServedProfile, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
    """Return a coroutine that does the same, and is recorded."""
    steps = _run_steps(profile, coroutine)
    # A task that is cancelled before its first step drops its coroutine, and with it the one inside.
    weakref.finalize(steps, coroutine.close).atexit = False
    return steps


async def _run_steps(profile: ServedProfile, coroutine: Coroutine[Any, Any, Any]) -> Any:
    sessions.enter(profile.session)  # for the whole task
    return await _Steps(profile.recording, coroutine)


class _Steps:
    """A coroutine each of whose steps is recorded. Others run on the same thread in between."""

    def __init__(self, recording: Recording, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._recording = recording
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                with self._recording.on_this_thread():
                    awaited = step()
            except StopIteration as end:
                return end.value
            try:
                value = yield awaited
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is raised in the coroutine
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, value)
