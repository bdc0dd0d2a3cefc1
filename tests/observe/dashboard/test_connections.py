"""Whoever has no token cannot keep others from the dashboard."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.observe.dashboard.test_feed import Group

from telegrad.observe.dashboard import connections
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.dashboard.server import Server

MANY = 3 * connections.MOST


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(Feed(Group().gather))
    made.start()
    yield made
    made.close()


def status(server: Server, path: str = "/state.json") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {server.access.token}"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("sent", [b"", b"GET /state.json HTTP/1.1\r\nhost:", b"GET / HTTP/1.1\r\nhost: evil\r\n\r\n"])
def test_idle_connections_make_room(server: Server, sent: bytes) -> None:
    clients = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(MANY)]
    try:
        for client in clients:
            with suppress(OSError):  # it has made room
                client.sendall(sent)
        assert status(server) == 200
    finally:
        for client in clients:
            client.close()


def test_a_connection_that_sends_nothing_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        assert client.recv(1) == b""


def test_a_browser_that_watches_keeps_its_place(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), 20) as browser:
        headers = f"host: 127.0.0.1:{server.port}\r\nauthorization: Bearer {server.access.token}\r\n"
        browser.sendall(f"GET /updates HTTP/1.1\r\n{headers}\r\n".encode())
        while b"event: state" not in browser.recv(1 << 20):
            pass
        clients = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(MANY)]
        for client in clients:
            client.close()
        assert status(server) == 200
        while b"event: update" not in browser.recv(1 << 20):
            pass


def test_senseless_requests_print_nothing(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    for data in (b"\x16\x03\x01\r\n\r\n", upgrade):
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(data)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 4")
    assert capfd.readouterr().err == ""
