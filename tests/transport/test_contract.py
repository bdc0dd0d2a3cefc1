"""Every transport keeps every promise of `telegrad.transport.base`."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest

from telegrad.testing import BrokenPromise, TransportUnderTest, check_transport
from telegrad.testing.transport_bench import Bench
from telegrad.testing.transports import PROMISES, Promise
from telegrad.transport.memory import MemoryLink, MemoryNetwork, MemoryTransport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.unix import UnixTransport
from telegrad.wire.frames import Frame

Factory = Callable[[], AbstractContextManager[TransportUnderTest]]


@contextmanager
def memory() -> Iterator[TransportUnderTest]:
    transport = MemoryTransport(MemoryNetwork())
    with closing(transport.poller()) as poller:
        yield TransportUnderTest(transport, poller, "memory://")


@contextmanager
def unix() -> Iterator[TransportUnderTest]:
    with tempfile.TemporaryDirectory() as directory, closing(SocketPoller()) as poller:
        yield TransportUnderTest(UnixTransport(), poller, f"unix://{directory}/a.sock")


@contextmanager
def tcp() -> Iterator[TransportUnderTest]:
    with closing(SocketPoller()) as poller:
        yield TransportUnderTest(TcpTransport(), poller, "tcp://127.0.0.1:0")


@contextmanager
def tcp6() -> Iterator[TransportUnderTest]:
    with closing(SocketPoller()) as poller:
        yield TransportUnderTest(TcpTransport(), poller, "tcp://[::1]:0")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@pytest.mark.parametrize("factory", [memory, unix, tcp, pytest.param(tcp6, marks=needs_ipv6)])
def test_the_promise_is_kept(factory: Factory, promise: Promise) -> None:
    check_transport(factory, promises=[promise])


class LossyNetwork(MemoryNetwork):
    """Changes the body of every frame, and delivers nothing twice."""

    def deliver(self, link: MemoryLink, frame: Frame) -> None:
        link.other.arrived(frame._replace(body=bytearray(frame.body).upper()))


def test_a_broken_promise_is_named_with_its_transport() -> None:
    @contextmanager
    def lossy() -> Iterator[TransportUnderTest]:
        transport = MemoryTransport(LossyNetwork())
        yield TransportUnderTest(transport, transport.poller(), "memory://")

    with pytest.raises(BrokenPromise) as caught:
        check_transport(lossy, promises=PROMISES[:2])
    assert "memory: frames arrive unchanged in both directions: a HANDSHAKE arrived as" in str(caught.value)


def test_all_broken_promises_are_reported_together() -> None:
    def first_promise(bench: Bench) -> None:
        raise BrokenPromise("this came instead")

    def second_promise(bench: Bench) -> None:
        raise OSError("the machine is on fire")

    with pytest.raises(BrokenPromise) as caught:
        check_transport(memory, promises=[first_promise, second_promise])
    assert str(caught.value).splitlines() == [
        "memory: first promise: this came instead",
        "memory: second promise: OSError('the machine is on fire')",
    ]
