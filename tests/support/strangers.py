"""Programs without the token that a worker connects to: one that answers anything, and one that relays."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

from tests.support import tls_client

from telegrad.transport.addresses import parse_address
from telegrad.transport.certificates import make_credentials
from telegrad.wire.preamble import PREAMBLE_SIZE

PATIENCE = 30.0


class Listener:
    """Listens on the loopback address, with a certificate of its own if `tls`, and handles each connection."""

    def __init__(self, handle: Callable[[socket.socket], None], *, tls: bool = False) -> None:
        self._handle = handle
        self._context: ssl.SSLContext | None = make_credentials().listener if tls else None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.preambles: dict[socket.socket, bytes] = {}
        """What came before TLS, by connection."""
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        plain = sock.dup()  # the wrapped socket takes the other one
        self._open.append(plain)
        with contextlib.suppress(OSError, EOFError):
            if self._context is not None:
                preamble = read_exactly(sock, PREAMBLE_SIZE)
                sock = self._context.wrap_socket(sock, server_side=True)
                self.preambles[sock] = preamble
            self._handle(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        plain.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def connect(address: str, *, preamble: bytes = b"") -> socket.socket:
    """Connect to a worker as a stranger, who accepts any certificate; with TLS if it has a preamble."""
    parsed = parse_address(address)
    sock = socket.create_connection((parsed.host, parsed.port), timeout=PATIENCE)
    return tls_client.wrap(sock, preamble) if preamble else sock


def read_until_closed(sock: socket.socket) -> bytes:
    """Return what the other side sends until it closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := sock.recv(65536):
            data += piece
    return data


class HoldingRelay(Listener):
    """Passes bytes on, but holds back the Proof of the first connection, and ends that connection for the opener.

    It recognizes the Proof by the number of answers of the worker before it: TLS, then the Challenge.
    """

    def __init__(self, target: str, *, answers: int) -> None:
        self._target = target
        self._answers = answers
        self.release = threading.Event()
        """Set this to send the Proof on."""
        self.answer = b""
        """What the worker answered to it, until it closed the connection."""
        self.is_holding = True
        """Whether the Proof was not sent on yet, or the worker has not closed the connection yet."""
        self.drops_answers = False
        """Whether what workers answer is dropped from now on."""
        super().__init__(self._handle)

    def _handle(self, opener: socket.socket) -> None:
        first = self.connections == 1
        with connect(self._target) as worker:
            back = threading.Thread(target=self._pass_back, args=(worker, opener, first))
            back.start()
            held = self._hold_proof(opener, worker) if first else b""
            if held:
                opener.shutdown(socket.SHUT_RDWR)
                back.join()
                assert self.release.wait(PATIENCE)
                worker.sendall(held)
                self.answer = read_until_closed(worker)
                self.is_holding = False
                return
            with contextlib.suppress(OSError):
                while data := opener.recv(65536):
                    worker.sendall(data)
            _shut_down(opener, worker)
            back.join()

    def _hold_proof(self, opener: socket.socket, worker: socket.socket) -> bytes:
        while data := opener.recv(65536):
            if self._answers == 0:
                return data
            worker.sendall(data)
        return b""

    def _pass_back(self, worker: socket.socket, opener: socket.socket, first: bool) -> None:
        with contextlib.suppress(OSError):
            while data := worker.recv(65536):
                if first:
                    self._answers -= 1
                if not self.drops_answers:
                    opener.sendall(data)
                if first and self._answers == 0:
                    return
        _shut_down(opener, worker)


def _shut_down(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


class Relay(Listener):
    """Passes bytes on between whoever connects and a worker, and records them; with `tls`, what is inside TLS."""

    def __init__(self, target: str, *, tls: bool) -> None:
        self.sent: list[bytes] = []
        """What came from the side that opened the connection."""
        self.answered: list[bytes] = []
        """What the worker answered."""
        self._target = target
        super().__init__(self._relay, tls=tls)

    def _relay(self, opener: socket.socket) -> None:
        with connect(self._target, preamble=self.preambles.get(opener, b"")) as worker:
            back = threading.Thread(target=self._pass_on, args=(worker, opener, self.answered))
            back.start()
            self._pass_on(opener, worker, self.sent)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, record: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                record.append(data)
                sink.sendall(data)
        _shut_down(source, sink)
