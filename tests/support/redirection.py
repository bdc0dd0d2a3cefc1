"""Sends the connections of an agent to another address, as somebody on the path can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from telegrad.agent.agent import Agent
from telegrad.transport.addresses import parse_address
from telegrad.transport.tcp import TcpTransport


@contextmanager
def redirected(agent: Agent, real: str, other: str) -> Iterator[None]:
    """Let connections that `agent` opens to the tcp address `real` arrive at `other`."""
    transport = agent.peers.connector.dialer._transports["tcp"]
    assert isinstance(transport, TcpTransport)
    with rerouted(transport, real, other):
        yield


@contextmanager
def rerouted(transport: TcpTransport, real: str, other: str) -> Iterator[None]:
    """Let connections that `transport` opens to the address `real` arrive at `other`."""

    def destination(address: str) -> tuple[str, int]:
        found = parse_address(other if address == real else address)
        return found.host, found.port

    transport._destination = destination  # type: ignore[method-assign]  # until the end of the block
    try:
        yield
    finally:
        del transport._destination  # type: ignore[method-assign]  # the class has it
