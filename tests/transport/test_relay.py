"""Addresses of workers that open their connections themselves, and links over sockets that lead to them."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from telegrad.transport.relay import RelayTransport, incarnation_in, relay_address
from telegrad.transport.tls import TlsTransport
from telegrad.wire.frames import Kind

KEY = b"a key of 32 bytes for this group"


def test_an_address_names_an_incarnation() -> None:
    assert incarnation_in(relay_address("46", 2**63 - 1)) == 2**63 - 1


def test_a_link_over_any_socket_is_encrypted_from_end_to_end() -> None:
    address = relay_address("4", 5)
    caller, target = RelayTransport(TlsTransport(KEY)), RelayTransport(TlsTransport(KEY))
    here, there = socket.socketpair()
    caller.find_socket = lambda incarnation, deadline: (here, f"worker {incarnation}")
    listener = target.listen(address)
    assert listener.address == address
    assert listener.accept() is None
    accepted = target.accept(there, "a relay")
    frames: list[bytes] = []

    def serve() -> None:
        while not frames:
            accepted.wait(time.monotonic() + 20)
            frames.extend(bytes(frame.body) for frame in accepted.receive())

    thread = threading.Thread(target=serve)
    thread.start()
    link = caller.connect(address, time.monotonic() + 20)
    link.send(Kind.HANDSHAKE, b"hello", 0, 0, 0)
    thread.join(20)
    assert frames == [b"hello"]
    assert link.binding == accepted.binding != b""
    assert link.peer == "worker 5"
    link.close()
    accepted.close()


def test_the_socket_is_closed_if_no_worker_answers() -> None:
    caller = RelayTransport(TlsTransport(KEY))
    here, there = socket.socketpair()
    there.close()
    caller.find_socket = lambda incarnation, deadline: (here, "nobody")
    with pytest.raises(OSError, match="nobody"):
        caller.connect(relay_address("4", 5), time.monotonic() + 20)
    assert here.fileno() == -1
