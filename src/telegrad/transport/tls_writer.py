"""The sending half of a TLS link: frames are encrypted when their turn comes, and what cannot be sent yet is kept.

A frame is encrypted in pieces, and the next piece when the kernel has taken the one before. So a control frame
overtakes queued bulk at frame boundaries, as without TLS. Nothing is encrypted twice: a piece that cannot be sent now
is kept, and if that fails, the link ends.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

from telegrad.errors import is_shortage
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.socket_writer import BEHIND_BULK, MAX_JOINED
from telegrad.wire.frames import pack_header

_PIECE = 64 * 1024  # encrypted at once: larger ones are allocated and freed in the kernel every time
_IN_BIO = [memoryview(b"")]  # as `_started`: encrypted bytes are still in the BIO, for want of memory


class TlsWriter(SocketLink):
    """Sends frames with TLS. In `_started` are encrypted bytes, which leave before anything else."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        super().__init__(sock, peer=peer, resumable=True)
        # The lock of the link protects all of these.
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject  # from _start_tls on
        self._established = False
        self._early: list[tuple[int, bytes, bytes | bytearray | memoryview]] = []  # frames before the TLS handshake
        self._plain: list[memoryview] = []  # the rest of a frame of which a part is encrypted

    def _start_tls(self, context: ssl.SSLContext, *, opens: bool) -> None:
        """Begin to use OpenSSL. Called with the lock held."""
        try:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=not opens)
        except ssl.SSLError as error:
            raise MemoryError("no memory for a TLS connection") from error
        # The wrapper in Python around the same two methods costs 0.5 µs a call, if there is one.
        methods = getattr(self._tls, "_sslobj", self._tls)
        self._write = methods.write
        # The types of the standard library claim that this returns bytes, even if it is given a buffer.
        self._read = cast("Callable[[int, memoryview], int]", methods.read)

    def _establish(self) -> None:
        """Queue the frames that were sent before the TLS handshake, which is done. Called with the lock held."""
        for kind, header, body in self._early:
            self._queue(kind).append([memoryview(header), memoryview(body)])
        self._early = []
        self._established = True

    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        header = pack_header(kind, len(body), sequence, ack_control, ack_bulk)
        try:
            with self._lock:
                if self._closed:
                    return
                if not self._established:
                    self._early.append((kind, header, body))
                    return
                if self._started or self._control or self._bulk:
                    self._queue(kind).append([memoryview(header), memoryview(body)])
                    return
                if len(body) <= MAX_JOINED:
                    self._write(header + body)
                    encrypted, sent = b"", 0
                    try:
                        encrypted = self._outgoing.read()
                        sent = self._socket.send(encrypted)
                        if sent == len(encrypted):
                            return
                    except (OSError, MemoryError) as error:
                        if isinstance(error, OSError) and error.errno is None:  # as in _transmit
                            raise
                    if encrypted:  # else it is still in the BIO
                        self._started = [memoryview(encrypted)[sent:]]
                else:
                    self._plain = [memoryview(header), memoryview(body)]
                self._transmit()
                if self._started:
                    self._update_mask()
        except ssl.SSLError as error:
            self._fail(error)  # receive() will raise
        except BaseException as error:
            self._fail(error)
            raise

    def flush(self) -> None:
        try:
            with self._lock:
                if not self._closed:
                    self._transmit()
                    self._update_mask()
        except ssl.SSLError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise

    def _queue(self, kind: int) -> deque[list[memoryview]]:
        return self._bulk if kind in BEHIND_BULK else self._control

    def _transmit(self) -> None:
        """Encrypt and send what is queued, as far as there is room. Called with the lock held."""
        while True:
            started = self._started
            if not started or started is _IN_BIO:
                try:
                    encrypted = self._encrypt()
                except MemoryError:
                    self._started = _IN_BIO
                    return
                if not encrypted:
                    self._started = []
                    return
                try:
                    self._started = started = [memoryview(encrypted)]
                except MemoryError as error:  # what is encrypted cannot be encrypted again
                    self._fail(error)
                    return
            try:
                sent = self._socket.send(started[0])
            except (BlockingIOError, MemoryError):
                return
            except OSError as error:
                if error.errno is None:  # raised by a signal handler, not by the system
                    raise
                if not is_shortage(error):  # receive() will raise
                    self._drop_unsent()
                return
            if sent < len(started[0]):
                self._started = [started[0][sent:]]
                return
            self._started = []

    def _encrypt(self) -> bytes:
        """Return the next encrypted bytes to send. After a MemoryError they are in the BIO, or not encrypted yet."""
        outgoing = self._outgoing
        while outgoing.pending < _PIECE:
            if not self._plain:
                queue = self._control or self._bulk
                if not queue:
                    break
                self._plain = queue.popleft()
            part = self._plain[0]
            if len(part) > _PIECE:
                piece, rest = part[:_PIECE], part[_PIECE:]
                self._write(piece)
                self._plain[0] = rest
            else:
                if len(part):
                    self._write(part)
                del self._plain[0]
        return outgoing.read()

    def _drop_unsent(self) -> None:
        super()._drop_unsent()
        self._plain, self._early = [], []
