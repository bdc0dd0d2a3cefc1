from __future__ import annotations

import socket

import pytest
from tests.observe.dashboard.test_feed import Group

from telegrad.errors import TelegradError
from telegrad.observe.dashboard.feed import Feed
from telegrad.observe.dashboard.server import Server, check_installed


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(TelegradError, match=r"needs uvicorn.*pip install 'telegrad\[dashboard\]'"):
        check_installed(lambda name: None if name == "uvicorn" else name)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            TelegradError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose"
        ):
            Server(Feed(Group().gather), port=port)


def test_it_listens_on_loopback_and_ends_while_a_browser_watches() -> None:
    server = Server(Feed(Group().gather))
    assert server._socket.getsockname()[0] == "127.0.0.1"
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as browser:
        headers = f"host: 127.0.0.1:{server.port}\r\nauthorization: Bearer {server.access.token}\r\n"
        browser.sendall(f"GET /updates HTTP/1.1\r\n{headers}\r\n".encode())
        while b"event: state" not in browser.recv(65536):
            pass
        server.close()
    assert not server._thread.is_alive()
