"""Frames over one connected stream socket: what unix sockets and TCP have in common."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from telegrad.errors import is_shortage
from telegrad.interrupts import interruptible
from telegrad.transport.base import LinkClosed, Poller, Ready
from telegrad.transport.socket_writer import SocketWriter
from telegrad.transport.spinning import Spin
from telegrad.wire.frame_reader import FrameReader
from telegrad.wire.frames import HANDSHAKE_LIMITS, Frame, Limits

if TYPE_CHECKING:
    from telegrad.transport.sockets import SocketPoller

ENDED = "end of file: the other process has ended, or has closed the connection"
"""Why a link is closed of which nothing else is known. Users read it as the reason of a loss."""
_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing waits 0 seconds for what was not delivered
_DISCARDED_AT_ONCE = 128 * 1024
_MAX_READ = 16 * 1024 * 1024  # read no more at once, so that the poller gets to look at other links

_READ, _WRITE, _POLLER = Ready.READ, Ready.WRITE, Ready.POLLER
_POLLIN, _POLLOUT, _EPOLLIN, _EPOLLOUT = select.POLLIN, select.POLLOUT, select.EPOLLIN, select.EPOLLOUT


class SocketLink(SocketWriter):
    """A connected stream socket."""

    _undecrypted = False
    """Whether there may be something to read that the socket does not report any more."""
    _draining = False
    """Whether only that is to be read, and no more from the socket."""

    def __init__(self, sock: socket.socket, *, peer: str, resumable: bool) -> None:
        super().__init__(sock)
        self.peer = peer
        self.resumable = resumable
        self._fd = sock.fileno()
        self._reader = FrameReader(HANDSHAKE_LIMITS)
        self._recv_into: Callable[[memoryview], int] = sock.recv_into
        self._poller: SocketPoller | None = None
        self._read_armed = False
        self.once = False
        """Whether the poller reports this link once, until it is armed again."""
        self._mask = -1  # what the poller watches for; -1: not what it was last told
        self._waiters: list[_Waiter] = []  # for this link alone, and with a poller
        self._waiter: _Waiter | None = None  # the one that was used last
        self._wake_fd = -1
        self._woken = False  # `wake` was called before there was a file descriptor to write to
        self._spin = Spin(0)

    def fileno(self) -> int:
        return self._fd

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        self._reader.admit(limits, place)

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self) -> Iterable[Frame]:
        reader = self._reader
        if reader.unfinished:
            return self._receive(-1, 0)
        self._draining = False
        buffer = reader.buffer()
        try:
            count = self._recv_into(buffer)
        except BlockingIOError:
            return ()
        except OSError as error:
            raise self._broken(error) from error
        if count == 0:
            raise LinkClosed(self._closed or self._failure or ENDED)
        frame = None if self._undecrypted else reader.take_single(count)
        return self._receive(count, len(buffer)) if frame is None else (frame,)

    def _receive(self, count: int, room: int) -> Iterator[Frame]:
        """Continue after `count` of at most `room` bytes were read; -1: with the rest of the last time."""
        reader, total = self._reader, 0
        if count < 0:
            yield from reader.advance(0)
            count = room = 1  # there may be more
        else:
            yield from reader.advance(count)
        while (count == room and total < _MAX_READ) or self._undecrypted:
            total += count
            self._draining = total >= _MAX_READ
            buffer = reader.buffer()
            room = len(buffer)
            try:
                count = self._recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise LinkClosed(self._closed or self._failure or ENDED)
            yield from reader.advance(count)

    def _broken(self, error: OSError) -> OSError:
        # If the system is short of something, nothing was read, and the connection is unchanged.
        if is_shortage(error):
            return error
        return LinkClosed(self._closed or self._failure or error.strerror or str(error))

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, deadline: float | None, poller: Poller | None = None) -> int:
        waiter = self._waiter
        if waiter is None or waiter.poller is not poller:
            waiter = self._waiter = self._waiter_with(poller)
        # Checked when there is already something that close() can wake.
        if self._closed or self._reader.unfinished or self._undecrypted:
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
        with self._lock:
            if self._wake_fd < 0:
                self._wake_fd = os.eventfd(int(self._woken), os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._woken = False
        waiter = _Waiter(poller)
        waiter.poll.register(self._fd, _POLLIN)
        waiter.poll.register(self._wake_fd, _POLLIN)
        if poller is not None:
            waiter.poll.register(cast("SocketPoller", poller).fileno(), _POLLIN)
        self._waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            else:  # nobody has waited yet, and there may be no file descriptor left for it now
                self._woken = True

    # -- for the poller -----------------------------------------------------------------------------------------

    def watch(self, poller: SocketPoller | None, read: bool, once: bool) -> None:
        """Use `poller`, or none."""
        with self._lock:
            self._poller, self._read_armed, self.once = poller, read, once
            self._spin = Spin(poller.spin if poller is not None else 0)
            self._mask = -1
            self._update_mask()

    def reported(self, ready: int) -> None:
        """Record that the poller reported this link. With `once`, a change of the mask must not repeat the report."""
        if self.once:
            with self._lock:
                self._mask = -1  # it watches for nothing now
                if ready & _READ:
                    self._read_armed = False

    def rearm(self, read: bool) -> None:
        """Let the poller report again, and readiness to read only if `read`."""
        with self._lock:
            self._read_armed = read
            self._update_mask()

    def _update_mask(self) -> None:
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

    # -- closing ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._begin_close():
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in poll
            self._discard_unread()
        except OSError:  # the peer closed first, or there is nothing to read
            return
        finally:
            self._socket.close()
            with self._lock:
                if self._wake_fd >= 0:
                    os.eventfd_write(self._wake_fd, 1)

    def abort(self) -> None:
        if self._begin_close():
            reset(self._socket)

    def release(self) -> socket.socket:
        """Return the socket, and close the link without it."""
        self._begin_close()
        return socket.socket(fileno=self._socket.detach())

    def _begin_close(self) -> bool:
        """Stop sending, and leave the poller. Returns False if the link is closed already."""
        with self._lock:
            if self._closed:
                return False
            self._closed = "closed by this worker"
            poller, self._poller = self._poller, None
            self._drop_unsent()
        if poller is not None:
            poller.remove(self)
        return True

    def _discard_unread(self) -> None:
        """Drop what was received: otherwise TCP would send a reset, and the peer would lose our last frames."""
        # From an unauthenticated peer no more than this: if it keeps sending, only it loses our last frames.
        rest = FrameReader.SCRATCH if self._reader.only_handshake else _MAX_READ
        scratch = bytearray(min(rest, _DISCARDED_AT_ONCE))
        while rest > 0 and (count := self._socket.recv_into(scratch)):
            rest -= count

    def abandon(self) -> None:
        self._socket.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def __del__(self) -> None:
        # Not in close(): a thread may still wait on it, and the number of a closed descriptor may be reused.
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
        self._socket.close()


class _Waiter:
    """What one thread waits on: a link, alone or with a poller. Kept, because setting it up is expensive."""

    __slots__ = ("poll", "poller", "writes")

    def __init__(self, poller: Poller | None) -> None:
        self.poll = select.poll()
        self.poller = poller
        self.writes = False


def reset(sock: socket.socket) -> None:
    """Close a connection with a reset: the kernel would otherwise keep it until the peer has closed its side, too."""
    with suppress(OSError):  # it is closed
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


@interruptible
def connect(sock: socket.socket, address: Any) -> None:
    """Connect. This takes at most the timeout of the socket."""
    sock.connect(address)
