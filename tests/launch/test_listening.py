"""The sockets of launchers and stores keep to the ports that are allowed."""

from __future__ import annotations

import socket

import pytest
from tests.support.stores import reserved_port

from telegrad.errors import TelegradError
from telegrad.launch.listening import LOOPBACK, listen


@pytest.mark.parametrize("loopback", [True, False])
@pytest.mark.parametrize("limited", [True, False])
def test_a_socket_takes_connections_at_an_allowed_port(loopback: bool, limited: bool) -> None:
    with reserved_port() as port:
        pass
    with listen(str(port) if limited else "", loopback=loopback) as sock:
        found = sock.getsockname()
        assert (found[1] == port) == limited
        assert (found[0] == LOOPBACK) == loopback
        with socket.create_connection((LOOPBACK, found[1]), timeout=10):
            pass


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with reserved_port() as port:
        pass
    with (
        listen(str(port), loopback=False),
        pytest.raises(TelegradError, match=r"no port is free at ::? .*TELEGRAD_PORTS"),
    ):
        listen(str(port), loopback=False)


def test_ports_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="TELEGRAD_PORTS is 'many'"):
        listen("many", loopback=True)
