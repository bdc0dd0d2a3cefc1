"""Connections to a worker that cannot be connected to: it opens them itself when it is told to.

A worker may be unreachable because it can only connect outwards (NAT), or because it has no address of the family of
its caller. Three workers take part:

- The *target* stays connected to some others, its relays (`standby_relays`). They are ordinary connections.
- The *caller* connects to the first relay of both, with a header that names the target and a ticket.
- The *relay* tells the target the ticket on the connection that the target has opened (`DialBack`).
- The target connects to the caller with the ticket or, if it cannot, to the relay. In the first case the caller has its
  connection, and leaves the relay. In the second the relay joins the two connections, and forwards their bytes.
- Over the socket the caller opens a TLS link and performs the handshake, as over any other (`transport/relay.py`).

A caller to which the target stays connected needs no relay: it tells the target itself.

A relay that knows the token could claim to be the target, as any worker with the token can; with certificates on both
sides it cannot (`telegrad.connection.handshake`). Nobody else can read or alter what it forwards.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from telegrad.connection.channel import Channel
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.routes import can_dial, families, family, relays, standby_relays, ways
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import TelegradError
from telegrad.protocol.relay import RelayTable
from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link
from telegrad.transport.splicer import Splicer
from telegrad.wire.frames import Message
from telegrad.wire.relay_header import TICKET_SIZE, RelayHeader, Role, Status, pack_relay_header
from telegrad.wire.relay_messages import DialBack

if TYPE_CHECKING:
    from telegrad.connection.peer_table import Peer
    from telegrad.connection.peers import Peers
    from telegrad.transport.relay import RelayTransport

_log = logging.getLogger("telegrad")

MAX_RELAYED = 256
"""Connections that one worker relays at once, with those that wait for their target."""
_STANDBY = 2  # relays to which a worker stays connected for each group of callers
_TRIED = 8  # relays that a caller tries
_ONE_ADDRESS = 2.0  # seconds for one address, if there are others
_PATIENCE = 8.0  # seconds within which the target comes
_LINGER = 3.0  # seconds for which a worker that leaves forwards the last bytes of others


class Messages(Protocol):
    """What is used of `telegrad.calls.oneway.OneWay`."""

    def send(self, to: int, head: Any, *, back: Channel | None = None) -> Channel:
        """Send a message on the channel `back`."""

    def handle(
        self,
        kind: type,
        handler: Callable[[Channel, Any, Message], None],
        *,
        returns: bool = False,
        urgent: bool = False,
    ) -> None:
        """Have `handler` run for messages of this kind."""


class Relaying:
    """This worker as caller, as target and as relay."""

    def __init__(self, local: LocalWorker, peers: Peers, transport: RelayTransport | None) -> None:
        self._local = local
        self._peers = peers
        self._transport = transport
        self._splicer = Splicer(local.name)
        self._lock = threading.Lock()  # protects the three below
        self._table = RelayTable(MAX_RELAYED, _PATIENCE)
        self._callers: dict[bytes, socket.socket] = {}  # that wait for their targets, by ticket
        self._expected: dict[bytes, _Arrival] = {}  # connections that targets are to open to this worker
        self._refreshing = False
        self._messages: Messages
        self._adopt: Callable[[Link], None]
        if transport is not None:
            transport.find_socket = self._find_socket

    def attach(self, messages: Messages, adopt: Callable[[Link], None]) -> None:
        """Use `messages` to send and receive, and `adopt` for links whose handshake the other side begins."""
        self._messages = messages
        self._adopt = adopt
        messages.handle(DialBack, self.on_dial_back, returns=True, urgent=True)
        self._peers.lost_workers.observe(lambda *_: self.refresh(), lambda: bool(self._local.closed))

    # -- as the target ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Connect to the relays through which others reach this worker, in the background."""
        if self._transport is None or self._refreshing or self._local.closed or self._local.leaving:
            return
        if not _standby(self._local.me, self._peers):
            return
        self._refreshing = True
        self._local.executor.submit(self._connect_to_relays, urgent=True)

    def _connect_to_relays(self) -> None:
        self._refreshing = False
        for peer in _standby(self._local.me, self._peers):
            try:
                channel = peer.outgoing or self._peers.connector.channel_to(peer, None)
            except TelegradError as error:
                _log.warning(
                    "worker %r cannot connect to worker %r, through which others would reach it: %s",
                    *(self._local.name, peer.record.name, error),
                )
            else:
                channel.readers.leave_to_poller()

    def opened(self, channel: Channel) -> None:
        """Have the first connection to a worker read at any time, if others may reach this one only over it."""
        if self._transport is not None and not can_dial(channel.worker, self._local.me):
            channel.readers.leave_to_poller()

    def on_dial_back(self, channel: Channel, head: DialBack, message: object) -> None:
        """Connect to the worker that wants to reach this one, or else to the one that told so."""
        transport, me = self._transport, self._local.me
        if transport is None or len(head.ticket) != TICKET_SIZE:
            return
        header = RelayHeader(Role.TARGET, me.incarnation, head.caller, head.ticket)
        caller = self._find(head.caller)
        ways_back = [record for record in (caller, channel.worker) if record is not None and can_dial(me, record)]
        self._local.executor.block()
        try:
            for record in dict.fromkeys(ways_back):
                try:
                    sock, where = self._dial(transport, record, header, monotonic() + _PATIENCE)
                except OSError as error:
                    _log.debug("worker %r cannot connect back to worker %r: %s", me.name, record.name, error)
                else:
                    self._adopt(transport.accept(sock, where))
                    return
        finally:
            self._local.executor.unblock()

    # -- as the caller ----------------------------------------------------------------------------------------

    def _find_socket(self, incarnation: int, deadline: float) -> tuple[socket.socket, str]:
        """Return a socket that leads to a worker; see `RelayTransport`."""
        transport, me = self._transport, self._local.me
        if transport is not None and incarnation == me.incarnation:
            here, there = socket.socketpair()
            self._adopt(transport.accept(there, "this worker"))
            return here, "this worker"
        target = self._find(incarnation)
        if transport is None or target is None:
            raise TimeoutError(f"no worker with the incarnation {incarnation:016x} is known")
        group = [peer.record for peer in self._peers.all() if not peer.gone]
        candidates = relays(me, target, group)[:_TRIED]
        tried: list[str] = []
        if not candidates and not can_dial(target, me):
            raise ConnectionRefusedError(f"no worker is left through which worker {target.name!r} could be reached")
        with _Arrival() as arrival:
            with self._lock:
                self._expected[arrival.ticket] = arrival
            try:
                if can_dial(target, me) and self._tell(target, arrival.ticket, me.incarnation):
                    found = arrival.wait(deadline if not candidates else min(deadline, monotonic() + _PATIENCE / 2))
                    if found is not None:
                        return found, f"worker {target.name!r}, which has opened the connection"
                    tried.append("this worker itself")
                header = RelayHeader(Role.CALLER, target.incarnation, me.incarnation, arrival.ticket)
                for number, relay in enumerate(candidates, start=1):
                    left = deadline - monotonic()
                    until = deadline if number == len(candidates) else monotonic() + max(left / 2, 0.1)
                    found = self._ask(transport, relay, header, arrival, until)
                    if found is not None:
                        return found, f"worker {target.name!r} (through {relay.name!r}, or directly)"
                    tried.append(f"worker {relay.name!r}")
            finally:
                with self._lock:
                    del self._expected[arrival.ticket]
        raise TimeoutError(
            f"worker {target.name!r} can only be reached over connections that it opens, and has opened none to "
            f"{', '.join(tried) if tried else 'any worker that both can connect to'}"
        )

    def _ask(
        self, transport: RelayTransport, relay: WorkerRecord, header: RelayHeader, arrival: _Arrival, until: float
    ) -> socket.socket | None:
        """Return a socket that leads to the target through a relay, or directly; None if the relay cannot help."""
        try:
            sock, _ = self._dial(transport, relay, header, until)
        except OSError as error:
            _log.debug("worker %r cannot connect to relay %r: %s", self._local.name, relay.name, error)
            return None
        direct = arrival.wait(until, sock)
        if direct is None and _received(sock) == Status.RELAYED:
            return sock
        sock.close()
        return direct

    def _dial(
        self, transport: RelayTransport, record: WorkerRecord, header: RelayHeader, deadline: float
    ) -> tuple[socket.socket, str]:
        """Connect to a worker, send a header, and return the socket and the address of the worker."""
        own = families(self._local.me)
        addresses = [
            text for text in record.addresses if text.startswith("tcp://") and family(parse_address(text).host) & own
        ]
        failure: OSError = ConnectionRefusedError(f"worker {record.name!r} has no address")
        for address in addresses:
            try:
                sock = transport.tls.open_socket(address, min(deadline, monotonic() + _ONE_ADDRESS))
            except OSError as error:
                failure = error
                continue
            try:
                sock.sendall(pack_relay_header(transport.tls.preamble_key, header, address))
            except BaseException:
                sock.close()
                raise
            return sock, address.removeprefix("tcp://")
        raise failure

    # -- as the relay, and as a caller that is called back ----------------------------------------------------

    def take(self, sock: socket.socket, header: RelayHeader) -> None:
        """Take a connection that a member has opened, as the header says."""
        if header.role == Role.CALLER:
            self._take_caller(sock, header, self._local.runtime.now())
        else:
            self._take_target(sock, header)

    def _expire(self) -> None:
        """Refuse the callers whose target has not come. Those who have their connection from elsewhere have left."""
        with self._lock:
            tickets = self._table.expire(self._local.runtime.now())
            over = [self._callers.pop(ticket) for ticket in tickets if ticket in self._callers]
        for sock in over:
            _refuse(sock)

    def _take_caller(self, sock: socket.socket, header: RelayHeader, now: float) -> None:
        target = self._find(header.target)
        with self._lock:
            waits = target is not None and self._table.caller_came(header.ticket, header.target, now)
            if waits:
                self._callers[header.ticket] = sock
        if waits and target is not None and self._tell(target, header.ticket, header.caller):
            self._local.executor.timers.at(now + _PATIENCE, self._expire)
            return
        with self._lock:
            self._table.forget(header.ticket)
            mine = self._callers.pop(header.ticket, None) if waits else sock
        if mine is not None:
            _refuse(mine)

    def _take_target(self, sock: socket.socket, header: RelayHeader) -> None:
        with self._lock:
            arrival = self._expected.get(header.ticket)
            caller = None
            if arrival is None and self._table.target_came(header.ticket, header.target):
                caller = self._callers.pop(header.ticket)
        if arrival is not None:
            arrival.set(sock)
            return
        try:
            if caller is None:
                raise ConnectionAbortedError("nobody waits for it any more")
            caller.send(Status.RELAYED)
            self._splicer.join(caller, sock, self._pair_ended)
        except OSError as error:
            _log.debug("worker %r cannot relay a connection: %s", self._local.name, error)
            sock.close()
            if caller is not None:
                caller.close()
                self._pair_ended()

    def _pair_ended(self) -> None:
        with self._lock:
            self._table.pair_ended()

    def _tell(self, target: WorkerRecord, ticket: bytes, caller: int) -> bool:
        """Tell a worker to open a connection. Returns False if it has none to this one."""
        channel = self._peers.find(target.name).incoming
        if channel is None or channel.link is None or channel.worker.incarnation != target.incarnation:
            return False
        try:
            self._messages.send(target.id, DialBack(ticket, caller), back=channel)
        except TelegradError as error:
            _log.debug("worker %r cannot tell worker %r to connect: %s", self._local.name, target.name, error)
            return False
        return True

    def _find(self, incarnation: int) -> WorkerRecord | None:
        for peer in self._peers.all():
            if peer.record.incarnation == incarnation and not peer.gone:
                return peer.record
        return None

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Forward what is on its way for a short time, and close all connections."""
        with self._lock:
            callers, self._callers = list(self._callers.values()), {}
        for sock in callers:
            _refuse(sock)
        self._splicer.close(_LINGER)

    def abandon(self) -> None:
        """Close a forked child's copies of the connections. Takes no locks: the parent may have held one."""
        for sock in list(self._callers.values()):
            sock.close()
        self._splicer.abandon()


