"""How a worker leaves the group: gracefully, when all workers are ready to leave, or at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from telegrad.calls.exit_cause import FirstCause, cause_of, error_in_flight
from telegrad.calls.observing import OBSERVE
from telegrad.calls.service_names import GATHER
from telegrad.connection.channel import Channel
from telegrad.errors import DeadlineExceeded, ProtocolError, ReferencesHeld, TelegradError
from telegrad.execution.reported_wait import ReportedWait
from telegrad.interrupts import shielded
from telegrad.protocol.shutdown_report import report_of, to_plain
from telegrad.waiting import Event, Runtime
from telegrad.waiting_report import WaitingReport, seconds

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent
    from telegrad.rref.manager import RRefManager

_log = logging.getLogger("telegrad")

_FLUSH = 1.0  # seconds that the last frames may take to leave
_MAX_ROUNDS = 60  # rounds in which references may settle: a count, so that all workers stop in the same round
_REPORT = 30.0  # seconds after which a shutdown says whom it waits for
_PAUSE = 0.1  # maximum seconds between rounds


class RRefMessageCounts(NamedTuple):
    """Messages about references, counted at both ends: see `Shutdown._drain`."""

    pending: bool
    """Whether more are about to be sent."""
    sent: dict[int, int]
    """How many were ever sent, by receiver."""
    received: dict[int, int]
    """How many were ever received, by sender, when all that follows from them has been sent."""


_NO_MESSAGES = RRefMessageCounts(False, {}, {})


class Round(NamedTuple):
    """What all workers together said in a round of a shutdown."""

    busy: bool
    """Whether a worker has a call in flight."""
    made: int
    """How many calls and messages about references were ever made."""
    settled: bool
    """Whether all messages about references have arrived, and no more follow."""


def _round(summary: object) -> Round | None:
    """Return the summary that the root has sent; None if this worker has missed the round."""
    if summary == {}:
        return None
    if type(summary) is not tuple or [type(part) for part in summary] != [bool, int, bool]:
        raise ProtocolError("the worker that collects the rounds of a shutdown sent a malformed one")
    return Round(*summary)


def _do_nothing(is_over: bool = False) -> None:
    """Stand for a callback that is not set."""


class Shutdown:
    """Shuts one agent down."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._local = agent.local
        self.references: RRefManager | None = None
        """The references of this worker, which are counted and released at the end."""
        self.on_leave: Callable[[bool], None] = _do_nothing
        """Called when the worker leaves, with whether all have agreed to leave, and possibly again."""
        self.on_closed: Callable[[], None] = _do_nothing
        """Called when everything is closed."""
        self.report_after = _REPORT
        """Seconds after which it logs whom it waits for. A worker that only serves is always in a shutdown."""
        self._lock = threading.Lock()  # protects _thread and the agent's closed
        self._thread: int | None = None  # the one that shuts down
        self._done: Event = agent.runtime.event()  # everything is closed
        self._drained: Event | None = None
        self._cause = ""  # the error with which this worker exits, if any
        self._first_cause = FirstCause(agent.peers.members)

    @property
    def first_cause(self) -> str:
        """Which other worker exited with an error first, and with which error. Empty if it was replaced since."""
        return self._first_cause.text()

    def note_cause(self, error: BaseException | None) -> None:
        """Record that this worker exits with `error`, if any. The other workers get the first one."""
        # In registered mode the others are no friends, and learn nothing of this program's source.
        place = self._agent.registry is None
        self._cause = self._cause or cause_of(error, self.first_cause, place=place)

    def heard(self, worker: str, cause: str) -> None:
        """Record that another worker exited with an error."""
        if self._first_cause.heard(worker, cause) and not self._local.closed:
            _log.warning("worker %r: %s", self._agent.me.name, self.first_cause)

    @property
    def begun(self) -> bool:
        """Whether this worker is leaving."""
        return self._local.leaving

    def activity(self) -> list[str]:
        """Describe the calls in flight, made and served, for error messages."""
        lines = []
        for peer in self._agent.peers.table.used():
            for channel in peer.channels():
                calls = list(channel.calls.values())
                lines += [str(call) for call in calls if call.function not in (GATHER, OBSERVE)]
        lines += filter(None, [retried.suspended() for retried in list(self._agent.client.retried)])
        for served in self._agent.server.unanswered():
            if served.function != GATHER:
                lines.append(f"{served.function}, called by worker {served.caller!r}, is still running")
        return lines

    def activity_ended(self) -> None:
        """Wake a shutdown that waits for calls to end, if all have."""
        drained = self._drained
        if drained is not None and not _is_serving(self._agent) and not self.activity():
            drained.set()

    def shutdown(self, *, graceful: bool, timeout: float, strict_references: bool = False) -> None:
        """See `Agent.shutdown`."""
        with self._lock:
            thread = self._thread
            if thread is None:
                self._thread = threading.get_ident()
                self._local.leaving = True
        if thread is not None:
            self._join(thread, graceful=graceful, timeout=timeout)
            return
        held: list[str] = []
        try:
            is_over = graceful and not self._local.closed and not self._agent.peers.members.is_open
            if graceful and not self._local.closed:
                held = self._drain(timeout) if is_over else self._drain_own(timeout)
            self._local.departing = True
            self.on_leave(is_over)
        except BaseException as error:
            self.note_cause(error)
            raise
        finally:
            self.close(in_order=graceful)
        if held:
            text = f"worker {self._agent.me.name!r} shut down with references held: {'; '.join(held)}"
            if strict_references:
                raise ReferencesHeld(f"{text}. Release or delete them before shutdown")
            _log.info(text)

    def _join(self, thread: int, *, graceful: bool, timeout: float) -> None:
        """Wait until the agent is closed, which another thread does, or this one in a frame below (a signal handler).

        Who does not want to wait for the other workers closes the agent, and the first caller gets an error.
        """
        agent = self._agent
        if not graceful:
            self.close()
        if thread == threading.get_ident():
            return
        if not agent.executor.wait(self._done, agent.runtime.now() + timeout if timeout else None):
            raise DeadlineExceeded(
                f"worker {agent.me.name!r} has not shut down after {timeout:g} s: another thread is in shutdown(), and "
                "waits for the other workers. shutdown(graceful=False) does not wait for them",
                worker=agent.me.name,
                elapsed=timeout,
            )

    def _drain_own(self, timeout: float) -> list[str]:
        """Wait until this worker has no call in flight, which is enough to leave an open group."""
        deadline = self._agent.runtime.now() + timeout if timeout else None
        self._wait_until_idle(deadline, timeout, WaitingReport(self._agent.runtime.now(), self.report_after))
        return self.references.held() if self.references is not None else []

    def _wait_until_idle(self, deadline: float | None, timeout: float, schedule: WaitingReport) -> None:
        agent = self._agent
        while self.activity():
            drained = self._drained = agent.runtime.event()
            self._local.on_idle = self.activity_ended
            try:
                with ReportedWait(agent.runtime, agent.executor, self._report_activity, schedule):
                    in_time = not self.activity() or agent.executor.wait(drained, deadline)
            finally:
                self._local.on_idle = None  # or every call that it serves from now on would look for others
            if not in_time:
                raise DeadlineExceeded(
                    f"worker {agent.me.name!r} shut down after {timeout:g} s with calls in flight: "
                    + "; ".join(self.activity()),
                    worker=agent.me.name,
                    elapsed=timeout,
                )

    def _drain(self, timeout: float) -> list[str]:
        """Wait until no worker has a call in flight, twice in a row, with no call made in between.

        Returns the references that are still held.
        """
        agent, now = self._agent, self._agent.runtime.now
        deadline = now() + timeout if timeout else None
        schedule = WaitingReport(now(), self.report_after)
        before, unsettled, missed = -1, 0, 0
        while True:
            self._wait_until_idle(deadline, timeout, schedule)
            left = None if deadline is None else max(0.01, deadline - now())
            # Before the others can learn that all calls have ended, and leave: what they hold would be released. And
            # the traffic first: what arrives between the two is then neither settled nor held.
            traffic = self.references.message_counts() if self.references is not None else _NO_MESSAGES
            held = self.references.held() if self.references is not None else []
            mine = report_of(
                agent.me.id,
                busy=bool(self.activity()),
                calls=agent.client.made,
                pending=traffic.pending,
                sent=traffic.sent,
                received=traffic.received,
            )
            values = _round(agent.collectives.shutdown_round(to_plain(mine), left, schedule))
            _log.debug("worker %r: a round of the shutdown: %s", agent.me.name, values)
            if values is None:  # the others are in a later round, or one of them claims to be
                before, missed = -1, missed + 1
                if deadline is not None and now() >= deadline:
                    raise DeadlineExceeded(
                        f"worker {agent.me.name!r} shut down after {timeout:g} s alone: another worker was always in a "
                        "later round of the shutdown",
                        worker=agent.me.name,
                        elapsed=timeout,
                    )
                if missed > 1:
                    agent.runtime.event().wait(now() + min(_PAUSE, 0.002 * missed))
                continue
            if values.made == before and not values.busy:
                # Messages about references are not calls, so they are counted at both ends. That is only for the list
                # of references that are held, so the wait for it is bounded.
                if values.settled or unsettled == _MAX_ROUNDS:
                    return held
                unsettled += 1
                agent.runtime.event().wait(now() + min(_PAUSE, 0.002 * unsettled))
            before = values.made

    def _report_activity(self, elapsed: float) -> None:
        calls = "; ".join(self.activity())
        if calls:
            _log.warning("worker %r has waited %s in shutdown() for: %s", self._agent.me.name, seconds(elapsed), calls)

    def close(self, *, in_order: bool = False) -> None:
        """See `Agent.close`."""
        if not in_order:
            self.note_cause(error_in_flight())
        with self._lock:
            if self._local.closed:
                return
            self._local.closed = "it has been shut down"
        _log.info("worker %r leaves the group%s", self._agent.me.name, f" {self._cause}" if self._cause else "")
        try:
            self._close()
        finally:
            self._done.set()

    def _close(self) -> None:
        agent = self._agent
        agent.peers.members.wake_all()
        self.close_listeners()
        # An interrupt ends the waits; the rest is done nevertheless.
        try:
            self.on_leave(False)
            if self._cause:
                _connect_to_all(agent)
            channels = [channel for peer in agent.peers.table.used() for channel in peer.channels()]
            for channel in channels:
                channel.say_goodbye(self._cause)
            _flush(agent.runtime, channels)
        finally:
            agent.peers.relaying.close()
            agent.pending.close()
            agent.peers.lost_workers.all_left("this worker has shut down")
            agent.server.loop.close()
            if self.references is not None:
                self.references.close()
            try:
                self._stop(agent.runtime.now() + agent.settings.stop_timeout)
            except BaseException:
                self._stop_at_once()
                raise
            finally:
                self.on_closed()
                agent.poller.close()
                _remove_traces(agent)

    def _stop(self, deadline: float) -> None:
        agent = self._agent
        running = agent.executor.stop(deadline)
        if running:
            what = "; ".join(self.activity() or running)
            _log.warning("worker %r shut down while functions were still running: %s", agent.me.name, what)

    @shielded
    def _stop_at_once(self) -> None:
        """Wait for threads that are about to end, before what they use is closed."""
        self._stop(self._agent.runtime.now())

    def close_listeners(self) -> None:
        """Stop accepting connections."""
        for listener in self._agent.listeners:
            if listener.is_open:
                self._agent.poller.remove(listener)
            listener.close()


