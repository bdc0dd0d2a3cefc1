"""Connections between launchers and runners: only those who were invited get in, and only the launcher is believed."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from tests.support.processes import wait_until

from telegrad.errors import TelegradError
from telegrad.launch.runner_channel import ChannelClosed, Invitation, PipeChannel, TlsChannel
from telegrad.launch.runner_listener import RunnerListener
from telegrad.launch.runner_messages import Hello, Output
from telegrad.transport.certificates import client_context


@pytest.fixture
def listener() -> Iterator[RunnerListener]:
    with closing(RunnerListener(["127.0.0.1"])) as listener:
        yield listener


def wait_for_end(channel: TlsChannel) -> None:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while poll.poll(20_000):
        try:
            list(channel.receive())
        except ChannelClosed:
            return
    raise AssertionError("the other side has not closed the connection")


def test_a_runner_that_was_invited_is_connected(listener: RunnerListener) -> None:
    invitation = Invitation.take(listener.invitation.environment())
    assert invitation == listener.invitation
    with closing(invitation.connect()) as runner:
        runner.send(Hello(3, "host", key=invitation.key))
        found: list[tuple[TlsChannel, Hello]] = []
        wait_until(lambda: bool(found.extend(listener.connected()) or found))
        ((launcher, hello),) = found
        assert (hello.rank, hello.host) == (3, "host")
        data = b"x" * 3_000_000
        received: list[object] = []
        runner.send(Output(1, data[:1000]))  # fits into the buffers; nobody reads yet
        wait_until(lambda: bool(received.extend(launcher.receive()) or received))
        assert received == [Output(1, data[:1000])]
        launcher.close()
        wait_for_end(runner)


def test_a_wrong_key_is_refused(listener: RunnerListener, caplog: pytest.LogCaptureFixture) -> None:
    with closing(listener.invitation.connect()) as runner:
        runner.send(Hello(0, "host", key="guessed"))
        wait_for_end(runner)
    wait_until(lambda: "it does not know the key" in caplog.text)
    assert listener.connected() == []


def test_what_is_no_hello_is_refused(listener: RunnerListener, caplog: pytest.LogCaptureFixture) -> None:
    with closing(listener.invitation.connect()) as runner:
        runner.send(Output(1, b"x" * 5000))
        wait_for_end(runner)
    wait_until(lambda: "4096 are allowed" in caplog.text)


def test_what_is_no_tls_is_refused(listener: RunnerListener, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", listener.invitation.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        wait_until(lambda: "the launcher has refused a connection" in caplog.text)


def test_a_runner_does_not_show_its_key_to_another_program(listener: RunnerListener) -> None:
    wrong = replace(listener.invitation, fingerprint="0" * 64)
    with pytest.raises(TelegradError, match=r"cannot reach its launcher .* another program answers there"):
        wrong.connect()


def test_a_launcher_that_is_gone_is_named() -> None:
    with closing(RunnerListener(["127.0.0.1"])) as listener:
        invitation = listener.invitation
    with pytest.raises(TelegradError, match=f"at port {invitation.port} .*refused"):
        invitation.connect()


def test_a_runner_without_an_invitation_is_refused() -> None:
    with pytest.raises(TelegradError, match="started by telegrad's launchers only"):
        Invitation.take({})


def test_the_repr_of_an_invitation_shows_no_key(listener: RunnerListener) -> None:
    assert listener.invitation.key not in repr(listener.invitation)


def test_only_tls_1_3_is_offered(listener: RunnerListener) -> None:
    context = client_context()
    with socket.create_connection(("127.0.0.1", listener.invitation.port)) as plain, context.wrap_socket(plain) as sock:
        assert isinstance(sock, ssl.SSLSocket)
        assert sock.version() == "TLSv1.3"


def test_a_forked_child_does_not_keep_the_channels_of_the_launcher() -> None:
    read_end, write_end = os.pipe()
    channel = PipeChannel(read_end, write_end)
    child = os.fork()
    if child == 0:
        closed = 0
        for descriptor in (read_end, write_end):
            try:
                os.fstat(descriptor)
            except OSError:
                closed += 1
        os._exit(closed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    channel.close()
