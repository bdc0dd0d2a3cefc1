"""Opens connections to other workers: one outgoing channel per peer, connected when first needed.

Anybody can accept a connection at an address that a worker had, answer anything, or close it. So a handshake in which
the peer has not proved itself is a failed attempt, whatever was answered, and says nothing about the worker:

- An established session tries again by its own rules, until its time limit.
- A first connection is tried again for a second (`UnprovedAttempts`). If all attempts fail, the call raises an
  AuthenticationError, but the worker is not lost: the next call tries again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from telegrad.connection.channel import Channel
from telegrad.connection.dialer import Dialer
from telegrad.connection.handshake import AnotherWorker, GivenUp, Refused, Rejected
from telegrad.connection.local_worker import LocalWorker, session_settings
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import (
    AuthenticationError,
    DeadlineExceeded,
    OtherVersion,
    ProtocolError,
    ResourceExhausted,
    WorkerLost,
    is_shortage,
)
from telegrad.execution.reported_wait import ReportedWait
from telegrad.interrupts import shielded
from telegrad.protocol.session_events import SessionState
from telegrad.transport.base import Link, LinkClosed, Ready, Transport
from telegrad.waiting import Event
from telegrad.waiting_report import seconds

if TYPE_CHECKING:
    from telegrad.connection.peer_table import Peer
    from telegrad.connection.peers import Peers

_log = logging.getLogger("telegrad")

_RETRY_DELAY = 0.1  # seconds between two attempts to connect if the session does not say when the next is due
_UNPROVED_LIMIT = 1.0  # seconds for which a first connection is retried although the peer does not prove itself
_MIN_ATTEMPTS = 5  # ... and how often, at least


class Connector:
    """Opens links to peers, performs the handshake, and attaches the links to channels."""

    def __init__(self, local: LocalWorker, peers: Peers, transports: Mapping[str, Transport]) -> None:
        self._local = local
        self._peers = peers
        self.dialer = Dialer(local, transports)

    def channel_to(self, peer: Peer, deadline: float | None) -> Channel:
        """Return the channel for calls to `peer`. The first caller opens it, and the others wait for that."""
        while True:
            channel = peer.outgoing
            if channel is not None:
                return channel
            self._peers.table.use(peer)  # before that: a worker that leaves then finds it, or it finds itself gone
            with peer.lock:
                if peer.gone:
                    raise WorkerLost(f"worker {peer.record.name!r} is gone: {peer.gone}", worker=peer.record.name)
                if peer.outgoing is not None:
                    continue
                opening = peer.opening
                if opening is None:
                    peer.opening = Opening(self._local.runtime.event())
            if opening is None:
                return self._open_channel(peer, deadline)
            if not self._wait(peer, opening, deadline):
                raise self._deadline_exceeded(peer, None)
            if opening.error is not None:  # the same would happen again
                raise AuthenticationError(str(opening.error)) from opening.error

    def _wait(self, peer: Peer, opening: Opening, deadline: float | None) -> bool:
        """Wait for another thread, which opens the connection."""
        key = self._enter_wait(peer)
        try:
            return self._local.executor.wait(opening.done, deadline)
        finally:
            self._local.waits.leave(key)

    def _enter_wait(self, peer: Peer) -> int:
        name = peer.record.name
        return self._local.waits.enter("connection", (name,), lambda: f"a connection to worker {name!r}")

    def _open_channel(self, peer: Peer, deadline: float | None) -> Channel:
        local = self._local
        channel: Channel | None = None
        connected = False
        key = self._enter_wait(peer)
        try:
            transport, _ = self.dialer.route_to(peer.record)
            channel = self._peers.make_channel(
                local,
                self._peers,
                peer.record,
                outgoing=True,
                resumable=transport.resumable,
                session_id=local.runtime.random_bits(63),
                settings=session_settings(local, peer.record.name),
                allocate=local.buffers.take,
            )
            with ReportedWait(local.runtime, local.executor, partial(self._report, peer)):
                self._connect_first(channel, peer, deadline)
            connected = True
        except WorkerLost as error:
            reason = None if channel is None else channel.session.lost_reason
            self._peers.lost_workers.peer_lost(peer, reason or str(error))
            raise
        except AuthenticationError as error:
            if peer.opening is not None:
                peer.opening.error = error
            raise
        finally:
            local.waits.leave(key)
            with peer.lock:
                if connected and not peer.gone:
                    peer.outgoing = channel
                opening, peer.opening = peer.opening, None
            if opening is not None:
                opening.done.set()
            if channel is not None and (peer.gone or not connected):
                channel.close(peer.gone or "no connection could be opened")
        self._peers.relaying.opened(channel)
        channel.receiver.on_ready(Ready.READ)  # as in `connect`, but now the worker's loss finds the channel
        return channel

    def _connect_first(self, channel: Channel, peer: Peer, deadline: float | None) -> None:
        """Try to open the first link of a channel until that succeeds or is hopeless."""
        local, attempts = self._local, UnprovedAttempts(peer.record)
        while True:
            now = local.runtime.now()
            if deadline is not None and now >= deadline:
                raise self._deadline_exceeded(peer, attempts)
            if peer.gone:
                raise WorkerLost(f"worker {peer.record.name!r} is gone: {peer.gone}", worker=peer.record.name)
            with channel.lock:
                channel.session.tick(now)
            failure = self.connect(channel, peer, fresh=True)
            if failure is None:
                return
            attempts.add(failure, local.runtime.now())
            if channel.session.state is SessionState.LOST:
                reason = channel.session.lost_reason
                raise WorkerLost(f"worker {peer.record.name!r} is lost: {reason}", worker=peer.record.name)
            with channel.lock:
                due = channel.session.next_tick()
            pause = now + _RETRY_DELAY if due is None else due
            local.executor.wait(local.runtime.event(), pause if deadline is None else min(pause, deadline))

    def _report(self, peer: Peer, elapsed: float) -> None:
        name, (_, address) = peer.record.name, self.dialer.route_to(peer.record)
        _log.warning(
            "worker %r has tried to reach worker %r at %s for %s", self._local.name, name, address, seconds(elapsed)
        )

    def connect(self, channel: Channel, peer: Peer, *, fresh: bool = False) -> Exception | None:
        """Open a link for `channel`. If that fails, return why; the session then knows, too.

        Raises WorkerLost, Refused or Rejected if that was proved in the handshake, because retrying would not help.
        """
        local = self._local
        _, address = self.dialer.route_to(peer.record, resumable=channel.resumable)  # to name if none can be reached
        deadline = local.runtime.now() + local.settings.connect_timeout
        try:
            link, address = self.dialer.dial(peer.record, deadline, resumable=channel.resumable)
        except ConnectionRefusedError as error:
            channel.connect_failed(f"{address} refuses connections ({error})", refused=True)
            return error
        except Exception as error:
            if is_shortage(error):
                raise self._exhausted(peer, error) from error
            if not isinstance(error, OSError):
                raise
            channel.connect_failed(f"{address} cannot be reached ({error})", refused=False)
            return error
        self.dialer.connecting.append(link)
        try:
            # What the system may refuse comes first: a peer that admitted us and then sees the connection end would
            # take this worker for dead.
            local.poller.add(link, read=False, once=True)
            handshake = self._handshake if link.resumable else self._shielded_handshake
            received = handshake(link, channel, peer, deadline, fresh, address)
            channel.attach(link, received)
        except (Refused, Rejected):
            link.close()
            raise
        except GivenUp as error:
            link.close()
            self._peers.lost_workers.given_up(peer, error.reason)
            raise
        except (LinkClosed, TimeoutError, ProtocolError, AuthenticationError) as error:
            link.close()
            self.dialer.failed(peer.record, address)
            # Nobody who is the peer listens there, if another worker has proved that it does.
            channel.connect_failed(
                f"the handshake with {link.peer} failed ({error})", refused=isinstance(error, AnotherWorker)
            )
            return error
        except BaseException as error:
            link.close()
            if is_shortage(error):
                raise self._exhausted(peer, error) from error
            raise
        finally:
            self.dialer.connecting.remove(link)
        # A connection that broke and was opened again is worth knowing; the first one is routine.
        level, verb = (logging.DEBUG, "connected") if fresh else (logging.INFO, "reconnected")
        _log.log(level, "worker %r %s to worker %r at %s", local.name, verb, peer.record.name, address)
        if not fresh:  # the poller does not report the replies that arrived together with the Welcome
            channel.receiver.on_ready(Ready.READ)
        return None

    @shielded
    def _shielded_handshake(
        self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool, address: str
    ) -> tuple[int, int]:
        """Perform the handshake without interrupts: the peer would take the end of a unix link for our death."""
        return self._handshake(link, channel, peer, deadline, fresh, address)

    def _handshake(
        self, link: Link, channel: Channel, peer: Peer, deadline: float, fresh: bool, address: str
    ) -> tuple[int, int]:
        """Authenticate `link`, and return what the peer has received of the session."""
        opener = self.dialer.opener(
            self._local.me,
            peer.record,
            link,
            address,
            session=channel.session_id,
            received=channel.session.received_up_to(),
            fresh=fresh,
        )
        return self.dialer.exchange(link, opener, deadline)

    def _exhausted(self, peer: Peer, error: BaseException) -> ResourceExhausted:
        return ResourceExhausted(
            f"worker {self._local.me.name!r} lacks a resource to connect to worker {peer.record.name!r}: {error}. Free "
            "some, or raise its limit (ulimit -n for files): the next call connects again",
            worker=peer.record.name,
        )

    def _deadline_exceeded(self, peer: Peer, attempts: UnprovedAttempts | None) -> DeadlineExceeded:
        name = peer.record.name
        text = f"worker {name!r} could not be connected to before the deadline"
        if attempts is not None and attempts.last is not None:
            text += f" (last attempt: {attempts.last})"
        return DeadlineExceeded(text, worker=name)


class Opening:
    """The opening of a first connection by one thread, for which others wait."""

    def __init__(self, done: Event) -> None:
        self.done = done
        self.error: AuthenticationError | None = None
        """Why it failed, if the peer did not prove itself or refused."""


class UnprovedAttempts:
    """The attempts to open a first connection that reached a listener, which then did not prove itself.

    Another token is the usual cause, and its user should learn about it soon. But a worker that lacks memory or evicts
    connections in a flood closes some, too, so one attempt is not enough to tell.
    """

    def __init__(self, target: WorkerRecord) -> None:
        self._target = target
        self._count = 0
        self._since = 0.0
        self.last: Exception | None = None
        """Why the last attempt failed, if it was one of these."""

    def add(self, failure: Exception, now: float) -> None:
        """Take a failed attempt into account. Raises an error if it is time to give up."""
        if not isinstance(failure, LinkClosed | ProtocolError | AuthenticationError):
            self._count, self.last = 0, None
            return
        if not self._count:
            self._since = now
        self._count += 1
        self.last = failure
        if self._count < _MIN_ATTEMPTS or now - self._since < _UNPROVED_LIMIT:
            return
        if isinstance(failure, OtherVersion):
            raise failure
        name = self._target.name
        seen = f"it closed the connection ({failure})" if isinstance(failure, LinkClosed) else str(failure)
        raise AuthenticationError(
            f"worker {name!r} did not prove that it belongs to this group, in {self._count} attempts: {seen}. Start "
            "every worker with the same TELEGRAD_TOKEN and telegrad version, and either all with certificates of the "
            f"CA in tls_ca, or none. The log of worker {name!r} says why it refuses connections"
        ) from failure
