"""Workers that cannot be connected to, in one process on real sockets."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from telegrad.agent.agent import Agent
from telegrad.connection import relaying
from telegrad.connection.group_keys import derive_keys
from telegrad.transport.base import Transport
from telegrad.transport.relay import RelayTransport, relay_address
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tls import TlsTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.relay_header import RelayHeader, Role, Status, pack_relay_header

TOKEN = b"the token of a group with relays"
PATIENCE = 30.0


@contextmanager
def group_of(**inbound: bool) -> Iterator[dict[str, Agent]]:
    """Start agents by name; those without inbound connections listen nowhere."""
    agents: dict[str, Agent] = {}
    try:
        for number, (name, accepts) in enumerate(inbound.items()):
            tls = TlsTransport(derive_keys(TOKEN).preamble)
            transports: list[tuple[Transport, str]] = [(tls, "tcp://127.0.0.1:0" if accepts else "")]
            transports.append((RelayTransport(tls), relay_address("4", number + 1)))
            agents[name] = Agent(
                name,
                number,
                transports=transports,
                poller=SocketPoller(),
                runtime=RealRuntime(),
                token=TOKEN,
                incarnation=number + 1,
            )
        for agent in agents.values():
            agent.start([one.me for one in agents.values()])
        yield agents
    finally:
        for agent in agents.values():
            agent.close()


def test_a_worker_that_only_connects_outwards_is_called_over_connections_that_it_opens() -> None:
    with group_of(a=True, b=False) as group:
        assert group["a"].call("b", operator.add, (1, 2), timeout=PATIENCE) == 3
        assert group["b"].call("a", operator.add, (1, 2), timeout=PATIENCE) == 3
        assert group["b"].call("b", operator.add, (1, 2), timeout=PATIENCE) == 3
        link = group["a"].peers.find("b").outgoing.link  # type: ignore[union-attr]  # there is one
        assert link is not None
        assert "which has opened the connection" in link.peer
        assert not any(address.startswith("tcp://") for address in group["b"].me.addresses)


def test_two_workers_that_only_connect_outwards_call_each_other_through_a_third() -> None:
    with group_of(a=False, b=False, relay=True) as group:
        large = b"x" * 3_000_000
        assert group["a"].call("b", operator.add, (large, b"y"), timeout=PATIENCE) == large + b"y"
        assert group["b"].call("a", operator.add, (1, 2), timeout=PATIENCE) == 3
        assert group["relay"].peers.relaying._table.joined == 2


def test_a_relayed_session_goes_on_over_another_connection_when_its_own_breaks() -> None:
    with group_of(a=False, b=False, relay=True) as group:
        assert group["a"].call("b", operator.add, (1, 2), timeout=PATIENCE) == 3
        for pair in set(group["relay"].peers.relaying._splicer._pairs.values()):
            pair.sockets[0].shutdown(socket.SHUT_RDWR)
        assert group["a"].call("b", operator.add, (3, 4), timeout=PATIENCE) == 7


def ask(relay: Agent, header: RelayHeader, key: bytes = TOKEN) -> bytes:
    """Open a connection to a relay, and return its answer."""
    address = next(text for text in relay.me.addresses if text.startswith("tcp://"))
    packed = pack_relay_header(derive_keys(key).preamble, header, address)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=PATIENCE) as sock:
        sock.sendall(packed)
        try:
            return sock.recv(1)
        except ConnectionResetError:
            return b""


def test_a_relay_serves_members_only_and_says_that_a_target_is_not_there() -> None:
    with group_of(relay=True, other=True) as group:
        header = RelayHeader(Role.CALLER, 2, 1, os.urandom(16))
        assert ask(group["relay"], header) == Status.ABSENT  # it has no connection from that worker
        assert ask(group["relay"], header) == b"", "a header is accepted once"
        assert ask(group["relay"], RelayHeader(Role.CALLER, 77, 1, os.urandom(16))) == Status.ABSENT
        assert ask(group["relay"], RelayHeader(Role.TARGET, 2, 1, os.urandom(16))) == b""
        stranger = b"another token, of another group!"
        assert ask(group["relay"], RelayHeader(Role.CALLER, 2, 1, os.urandom(16)), stranger) == b""


def test_a_relay_that_is_full_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "MAX_RELAYED", 0)
    with group_of(relay=True, inside=False) as group:
        assert group["inside"].call("relay", operator.add, (1, 2), timeout=PATIENCE) == 3  # it is connected now
        assert ask(group["relay"], RelayHeader(Role.CALLER, 2, 1, os.urandom(16))) == Status.ABSENT
