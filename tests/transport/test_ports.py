"""Ranges of ports: how they are written, and that a worker listens on no other port."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.stores import reserved_port

from telegrad.errors import TelegradError
from telegrad.transport.ports import bind_in_range, describe_ports, parse_ports
from telegrad.transport.tcp import TcpTransport

HOST = "127.0.0.1"


def take(ports: tuple[int, ...]) -> tuple[socket.socket, bool]:
    return bind_in_range((socket.AF_INET, socket.SOCK_STREAM, 0), (HOST, 0), ports)


@pytest.fixture
def ports() -> tuple[int, ...]:
    """Three ports that were free a moment ago."""
    with ExitStack() as stack:
        return tuple(stack.enter_context(reserved_port()) for _ in range(3))


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("29600", (29600,)),
        ("29600-29603", (29600, 29601, 29602, 29603)),
        (" 443 , 80-81,443", (443, 80, 81)),
        ("65535-65535", (65535,)),
    ],
)
def test_ports_and_ranges_of_ports_are_listed(text: str, ports: tuple[int, ...]) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "0", "0-5", "65536", "9-8", "80-", "-80", "a", "80;81", "٣", "1-2-3", "80,"])
def test_an_invalid_range_is_an_error_that_names_its_source(text: str) -> None:
    with pytest.raises(ValueError, match=r"the option ports is .*: it must list ports from 1 to 65535, as in"):
        parse_ports(text, "the option ports")


@given(st.lists(st.integers(1, 0xFFFF), min_size=1, unique=True))
def test_describing_ports_and_parsing_them_are_inverse(ports: list[int]) -> None:
    assert parse_ports(describe_ports(ports)) == tuple(ports)


def test_workers_of_one_host_take_different_ports_and_the_next_is_told_that_none_is_left(
    ports: tuple[int, ...],
) -> None:
    transport = TcpTransport(deferred=True, ports=ports)
    with ExitStack() as stack:
        listeners = [stack.enter_context(closing(transport.listen(f"tcp://{HOST}:0"))) for _ in ports]
        assert [listener.address for listener in listeners] == [f"tcp://{HOST}:{port}" for port in ports]
        with pytest.raises(TelegradError, match=f"no port is free at {HOST} of those that TELEGRAD_PORTS") as raised:
            transport.listen(f"tcp://{HOST}:0")
        assert describe_ports(ports) in str(raised.value)
        for listener in listeners:
            listener.open()  # nobody else has the port


def test_a_port_that_only_old_connections_hold_is_taken_and_is_listened_on_at_once(ports: tuple[int, ...]) -> None:
    only = ports[:1]
    with closing(TcpTransport(ports=only).listen(f"tcp://{HOST}:0")) as listener:
        client = socket.create_connection((HOST, only[0]))
        link = listener.accept()
        assert link is not None
        link.close()  # first, so that this side keeps the connection in TIME_WAIT
        client.close()
    sock, listens = take(only)
    with sock:
        assert listens
        assert sock.getsockname() == (HOST, only[0])
        with pytest.raises(TelegradError, match="no port is free"):
            take(only)


def test_an_address_that_this_machine_does_not_have_is_an_oserror_and_not_a_lack_of_ports() -> None:
    with pytest.raises(OSError, match=r"[Cc]annot assign"):
        bind_in_range((socket.AF_INET, socket.SOCK_STREAM, 0), ("192.0.2.1", 0), (29600,))
