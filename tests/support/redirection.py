"""Sends the connections of an agent to another address, as somebody on the path can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from telegrad.agent.agent import Agent
from telegrad.transport.base import Link


@contextmanager
def redirected(agent: Agent, real: str, other: str) -> Iterator[None]:
    """Let connections that `agent` opens to the address `real` arrive at `other`."""
    transport = agent.peers.connector._transports[real.partition("://")[0]]
    connect = transport.connect

    def connect_to_other(address: str, deadline: float) -> Link:
        return connect(other if address == real else address, deadline)

    transport.connect = connect_to_other  # type: ignore[method-assign]  # until the end of the block
    try:
        yield
    finally:
        del transport.connect  # type: ignore[method-assign]  # the class has it
