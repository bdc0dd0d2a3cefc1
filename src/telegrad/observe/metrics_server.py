"""Serves the metrics of one worker to Prometheus, over HTTP.

There is no token, as usual for metrics: by default only this machine can reach them. A request must name the server by
an address or as localhost, so that no page of another site can read them through a browser (DNS rebinding).
"""

from __future__ import annotations

import http.server
import logging
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.errors import TelegradError
from telegrad.observe.dashboard.access import Access
from telegrad.observe.describe import describe
from telegrad.observe.metrics import Durations, check_installed, families, render
from telegrad.observe.model import ViewRequest
from telegrad.transport.base import Link, Listener

_log = logging.getLogger("telegrad")

_PATIENCE = 10.0  # seconds that a client has to send its request and to read the answer
_RETRY = 1.0  # seconds until the next attempt to accept, after one that failed: there may be no file descriptor
_MOST_CLIENTS = 8
"""Clients that are served at once, each on a thread of the worker. Any user of this machine may connect."""


class WorkerMetrics:
    """The metrics of one worker, from one scrape to the next."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # protects the two below
        self._next_event = 0
        self._durations = Durations()

    def render(self) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type."""
        with self._lock:
            view = describe(self._agent, ViewRequest(events_since=self._next_event))
            self._next_event = view.next_event
            self._durations.add([view])
            found = list(families([view], (), self._durations))
        return render(found)


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Return host and port of an address such as ``9400`` or ``0.0.0.0:9400``.

    >>> parse_metrics_address("9400"), parse_metrics_address("[::]:9400")
    (('127.0.0.1', 9400), ('::', 9400))
    """
    host, _, port = text.strip().rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"the address for metrics (TELEGRAD_METRICS) must be PORT or HOST:PORT, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def serve_metrics(agent: Agent, address: str) -> MetricsListener | None:
    """Serve the metrics of a worker until it ends: at the given port plus the worker's id, or any free port for 0.

    A port that is in use is logged, and does not keep the worker from its work.
    """
    check_installed()
    host, base = parse_metrics_address(address)
    port = base + agent.me.id if base else 0
    try:
        listener = MetricsListener(agent, host, port)
        agent.listeners.append(listener)
        agent.executor.threads.start("metrics", listener.serve)
    except (OSError, OverflowError, TelegradError) as error:
        _log.warning(
            "worker %r serves no metrics: it cannot listen on %s port %d (%s); set TELEGRAD_METRICS to another port",
            agent.me.name,
            host,
            port,
            error,
        )
        return None
    _log.info("worker %r serves metrics at %s", agent.me.name, listener.address)
    return listener


class MetricsListener(Listener):
    """Accepts scrapes, on a thread of its own. The agent closes it as one of its listeners."""

    is_open = False  # not for the poller

    def __init__(self, agent: Agent, host: str, port: int) -> None:
        self._server = _Server(host, port, WorkerMetrics(agent))
        self.port: int = self._server.server_address[1]
        self._server.access = Access(self.port, host)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self.port}/metrics"

    def serve(self) -> None:
        """Answer until this is closed."""
        try:
            while not self._server.ended.is_set():
                self._server.handle_request()  # or nothing, if none comes for a moment
                self._server.end_slow_clients()
        finally:
            self._server.server_close()

    def accept(self) -> Link | None:
        """Nothing: scrapes are not links."""
        return None

    def close(self) -> None:
        self._server.ended.set()

    def abandon(self) -> None:
        self._server.socket.close()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    timeout = 0.2
    access: Access

    def __init__(self, host: str, port: int, metrics: WorkerMetrics) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.metrics = metrics
        self.ended = threading.Event()
        self._lock = threading.Lock()  # protects _clients
        self._clients: dict[socket.socket, float] = {}  # with the time at which they came
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a client. If that fails, pause: the client still waits, and the next attempt would follow at once."""
        try:
            return super().get_request()
        except OSError as error:
            _log.debug("metrics: no client can be accepted now: %s", error)
            self.ended.wait(_RETRY)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for another client."""
        with self._lock:
            if len(self._clients) >= _MOST_CLIENTS:
                return False
            self._clients[request] = time.monotonic()
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def end_slow_clients(self) -> None:
        """Disconnect those that take too long. The timeout of a socket only limits the time between two bytes."""
        with self._lock:
            slow = [client for client, came in self._clients.items() if time.monotonic() - came > _PATIENCE]
            for client in slow:
                with suppress(OSError):  # it is gone already
                    client.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong: a client that leaves is no news for the standard error of a worker."""
        error = sys.exception()
        _log.log(logging.DEBUG if isinstance(error, OSError) else logging.WARNING, "metrics: %r", error, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE
    server_version, sys_version = "telegrad", ""

    def do_GET(self) -> None:
        if not self.server.access.knows_host(self.headers.get("host", "")):
            return self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"Use the address of this server.\n", "text/plain")
        if self.path != "/metrics":
            return self._answer(HTTPStatus.NOT_FOUND, b"The metrics are at /metrics.\n", "text/plain")
        return self._answer(HTTPStatus.OK, *self.server.metrics.render())

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (("content-type", kind), ("content-length", str(len(body))), ("cache-control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("metrics: " + format, *args)
