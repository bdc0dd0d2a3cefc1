"""Dials other workers and performs the opener's side of the handshake. What the connection is for, others know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec

from telegrad.connection.handshake import NONCE_SIZE, Opener, Rejected
from telegrad.connection.local_worker import LocalWorker
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import WorkerLost, is_shortage
from telegrad.transport.base import Link, Ready, Transport
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.handshake_messages import HandshakeMessage, Purpose, decode_handshake


class Dialer:
    """Finds the address of a worker, and greets it there."""

    def __init__(self, local: LocalWorker, transports: Mapping[str, Transport]) -> None:
        self._local = local
        self._transports = transports  # by scheme
        self._attempts = itertools.count(1)
        self.connecting: list[Link] = []
        """Links that are open and in their handshake."""

    def ask(self, me: WorkerRecord, target: WorkerRecord, purpose: Purpose, deadline: float) -> None:
        """Perform a handshake that is not for a session. Returns if the target has answered with a Welcome.

        `me` is what this worker says that it is. Raises what `Transport.connect` and `Opener.receive` raise, or
        TimeoutError.
        """
        local = self._local
        transport, address = self.route_to(target)
        local.executor.block()
        try:
            link = transport.connect(address, deadline)
        finally:
            local.executor.unblock()
        self.connecting.append(link)
        try:
            local.poller.add(link, read=False, once=True)
            opener = self.opener(me, target, link, address, purpose=purpose)
            self.exchange(link, opener, deadline)
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

    def _advance(self, link: Link, opener: Opener, frame: Frame) -> tuple[int, int] | None:
        try:
            response = opener.receive(decode_handshake(frame.body))
        except Rejected as error:
            if error.greeting is not None:
                send_greeting(link, error.greeting)
            raise
        if isinstance(response, tuple):
            return response
        send_greeting(link, response)
        return None

    def route_to(self, record: WorkerRecord) -> tuple[Transport, str]:
        """Return the best transport and address that both workers have."""
        own_host = self._local.me.host
        for address in record.addresses:
            scheme = address.partition("://")[0]
            transport = self._transports.get(scheme)
            if transport is not None and (scheme != "unix" or record.host == own_host):
                return transport, address
        raise WorkerLost(
            f"worker {record.name!r} listens at {', '.join(record.addresses) or 'no address'}, none of which this "
            f"worker can reach with its transports ({', '.join(self._transports)})",
            worker=record.name,
        )


def send_greeting(link: Link, greeting: HandshakeMessage) -> None:
    """Send a handshake message."""
    link.send(Kind.HANDSHAKE, msgspec.msgpack.encode(greeting), 0, 0, 0)