def _standby(me: WorkerRecord, peers: Peers) -> list[Peer]:
    """Return the workers to which `me` has to stay connected, so that others can reach it."""
    if not standby_relays(me, peers.table.samples(), _STANDBY):
        return []  # and the records of all need not be decoded
    records = standby_relays(me, [peer.record for peer in peers.all() if not peer.gone], _STANDBY)
    return [peers.find(record.name) for record in records]


def needs_relay(me: WorkerRecord, record: WorkerRecord) -> bool:
    """Return whether `me` reaches a worker only over connections that this one opens."""
    found = ways(me, record)
    return bool(found) and found[0].startswith("relay://")


class _Arrival:
    """A connection that a target is to open to this worker, which waits for it."""

    def __init__(self) -> None:
        self.ticket = os.urandom(TICKET_SIZE)
        self._lock = threading.Lock()  # protects all below
        self._socket: socket.socket | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._over = False

    def set(self, sock: socket.socket) -> None:
        """Hand the connection over. It is closed if nobody waits for it."""
        with self._lock:
            if self._over or self._socket is not None:
                sock.close()
                return
            self._socket = sock
            os.eventfd_write(self._event, 1)

    def wait(self, until: float, other: socket.socket | None = None) -> socket.socket | None:
        """Return the connection, or None if `until` passes, or the other socket can be read, first."""
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        if other is not None:
            poll.register(other, select.POLLIN)
        poll.poll(max(0.0, until - monotonic()) * 1000)
        with self._lock:
            found, self._socket = self._socket, None
            return found

    def __enter__(self) -> _Arrival:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            os.close(self._event)
            if self._socket is not None:
                self._socket.close()


def _received(sock: socket.socket) -> bytes:
    """Return the byte with which a relay answers, if it has come."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _refuse(sock: socket.socket) -> None:
    """Tell a caller that this relay cannot help."""
    try:
        sock.send(Status.ABSENT)
    except OSError as error:
        _log.debug("a caller has left its relay: %s", error)
    sock.close()
