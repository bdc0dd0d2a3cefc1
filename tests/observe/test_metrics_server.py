from __future__ import annotations

import errno
import http.client
import logging
import operator
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

import pytest
from tests.support.processes import wait_until

from telegrad.agent.agent import Agent
from telegrad.observe import metrics_server
from telegrad.observe.metrics_server import MetricsListener, parse_metrics_address, serve_metrics
from telegrad.testing.group import local_group


@pytest.fixture
def group() -> Iterator[dict[str, Agent]]:
    with local_group(["a", "b"]) as agents:
        yield agents


def served(agent: Agent) -> MetricsListener:
    listener = serve_metrics(agent, "0")
    assert listener is not None
    return listener


def get(port: int, path: str = "/metrics", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers={"host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, re.sub(r'host="[^"]*"', 'host="here"', answer.read().decode())
    finally:
        connection.close()


def test_a_worker_serves_its_own_metrics_and_counts_each_event_once(group: dict[str, Agent]) -> None:
    port = served(group["a"]).port
    for _ in range(2):
        group["a"].call("b", operator.add, (1, 2))
    for _ in range(2):  # a second scrape does not count the calls again
        status, text = get(port)
        assert status == 200
        assert 'telegrad_duration_seconds_count{host="here",kind="call",outcome="ok",worker="a"} 2.0' in text
    assert 'telegrad_calls_made_total{host="here",worker="a"} 2.0' in text
    assert 'worker="b"' not in text


def test_a_foreign_host_header_and_other_paths_are_refused(group: dict[str, Agent]) -> None:
    port = served(group["a"]).port
    assert get(port, host="evil.example")[0] == 421
    assert get(port, "/")[0] == 404


def test_it_ends_with_the_worker(group: dict[str, Agent]) -> None:
    port = served(group["a"]).port
    group["a"].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 20).close()


def test_clients_that_send_nothing_take_few_threads_and_are_disconnected(
    group: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine can connect, so a thousand connections must not become a thousand threads."""
    port = served(group["a"]).port
    before = threading.active_count()
    monkeypatch.setattr(metrics_server, "_PATIENCE", 600.0)  # the machine may be busy
    monkeypatch.setattr(metrics_server._Handler, "timeout", 600.0)
    clients = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(100)]
    try:
        refused = [client for client in clients[-10:] if client.recv(1) == b""]  # accepted in order
        assert len(refused) == 10
        assert threading.active_count() <= before + metrics_server._MOST_CLIENTS
        with pytest.raises((OSError, http.client.HTTPException)):
            get(port)  # there is no room
        monkeypatch.setattr(metrics_server, "_PATIENCE", 0.0)
        assert all(client.recv(1) == b"" for client in clients)
    finally:
        for client in clients:
            client.close()
    monkeypatch.undo()
    wait_until(lambda: has_room(port))


def has_room(port: int) -> bool:
    try:
        return get(port)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_shortage_of_descriptors_costs_no_processor_time(
    group: dict[str, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def get_request(server: object) -> None:
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    listener = served(group["a"])
    assert get(listener.port)[0] == 200
    with monkeypatch.context() as patched:
        patched.setattr(metrics_server, "_RETRY", 600.0)
        patched.setattr(socketserver.TCPServer, "get_request", get_request)
        with socket.create_connection(("127.0.0.1", listener.port), 20):
            wait_until(lambda: bool(tries))
            for _ in range(100):
                group["a"].call("b", operator.add, (1, 2))
            assert len(tries) == 1
        group["a"].close()  # ends the wait


def test_a_client_that_leaves_early_is_not_worth_a_traceback(
    group: dict[str, Agent], capfd: pytest.CaptureFixture[str]
) -> None:
    listener = served(group["a"])
    for data in (b"", b"GET /metrics HTTP/1.1\r\n", b"\x00" * 70_000, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", listener.port), 20) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets the connection
            client.sendall(data)
    wait_until(lambda: not listener._server._clients)
    assert get(listener.port)[0] == 200
    assert capfd.readouterr().err == ""


def test_the_port_grows_with_the_id_and_one_in_use_is_logged(
    group: dict[str, Agent], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        assert serve_metrics(group["b"], str(port - 1)) is None
    assert f"cannot listen on 127.0.0.1 port {port}" in caplog.text
    assert "TELEGRAD_METRICS" in caplog.text


@pytest.mark.parametrize("text", ["", "x", "1:x", "127.0.0.1", "99999", "-1"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="TELEGRAD_METRICS"):
        parse_metrics_address(text)
