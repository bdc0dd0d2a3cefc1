"""Forwards bytes between pairs of sockets, on one thread. It does not look at them.

Each direction has a buffer of CHUNK bytes: no more is read until that is written. So a receiver that does not read
slows its sender down, as on one connection, and the memory is bounded by the number of pairs. When one side has ended
its stream and all of it is forwarded, the other is told. A pair is over when both have, when a connection breaks, or
when nothing has come for IDLE seconds: workers send a heartbeat every few.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

_log = logging.getLogger("telegrad")

CHUNK = 64 * 1024
IDLE = 120.0
"""Seconds without a byte after which a pair is given up."""
_MAX_DROPPED = 64  # chunks that are read and dropped at the end
_CHECK = 5.0  # seconds between two looks for idle pairs


class _Flow:
    """One direction of a pair."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self._buffer = memoryview(bytearray(CHUNK))
        self.unsent = self._buffer[:0]
        self.ended = False

    def advance(self) -> bool:
        """Move bytes until one side has to wait, or has ended. Returns whether any moved."""
        moved = False
        try:
            while not self.ended:
                if not self.unsent:
                    count = self.source.recv_into(self._buffer)
                    moved = True
                    if not count:
                        self._end()
                        break
                    self.unsent = self._buffer[:count]
                sent = self.sink.send(self.unsent)
                moved = True
                self.unsent = self.unsent[sent:]
        except BlockingIOError:
            pass
        except OSError as error:  # what is on its way in the other direction still arrives
            _log.debug("a relayed connection broke: %s", error)
            self._end()
        return moved

    def _end(self) -> None:
        self.ended, self.unsent = True, self._buffer[:0]
        with suppress(OSError):  # it is closed
            self.sink.shutdown(socket.SHUT_WR)


class _Pair:
    def __init__(self, one: socket.socket, other: socket.socket, on_end: Callable[[], None]) -> None:
        self.sockets = one, other
        self.flows = _Flow(one, other), _Flow(other, one)
        self.on_end = on_end
        self.last = monotonic()

    def mask(self, sock: socket.socket) -> int:
        """Return what has to be waited for at one of the sockets."""
        mask = 0
        for flow in self.flows:
            if flow.source is sock and not flow.ended and not flow.unsent:
                mask |= select.EPOLLIN
            if flow.sink is sock and flow.unsent:
                mask |= select.EPOLLOUT
        return mask


class Splicer:
    """The pairs of one relay. The thread runs while there are any."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # protects _pairs, _thread and _epoll
        self._pairs: dict[int, _Pair] = {}  # by file descriptor: each pair is here twice
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._closed = False
        self._ended = threading.Event()  # there are no pairs
        self._ended.set()

    def join(self, one: socket.socket, other: socket.socket, on_end: Callable[[], None]) -> None:
        """Forward bytes between two sockets, which this closes in the end. Then it calls `on_end`."""
        for sock in (one, other):
            sock.setblocking(False)
        pair = _Pair(one, other, on_end)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("this worker leaves the group")
            if self._epoll is None:
                self._epoll = select.epoll()
            self._ended.clear()
            for sock in pair.sockets:
                self._pairs[sock.fileno()] = pair
            for sock in pair.sockets:
                self._epoll.register(sock, select.EPOLLIN | select.EPOLLONESHOT)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"telegrad-{self._name}-relay", daemon=True)
                self._thread.start()

    def close(self, patience: float) -> None:
        """End when all pairs have, but after `patience` seconds in any case."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._ended.wait(patience)
        with self._lock:
            for pair in set(self._pairs.values()):
                for sock in pair.sockets:
                    with suppress(OSError):  # the peer has closed it
                        sock.shutdown(socket.SHUT_RDWR)  # which the thread sees
        if thread is not None:
            thread.join(patience)

    def abandon(self) -> None:
        """Close a forked child's copies of the sockets. Takes no locks: the parent may have held one."""
        if self._epoll is not None:
            self._epoll.close()
        for pair in set(self._pairs.values()):
            for sock in pair.sockets:
                sock.close()

    def _run(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        checked = monotonic()
        while True:
            for fd, _ in epoll.poll(_CHECK):
                with self._lock:  # a pair whose first socket is ready may be half registered until then
                    pair = self._pairs.get(fd)
                if pair is not None:
                    self._advance(pair, epoll)
            if monotonic() - checked >= _CHECK:
                checked = monotonic()
                for pair in set(self._pairs.values()):
                    if checked - pair.last >= IDLE:
                        self._end(pair)
            with self._lock:
                if not self._pairs:
                    self._thread = self._epoll = None
                    epoll.close()
                    self._ended.set()
                    return

    def _advance(self, pair: _Pair, epoll: select.epoll) -> None:
        for flow in pair.flows:
            if flow.advance():
                pair.last = monotonic()
        if all(flow.ended for flow in pair.flows):
            self._end(pair)
            return
        for sock in pair.sockets:
            # Not for nothing: the end of a broken connection would be reported over and over.
            if mask := pair.mask(sock):
                epoll.modify(sock, mask | select.EPOLLONESHOT)

    def _end(self, pair: _Pair) -> None:
        with self._lock:
            for sock in pair.sockets:
                self._pairs.pop(sock.fileno(), None)
        for sock in pair.sockets:
            _close(sock)
        pair.on_end()


def _close(sock: socket.socket) -> None:
    """Close a socket. What was not read is dropped first, or the peer would lose what was sent to it."""
    with suppress(OSError):  # there is nothing, or the connection broke
        sock.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_DROPPED):
            if not sock.recv(CHUNK):
                break
    sock.close()
