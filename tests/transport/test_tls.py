"""When the TLS transport makes its certificate, and which connections of a long backlog it accepts."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import closing, suppress

import pytest
from tests.support.tls_links import KEY, preamble_for, soon

from telegrad.transport import tcp, tls
from telegrad.transport.addresses import parse_address
from telegrad.transport.base import RelayedConnection
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.tls import TlsTransport
from telegrad.wire.relay_header import TICKET_SIZE, RelayHeader, Role, pack_relay_header


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Credentials]:
    """Return a list of the certificates that transports have made."""
    certificates: list[Credentials] = []

    def make() -> Credentials:
        certificates.append(make_credentials())
        return certificates[-1]

    monkeypatch.setattr(tls, "make_credentials", make)
    return certificates


def test_the_certificate_is_made_when_a_listener_opens(made: list[Credentials]) -> None:
    transport = TlsTransport(KEY, deferred=True)
    with (
        closing(transport.listen("tcp://127.0.0.1:0")) as listener,
        closing(transport.listen("tcp://127.0.0.1:0")) as other,
    ):
        assert not made
        listener.open()
        assert len(made) == 1
        other.open()
        assert len(made) == 1


def test_the_certificate_is_made_before_connecting(made: list[Credentials]) -> None:
    transport = TlsTransport(KEY, deferred=True)
    with closing(transport.listen("tcp://127.0.0.1:0")) as listener:  # refuses connections, as it is not open
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                transport.connect(listener.address, soon())
            assert len(made) == 1


def test_threads_that_connect_at_once_share_a_certificate(made: list[Credentials]) -> None:
    transport = TlsTransport(KEY, deferred=True)
    together = threading.Barrier(4)

    with closing(transport.listen("tcp://127.0.0.1:0")) as listener:

        def connect() -> None:
            together.wait(30)
            with pytest.raises(ConnectionRefusedError):
                transport.connect(listener.address, soon())

        threads = [threading.Thread(target=connect) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1


def test_certificates_of_the_user_are_used(made: list[Credentials]) -> None:
    mine = make_credentials()
    with closing(TlsTransport(KEY, mine).listen("tcp://127.0.0.1:0")):
        assert not made


def test_of_a_long_backlog_only_connections_with_a_valid_preamble_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_backlog", lambda sock: 1000)
    with closing(TlsTransport(KEY).listen("tcp://127.0.0.1:0")) as listener:
        address = parse_address(listener.address)

        def accepted(data: bytes) -> bool:
            with socket.create_connection((address.host, address.port), timeout=20) as sock:
                sock.sendall(data)
                select.select([listener], [], [], 20)
                link = listener.accept()
                if link is None:
                    return False
                with suppress(RelayedConnection):
                    assert not list(link.receive())
                link.close()
                return True

        valid, hello = preamble_for(listener), b"\x16\3\1\2\0\1\0\1\xfc\3\3" + bytes(100)
        assert not accepted(hello)
        assert not accepted(valid[:-1])
        assert not accepted(preamble_for(listener, b"the key of another group") + hello)
        assert accepted(valid), "a member's connection"
        assert not accepted(valid), "repeated"
        relayed = RelayHeader(Role.CALLER, 1, 2, bytes(TICKET_SIZE))
        assert accepted(pack_relay_header(KEY, relayed, listener.address)), "a member's, to a worker behind NAT"
        assert all(accepted(preamble_for(listener)) for _ in range(tcp._FEW - 2))
        assert sum(accepted(preamble_for(listener)) for _ in range(2 * tcp._ONE_IN)) == 2
