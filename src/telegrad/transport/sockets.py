"""Frames over stream sockets, and the poller that watches many of them: what unix and tcp have in common."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from telegrad.errors import is_shortage
from telegrad.interrupts import interruptible
from telegrad.transport.base import Link, LinkClosed, Listener, Poller, Readiness, Ready
from telegrad.transport.spinning import SPIN, Spin
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import HANDSHAKE_LIMITS, Frame, Kind, Limits, pack_header

# PING and GOODBYE say how much was sent before them, so they pass nothing.
_BEHIND_BULK = frozenset(int(kind) for kind in (Kind.BULK_HEAD, Kind.BULK_CHUNK, Kind.PING, Kind.GOODBYE))
_READ_AT_ONCE = 16 * 1024 * 1024  # then the poller gets to look at the other links
_JOINED = 16 * 1024  # up to here, joining header and body is cheaper than handing the kernel a list of two

_new_readiness = partial(tuple.__new__, Readiness)  # a named tuple's own constructor is a Python function
_READ, _WRITE, _POLLER = Ready.READ, Ready.WRITE, Ready.POLLER
_POLLIN, _POLLOUT, _EPOLLIN, _EPOLLOUT = select.POLLIN, select.POLLOUT, select.EPOLLIN, select.EPOLLOUT


class SocketLink(Link):
    """A connected stream socket."""

    def __init__(self, sock: socket.socket, *, peer: str, resumable: bool) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.resumable = resumable
        self._socket = sock
        self._fd = sock.fileno()
        self._reader = FrameReader(HANDSHAKE_LIMITS)
        self._recv_into: Callable[[memoryview], int] = sock.recv_into
        # protects _closed, _started, _control, _bulk and the order of writes. It is held during a system call that
        # cannot wait.
        self._lock = threading.Lock()
        self._closed = ""
        self._torn = ""  # why it cannot be used, although it is not closed
        self._started: list[memoryview] = []  # the rest of a frame of which a part is sent
        self._control: deque[list[memoryview]] = deque()
        self._bulk: deque[list[memoryview]] = deque()
        self._poller: SocketPoller | None = None
        self._read_armed = False
        self.once = False
        """Whether the poller reports it once."""
        self._mask = -1  # what the poller watches for; -1: not what it was last told
        self._waiters: list[_Waiter] = []  # for this link alone, and with a poller
        self._waiter: _Waiter | None = None  # the one that was used last
        self._wake_fd = -1
        self._woken = False  # by `wake`, before there was a number to write to
        self._spin = Spin(0)

    def fileno(self) -> int:
        return self._fd

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        self._reader.admit(limits, place)

    # -- sending ----------------------------------------------------------------------------------------------

    def send(
        self, kind: int, body: bytes | bytearray | memoryview, sequence: int, ack_control: int, ack_bulk: int
    ) -> None:
        header = pack_header(kind, len(body), sequence, ack_control, ack_bulk)
        try:
            with self._lock:
                if self._closed:
                    return
                if self._started or self._control or self._bulk:
                    queue = self._bulk if kind in _BEHIND_BULK else self._control
                    queue.append([memoryview(header), memoryview(body)])
                    return
                try:
                    if len(body) <= _JOINED:
                        sent = self._socket.send(header + body)
                    else:
                        sent = self._socket.sendmsg((header, body))
                except (BlockingIOError, MemoryError):
                    sent = 0
                except OSError as error:
                    if error.errno is None:  # not the system's, but raised by a signal handler
                        raise
                    if not is_shortage(error):
                        return  # reading will say so
                    sent = 0
                if sent < len(header) + len(body):
                    self._started = after([memoryview(header), memoryview(body)], sent)
                    self._watch()
        except BaseException as error:
            self._break_off(error)
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
                    try:
                        sent = self._socket.sendmsg(self._started)
                    except (BlockingIOError, MemoryError):
                        break
                    except OSError as error:
                        if error.errno is None:  # as in send
                            raise
                        if is_shortage(error):
                            break
                        self._started = []  # reading will say so
                        self._control.clear()
                        self._bulk.clear()
                        break
                    self._started = after(self._started, sent)
                self._watch()
        except BaseException as error:
            self._break_off(error)
            raise

    def _break_off(self, error: BaseException) -> None:
        """Nobody knows how much of a frame was sent: nothing more may be, and reading says so."""
        self._torn = f"{type(error).__name__} on this worker, in the middle of sending"
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def unsent(self) -> bool:
        return bool(self._started or self._control or self._bulk)

    # -- receiving --------------------------------------------------------------------------------------------

    def receive(self) -> Iterable[Frame]:
        reader = self._reader
        if reader.unfinished:
            return self._receive(-1, 0)
        buffer = reader.buffer()
        try:
            count = self._recv_into(buffer)
        except BlockingIOError:
            return ()
        except OSError as error:
            raise self._broken(error) from error
        if count == 0:
            raise LinkClosed(self._closed or self._torn or "end of file")
        frame = reader.take_single(count)
        return self._receive(count, len(buffer)) if frame is None else (frame,)

    def _receive(self, count: int, room: int) -> Iterator[Frame]:
        """Go on after `count` bytes came where there was room for so many; -1: with what is left of the last time."""
        reader, total = self._reader, 0
        if count < 0:
            yield from reader.advance(0)
            count = room = 1  # there may be more
        else:
            yield from reader.advance(count)
        while count == room and total < _READ_AT_ONCE:
            total += count
            buffer = reader.buffer()
            room = len(buffer)
            try:
                count = self._recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise LinkClosed(self._closed or self._torn or "end of file")
            yield from reader.advance(count)

    def _broken(self, error: OSError) -> OSError:
        # Where the system is short of something, nothing was read, and the connection is as it was.
        if is_shortage(error):
            return error
        return LinkClosed(self._closed or self._torn or error.strerror or str(error))

    def wait(self, deadline: float | None, poller: Poller | None = None) -> int:
        waiter = self._waiter
        if waiter is None or waiter.poller is not poller:
            waiter = self._waiter = self._waiter_with(poller)
        if self._closed or self._reader.unfinished:  # looked at after there is something that close() can wake
            return _READ
        writes = bool(self._started or self._control or self._bulk)
        if writes is not waiter.writes:
            waiter.writes = writes
            waiter.poll.register(self._fd, _POLLIN | _POLLOUT if writes else _POLLIN)
        ready = 0
        left = None if deadline is None else (deadline - monotonic()) * 1000
        for fd, mask in self._spin.wait(waiter.poll.poll, 0 if left is not None and left < 0 else left):
            if fd == self._fd:
                if mask & ~_POLLOUT:
                    ready |= _READ
                if mask & _POLLOUT:
                    ready |= _WRITE
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                ready |= _POLLER
        if ready & _WRITE:
            self.flush()
        return ready

    def _waiter_with(self, poller: Poller | None) -> _Waiter:
        for waiter in self._waiters:
            if waiter.poller is poller:
                return waiter
        assert poller is None or isinstance(poller, SocketPoller)
        with self._lock:
            if self._wake_fd < 0:
                self._wake_fd = os.eventfd(int(self._woken), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._woken = False
        waiter = _Waiter(poller)
        waiter.poll.register(self._fd, _POLLIN)
        waiter.poll.register(self._wake_fd, _POLLIN)
        if poller is not None:
            waiter.poll.register(poller.fileno(), _POLLIN)
        self._waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            else:  # nobody has waited yet; and there may be no descriptor for it now
                self._woken = True

    # -- the poller's side ------------------------------------------------------------------------------------

    def watch(self, poller: SocketPoller | None, read: bool, once: bool) -> None:
        """Belong to `poller` (None: to none)."""
        with self._lock:
            self._poller, self._read_armed, self.once = poller, read, once
            self._spin = Spin(poller.spin if poller is not None else 0)
            self._mask = -1
            self._watch()

    def reported(self, ready: int) -> None:
        """The poller says so; where it does that once, a later change of the mask must not bring it up again."""
        if self.once:
            with self._lock:
                self._mask = -1  # it watches for nothing now
                if ready & _READ:
                    self._read_armed = False

    def rearm(self, read: bool) -> None:
        """Let the poller report again, and readiness to read only if `read`."""
        with self._lock:
            self._read_armed = read
            self._watch()

    def _watch(self) -> None:
        if self._poller is not None and not self._closed:
            mask = select.EPOLLRDHUP
            if self._read_armed:
                mask |= _EPOLLIN
            if self.unsent():
                mask |= _EPOLLOUT
            if self.once:
                mask |= select.EPOLLONESHOT
            if mask != self._mask:
                self._mask = -1
                self._poller.set_mask(self._fd, self, mask)
                self._mask = mask

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = "closed by this worker"
            poller, self._poller = self._poller, None
        if poller is not None:
            poller.remove(self)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in poll
            self._discard_unread()
        except OSError:  # the other side was first, or nothing is left
            return
        finally:
            self._socket.close()
            with self._lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)

    def _discard_unread(self) -> None:
        """Read what nobody will: TCP, closed before unread bytes, sends a reset, and what we sent is lost with it."""
        # Of a stranger no more than that: it may lose our last words by talking on.
        rest = FrameReader.UNAUTHENTICATED_SCRATCH if self._reader.only_handshake else _READ_AT_ONCE
        scratch = bytearray(min(rest, FrameReader.SCRATCH))
        while rest > 0 and (count := self._socket.recv_into(scratch)):
            rest -= count

    def abandon(self) -> None:
        self._socket.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def __del__(self) -> None:
        # Not in close(): a thread may still wait on it, and a closed number may be somebody else's.
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
        self._socket.close()


class _Waiter:
    """What one thread waits on: a link, and a poller with it or none. OwnerValue, because setting it up costs more."""

    __slots__ = ("poll", "poller", "writes")

    def __init__(self, poller: SocketPoller | None) -> None:
        self.poll = select.poll()
        self.poller = poller
        self.writes = False


@interruptible
def connect(sock: socket.socket, where: Any) -> None:
    """Connect, which may take as long as the timeout of the socket."""
    sock.connect(where)


def after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `parts` after their first `sent` bytes."""
    rest = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            rest.append(part[sent:])
            sent = 0
    return rest


