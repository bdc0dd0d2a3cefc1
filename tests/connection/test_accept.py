"""However many strangers come, few are inside at once, members get in, and nobody spins."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.connection import accept as guests
from telegrad.connection.accept import PendingConnections
from telegrad.connection.worker_record import WorkerRecord
from telegrad.execution.timers import Timer
from telegrad.settings import AgentSettings
from telegrad.transport.base import Link, Listener, Ready
from telegrad.transport.memory import MemoryNetwork, MemoryTransport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.unix import UnixTransport

MOST = 3


class House:
    """An agent, reduced to what letting in needs of it; its clock stands until the test moves it."""

    def __init__(self) -> None:
        self.me = WorkerRecord("a", 0, 1, ())
        self.token = b"x" * 32
        self.settings = AgentSettings(connect_timeout=30.0)
        self.runtime: Any = self
        self.executor: Any = self
        self.time = 0.0
        self.timers: list[Timer] = []
        self.transport = MemoryTransport(MemoryNetwork())
        self.poller = self.transport.poller()
        peers: Any = SimpleNamespace(check=None, resume=None)  # nobody gets through a handshake here
        self.pending = PendingConnections(self, peers)
        self.listener = self.transport.listen("memory://a")
        self.pending.watch(self.listener)

    def now(self) -> float:
        return self.time

    def random_bits(self, count: int) -> int:
        return 1

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, action))
        return self.timers[-1]

    def cancel(self, timer: Timer) -> None:
        timer.action = None

    def channel_lost(self, channel: object, reason: str) -> None:
        raise AssertionError(reason)

    def connect(self) -> Link:
        return self.transport.connect("memory://a", 0.0)

    def poll(self) -> bool:
        """Do what the poller says once; whether it said anything of the listener."""
        heard = False
        for item, ready in self.poller.wait(0.0):
            heard = heard or isinstance(item, Listener)
            item.owner.on_ready(ready)
        return heard

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        for timer in list(self.timers):
            if timer.action is not None and timer.when <= self.time:
                action, timer.action = timer.action, None
                action()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(guests, "MOST", MOST)
    return House()


def test_no_more_are_inside_than_the_bound_and_the_poller_does_not_spin(house: House) -> None:
    links = [house.connect() for _ in range(MOST + 2)]
    assert house.poll()
    assert len(house.pending.inside()) == MOST
    assert not house.poll(), "somebody waits outside, but there is no room"
    assert len(links) == MOST + 2


def test_when_one_leaves_the_next_gets_in_at_once(house: House) -> None:
    links = [house.connect() for _ in range(MOST + 1)]
    house.poll()
    links[0].close()
    house.poll()
    assert len(house.pending.inside()) == MOST - 1
    assert house.poll()
    assert len(house.pending.inside()) == MOST


def test_the_longest_there_makes_room_after_a_second(house: House, caplog: pytest.LogCaptureFixture) -> None:
    links = [house.connect() for _ in range(MOST)]
    house.poll()
    house.pass_time(0.5)
    links.append(house.connect())
    house.poll()
    assert not links[0].wait(0.0)
    house.pass_time(0.5)
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert house.poll()
    assert links[0].wait(0.0) == Ready.READ, "it was shown out"
    assert "too many connections" in caplog.text
    assert len(house.pending.inside()) == MOST
    assert [guest.since for guest in house.pending.inside()] == [0.0] * (MOST - 1) + [1.0]


def test_without_a_file_descriptor_others_wait_outside_and_the_poller_does_not_spin(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = house.listener.accept
    link = house.connect()

    def out_of_files() -> Link | None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(house.listener, "accept", out_of_files)
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert house.poll()
    assert "Too many open files" in caplog.text
    assert "ulimit" in caplog.text
    assert not house.poll()
    monkeypatch.setattr(house.listener, "accept", accept)
    house.pass_time(1.0)
    assert house.poll()
    assert len(house.pending.inside()) == 1
    link.close()


def test_a_socket_listener_says_that_it_has_no_file_descriptor_left(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener: Any = UnixTransport().listen(f"unix://{tmp_path}/a.sock")

    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        close = listener._socket.close

    try:
        monkeypatch.setattr(listener, "_socket", Exhausted())
        with pytest.raises(OSError, match="Too many open files"):
            listener.accept()
    finally:
        listener.close()


def test_whoever_comes_after_the_end_is_shown_out(house: House) -> None:
    house.pending.close()
    link = house.connect()
    house.poll()
    assert link.wait(0.0) == Ready.READ
    assert not house.pending.inside()


def test_a_poller_of_sockets_stops_reporting_a_listener_that_is_shut(tmp_path: Any) -> None:
    transport, poller = UnixTransport(), SocketPoller()
    listener = transport.listen(f"unix://{tmp_path}/a.sock")
    poller.add(listener, read=True)
    link = transport.connect(listener.address, time.monotonic() + 20)
    try:
        assert [item for item, _ in poller.wait(None)] == [listener]
        poller.arm(listener, read=False)
        assert not poller.wait(0.0)
        poller.arm(listener, read=True)
        assert [item for item, _ in poller.wait(None)] == [listener]
    finally:
        link.close()
        listener.close()
        poller.close()
