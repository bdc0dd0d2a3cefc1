"""When the TLS transport makes its certificate."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from tests.support.tls_links import KEY, soon

from telegrad.transport import tls
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.tls import TlsTransport


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
