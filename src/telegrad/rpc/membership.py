"""Who is in the group, and who is there again: functions that act on the default agent of this process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Literal

from telegrad.agent.agent import Agent
from telegrad.connection.worker_record import check_name
from telegrad.default_agent import default_agent
from telegrad.errors import DeadlineExceeded, NotInitialized
from telegrad.execution.reported_wait import ReportedWait
from telegrad.protocol.membership import Member, State
from telegrad.waiting_report import seconds
from telegrad.worker_info import WorkerInfo, WorkerStatus

_log = logging.getLogger("telegrad")

_STATES: dict[State, Literal["alive", "lost", "left"]] = {
    State.ALIVE: "alive",
    State.LOST: "lost",
    State.LEFT: "left",
}


def workers() -> list[WorkerStatus]:
    """Return all workers of the group with what this one holds them for, ordered by id."""
    agent = default_agent()
    return [_status(agent, member) for member in agent.peers.members.all()]


def _status(agent: Agent, member: Member) -> WorkerStatus:
    name, worker_id, _, generation = member.identity
    age = agent.runtime.now() - member.since
    addresses = agent.peers.find(name).record.addresses
    return WorkerStatus(name, worker_id, _STATES[member.state], generation, age, addresses)


def wait_for_worker(name: str | WorkerInfo, timeout: float | None = None) -> WorkerStatus:
    """Wait until the worker with that name is alive: until it has joined, or was replaced after it was lost.

    Raises DeadlineExceeded after `timeout` seconds (None: no limit). After 3 seconds it logs for whom it waits.
    """
    agent = default_agent()
    name = name.name if isinstance(name, WorkerInfo) else name
    check_name(name)
    _check_timeout(timeout)
    if not agent.peers.members.is_open:
        agent.peers.find(name)  # raises an error that lists the workers
    begin = agent.runtime.now()

    def report(elapsed: float) -> None:
        _log.warning(
            "worker %r has waited %s in wait_for_worker() for worker %r", agent.me.name, seconds(elapsed), name
        )

    with ReportedWait(agent.runtime, agent.executor, report):
        there = agent.peers.members.wait_for(name, None if timeout is None else begin + timeout)
    member = agent.peers.members.find(name)
    if not there or member is None:
        if agent.closed:
            raise NotInitialized(f"worker {agent.me.name!r} waited for worker {name!r}, but {agent.closed}")
        raise DeadlineExceeded(
            f"worker {name!r} was not there after {timeout:g} s: start it again, or see its output for why it does not "
            "join",
            worker=name,
            elapsed=agent.runtime.now() - begin,
        )
    return _status(agent, member)


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, or None for no limit, not {timeout!r}")
    if timeout is not None and not timeout >= 0:  # which is also false for NaN
        raise ValueError(f"timeout must be at least 0 seconds, or None for no limit, not {timeout}")


def on_worker_lost(callback: Callable[[WorkerStatus, str], None]) -> Callable[[], None]:
    """Call ``callback(status, reason)`` on a worker thread whenever a worker is lost. Returns a function to end that.

    It is not called for workers that leave in order, nor when this worker itself leaves.
    """
    if not callable(callback):
        raise TypeError(f"the callback for lost workers must be a function of status and reason, not {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(
            f"the callback for lost workers must be a plain function, not the coroutine function {callback!r}, which "
            "no event loop would run"
        )
    agent = default_agent()
    return agent.peers.members.on_lost(lambda member, reason: callback(_status(agent, member), reason))
