"""The memory transport: what it adds to the contract of transports."""

from __future__ import annotations

import time

import pytest

from telegrad.testing.scheduler import Scheduler, SimRuntime
from telegrad.transport.base import Link, LinkClosed, Ready
from telegrad.transport.memory import MemoryLink, MemoryListener, MemoryNetwork, MemoryTransport
from telegrad.wire.frames import BULK_CHUNK, MESSAGE, Frame, Kind, Limits


def pair(network: MemoryNetwork, *, resumable: bool = True) -> tuple[Link, Link]:
    transport = MemoryTransport(network, resumable=resumable, origin="memory://caller")
    listener = transport.listen("memory://callee")
    here = transport.connect("memory://callee", time.monotonic() + 20)
    there = listener.accept()
    assert there is not None
    listener.close()
    for link in (here, there):
        link.admit(Limits(), lambda sequence, length: None)
    return here, there


def test_an_empty_name_picks_a_free_one() -> None:
    transport = MemoryTransport(MemoryNetwork())
    first, second = transport.listen("memory://"), transport.listen("memory://")
    assert first.address != second.address
    assert first.address.startswith("memory://")


def test_networks_are_separate() -> None:
    MemoryTransport(MemoryNetwork()).listen("memory://a")
    with pytest.raises(ConnectionRefusedError, match="nobody listens at memory://a"):
        MemoryTransport(MemoryNetwork()).connect("memory://a", time.monotonic() + 20)


@pytest.mark.parametrize("resumable", [True, False])
def test_links_are_resumable_if_the_transport_is(resumable: bool) -> None:
    here, there = pair(MemoryNetwork(), resumable=resumable)
    assert (here.resumable, there.resumable) == (resumable, resumable)
    assert (here.peer, there.peer) == ("memory://callee", "memory://caller")


@pytest.mark.parametrize("kind", [MESSAGE, BULK_CHUNK])
def test_the_receiver_does_not_share_memory_with_the_sender(kind: int) -> None:
    here, there = pair(MemoryNetwork())
    body = bytearray(b"before")
    here.send(kind, body, 1, 0, 0)
    (frame,) = there.receive()
    body[:] = b"after!"
    assert bytes(frame.body) == b"before"


@pytest.mark.parametrize(("kind", "read"), [(MESSAGE, b"before"), (BULK_CHUNK, b"after!")])
def test_chunks_are_read_late_as_by_a_slow_socket(kind: int, read: bytes) -> None:
    """A sender that changes what a chunk refers to is found out."""
    here, there = pair(MemoryNetwork())
    body = bytearray(b"before")
    here.send(kind, body, 1, 0, 0)
    body[:] = b"after!"
    (frame,) = there.receive()
    assert bytes(frame.body) == read


def test_closing_a_listener_closes_pending_connections() -> None:
    transport = MemoryTransport(MemoryNetwork())
    listener = transport.listen("memory://a")
    link = transport.connect("memory://a", time.monotonic() + 20)
    listener.close()
    assert link.wait(time.monotonic() + 20) == Ready.READ
    with pytest.raises(LinkClosed, match="end of file"):
        list(link.receive())


def test_closing_an_old_listener_does_not_affect_a_new_one_at_the_same_address() -> None:
    network = MemoryNetwork()
    transport = MemoryTransport(network)
    old = transport.listen("memory://a")
    old.close()
    new = transport.listen("memory://a")
    old.close()
    assert isinstance(new, MemoryListener)
    assert network.listeners["memory://a"] is new


def test_a_network_can_lose_and_duplicate_frames() -> None:
    class OddNetwork(MemoryNetwork):
        def deliver(self, link: MemoryLink, frame: Frame) -> None:
            for _ in range(frame.sequence % 3):
                super().deliver(link, frame)

    here, there = pair(OddNetwork())
    for sequence in range(6):
        here.send(MESSAGE, b"", sequence, 0, 0)
    assert [frame.sequence for frame in there.receive()] == [1, 2, 2, 4, 5, 5]


def test_a_network_can_refuse_connections() -> None:
    class Parted(MemoryNetwork):
        def connecting(self, source: str, target: str) -> None:
            raise TimeoutError(f"no way from {source} to {target}")

    transport = MemoryTransport(Parted(), origin="memory://b")
    transport.listen("memory://a")
    with pytest.raises(TimeoutError, match="no way from memory://b to memory://a"):
        transport.connect("memory://a", time.monotonic() + 20)


def test_waits_use_the_clock_of_the_network() -> None:
    scheduler = Scheduler(seed=1)
    network = MemoryNetwork(SimRuntime(scheduler, ""))
    here, there = pair(network)
    poller = MemoryTransport(network).poller()
    poller.add(there, read=True)

    def program() -> tuple[int, float, int, float, int]:
        scheduler.at(1000.0, lambda: here.send(Kind.PING, b"", 0, 0, 0))
        first = there.wait(500.0)
        at = scheduler.now
        second = here.wait(None, poller)
        return first, at, second, scheduler.now, len(poller.wait(None))

    assert scheduler.run(program) == (Ready.NOTHING, 500.0, Ready.POLLER, 1000.0, 1)