class SocketListener(Listener):
    """A listening stream socket."""

    def __init__(self, sock: socket.socket, address: str, make_link: Callable[[socket.socket], Link | None]) -> None:
        sock.setblocking(False)
        self.address = address
        self._socket = sock
        self._fd = sock.fileno()
        self._make_link = make_link
        self.once = False
        """Whether the poller reports it once."""

    def reported(self, ready: int) -> None:
        """The poller says so."""

    def fileno(self) -> int:
        return self._fd

    def accept(self) -> Link | None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if is_shortage(error):
                    raise
                return None  # nobody waits, or the one that did has gone
            try:
                link = self._make_link(sock)
            except BaseException:
                sock.close()
                raise
            if link is not None:
                return link

    def close(self) -> None:
        self._socket.close()

    def abandon(self) -> None:
        self._socket.close()


class SocketPoller(Poller):
    """epoll. Threads that wait for it, or for one of its links, look for `spin` microseconds before they sleep."""

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
        self._lock = threading.Lock()  # protects _items, the epoll's set, and both numbers from being used when closed
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
        """Watch `item` for what `mask` says."""
        with self._lock:
            if self._epoll.closed:
                return
            if self._items.get(fd) is item:
                self._epoll.modify(fd, mask)
            else:
                self._items[fd] = item  # first: it may be reported at once
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
                    if error.errno not in (errno.EBADF, errno.ENOENT):  # it was closed, which took it out of the set
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
            if not self._epoll.closed:  # or the number may be somebody else's by now
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._epoll.closed:
                self._epoll.close()
                os.close(self._wake_fd)

    def abandon(self) -> None:
        # Without the lock, which some thread of the parent may have held when it forked.
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake_fd)
