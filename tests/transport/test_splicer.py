"""Forwarding bytes between sockets: all of them, in order, in bounded memory."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad.transport.splicer import Splicer

PATIENCE = 20.0


@pytest.fixture
def splicer() -> Iterator[Splicer]:
    made = Splicer("test")
    yield made
    made.close(0.0)


def joined(splicer: Splicer) -> tuple[socket.socket, socket.socket, threading.Event]:
    """Return the outer ends of a pair, and an event that is set when the pair is over."""
    one, near = socket.socketpair()
    other, far = socket.socketpair()
    over = threading.Event()
    splicer.join(near, far, over.set)
    for sock in (one, other):
        sock.settimeout(PATIENCE)
    return one, other, over


def read_all(sock: socket.socket) -> bytes:
    pieces = []
    while piece := sock.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


def test_both_directions_arrive_whole_and_an_end_of_stream_is_passed_on(splicer: Splicer) -> None:
    one, other, over = joined(splicer)
    with one, other:
        there, back = random.Random(1).randbytes(3_000_000), random.Random(2).randbytes(2_000_000)

        def send(sock: socket.socket, data: bytes) -> None:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        threads = [threading.Thread(target=send, args=pair) for pair in ((one, there), (other, back))]
        got: list[bytes] = []
        threads.append(threading.Thread(target=lambda: got.append(read_all(one))))
        for thread in threads:
            thread.start()
        assert read_all(other) == there
        for thread in threads:
            thread.join(PATIENCE)
        assert got == [back]
        assert over.wait(PATIENCE)


class _SlowEpoll:
    """An epoll that lets the thread run between the registrations of the two sockets of a pair."""

    def __init__(self, real: select.epoll) -> None:
        self._real = real
        self.polled = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        found = self._real.poll(timeout)
        self.polled.set()
        return found

    def register(self, sock: socket.socket, mask: int) -> None:
        self._real.register(sock, mask)
        self.polled.wait(0.2)  # the thread has seen the first socket; it may need the second one now
        self.polled.clear()


def test_a_pair_whose_first_socket_is_ready_at_once_is_not_used_before_it_is_whole(
    splicer: Splicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = select.epoll
    monkeypatch.setattr(select, "epoll", lambda: _SlowEpoll(real()))
    busy, busy_end, _ = joined(splicer)
    one, near = socket.socketpair()
    other, far = socket.socketpair()
    with busy, busy_end, one, other:
        one.sendall(b"before it was joined")
        splicer.join(near, far, lambda: None)
        other.settimeout(PATIENCE)
        assert other.recv(100) == b"before it was joined"


def test_a_receiver_that_does_not_read_stops_its_sender(splicer: Splicer) -> None:
    one, other, _ = joined(splicer)
    with one, other:
        one.settimeout(1.0)
        with pytest.raises(TimeoutError):
            one.sendall(bytes(4_000_000))  # more than the kernel and one buffer hold


def test_the_end_of_one_side_ends_the_other_after_what_was_sent(splicer: Splicer) -> None:
    one, other, over = joined(splicer)
    with other:
        one.sendall(b"the last words")
        one.close()
        assert read_all(other) == b"the last words"
        other.close()
        assert over.wait(PATIENCE)


def test_closing_ends_all_pairs_and_refuses_new_ones(splicer: Splicer) -> None:
    one, other, over = joined(splicer)
    with one, other:
        splicer.close(0.1)
        assert over.wait(PATIENCE)
        assert one.recv(1) == other.recv(1) == b""
        near, far = socket.socketpair()
        with near, far, pytest.raises(ConnectionAbortedError):
            splicer.join(near, far, over.set)


def test_pairs_after_an_idle_time_are_served_by_another_thread(splicer: Splicer) -> None:
    for _ in range(2):
        one, other, over = joined(splicer)
        with one, other:
            one.sendall(b"x")
            assert other.recv(1) == b"x"
        assert over.wait(PATIENCE)
