"""The listener and the poller for stream sockets: what unix sockets and TCP have in common (see `socket_link`)."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from telegrad.errors import is_shortage
from telegrad.transport.base import Link, Listener, Poller, Readiness, Ready
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.spinning import SPIN, Spin

_new_readiness = partial(tuple.__new__, Readiness)  # the constructor of a named tuple is a Python function
_READ, _WRITE = Ready.READ, Ready.WRITE
_EPOLLOUT = select.EPOLLOUT
_MAX_DROPPED = 32  # connections to drop before other links are served


class SocketListener(Listener):
    """A listening stream socket."""

    def __init__(self, sock: socket.socket, address: str, make_link: Callable[[socket.socket], Link | None]) -> None:
        sock.setblocking(False)
        self.address = address
        self._socket = sock
        self._fd = sock.fileno()
        self._make_link = make_link
        self._spare = _spare_descriptor()
        self.once = False
        """Whether the poller reports this listener once, until it is armed again."""

    def reported(self, ready: int) -> None:
        """Do nothing: only links keep a mask."""

    def fileno(self) -> int:
        return self._fd

    def accept(self) -> Link | None:
        for _ in range(_MAX_DROPPED):
            try:
                sock = self._accept()
            except OSError as error:
                if is_shortage(error):
                    raise
                return None  # no connection is pending, or it was closed meanwhile
            try:
                link = self._make_link(sock)
            except BaseException:
                sock.close()
                raise
            if link is not None:
                return link
        return None  # there may be more, but other links have to be served, too

    def _accept(self) -> socket.socket:
        """Accept a connection. If no file descriptor is left, use the spare one; the next time, this raises."""
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if self._spare < 0 or not is_shortage(error):
                raise
            os.close(self._spare)
            self._spare = -1
            sock, _ = self._socket.accept()
        if self._spare < 0:
            self._spare = _spare_descriptor()
        return sock

    def close(self) -> None:
        self._socket.close()
        self._close_spare()

    def abandon(self) -> None:
        self._socket.close()
        self._close_spare()

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _spare_descriptor() -> int:
    """Return a file descriptor that can be closed when another one is needed; -1 if there is none now."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class SocketPoller(Poller):
    """An epoll set. Threads that wait for it or for one of its links spin for `spin` microseconds before they sleep."""

    def __init__(self, spin: int = SPIN) -> None:
        self.spin = spin
        self._spin = Spin(spin)
        self._epoll = select.epoll()
        self._fd = self._epoll.fileno()
        try:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._epoll.close()
            raise
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lock = threading.Lock()  # protects _items, the epoll set, and both file descriptors from use after close
        self._items: dict[int, SocketLink | SocketListener] = {}

    def fileno(self) -> int:
        return self._fd

    def add(self, item: Link | Listener, *, read: bool, once: bool = False) -> None:
        if isinstance(item, SocketLink):
            item.watch(self, read, once)
        else:
            assert isinstance(item, SocketListener)
            item.once = once
            self.arm(item, read=read)

    def arm(self, item: Link | Listener, *, read: bool) -> None:
        if isinstance(item, SocketLink):
            item.rearm(read)
        else:
            assert isinstance(item, SocketListener)
            mask = select.EPOLLIN if read else 0
            self.set_mask(item.fileno(), item, mask | select.EPOLLONESHOT if item.once else mask)

    def set_mask(self, fd: int, item: SocketLink | SocketListener, mask: int) -> None:
        """Watch `item` for the events in `mask`."""
        with self._lock:
            if self._epoll.closed:
                return
            if self._items.get(fd) is item:
                self._epoll.modify(fd, mask)
            else:
                self._items[fd] = item  # first, because it may be reported at once
                try:
                    self._epoll.register(fd, mask)
                except BaseException:
                    del self._items[fd]
                    raise

    def remove(self, item: Link | Listener) -> None:
        assert isinstance(item, SocketLink | SocketListener)
        with self._lock:
            if self._items.get(item.fileno()) is item:
                del self._items[item.fileno()]
                try:
                    if not self._epoll.closed:
                        self._epoll.unregister(item.fileno())
                except OSError as error:
                    if error.errno not in (errno.EBADF, errno.ENOENT):  # it was closed, which removed it from the set
                        raise

    def wait(self, deadline: float | None) -> list[Readiness]:
        found = []
        left = None if deadline is None else max(0.0, deadline - monotonic())
        for fd, mask in self._spin.wait(self._epoll.poll, left):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            item = self._items.get(fd)
            if item is None:
                continue
            ready = 0
            if mask & ~_EPOLLOUT:
                ready |= _READ
            if mask & _EPOLLOUT:
                ready |= _WRITE
            if item.once:
                item.reported(ready)
            found.append(_new_readiness((item, ready)))
        return found

    def wake(self) -> None:
        with self._lock:
            if not self._epoll.closed:  # otherwise the file descriptor may have been reused
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._epoll.closed:
                self._epoll.close()
                os.close(self._wake_fd)

    def abandon(self) -> None:
        # Without the lock, which a thread of the parent may have held at the fork.
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake_fd)
