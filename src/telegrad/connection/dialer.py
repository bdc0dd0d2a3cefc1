"""Dials other workers and performs the opener's side of the handshake. What the connection is for, others know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from telegrad.connection.handshake import NONCE_SIZE, Opener, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.routes import ways
from telegrad.connection.worker_record import WorkerRecord, check_record
from telegrad.errors import ProtocolError, TelegradError, WorkerLost, is_shortage
from telegrad.protocol.membership import State
from telegrad.transport.base import Link, Ready, Transport
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.handshake_messages import Description, HandshakeMessage, Purpose, decode_handshake

ANYBODY = WorkerRecord("", 0, 0, ())
"""The target of an opener that does not know who listens at an address."""


class DescribedMember(NamedTuple):
    """A member, as another one describes it to a newcomer."""

    record: WorkerRecord
    state: State
    is_open: bool
    """Whether the group is open."""


_ONE_ADDRESS = 2.0  # seconds for one address of a worker if it has others: a lost packet is sent again after one


class Dialer:
    """Finds the address of a worker, and greets it there."""

    def __init__(self, local: LocalWorker, transports: Mapping[str, Transport]) -> None:
        self._local = local
        self._transports = transports  # by scheme
        self._attempts = itertools.count(1)
        self._last_used: dict[int, str] = {}  # by incarnation: the address at which a worker was reached
        self.connecting: list[Link] = []
        """Links that are open and in their handshake."""

    def ask(self, me: WorkerRecord, target: WorkerRecord, purpose: Purpose, deadline: float) -> None:
        """Perform a handshake that is not for a session. Returns if the target has answered with a Welcome.

        `me` is what this worker says that it is. Raises what `Transport.connect` and `Opener.receive` raise, or
        TimeoutError.
        """
        link, address = self.dial(target, deadline, resumable=self.route_to(target)[0].resumable)
        self._question(me, target, link, address, purpose, deadline)

    def describe(
        self, me: WorkerRecord, address: str, member: int, deadline: float, target: WorkerRecord = ANYBODY
    ) -> DescribedMember | None:
        """Ask the worker at an address for the member with this id, or the next. None: there is no such member.

        Raises what `ask` does.
        """
        transport = self._transports.get(address.partition("://")[0])
        if transport is None:
            raise TelegradError(f"{address} cannot be reached with the transports {', '.join(self._transports)}")
        self._local.executor.block()
        try:
            link = transport.connect(address, deadline)
        finally:
            self._local.executor.unblock()
        answer = self._question(me, target, link, address, Purpose.DESCRIBE, deadline, member)
        assert isinstance(answer, Description)
        if not answer.record:
            return None
        try:
            record = msgspec.msgpack.decode(answer.record, type=WorkerRecord)
            check_record(record)
            return DescribedMember(record, State(answer.state), answer.is_open)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"the worker at {address} described a member that cannot be one: {error}") from error

    def _question(
        self,
        me: WorkerRecord,
        target: WorkerRecord,
        link: Link,
        address: str,
        purpose: Purpose,
        deadline: float,
        session: int = 0,
    ) -> tuple[int, int] | Description:
        """Perform a handshake that is not for a session on a link, and close it."""
        local = self._local
        self.connecting.append(link)
        try:
            local.poller.add(link, read=False, once=True)
            opener = self.opener(me, target, link, address, purpose=purpose, session=session)
            return self._exchange(link, opener, deadline)
        finally:
            self.connecting.remove(link)
            link.close()

    def opener(
        self,
        me: WorkerRecord,
        target: WorkerRecord,
        link: Link,
        address: str,
        *,
        session: int = 0,
        received: tuple[int, int] = (0, 0),
        fresh: bool = True,
        purpose: Purpose = Purpose.SESSION,
    ) -> Opener:
        """Return the opener's side of a handshake."""
        local = self._local
        return Opener(
            me,
            target,
            local.keys.handshake if local.keys is not None else None,
            local.runtime.random_bits(8 * NONCE_SIZE).to_bytes(NONCE_SIZE, "big"),
            dialled=address,
            attempt=next(self._attempts),
            session=session,
            received=received,
            fresh=fresh,
            link=link,
            purpose=purpose,
        )

    def exchange(self, link: Link, opener: Opener, deadline: float) -> tuple[int, int]:
        """Exchange greetings until the handshake is over, and return what the peer has received of the session."""
        received = self._exchange(link, opener, deadline)
        assert isinstance(received, tuple)
        return received

    def _exchange(self, link: Link, opener: Opener, deadline: float) -> tuple[int, int] | Description:
        local = self._local
        send_greeting(link, opener.start())
        while True:
            ready = local.executor.wait_for_link(link, deadline)
            if local.runtime.now() >= deadline and not ready & Ready.READ:
                raise TimeoutError(f"no response within {local.settings.connect_timeout:g} s")
            try:
                for frame in link.receive():
                    received = self._advance(link, opener, frame)
                    if received is not None:
                        return received
            except Exception as error:
                # Nothing was read, so retry. The peer may have admitted us, and would take this worker for dead.
                if not is_shortage(error) or local.runtime.now() >= deadline:
                    raise
                local.executor.pause()

    def _advance(self, link: Link, opener: Opener, frame: Frame) -> tuple[int, int] | Description | None:
        try:
            response = opener.receive(decode_handshake(frame.body))
        except Rejected as error:
            if error.greeting is not None:
                send_greeting(link, error.greeting)
            raise
        if isinstance(response, tuple | Description):
            return response
        send_greeting(link, response)
        return None

    def dial(self, record: WorkerRecord, deadline: float, *, resumable: bool) -> tuple[Link, str]:
        """Connect to a worker at the first of its addresses where that succeeds, and return the link and the address.

        Only transports count whose links are `resumable`, or not. Raises what `Transport.connect` raises:
        ConnectionRefusedError only if all addresses refuse.
        """
        routes = self._routes_to(record, resumable)
        failure: OSError = ConnectionRefusedError(f"worker {record.name!r} has no address")
        for number, (transport, address) in enumerate(routes, start=1):
            until = deadline if number == len(routes) else min(deadline, self._local.runtime.now() + _ONE_ADDRESS)
            self._local.executor.block()
            try:
                link = transport.connect(address, until)
            except OSError as error:
                if is_shortage(error):
                    raise
                if number == 1 or not isinstance(error, ConnectionRefusedError):
                    failure = error
                continue
            finally:
                self._local.executor.unblock()
            self._last_used[record.incarnation] = address
            return link, address
        raise failure

    def failed(self, record: WorkerRecord, address: str) -> None:
        """Take note that somebody else, or nobody, is at this address of a worker: others are tried first from now."""
        if self._last_used.get(record.incarnation) == address:
            rest = [other for _, other in self._routes_to(record) if other != address]
            self._last_used[record.incarnation] = rest[0] if rest else address

    def route_to(self, record: WorkerRecord, *, resumable: bool | None = None) -> tuple[Transport, str]:
        """Return the best transport and address that both workers have, of those whose links are `resumable` or not."""
        return self._routes_to(record, resumable)[0]

    def is_local(self, record: WorkerRecord) -> bool:
        """Return whether a worker is on this host, and its unix socket can be reached."""
        own = self._transports.get("unix")
        return own is not None and any(
            address.startswith("unix://") and own.reaches(address) for address in ways(self._local.me, record)
        )

    def _routes_to(self, record: WorkerRecord, resumable: bool | None = None) -> list[tuple[Transport, str]]:
        """Return the transports and addresses that lead to a worker. The one that was used last comes first.

        `resumable` says which transports count; None: all.
        """
        routes: list[tuple[Transport, str]] = []
        for address in ways(self._local.me, record):
            transport = self._transports.get(address.partition("://")[0])
            if transport is not None and resumable in (None, transport.resumable):
                routes.append((transport, address))
        if len(routes) > 1:
            routes = [route for route in routes if route[0].reaches(route[1])] or routes
            last = self._last_used.get(record.incarnation)
            routes.sort(key=lambda route: route[1] != last if route[0].resumable else False)
        if routes:
            return routes
        raise WorkerLost(
            f"worker {record.name!r} listens at {', '.join(record.addresses) or 'no address'}, none of which this "
            f"worker can reach with its transports ({', '.join(self._transports)})",
            worker=record.name,
        )


def send_greeting(link: Link, greeting: HandshakeMessage) -> None:
    """Send a handshake message."""
    link.send(Kind.HANDSHAKE, msgspec.msgpack.encode(greeting), 0, 0, 0)
