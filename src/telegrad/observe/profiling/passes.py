"""Profiles backward passes: workers record the islands that they run, and the caller collects that at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.backward.pass_run import PassRun
from telegrad.calls.call import Call, current_served
from telegrad.errors import TelegradError
from telegrad.interrupts import interruptible
from telegrad.observe.profiling import sessions
from telegrad.observe.profiling.clocks import clock_offset
from telegrad.observe.profiling.served import ServedProfile, profiled
from telegrad.observe.profiling.sessions import NameOf, RemoteProfile
from telegrad.torch_private_profiler import is_watched
from telegrad.wire.messages import PROFILED, PROFILING_OPTIONS

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.pass_profile"
_PATIENCE = 10.0  # seconds in which a worker has to send what it recorded


class PassProfiling:
    """The profiles of the passes of one agent."""

    def __init__(self, agent: Agent, name_of: NameOf) -> None:
        self._agent = agent
        self._name_of = name_of
        self.allowed = True
        """Whether others get profiles."""
        agent.register(SERVICE[1:], self._collect)

    def switch(self, is_on: bool) -> None:
        """Ask for profiles of the passes that begin here, or no longer do."""
        self._agent.autograd.messaging.profiling = self if is_on else None

    # -- on the worker that calls backward() -------------------------------------------------------------------------

    def modes(self) -> int:
        """Return the modes of a pass that begins on this thread: whether it is profiled, and how."""
        session = sessions.sessions.current()
        return 0 if session is None else PROFILED | session.options << PROFILING_OPTIONS

    def collect(self, run: PassRun) -> None:
        """Collect what the workers of a pass that is over have recorded. A worker that does not answer is left out."""
        session = sessions.sessions.current()
        if session is None:
            return
        session.worker = self._agent.me.id
        with run.lock:
            workers = [worker for worker in run.rules.reports() if worker != self._agent.me.id]
        args = run.info.context, run.info.number
        calls: list[Call] = []
        for worker in workers:
            try:
                calls.append(self._agent.begin(worker, SERVICE, args, timeout=_PATIENCE))
            except TelegradError as error:
                _log.warning("worker %d is not in the profile of a pass: %s", worker, error)
        for call in calls:
            try:
                data = self._agent.client.complete(call)
                offset = clock_offset(self._agent, call.channel.worker.id, _PATIENCE) if data else 0
            except Exception as error:  # noqa: BLE001 - whatever a worker raises must not fail a pass that is over
                _log.warning("worker %r is not in the profile of a pass: %s", call.worker, error)
            else:
                if isinstance(data, bytes) and data:
                    session.add(RemoteProfile(data, self._name_of, clock_offset=offset))
        own = run.profile
        if isinstance(own, ServedProfile):
            session.add(RemoteProfile(own.pack(), self._name_of))

    # -- on every worker ----------------------------------------------------------------------------------------------

    def recorded(self, run: PassRun, engine_run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs an island and records it, unless a profiler watches this thread already."""
        if is_watched() or not (self.allowed or run.begun_here):
            return engine_run
        with run.lock:
            profile = run.profile
            if not isinstance(profile, ServedProfile):
                profile = run.profile = ServedProfile(self._agent.me.id, run.info.modes >> PROFILING_OPTIONS)
        return partial(_run, profile, profiled(profile, engine_run))

    def _collect(self, context_id: int, number: int) -> bytes:
        """Return what this worker recorded in a pass. Called by the worker that began it."""
        served = current_served.get()
        context = self._agent.autograd.contexts.get(context_id) if isinstance(context_id, int) else None
        if context is None or served is None or not isinstance(number, int) or number >> 48 != served.worker.id:
            return b""
        with context.lock:
            run = context.passes.get(number)
        profile = None if run is None else run.profile
        return profile.pack() if isinstance(profile, ServedProfile) else b""


@interruptible
def _run(profile: ServedProfile, engine_run: Callable[..., Any], *args: Any) -> Any:
    profile.open()
    try:
        return engine_run(*args)
    finally:
        profile.close()
