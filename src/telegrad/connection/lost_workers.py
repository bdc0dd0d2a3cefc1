"""What follows when a connection or a worker is lost: reconnecting, and telling everybody who needs the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.connection.channel import Channel
from telegrad.connection.goodbye import shortened
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, WorkerLost
from telegrad.events import MEMBER

if TYPE_CHECKING:
    from telegrad.connection.peer_table import Peer
    from telegrad.connection.peers import Peers

_log = logging.getLogger("telegrad")

_RESTARTED = "it was restarted"
_TELLING = 10.0  # seconds for which a replacement waits until all have heard of the loss of its predecessor
_DYING = 1.0  # seconds within which a killed process is gone

LossObserver = Callable[["Peer", list[Channel], str], None]
"""Called with a worker that is gone, its channels, and the reason."""


class LostWorkers:
    """Declares workers lost, once each."""

    def __init__(self, local: LocalWorker, peers: Peers) -> None:
        self._local = local
        self._peers = peers
        self._observers: list[tuple[LossObserver, Callable[[], bool]]] = []
        self.on_goodbye: Callable[[str, str], None] | None = None
        """Called with the name of a worker that exited with an error, and the error."""
        self._refused_by: set[str] = set()
        self.on_given_up: Callable[[WorkerLost], None] | None = None
        """Called if this process has to end, with the reason."""

    def observe(self, observer: LossObserver, is_idle: Callable[[], bool] = lambda: False) -> None:
        """Call `observer` for every worker that is gone, after the observers added before.

        `is_idle` says that nothing it knows needs a worker without a connection. See `all_left`.
        """
        self._observers.append((observer, is_idle))

    def session_lost(self, channel: Channel, reason: str) -> None:
        """Declare the peer of a channel lost whose session was given up, unless the peer may never have had it.

        An opener whose call has a deadline may give up while the last message of the handshake is on its way to it.
        Then nobody resumes the session, although both workers are well. But the opener may as well have sent something
        that did not arrive, and have lost this worker: others may wait here for it. So this worker asks the opener.
        """
        peer = self._peers.of(channel)
        if peer is None or channel.outgoing or not channel.resumable or channel.session.was_used:
            self.channel_lost(channel, reason)
            return
        self._peers.drop_unused(channel, reason)

    def channel_lost(self, channel: Channel, reason: str) -> None:
        """Declare the peer of a channel lost whose session ended."""
        peer = self._peers.of(channel)
        if peer is not None:
            self.peer_lost(peer, reason)
        else:
            channel.close(reason)

    def channel_left(self, channel: Channel, cause: str) -> None:
        """Take the goodbye of a worker; `cause` is the error that it exited with, if any."""
        if cause:
            cause = shortened(cause)
            if self.on_goodbye is not None:
                self.on_goodbye(channel.peer, cause)
        peer = self._peers.of(channel)
        # On the channel on which it called this worker, a goodbye says nothing about the replies that it still owes:
        # they arrive, if at all, on the other channel, before the goodbye there.
        if peer is not None and (channel.outgoing or peer.outgoing is None):
            self.peer_lost(peer, f"it ended {cause}" if cause else "it has shut down", left=True, failed=bool(cause))

    def left(self, record: WorkerRecord) -> None:
        """Take over from another member that a worker has left, which is final."""
        peer = self._peers.find(record.name)
        if peer.record.incarnation == record.incarnation and not peer.channels():  # else its goodbye arrives here, too
            self.peer_lost(peer, "it has shut down", left=True)

    def peer_lost(self, peer: Peer, reason: str, *, left: bool = False, failed: bool = False) -> None:
        """Declare a worker gone, so that nothing that needs it waits any longer.

        `left` says that it said goodbye, and `failed` that it did so because of an error.
        """
        local = self._local
        self._peers.table.use(peer)
        with peer.lock:
            if peer.gone:
                return
            peer.gone, peer.left = reason, left
            told = peer.told = local.runtime.event()
            self._peers.changes += 1
            if failed or not left:
                peer.failed_at = local.runtime.now()
            if not left:  # a killed process may lose its connections before its listening socket
                peer.dying_until = local.runtime.now() + _DYING
            channels = peer.channels()
            if peer.opening is not None:
                peer.opening.done.set()
        # A worker that is leaving may find others gone before it: that is how a group ends.
        if not left and not local.closed and not local.leaving:
            _log.warning("worker %r lost worker %r: %s", local.name, peer.record.name, reason)
        elif not local.closed:  # then it knows nothing about the others
            _log.info("worker %r: worker %r has left the group: %s", local.name, peer.record.name, reason)
        now, what = local.runtime.now(), "left" if left else "lost"
        local.events.record(MEMBER, now, now, peer.record.id, peer=peer.record.name, what=what, outcome=reason)
        try:
            for channel in channels:
                channel.close(reason)
            for observer, _ in self._observers:
                self._tell(observer, peer, channels, reason)
            self._peers.members.gone(peer.record, reason, left=left)
            local.buffers.trim()  # those that its messages were received in may be hundreds of megabytes
        finally:
            told.set()
        if not left and not self._remove_traces(peer):
            local.executor.timers.at(peer.dying_until, lambda: self._remove_traces(peer))

    def displace(self, name: str) -> None:
        """Declare the worker lost that has a name, because another takes its place, and wait until all have heard.

        Those who know workers by id would otherwise take the replacement for it. Another thread may be telling them:
        they do not wait for anything, but they free values of users, whose destructors may do what they want.
        """
        member, peer = self._peers.members.find(name), self._peers.table.get(name)
        if member is None:
            return
        if peer is not None and peer.record.incarnation == member.identity.incarnation:
            self.peer_lost(peer, _RESTARTED)
            if peer.told is not None:
                self._local.executor.wait(peer.told, self._local.runtime.now() + _TELLING)
        self._peers.members.gone(member.identity, _RESTARTED, left=False)  # if it still counts as alive

    def given_up(self, peer: Peer, reason: str) -> None:
        """Note that another worker holds this one for lost.

        It was stopped, or cut off, for too long. If a launcher starts dead workers again, the others wait for a
        replacement, which cannot come while this process lives. Workers that do not trust each other believe that only
        if those say so who could vote for the replacement.
        """
        local = self._local
        if not local.settings.awaited_replacement or local.given_up is not None:
            return
        self._refused_by.add(peer.record.name)
        if local.settings.accept == "registered" and not self._peers.members.is_quorum(local.name, self._refused_by):
            return
        local.given_up = WorkerLost(
            f"worker {local.name!r} ends, so that its launcher starts it again: worker {peer.record.name!r} has lost "
            f"it ({reason})",
            worker=local.name,
        )
        if self.on_given_up is not None:
            self.on_given_up(local.given_up)

    def all_left(self, reason: str) -> None:
        """Declare all workers gone, because this one leaves.

        In a large group it has no connection with most of them. Observers hear of those only if it may matter.
        """
        unconnected = []
        table = self._peers.table
        table.leave_others(reason)
        used = table.used()
        for peer in used:
            with peer.lock:
                is_connected = bool(peer.channels() or peer.opening) or peer.record.name == self._local.name
                if not is_connected and not peer.gone:
                    peer.gone, peer.left = reason, True
                    unconnected.append(peer)
            if is_connected:
                self.peer_lost(peer, reason, left=True)
        observers = [observer for observer, is_idle in self._observers if not is_idle()]
        if observers:
            known = set(used)
            unconnected += [peer for peer in table.all() if peer not in known]
        for observer in observers:
            for peer in unconnected:
                self._tell(observer, peer, [], reason)

    def _tell(self, observer: LossObserver, peer: Peer, channels: list[Channel], reason: str) -> None:
        try:
            observer(peer, channels, reason)
        except Exception:  # noqa: BLE001 - a bug in telegrad, and the other observers must hear of the loss
            _log.exception("worker %r failed to handle the loss of %r", self._local.name, peer.record.name)

    def _remove_traces(self, peer: Peer) -> bool:
        """Remove the sockets that a killed worker left on this host; False if it may still listen."""
        try:
            return self._peers.remove_traces(peer.record)
        except OSError as error:
            _log.debug("cannot remove the sockets of worker %r: %s", peer.record.name, error)
            return True

    def reconnect(self, channel: Channel) -> None:
        """Open a new link for a channel, on a worker thread."""

        def attempt() -> None:
            peer = self._peers.of(channel)
            if peer is None:  # its first connection broke before the channel was registered, or it was replaced
                channel.connect_failed("the first connection broke at once", refused=False)
                return
            if peer.gone or self._local.closed:
                return
            try:
                self._peers.connector.connect(channel, peer)
            except (AuthenticationError, WorkerLost) as error:  # proved by the peer
                self.peer_lost(peer, str(error))
            except Exception as error:  # noqa: BLE001 - a shortage or a bug of ours: the session tries again
                _log.warning("worker %r cannot reconnect to worker %r: %s", self._local.name, channel.peer, error)
                channel.connect_failed(str(error), refused=False)

        self._local.executor.submit(attempt, urgent=True)
