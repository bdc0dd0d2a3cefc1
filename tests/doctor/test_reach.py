"""Reaching other machines: each kind of path, on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad.doctor import reach
from telegrad.doctor.listener import Listener
from telegrad.doctor.probe_protocol import GREETING, PROOF, Greeting
from telegrad.doctor.reach import Target, check_host, parse_targets

TOKEN = b"0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@contextlib.contextmanager
def listening(**options: Any) -> Iterator[Target]:
    listener = Listener("127.0.0.1", 0, **options)
    thread = threading.Thread(target=listener.serve)
    thread.start()
    try:
        yield Target("127.0.0.1", listener.port)
    finally:
        listener.close()
        thread.join()


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[Target]:
    """Accept one connection, and answer it so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Target("127.0.0.1", listener.getsockname()[1])
        thread.join()


def test_a_doctor_at_the_other_end_answers_all_questions() -> None:
    for token in (None, TOKEN):
        with listening(token=token) as target:
            (found,) = check_host(target, token, 20)
        assert found.level == "ok"
        assert "large messages pass" in found.text
        assert ("same token" if token else "no token") in found.text


def test_another_token_is_a_problem() -> None:
    with listening(token=TOKEN) as target:
        for token in (TOKEN + b"0", None):
            (found,) = check_host(target, token, 20)
            assert found.level == "problem"
            assert "has another group token" in found.text
            assert "TELEGRAD_TOKEN" in found.remedy


def test_a_clock_that_is_ahead_is_a_warning() -> None:
    with listening(clock=lambda: time.time() + 90) as target:
        (found,) = check_host(target, None, 20)
    assert found.level == "warning"
    assert "its clock is 90 s ahead of this one" in found.text
    assert "synchronize" in found.remedy


def test_a_path_that_loses_large_messages_is_a_problem() -> None:
    done = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(Greeting(bytes(16), time.time()).encode())
        size = 0
        while size < GREETING.size + PROOF:
            size += len(connection.recv(GREETING.size + PROOF - size))
        connection.sendall(bytes(PROOF))
        done.wait(20)  # what is larger never arrives

    with server(answer) as target:
        (found,) = check_host(target, None, 0.3)
        done.set()
    assert found.level == "problem"
    assert "small messages get through and 256 KiB do not" in found.text
    assert "lower the MTU" in found.remedy


def test_a_port_at_which_nothing_listens_says_that_the_machine_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (found,) = check_host(Target("127.0.0.1", port), None, 20)
    assert found.level == "ok"
    assert "can be reached; nothing listens" in found.text


def test_another_program_at_the_port_is_no_problem() -> None:
    with server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n" * 2)) as target:
        (found,) = check_host(target, None, 20)
    assert found.level == "ok"
    assert "something listens" in found.text


def test_a_firewall_that_drops_packets_is_a_problem() -> None:
    """A full backlog does what such a firewall does: the kernel drops the packets that open connections."""
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        (found,) = check_host(Target("127.0.0.1", listener.getsockname()[1]), None, 0.2)
    assert found.level == "problem"
    assert "as if a firewall dropped the packets" in found.text
    assert "TELEGRAD_PORTS" in found.remedy


def test_an_unknown_name_is_a_problem() -> None:
    (found,) = check_host(Target("no-such-host.invalid"), None, 20)
    assert (found.level, "name is unknown" in found.text) == ("problem", True)
    assert "/etc/hosts" in found.remedy


def test_an_unreachable_network_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(reach.socket.socket, "connect", unreachable)
    (found,) = check_host(Target("127.0.0.1"), None, 20)
    assert (found.level, found.remedy) == ("problem", "check the route (`ip route get 127.0.0.1`) and the address")


@pytest.fixture
def over_ipv4_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], None]:
    """What gives a host an IPv6 address too, to which no route leads."""
    connect = socket.socket.connect

    def connect_over_ipv4(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(101, "Network is unreachable")
        connect(self, address)

    def apply(target: Target) -> None:
        entries = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", target.port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("100::1", target.port, 0, 0)),
        ]
        monkeypatch.setattr(reach.socket, "getaddrinfo", lambda *_, **__: entries)
        monkeypatch.setattr(reach.socket.socket, "connect", connect_over_ipv4)

    return apply


def test_one_family_that_works_is_enough(over_ipv4_only: Callable[[Target], None]) -> None:
    with listening() as target:
        over_ipv4_only(target)
        assert [one.level for one in check_host(target, None, 20)] == ["ok", "warning"]


def test_another_token_is_a_problem_also_if_the_other_family_leads_nowhere(
    over_ipv4_only: Callable[[Target], None],
) -> None:
    with listening(token=TOKEN) as target:
        over_ipv4_only(target)
        assert [one.level for one in check_host(target, None, 20)] == ["problem", "warning"]


@pytest.mark.parametrize("text", ["a:0", "a:b", "a:70000"])
def test_wrong_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        parse_targets(text)


def test_ipv6_addresses_need_brackets_only_with_a_port() -> None:
    assert parse_targets("fe80::1, [::1], [::2]:5") == [Target("fe80::1"), Target("::1"), Target("::2", 5)]
