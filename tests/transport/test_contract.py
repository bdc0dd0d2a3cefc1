"""Every transport fulfills the contract of `telegrad.transport.base`."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
from tests.support.tls_links import KEY

from telegrad.testing import BrokenPromise, TransportUnderTest, check_transport
from telegrad.testing.transport_contract import CHECKS, Check, Harness, NotApplicable
from telegrad.transport.memory import MemoryLink, MemoryNetwork, MemoryTransport
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.tls import TlsTransport
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


@contextmanager
def tls() -> Iterator[TransportUnderTest]:
    with closing(SocketPoller()) as poller:
        yield TransportUnderTest(TlsTransport(KEY), poller, "tcp://127.0.0.1:0")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


NOT_APPLICABLE = {
    "memory": {  # its links never queue frames, and pass no file descriptors
        "an_offered_descriptor_that_was_not_taken_is_closed_with_the_link",
        "control_frames_overtake_queued_bulk",
        "the_poller_reports_that_a_link_can_send_again",
    },
    "unix": set[str](),
    "tcp": {"an_offered_descriptor_that_was_not_taken_is_closed_with_the_link"},
    "tls": {"an_offered_descriptor_that_was_not_taken_is_closed_with_the_link"},
    "tcp6": {"an_offered_descriptor_that_was_not_taken_is_closed_with_the_link"},
}
"""Checks of optional abilities, by the transport that lacks the ability."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("factory", [memory, unix, tcp, tls, pytest.param(tcp6, marks=needs_ipv6)])
def test_transport_fulfills_the_contract(factory: Factory, check: Check) -> None:
    applies = True
    with factory() as under_test, closing(Harness(under_test)) as harness:
        try:
            check(harness)
        except NotApplicable:
            applies = False
    assert applies == (check.__name__ not in NOT_APPLICABLE[factory.__name__])


def test_all_exceptions_name_checks() -> None:
    assert set[str]().union(*NOT_APPLICABLE.values()) <= {check.__name__ for check in CHECKS}


class UppercasingNetwork(MemoryNetwork):
    """Changes the body of every frame."""

    def deliver(self, link: MemoryLink, frame: Frame) -> None:
        link.other.arrived(frame._replace(body=bytearray(frame.body).upper()))


def test_a_failed_check_is_named_with_its_transport() -> None:
    @contextmanager
    def broken() -> Iterator[TransportUnderTest]:
        transport = MemoryTransport(UppercasingNetwork())
        yield TransportUnderTest(transport, transport.poller(), "memory://")

    with pytest.raises(BrokenPromise) as caught:
        check_transport(broken, checks=CHECKS[:2])
    assert "memory: frames arrive unchanged in both directions: a HANDSHAKE arrived as" in str(caught.value)


def test_all_failed_checks_are_reported_together() -> None:
    def first_check(harness: Harness) -> None:
        raise BrokenPromise("this happened instead")

    def second_check(harness: Harness) -> None:
        raise OSError("the machine is on fire")

    def does_not_apply(harness: Harness) -> None:
        raise NotApplicable("this transport cannot do it")

    with pytest.raises(BrokenPromise) as caught:
        check_transport(memory, checks=[first_check, does_not_apply, second_check])
    assert str(caught.value).splitlines() == [
        "memory: first check: this happened instead",
        "memory: second check: OSError('the machine is on fire')",
    ]
