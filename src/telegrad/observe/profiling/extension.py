"""The profiling extensions of messages: calls of a session ask for a profile, and callees answer with one.

While nobody in the process profiles, neither is part of the pipeline of calls, and a call pays nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call, Served
from telegrad.calls.extension import Concern, Extension, OutgoingMessage
from telegrad.calls.pipeline import Pipeline
from telegrad.calls.service_names import METHOD, is_service
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import UnknownWorker
from telegrad.observe.profiling import sessions
from telegrad.observe.profiling.recording import Recording
from telegrad.observe.profiling.served import ServedProfile, profiled
from telegrad.observe.profiling.sessions import CallRecord, NameOf, RemoteProfile, Session
from telegrad.wire.messages import Request
from telegrad.wire.profiling_messages import with_profiling


class CallProfiling(Extension):
    """Has the calls that an agent makes in a session profiled by their callees."""

    heads = True

    def __init__(self, me: WorkerRecord, pipeline: Pipeline, name_of: NameOf) -> None:
        self._me = me
        self._pipeline = pipeline
        self._name_of = name_of

    def switch(self, is_on: bool) -> None:
        """Become part of the pipeline, or leave it."""
        self._pipeline.remove(self)
        if is_on:
            self._pipeline.add(self, Concern.ALL)

    def heading(self, message: OutgoingMessage, head: Any) -> Any:
        """Have a request ask for a profile, if it is made in a session."""
        call = message.call
        if call is None or not isinstance(head, Request):
            return head
        session = sessions.sessions.current()
        if session is None or is_service(head.function):
            return head
        name = sessions.take_name()
        is_async = head.creation is not None or call.on_done is not None
        key = self._key(head, call, message.peer.name) if name is None else name.key
        record = session.begin_call(self._me.id, key, is_async)
        if name is not None:
            name.record = record
        call.when_ended(partial(self._ended, session, record, "" if name is None else key))
        return with_profiling(head, session.options)

    def _key(self, head: Request, call: Call, callee: str) -> str:
        kind = "remote" if head.creation is not None else "async" if call.on_done is not None else "sync"
        function = head.function.rpartition(":")[2] or call.by_value
        if head.function == METHOD and head.rref_access is not None:
            function = head.rref_access.method or "a function"
        return f"rpc_{kind}#{function}({self._me.name} -> {callee})"

    def _ended(self, session: Session, record: CallRecord, prefix: str, call: Call) -> None:
        data = getattr(call.answer, "profile", b"")
        if data:
            session.add(RemoteProfile(data, self._name_of, (record.sent, time.time_ns()), prefix=prefix, call=record))
        record.end()


class ServerProfile(Recording):
    """What all calls that this worker serves do, from `ServeProfiling.begin` to `end`."""

    def __init__(self, options: int) -> None:
        super().__init__(options)
        self.calls: list[Recording] = []
        """One for each call. Only appended to."""


class ServeProfiling(Extension):
    """Profiles the calls that an agent serves: for callers that ask for it, and for `ServerProfile`s."""

    serves = True

    def __init__(self, me: int, pipeline: Pipeline) -> None:
        self._me = me
        self._pipeline = pipeline
        self.allowed = True
        """Whether callers get profiles. Their requests are served in any case."""
        self._lock = threading.Lock()  # protects _server_profiles, and whether the pipeline has this extension
        self._server_profiles: tuple[ServerProfile, ...] = ()
        pipeline.add(self, Concern.PROFILING)

    def begin(self, profile: ServerProfile) -> None:
        """Record all calls from now on, whoever makes them."""
        with self._lock:
            self._server_profiles = (*self._server_profiles, profile)
            self._pipeline.remove(self)
            self._pipeline.add(self, Concern.PROFILING | Concern.ALL)

    def end(self, profile: ServerProfile) -> None:
        """Stop that."""
        with self._lock:
            self._server_profiles = tuple(each for each in self._server_profiles if each is not profile)
            if not self._server_profiles:
                self._pipeline.remove(self)
                self._pipeline.add(self, Concern.PROFILING)

    def serve(self, served: Served, function: Callable[[], None]) -> None:
        """Serve a call, and have its function recorded."""
        if served.around is None:  # else this extension was asked already
            if served.profiling is not None and self.allowed:
                profile = ServedProfile(self._me, served.profiling)
                profile.open()
                served.on_head = profile.add_to
                served.around = partial(profiled, profile)
            if self._server_profiles:
                served.around = partial(_observed, self._server_profiles, served.around)
        function()

    def answered(self, served: Served) -> None:
        """End the profile of a call."""
        on_head, served.on_head = served.on_head, None
        profile = getattr(on_head, "__self__", None)
        if isinstance(profile, ServedProfile):
            profile.close()


def _observed(
    observers: tuple[ServerProfile, ...],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function that does the same, and is recorded for the `observers`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        recording = Recording(_union(observers))
        try:
            with recording.on_this_thread():
                return function(*args, **kwargs)
        finally:
            for observer in observers:
                observer.calls.append(recording)

    return run if around is None else around(run)


def _union(observers: tuple[ServerProfile, ...]) -> int:
    options = 0
    for observer in observers:
        options |= observer.options
    return options


def name_of(agent: Agent, worker: int) -> str:
    """Return the name of a worker, or its number if there is none with that id: a peer may have made it up."""
    try:
        return agent.peers.find(worker).record.name
    except UnknownWorker:
        return f"number {worker}"
