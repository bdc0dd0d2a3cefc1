"""The sending half of a socket link: frames leave in order, and what the kernel has no room for is queued."""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress

from telegrad.errors import is_shortage
from telegrad.transport.base import Link
from telegrad.wire.frames import HEADER_SIZE, Kind, pack_header

# PING and GOODBYE say how much was sent before them, so they must not overtake anything.
BEHIND_BULK = frozenset(int(kind) for kind in (Kind.BULK_HEAD, Kind.BULK_CHUNK, Kind.PING, Kind.GOODBYE))
MAX_JOINED = 16 * 1024  # up to here, joining header and body is cheaper than passing the kernel a list of two


class SocketWriter(Link):
    """Sends frames on a non-blocking stream socket. `SocketLink` adds receiving and waiting.

    A base class rather than a member, because `send` runs once per frame and must not be delegated.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        # Protects _closed, _started, _control, _bulk, _queued and the order of writes. It is held during a system call
        # that cannot block.
        self._lock = threading.Lock()
        self._closed = ""
        self._failure = ""  # why the link cannot be used, although it is not closed
        self._started: list[memoryview] = []  # the rest of a frame that was sent in part
        self._control: deque[list[memoryview]] = deque()
        self._bulk: deque[list[memoryview]] = deque()
        self._queued = 0  # bytes in the two

    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        size = len(body)
        header = pack_header(kind, size, sequence, ack_control, ack_bulk)
        try:
            with self._lock:
                if self._closed:
                    return
                if self._started or self._control or self._bulk:
                    queue = self._bulk if kind in BEHIND_BULK else self._control
                    queue.append([memoryview(header), memoryview(body)])
                    self._queued += HEADER_SIZE + size
                    return
                try:
                    if size <= MAX_JOINED:
                        sent = self._socket.send(header + body)
                    else:
                        sent = self._socket.sendmsg((header, body))
                except (BlockingIOError, MemoryError):
                    sent = 0
                except OSError as error:
                    if error.errno is None:  # raised by a signal handler, not by the system
                        raise
                    if not is_shortage(error):
                        return  # receive() will raise
                    sent = 0
                if sent < HEADER_SIZE + size:
                    self._started = remaining([memoryview(header), memoryview(body)], sent)
                    self._update_mask()
        except BaseException as error:
            self._fail(error)
            raise

    def flush(self) -> None:
        try:
            with self._lock:
                while not self._closed:
                    if not self._started:
                        queue = self._control or self._bulk
                        if not queue:
                            break
                        self._started = queue.popleft()
                        self._queued -= sum(map(len, self._started))
                    try:
                        sent = self._socket.sendmsg(self._started)
                    except (BlockingIOError, MemoryError):
                        break
                    except OSError as error:
                        if error.errno is None:  # as in send
                            raise
                        if is_shortage(error):
                            break
                        self._drop_unsent()  # receive() will raise
                        break
                    self._started = remaining(self._started, sent)
                self._update_mask()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Make the link unusable: it is unknown how much of a frame was sent. receive() will raise."""
        self._failure = f"{type(error).__name__} on this worker, in the middle of sending"
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _drop_unsent(self) -> None:
        """Forget what is queued: it would live as long as whatever refers to the link. Called with the lock held."""
        self._started = []
        self._control.clear()
        self._bulk.clear()
        self._queued = 0

    def unsent(self) -> bool:
        return bool(self._started or self._control or self._bulk)

    def unsent_bytes(self) -> int:
        return self._queued

    def _update_mask(self) -> None:
        """Have the poller report when there is room to send, if frames are queued. Called with the lock held."""
        raise NotImplementedError


def remaining(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of `parts` after their first `sent` bytes."""
    rest = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            rest.append(part[sent:])
            sent = 0
    return rest