def _is_serving(agent: Agent) -> bool:
    """Return whether a call is being served, as `Shutdown.activity` would say. A busy worker asks after every call."""
    return any(served.function != GATHER for served in agent.server.unanswered())


def _connect_to_all(agent: Agent) -> None:
    """Connect to the workers without a connection, to tell them why this worker exits."""
    give_up = agent.runtime.now() + _FLUSH
    for peer in agent.peers.all():
        if peer.record.name != agent.me.name and not peer.gone and not peer.channels():
            try:
                agent.peers.connector.channel_to(peer, give_up)
            except TelegradError as error:
                _log.debug("could not send worker %r the reason for exiting: %s", peer.record.name, error)


def _flush(runtime: Runtime, channels: list[Channel]) -> None:
    """Wait until the last frames have left."""
    give_up = runtime.now() + _FLUSH
    while runtime.now() < give_up:
        links = [channel.link for channel in channels if channel.link is not None]
        if not any(link.unsent() for link in links):
            return
        runtime.event().wait(runtime.now() + 0.002)


def _remove_traces(agent: Agent) -> None:
    """Remove the sockets that lost workers left on this host, waiting for those that were lost just now."""
    runtime = agent.runtime
    lost = [peer for peer in agent.peers.table.used() if not peer.left]
    pause = 0.001
    while lost := [peer for peer in lost if not agent.peers.remove_traces(peer.record)]:
        lost = [peer for peer in lost if runtime.now() < peer.dying_until]
        if not lost:
            return
        pause *= 2
        runtime.event().wait(min(runtime.now() + pause, max(peer.dying_until for peer in lost)))
