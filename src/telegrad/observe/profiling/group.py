"""One profile of a whole group: all threads of all workers, started, stopped and collected by one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call, current_served
from telegrad.connection.worker_record import WorkerRecord
from telegrad.default_agent import default_agent
from telegrad.errors import TelegradError
from telegrad.execution.executor import GuaranteedTask
from telegrad.execution.timers import Timer
from telegrad.observe.profiling import merging
from telegrad.observe.profiling.clocks import clock_offset
from telegrad.observe.profiling.process_profile import process_profiler
from telegrad.observe.profiling.sessions import NameOf, RemoteProfile, Session
from telegrad.torch_private_profiler import empty_event_list
from telegrad.wire.profiles import encode_profile
from telegrad.wire.profiling_messages import FLOPS, MEMORY, SHAPES, STACKS

_log = logging.getLogger("telegrad")

SERVICE = "@telegrad.group_profile"
MOST_BYTES = 64 << 20
"""Most bytes of what one worker recorded. The shortest events are left out."""
MOST_SECONDS = 600.0
"""A worker stops recording after this time, in case nobody tells it to."""


class GroupProfiling:
    """The part of an agent that records for profiles of the group."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.allowed = True
        """Whether other workers may have this one recorded."""
        # By number: who started it, and what ends it. Changed by single operations, without a lock.
        self._limits: dict[int, tuple[int, Timer]] = {}
        self._stopped = 0  # the number that was stopped last
        agent.register(SERVICE[1:], self._serve)
        agent.on_lost(self._on_lost, lambda: not self._limits)

    def start(self, number: int, options: int, starter: int) -> None:
        """Start recording this process."""
        expired = self._agent.runtime.now() + MOST_SECONDS
        self._limits[number] = starter, self._agent.executor.timers.at(expired, partial(self._expire, number))
        try:
            process_profiler.start(number, options, self._agent.me.id)
        except BaseException:
            self._forget(number)
            raise
        if self._stopped == number:  # two threads serve both requests of a starter that was interrupted
            self._forget(number)
            process_profiler.drop(number, self._agent.me.id)

    def stop(self, number: int) -> bytes:
        """Stop, and return what was recorded as bytes."""
        self._stopped = number
        self._forget(number)
        profile = process_profiler.stop(number, self._agent.me.id)
        return b"" if profile is None else encode_profile(profile, MOST_BYTES)

    def _serve(self, number: int, options: int) -> bytes:
        """Start or, with options -1, stop. Called by the worker that profiles the group."""
        served = current_served.get()
        if not isinstance(number, int) or not isinstance(options, int) or served is None:
            raise TelegradError("a profile of the group has a number and options")
        if not self.allowed:
            raise TelegradError(
                f"worker {self._agent.me.name!r} is in registered mode, and does not show others what it does. Its "
                "program can allow it: telegrad.observe.serve_profiles(True)"
            )
        if options >= 0:
            self.start(number, options, served.worker.id)
            return b""
        return self.stop(number)

    def _expire(self, number: int) -> None:
        _log.warning("worker %r stops recording: the profile of the group was not ended", self._agent.me.name)
        self._drop(number)

    def _forget(self, number: int) -> None:
        _, timer = self._limits.pop(number, (0, None))
        if timer is not None:
            self._agent.executor.timers.cancel(timer)

    def _drop(self, number: int) -> None:
        self._forget(number)
        # Not here: it may take long, and threads that read messages call this.
        self._agent.executor.submit(GuaranteedTask(process_profiler.drop, number, self._agent.me.id))

    def _on_lost(self, record: WorkerRecord, reason: str) -> None:
        for number, (starter, _) in list(self._limits.items()):
            if starter == record.id or self._agent.closed:
                self._drop(number)


