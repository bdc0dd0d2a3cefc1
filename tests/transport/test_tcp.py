"""TCP: what it adds to the contract of transports."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from typing import cast

import pytest

from telegrad.transport import tcp
from telegrad.transport.base import Link, LinkClosed, Listener, Ready
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.sockets import SocketListener
from telegrad.transport.tcp import TcpTransport, format_tcp
from telegrad.wire.frames import HEADER_SIZE, MAGIC, Kind


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = TcpTransport().listen("tcp://127.0.0.1:0")
    yield listener
    listener.close()


def soon() -> float:
    return time.monotonic() + 20


def port_of(listener: Listener) -> int:
    return int(listener.address.rpartition(":")[2])


def test_port_zero_picks_a_free_port(listener: Listener) -> None:
    assert port_of(listener) > 0
    with socket.create_connection(("127.0.0.1", port_of(listener))):
        link = listener.accept()
        assert link is not None
        link.close()


def test_the_address_has_the_advertised_host() -> None:
    listener = TcpTransport(advertise="node7.cluster").listen("tcp://127.0.0.1:0")
    assert listener.address == f"tcp://node7.cluster:{port_of(listener)}"
    listener.close()


def test_ipv6_is_written_in_brackets() -> None:
    assert format_tcp("::1", 80) == "tcp://[::1]:80"
    assert format_tcp("node7", 80) == "tcp://node7:80"


def test_both_ends_name_each_other_and_can_be_resumed(listener: Listener) -> None:
    here = TcpTransport().connect(listener.address, soon())
    there = listener.accept()
    assert there is not None
    assert here.peer == listener.address.removeprefix("tcp://")
    assert there.peer.startswith("127.0.0.1:")
    assert here.resumable
    assert there.resumable
    here.close()
    there.close()


def test_small_frames_are_not_delayed(listener: Listener) -> None:
    here = TcpTransport().connect(listener.address, soon())
    there = listener.accept()
    for link in (here, there):
        assert isinstance(link, SocketLink)
        with socket.socket(fileno=socket.dup(link.fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        link.close()


def test_a_host_that_cannot_be_found_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*question: object, **options: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="not known"):
        TcpTransport().connect("tcp://no-such-host:1", soon())
    with pytest.raises(OSError, match="not known"):
        TcpTransport().listen("tcp://no-such-host:0")


def test_an_invalid_address_is_a_valueerror() -> None:
    with pytest.raises(ValueError, match="invalid address"):
        TcpTransport().connect("tcp://host", soon())


def test_connecting_ends_at_its_deadline() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for sock in (first, second):  # the kernel drops connections beyond the backlog, so connecting blocks
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            TcpTransport().connect(f"tcp://127.0.0.1:{full.getsockname()[1]}", started + 0.05)
        assert 0.04 < time.monotonic() - started < 10


def test_a_socket_that_connects_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class SelfConnecting(socket.socket):
        """Gets the target as its source port, as the kernel chooses it once in 28,000 times."""

        def connect(self, address: object) -> None:
            self.bind(address)  # type: ignore[arg-type]  # whatever connect takes
            super().connect(address)  # type: ignore[arg-type]  # whatever connect takes

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(socket, "socket", SelfConnecting)
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        TcpTransport().connect(f"tcp://127.0.0.1:{port}", soon())


def test_a_reset_connection_is_a_closed_link(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as peer:
        link = listener.accept()
        assert link is not None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert link.wait(soon()) & Ready.READ
    with pytest.raises(LinkClosed, match="reset"):
        list(link.receive())
    link.send(Kind.HANDSHAKE, b"x", 0, 0, 0)
    link.close()


def test_an_incomplete_frame_is_never_delivered(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as peer:
        link = listener.accept()
        assert link is not None
        peer.sendall(b"tg\1\1\5\0\0\0")
    assert link.wait(soon()) & Ready.READ
    assert list(link.receive()) == []
    with pytest.raises(LinkClosed, match="the other process has ended, or has closed the connection"):
        list(link.receive())
    link.close()


# -- deferred listeners ------------------------------------------------------------------------------------------


def test_a_deferred_listener_reserves_its_port_and_refuses_connections_until_it_is_opened() -> None:
    transport = TcpTransport(deferred=True)
    listener = transport.listen("tcp://127.0.0.1:0")
    try:
        assert not listener.is_open
        with pytest.raises(ConnectionRefusedError):
            transport.connect(listener.address, soon())
        with pytest.raises(OSError, match="in use"):
            TcpTransport().listen(listener.address)
        listener.open()
        listener.open()
        assert listener.is_open
        link = transport.connect(listener.address, soon())
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()
        link.close()
    finally:
        listener.close()


def test_many_deferred_listeners_have_different_ports() -> None:
    listeners = [TcpTransport(deferred=True).listen("tcp://127.0.0.1:0") for _ in range(200)]
    try:
        assert len({port_of(listener) for listener in listeners}) == 200
        for listener in listeners:
            listener.open()
    finally:
        for listener in listeners:
            listener.close()


# -- a long backlog -----------------------------------------------------------------------------------------------


def test_silent_connections_in_a_long_backlog_are_dropped_and_counted(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(400):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port_of(listener)))))
        speaking = stack.enter_context(socket.create_connection(("127.0.0.1", port_of(listener))))
        speaking.sendall(MAGIC + bytes(HEADER_SIZE))
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(listener))))
        accepted: list[Link] = []
        dropped = 0
        while select.select([cast("SocketListener", listener)], [], [], 0)[0]:
            link = listener.accept()
            dropped += sum(listener.take_dropped().values())
            if link is not None:
                accepted.append(link)
        assert dropped + len(accepted) == 701
        assert dropped > 400
        assert f"127.0.0.1:{speaking.getsockname()[1]}" in [link.peer for link in accepted]
        assert not listener.take_dropped()
        with pytest.raises(ConnectionResetError):
            silent[0].recv(1)
        for link in accepted:
            link.close()


def test_silent_connections_in_a_short_backlog_are_accepted(listener: Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(listener))))
        for _ in range(50):
            link = listener.accept()
            assert link is not None
            link.close()


def test_an_aborted_link_resets_its_connection(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as peer:
        link = listener.accept()
        assert link is not None
        link.abort()
        link.abort()
        link.close()
        with pytest.raises(ConnectionResetError):
            peer.recv(1)
        with pytest.raises(LinkClosed):
            list(link.receive())


def _connect(listener: Listener, data: bytes, source: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port_of(listener)), timeout=20, source_address=(source, 0))
    sock.sendall(data)
    return sock


def _accept_next(listener: Listener) -> bool:
    """Return whether the connection that was just opened is accepted, and not dropped."""
    select.select([cast("SocketListener", listener)], [], [], 20)
    link = listener.accept()
    if link is not None:
        link.close()
    return link is not None


def test_a_long_backlog_is_thinned_out_by_address(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_backlog", lambda sock: 1000)
    hello, http = MAGIC + bytes(HEADER_SIZE), b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n".ljust(HEADER_SIZE)

    def accepted(data: bytes, source: str = "127.0.0.1") -> bool:
        with _connect(listener, data, source):
            return _accept_next(listener)

    assert not accepted(b"")
    assert not accepted(http)
    assert all(accepted(hello) for _ in range(tcp._FEW))
    crowded = [accepted(hello) for _ in range(5 * tcp._ONE_IN)]
    assert sum(crowded) == 5
    assert accepted(hello, "127.0.0.2"), "an address that did not make the backlog long"
    assert sum(listener.take_dropped().values()) == 2 + len(crowded) - 5
    monkeypatch.setattr(tcp, "_backlog", lambda sock: 0)
    assert any(accepted(http) for _ in range(tcp._LOOK_EVERY + 1)), "the backlog is short again"
