"""How a worker leaves: in order, when everybody is ready to go, or at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Protocol

from telegrad.calls.collectives import SERVICE, Collectives
from telegrad.calls.exit_cause import cause_of, error_in_flight
from telegrad.calls.keeper import Keeper, Traffic
from telegrad.calls.server import Server
from telegrad.connection.accept import PendingConnections
from telegrad.connection.channel import Channel
from telegrad.connection.peers import Peer, Peers
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import DeadlineExceeded, ReferencesHeld, TelegradError
from telegrad.execution.executor import Executor
from telegrad.interrupts import shielded
from telegrad.settings import AgentSettings
from telegrad.transport.base import Listener, Poller
from telegrad.waiting import Event, Runtime

_log = logging.getLogger("telegrad")

_FLUSH = 1.0  # seconds that the last frames may take to leave
_PATIENCE = 60  # rounds of a shutdown in which references may settle: a number, so that all end in the same one
_PAUSE = 0.1  # seconds between them, at most
_NO_TRAFFIC = Traffic(False, {}, {})


def _settled(group: Mapping[int, Traffic]) -> bool:
    """Whether everything that these workers told each other of references has come, and nothing is to follow."""
    return not any(traffic.pending for traffic in group.values()) and all(
        count == group[to].received.get(who, 0)
        for who, traffic in group.items()
        for to, count in traffic.sent.items()
        if to in group
    )


class ShutdownOwner(Protocol):
    """What leaving needs of its agent."""

    closed: str
    draining: bool
    me: WorkerRecord
    settings: AgentSettings
    runtime: Runtime
    poller: Poller
    executor: Executor
    peers: Peers
    server: Server
    collectives: Collectives
    pending: PendingConnections
    listeners: list[Listener]
    keeper: Keeper | None

    def calls_made(self) -> int:
        """How many calls this worker ever made, but for gatherings."""

    def peer_lost(self, peer: Peer, reason: str, *, left: bool = False) -> None:
        """Nothing that needs this worker may wait any longer."""


class Shutdown:
    """The end of one agent, whose `closed` says that it came."""

    def __init__(self, owner: ShutdownOwner) -> None:
        self._owner = owner
        self._lock = threading.Lock()  # protects _closing and the owner's closed
        self._closing: Event | None = None
        self._drained: Event | None = None
        self._cause = ""  # why this worker ends, if not in order
        self.first_cause = ""
        """Which other worker ended with an error first, and with which."""

    def note_cause(self, error: BaseException | None) -> None:
        """This worker ends with `error`, if it is one; the first that is noted is what the others are told."""
        self._cause = self._cause or cause_of(error, self.first_cause)

    def heard(self, worker: str, cause: str) -> None:
        """Another worker ended with an error."""
        if not self.first_cause:
            self.first_cause = (
                cause.removeprefix("because ") if cause.startswith("because ") else f"worker {worker!r} ended {cause}"
            )
            if not self._owner.closed:
                _log.warning("worker %r: %s", self._owner.me.name, self.first_cause)

    @property
    def begun(self) -> bool:
        """Whether this worker is about to leave."""
        return self._closing is not None

    def activity(self) -> list[str]:
        """What is under way: calls made and calls served, for people."""
        lines = []
        for peer in self._owner.peers.all():
            for channel in peer.channels():
                lines += [str(call) for call in list(channel.calls.values()) if call.function != SERVICE]
        for served in self._owner.server.unanswered():
            if served.function != SERVICE:
                lines.append(f"{served.function}, called by worker {served.caller!r}, is still running")
        return lines

    def activity_ended(self) -> None:
        """Wake a shutdown that waits for quiet, if it is quiet."""
        drained = self._drained
        if drained is not None and not self.activity():
            drained.set()

    def shutdown(self, *, graceful: bool, timeout: float, strict_references: bool = False) -> None:
        """See `Agent.shutdown`."""
        with self._lock:
            closing = self._closing
            if closing is None:
                self._closing = self._owner.runtime.event()
        if closing is not None:
            closing.wait(None)
            return
        held: list[str] = []
        try:
            if graceful and not self._owner.closed:
                held = self._drain(timeout)
        except BaseException as error:
            self.note_cause(error)
            raise
        finally:
            self.close(in_order=graceful)
        if held:
            text = f"worker {self._owner.me.name!r} shut down with references held: {'; '.join(held)}"
            if strict_references:
                raise ReferencesHeld(f"{text}. Release them before shutdown, or let them die")
            _log.info(text)

    def _drain(self, timeout: float) -> list[str]:
        """Wait for quiet: nothing under way anywhere, twice in a row, with no call made in between.

        Returns the references that are held then.
        """
        owner, now = self._owner, self._owner.runtime.now
        deadline = now() + timeout if timeout else None
        before, unsettled = -1, 0
        while True:
            while self.activity():
                drained = self._drained = owner.runtime.event()
                owner.draining = True
                if self.activity() and not owner.executor.wait(drained, deadline):
                    raise DeadlineExceeded(
                        f"worker {owner.me.name!r} shut down after {timeout:g} s with calls under way: "
                        + "; ".join(self.activity()),
                        worker=owner.me.name,
                        elapsed=timeout,
                    )
            left = None if deadline is None else max(0.01, deadline - now())
            # Before the others can know that all is quiet, and leave: what they hold would be given up.
            # And the traffic first: what comes between the two is then not settled, and not held either.
            traffic = owner.keeper.traffic() if owner.keeper is not None else _NO_TRAFFIC
            held = owner.keeper.held() if owner.keeper is not None else []
            mine = owner.me.id, bool(self.activity()), owner.calls_made(), traffic
            values = list(owner.collectives.gather(mine, timeout=left, topic="shutdown").values())
            made = sum(count + sum(traffic.sent.values()) for _, _, count, traffic in values)
            if made == before and not any(busy for _, busy, _, _ in values):
                # What is told of references is no call, so it is counted at both ends. That is for the list of those
                # that are held, which nobody should wait for without end.
                if _settled({who: traffic for who, _, _, traffic in values}) or unsettled == _PATIENCE:
                    return held
                unsettled += 1
                owner.runtime.event().wait(now() + min(_PAUSE, 0.002 * unsettled))
            before = made

    def close(self, *, in_order: bool = False) -> None:
        """See `Agent.close`."""
        owner = self._owner
        if not in_order:
            self.note_cause(error_in_flight())
        with self._lock:
            if owner.closed:
                return
            owner.closed = "it has been shut down"
        try:
            self._close()
        finally:
            if self._closing is not None:
                self._closing.set()

    def _close(self) -> None:
        owner = self._owner
        self.close_listeners()
        # An interrupt ends what is waited for, and what follows is done all the same.
        try:
            if self._cause:
                self._connect_to_all()
            channels = [channel for peer in owner.peers.all() for channel in peer.channels()]
            for channel in channels:
                channel.say_goodbye(self._cause)
            self._flush(channels)
        finally:
            owner.pending.close()
            for peer in owner.peers.all():
                owner.peer_lost(peer, "this worker has shut down", left=True)
            owner.server.close()
            if owner.keeper is not None:
                owner.keeper.close()
            try:
                self._stop(owner.runtime.now() + owner.settings.stop_timeout)
            except BaseException:
                self._stop_at_once()
                raise
            finally:
                owner.poller.close()
                self._remove_traces()

    def _stop(self, deadline: float) -> None:
        owner = self._owner
        if owner.executor.stop(deadline):
            _log.warning(
                "worker %r shut down while functions were still running: %s", owner.me.name, "; ".join(self.activity())
            )

    @shielded
    def _stop_at_once(self) -> None:
        """Let threads end that are about to: what they use is closed next."""
        self._stop(self._owner.runtime.now())

    def _connect_to_all(self) -> None:
        """Connect to those that this worker has no connection with: they are to hear why it ends."""
        owner, give_up = self._owner, self._owner.runtime.now() + _FLUSH
        for peer in owner.peers.all():
            if peer.record.name != owner.me.name and not peer.gone and not peer.channels():
                try:
                    owner.peers.channel_to(peer, give_up)
                except TelegradError as error:
                    _log.debug("worker %r is not told why this one ends: %s", peer.record.name, error)

    def _flush(self, channels: list[Channel]) -> None:
        """Let the last frames leave."""
        runtime = self._owner.runtime
        give_up = runtime.now() + _FLUSH
        while runtime.now() < give_up:
            links = [channel.link for channel in channels if channel.link is not None]
            if not any(link.unsent() for link in links):
                return
            runtime.event().wait(runtime.now() + 0.002)

    def _remove_traces(self) -> None:
        """Remove what lost workers left on this host, and wait for those that were lost just now to stop listening."""
        owner, runtime = self._owner, self._owner.runtime
        lost = [peer for peer in owner.peers.all() if not peer.left]
        pause = 0.001
        while lost := [peer for peer in lost if not owner.peers.remove_traces(peer.record)]:
            lost = [peer for peer in lost if runtime.now() < peer.dying_until]
            if not lost:
                return
            pause *= 2
            runtime.event().wait(min(runtime.now() + pause, max(peer.dying_until for peer in lost)))

    def close_listeners(self) -> None:
        """Let nobody in any more."""
        for listener in self._owner.listeners:
            self._owner.poller.remove(listener)
            listener.close()