class GroupProfile:
    """A profile of all workers of a group. Use it in a ``with`` block, and read it afterwards."""

    def __init__(self, agent: Agent, name_of: NameOf, options: int, timeout: float) -> None:
        self._agent = agent
        self._name_of = name_of
        self._options = options
        self._timeout = timeout
        self._number = 0
        self._session = Session(options)
        self._workers: list[WorkerRecord] = []  # those that were asked to record
        self.missing: dict[str, str] = {}
        """Workers that are not in the profile, and why."""

    def __enter__(self) -> GroupProfile:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start recording on all workers."""
        if self._number:
            raise TelegradError("this profile of the group has been started already; make a new one")
        self._number = self._agent.runtime.random_bits(62) | 1
        try:
            self._agent.profiling.group.start(self._number, self._options, self._agent.me.id)
        except TelegradError as error:
            raise TelegradError(f"worker {self._agent.me.name!r} cannot profile the group: {error}") from error
        self._workers = self._others()
        try:
            self._ask(self._options, self._workers)
        except BaseException:  # an interrupt: nobody will call stop()
            self._abandon()
            raise

    def stop(self) -> None:
        """Stop recording, and collect what was recorded."""
        workers = [record for record in self._workers if record.name not in self.missing]
        own = self._agent.profiling.group.stop(self._number)
        self._add(own, 0)
        for record, data in self._ask(-1, workers):
            if not isinstance(data, bytes):
                self._miss(record.name, f"it sent a {type(data).__name__} instead of what it recorded")
                continue
            try:
                self._add(data, clock_offset(self._agent, record.id, self._timeout))
            except TelegradError as error:
                self._miss(record.name, str(error))

    def _abandon(self) -> None:
        """Have all workers stop recording, without waiting for them."""
        self._agent.profiling.group.stop(self._number)
        for record in self._workers:
            with suppress(TelegradError):  # it is lost, and records no longer
                self._agent.call_async(record.id, SERVICE, (self._number, -1), timeout=self._timeout, on_done=_ignore)

    def _others(self) -> list[WorkerRecord]:
        me = self._agent.me.id
        return [peer.record for peer in self._agent.peers.all() if not peer.gone and peer.record.id != me]

    def _ask(self, options: int, workers: Iterable[WorkerRecord]) -> list[tuple[WorkerRecord, Any]]:
        calls: list[tuple[WorkerRecord, Call]] = []
        answers: list[tuple[WorkerRecord, Any]] = []
        for record in workers:
            try:
                args = (self._number, options)
                calls.append((record, self._agent.begin(record.id, SERVICE, args, timeout=self._timeout)))
            except TelegradError as error:
                self._miss(record.name, str(error))
        for record, call in calls:
            try:
                answers.append((record, self._agent.client.complete(call)))
            except Exception as error:  # noqa: BLE001 - whatever a worker raises, the others are in the profile
                self._miss(record.name, str(error))
        return answers

    def _miss(self, name: str, reason: str) -> None:
        self.missing[name] = reason
        _log.warning("worker %r is not in the profile of the group: %s", name, reason)

    def _add(self, data: bytes, offset: int) -> None:
        if data:
            self._session.add(RemoteProfile(data, self._name_of, clock_offset=offset), MOST_BYTES)

    # -- results ----------------------------------------------------------------------------------------------------

    def events(self) -> Any:
        """Return the events of all workers, as torch's profiler does. Names end with that of the worker."""
        events = empty_event_list(bool(self._options & MEMORY), bool(self._options & FLOPS))
        merging.add_events(self._session, events, self._session.began)
        return events

    def key_averages(self, **options: Any) -> Any:
        """Return sums and averages by name; see `torch.profiler.profile.key_averages`."""
        return self.events().key_averages(**options)

    def table(self, sort_by: str = "self_cpu_time_total", row_limit: int = 100, **options: Any) -> str:
        """Return a table of where the time went, on all workers."""
        return str(self.key_averages().table(sort_by=sort_by, row_limit=row_limit, **options))

    def export_chrome_trace(self, path: str) -> None:
        """Write a trace for Perfetto or chrome://tracing, in which each worker is a process."""
        began = self._session.began
        events = merging.trace_events(merging.placed_events(self._session), began)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "baseTimeNanoseconds": began, "displayTimeUnit": "ms"}, file)


def _ignore(call: Call) -> None:
    """Do nothing."""


def profile(
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_flops: bool = False,
    with_stack: bool = False,
    timeout: float = 30.0,
) -> GroupProfile:
    """Profile all workers of the group, with all their threads, during a ``with`` block.

    The options are those of `torch.profiler.profile`. A worker that does not answer within `timeout` seconds is left
    out: see `GroupProfile.missing`.
    """
    agent = default_agent()
    chosen = ((record_shapes, SHAPES), (profile_memory, MEMORY), (with_flops, FLOPS), (with_stack, STACKS))
    options = sum(option for is_on, option in chosen if is_on)
    return GroupProfile(agent, agent.profiling.name_of, options, timeout)


def serve_profiles(allow: bool) -> None:
    """Say whether other workers may see what this one does. They may, except in registered mode."""
    default_agent().profiling.allow(allow)
