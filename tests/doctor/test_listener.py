from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator

import pytest

from telegrad.doctor import listener as listener_module
from telegrad.doctor.listener import Listener
from telegrad.doctor.probe_protocol import GREETING, MAGIC


@pytest.fixture
def listener() -> Iterator[Listener]:
    serving = Listener("127.0.0.1", 0)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    yield serving
    serving.close()
    thread.join()


def test_it_greets_and_survives_strangers(listener: Listener) -> None:
    for sent in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10):
        with socket.create_connection(("127.0.0.1", listener.port), 20) as connection:
            assert connection.recv(GREETING.size).startswith(MAGIC)
            connection.sendall(sent)
            with contextlib.suppress(ConnectionResetError):  # it has not read all
                with contextlib.suppress(OSError):  # it has ended the connection already
                    connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""


def test_it_goes_on_after_a_shortage_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_POLL", 0.01)
    shortages, accept = [1, 2], socket.socket.accept

    def fail_twice(self: socket.socket) -> tuple[socket.socket, object]:
        if shortages:
            shortages.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    serving = Listener("127.0.0.1", 0)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", serving.port), 20) as connection:
            assert connection.recv(GREETING.size).startswith(MAGIC)
    finally:
        serving.close()
        thread.join()
    assert not shortages


def test_a_doctor_waits_while_as_many_as_allowed_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_MAX_CONVERSATIONS", 1)
    serving = Listener("127.0.0.1", 0)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        where = "127.0.0.1", serving.port
        with socket.create_connection(where, 20) as first, socket.create_connection(where, 20) as second:
            assert first.recv(GREETING.size).startswith(MAGIC)
            first.close()
            assert second.recv(GREETING.size).startswith(MAGIC)
    finally:
        serving.close()
        thread.join()
