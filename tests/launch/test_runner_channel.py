"""Connections between launchers and runners: only those who were invited get in, and only the launcher is believed."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
from tests.support.processes import wait_until

from telegrad.errors import TelegradError
from telegrad.launch import runner_channel
from telegrad.launch.runner_channel import ChannelClosed, Invitation, PipeChannel, TlsChannel
from telegrad.launch.runner_listener import RunnerListener
from telegrad.launch.runner_messages import Hello, Output, Signal
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
        runner.close()
        wait_for_end(launcher)
        assert launcher.peer == "127.0.0.1"  # also when the runner is gone
        launcher.close()


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


def test_a_stranger_that_sends_one_byte_at_a_time_is_refused(
    listener: RunnerListener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_channel, "_CONNECT_TIMEOUT", 0.5)
    begin = b"\x16\x03\x01\x40\x00\x01"  # a handshake of 16 KB
    with socket.create_connection(("127.0.0.1", listener.invitation.port)) as stranger:
        sent = 0
        while not select.select([stranger], [], [], 0.1)[0]:
            stranger.send(begin[sent : sent + 1] or b"x")
            sent += 1
            assert sent < 500
    wait_until(lambda: "it has not finished the handshake of TLS within 0.5 s" in caplog.text)


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


class Pipes:
    """A channel to write to, and one to read what arrives."""

    def __init__(self) -> None:
        (read_end, self._write_end), (self._read_end, write_end) = os.pipe(), os.pipe()
        self.launcher, self.runner = PipeChannel(read_end, write_end), PipeChannel(self._read_end, self._write_end)

    def close(self) -> None:
        self.launcher.close()
        self.runner.close()


def test_a_launcher_does_not_wait_for_a_runner_that_takes_nothing() -> None:
    messages = [Output(1, bytes([number]) * 100_000) for number in range(10)]
    asked: list[int] = []
    with closing(Pipes()) as pipes:
        pipes.launcher.post(asked.append(number) or message for number, message in enumerate(messages))  # type: ignore[func-returns-value]  # counts
        assert pipes.launcher.unsent
        assert asked == [0], "only the message that is being sent is in memory"
        pipes.launcher.post([Signal(9)])
        found: list[object] = []
        while pipes.launcher.unsent:
            found += pipes.runner.receive()
            pipes.launcher.flush()
        found += pipes.runner.receive()
    assert found == [*messages, Signal(9)]


def test_tls_does_not_wait_for_a_runner_that_takes_nothing(listener: RunnerListener) -> None:
    with closing(listener.invitation.connect()) as runner:
        runner.send(Hello(0, "host", key=listener.invitation.key))
        connected: list[tuple[TlsChannel, Hello]] = []
        wait_until(lambda: bool(connected.extend(listener.connected()) or connected))
        with closing(connected[0][0]) as launcher:
            message = Output(1, b"x" * 30_000_000)  # more than the buffers of both sockets hold
            launcher.post([message])
            assert launcher.unsent
            found: list[object] = []
            while not found:
                launcher.flush()
                found += runner.receive()
            assert found == [message]


def test_a_runner_waits_until_its_launcher_reads() -> None:
    message = Output(1, b"x" * 1_000_000)
    found: list[object] = []
    with closing(Pipes()) as pipes:
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(pipes.runner.send, message)
            wait_until(lambda: pipes.runner.unsent)
            while not found:
                found += pipes.launcher.receive()
            sent.result(60)
    assert found == [message]


def test_what_was_not_sent_is_dropped_with_the_connection() -> None:
    (other_end, write_end), (read_end, unused) = os.pipe(), os.pipe()
    with closing(PipeChannel(read_end, write_end)) as channel:
        channel.post([Output(1, b"x" * 1_000_000)])
        assert channel.unsent
        os.close(other_end)
        with pytest.raises(ChannelClosed, match="the pipe is closed"):
            channel.flush()
        assert not channel.unsent
    os.close(unused)


def test_a_host_that_vanishes_is_noticed(listener: RunnerListener) -> None:
    with closing(listener.invitation.connect()) as runner, socket.socket(fileno=os.dup(runner.fileno())) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 120


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
