"""Where runners connect to their launcher."""

from __future__ import annotations

import select
import socket

import pytest
from tests.support.stores import reserved_port

from telegrad.launch import runner_listener
from telegrad.launch.runner_channel import TlsChannel
from telegrad.launch.runner_listener import RunnerListener
from telegrad.launch.runner_messages import Hello
from telegrad.transport.certificates import client_context


def test_the_launcher_keeps_to_the_allowed_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        pass
    monkeypatch.setenv("TELEGRAD_PORTS", str(port))
    listener = RunnerListener(["127.0.0.1"])
    try:
        assert listener.invitation.port == port
    finally:
        listener.close()


def test_a_runner_waits_while_as_many_connections_as_allowed_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_listener, "_MOST_UNCHECKED", 1)
    listener = RunnerListener(["127.0.0.1"])
    try:
        where = "127.0.0.1", listener.invitation.port
        stranger = socket.create_connection(where, 20)
        runner = socket.create_connection(where, 20)
        stranger.close()
        channel = TlsChannel(client_context().wrap_socket(runner))
        channel.send(Hello(3, "here", key=listener.invitation.key))
        assert select.select([listener], [], [], 60)[0]
        ((found, hello),) = listener.connected()
        found.close()
        channel.close()
        assert hello.rank == 3
    finally:
        listener.close()
