"""Describes a worker: reads the tables of its agent, without stopping anything.

Tables change while they are read. Each is copied by one operation or under its lock, so what is told of one thing is
consistent, but two things may be told of different moments.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.calls.call import Call, Served
from telegrad.calls.observing import OBSERVE
from telegrad.calls.server import Server
from telegrad.calls.service_names import readable_name
from telegrad.connection.peer_table import Peer
from telegrad.errors import NotInitialized
from telegrad.events import FIELDS, Entry
from telegrad.observe.describe_autograd import context_views, pass_views
from telegrad.observe.describe_waits import Running, waits_of
from telegrad.observe.model import CallKey, Event, Kind, LiveCall, ViewRequest, WorkerView
from telegrad.observe.stacks import Function, Stacks, where_it_awaits
from telegrad.rref.service import RRefService

_PAGE = resource.getpagesize()
_SERVING = (
    Function("calls/server.py", Server._serve.__name__),
    Function("calls/server.py", Server.serve_message.__name__),
    Function("rref/service.py", RRefService._run.__name__, RRefService._method.__name__),  # then `_serve` is counted
)
"""The functions that run served calls."""
_MOST_LIVE = 2000  # calls that were made, and as many that are served, that a view lists


def describe(agent: Agent, request: ViewRequest) -> WorkerView:
    """Return what `request` wants to know of a worker."""
    local, me = agent.local, agent.me
    base = {
        "name": me.name,
        "id": me.id,
        "incarnation": me.incarnation,
        "generation": me.generation,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "addresses": _open_addresses(agent),
        "now": local.runtime.now(),
        "wall": time.time(),
        "started": agent.started,
    }
    if request.clock:
        return WorkerView(**base)  # type: ignore[arg-type]  # the fields are checked where they are set
    stacks = Stacks(me.name)
    served = agent.server.unanswered()
    running = _running(served, stacks)
    peers = agent.peers.all()
    traffic = [peer.traffic() for peer in peers]
    references = _reference_counts(agent)
    counts = agent.autograd.messaging.counts() if _has_autograd(agent) else {}
    events, following, dropped = _events(agent, request, stacks)
    return WorkerView(
        **base,  # type: ignore[arg-type]  # as above
        members={member.identity.name: member.state.name.lower() for member in agent.peers.members.all()},
        connections=dict(_connections(peers)),
        calls_made=agent.client.made,
        calls_served=agent.server.replier.answered,
        calls_failed=agent.client.completion.failed,
        bytes_sent=sum(sent for sent, _ in traffic),
        bytes_received=sum(received for _, received in traffic),
        memory=_resident(),
        shared_memory=local.slabs.total,
        threads=len(stacks.native),
        descriptors=_descriptors(),
        cpu_seconds=time.process_time(),
        passes_run=counts.get("passes begun", 0) + counts.get("passes joined", 0),
        passes_begun=counts.get("passes begun", 0),
        optimizer_steps=local.optimizer_steps,
        references_owned=references.get("owned", 0),
        references_held=references.get("forks", 0),
        made=tuple(islice(_made(agent, peers, stacks), _MOST_LIVE)),
        served=tuple(_served(agent, served, running, stacks)),
        passes=pass_views(agent, stacks) if _has_autograd(agent) else (),
        contexts=context_views(agent, request) if _has_autograd(agent) and request.contexts else (),
        contexts_alive=len(agent.autograd.contexts.all()) if _has_autograd(agent) else 0,
        waits=waits_of(agent, peers, served, running, stacks),
        stacks=stacks.all() if request.stacks else {},
        events=events,
        next_event=following,
        dropped=dropped,
    )


def _has_autograd(agent: Agent) -> bool:
    try:
        return agent.autograd.contexts is not None
    except NotInitialized:  # a bare agent, as tests have
        return False


def _reference_counts(agent: Agent) -> dict[str, int]:
    try:
        return agent.references.counts()
    except NotInitialized:  # as above
        return {}


def _running(served: Iterable[Served], stacks: Stacks) -> Running:
    """Return the calls that threads run now, outermost first, by thread.

    The thread of a call that was deferred does other things. How many calls a thread runs is seen in its stack, and
    those are the ones that it began last.
    """
    begun: dict[int, list[Served]] = {}
    for call in served:
        if call.thread and call.running and call.waits is None:
            begun.setdefault(call.thread, []).append(call)
    running: Running = {}
    for thread, calls in begun.items():
        if stacks.is_unknown(thread):  # then all that it has begun, except for what is deferred
            own = [call for call in calls if not call.deferred and call.on_cancel is None]
            running[thread] = sorted(own, key=lambda call: call.running)
            continue
        count = stacks.count(thread, _SERVING)
        if count:
            running[thread] = sorted(calls, key=lambda call: call.running)[-count:]
    return running


def _connections(peers: Iterable[Peer]) -> Iterable[tuple[str, str]]:
    for peer in peers:
        for channel in peer.channels():
            link = channel.link
            if link is not None:
                kind = "unix" if not channel.resumable else "tcp+tls" if link.binding else "tcp"
                yield peer.record.name, kind


def parent_of(call: Call) -> CallKey | None:
    """Return caller and number of the served call that made a call."""
    parent = call.parent
    return None if parent is None else (parent.caller, parent.id)


def _made(agent: Agent, peers: Iterable[Peer], stacks: Stacks) -> Iterable[LiveCall]:
    for peer in peers:
        channel = peer.outgoing
        for call in list(channel.calls.values()) if channel is not None else ():
            if call.function == OBSERVE:
                continue
            waiters = list(call.waiters)
            thread = waiters[0].thread if waiters else call.thread
            yield LiveCall(
                call.id,
                agent.me.name,
                call.worker,
                call.name(),
                call.started,
                call.deadline,
                parent_of(call),
                call.context_id,
                "sent" if call.sent else "unsent",
                thread=stacks.native_id(thread),
                where=stacks.where(thread) if waiters else "",
            )


def _served(agent: Agent, served: list[Served], running: Running, stacks: Stacks) -> Iterable[LiveCall]:
    now_running = {id(call) for calls in running.values() for call in calls}
    for call in served[:_MOST_LIVE]:
        runs = id(call) in now_running
        yield LiveCall(
            call.id,
            call.caller,
            agent.me.name,
            function_of(call),
            call.started,
            call.deadline,
            None,
            call.autograd.context if call.autograd is not None else 0,
            _state(call, runs),
            call.cancelled,
            stacks.native_id(call.thread) if runs else 0,
            stacks.where(call.thread) if runs else where_it_awaits(call.coroutine),
        )


def _open_addresses(agent: Agent) -> tuple[str, ...]:
    """Return the addresses at which a worker can be reached: its TCP port is closed if nobody needs it."""
    closed = {listener.address for listener in agent.listeners if not listener.is_open}
    return tuple(address for address in agent.me.addresses if address not in closed)


def function_of(call: Served) -> str:
    """Return the name of the function that a served call runs, or will run."""
    return readable_name(call.function, call.rref_access) or "a function by value"


def _state(call: Served, runs: bool) -> str:
    if call.answered:
        return "replying"
    if call.waits is not None:
        return {"queue": "queued", "reference": "held back"}.get(call.waits.kind, "deferred")
    if runs:
        return "running"
    return "deferred" if call.running else "queued"


def _events(agent: Agent, request: ViewRequest, stacks: Stacks) -> tuple[tuple[Event, ...], int, int]:
    if request.events_since < 0:
        return (), 0, 0
    first = request.events_since if request.events_of in (0, agent.me.incarnation) else 0
    entries, following, dropped = agent.local.events.since(first)
    entries = [entry for entry in entries if entry[6] != OBSERVE]
    left_out = max(0, len(entries) - request.most_events)
    events = tuple(_event(entry, stacks) for entry in entries[left_out:])
    return events, following, dropped + left_out


def _event(entry: Entry, stacks: Stacks) -> Event:
    fields: list[Any] = list(entry[:FIELDS])  # in the order of the fields
    fields[1], fields[13] = Kind(fields[1]), stacks.native_id(fields[13])
    marks = entry[FIELDS:]
    return Event(*fields, marks=marks if any(marks) else ())  # type: ignore[misc]  # mypy takes * for all fields


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # as above
        return 0
