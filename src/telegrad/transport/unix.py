"""Unix sockets, between processes of one user on one host.

A broken connection means that the other process has ended. Only processes of the same user can connect: only the owner
can read and write the socket file, and the kernel reports the user at the other end.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.addresses import NEW_SUFFIX
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.memory_map import IS_SUPPORTED
from telegrad.transport.socket_link import SocketLink, connect
from telegrad.transport.socket_writer import remaining
from telegrad.transport.sockets import SocketListener
from telegrad.wire.frames import Kind, Limits, pack_header

_log = logging.getLogger("telegrad")
_CREDENTIALS = struct.Struct("iII")
_BACKLOG = 4096  # the kernel may allow less (net.core.somaxconn)
_FD = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FD.size)
_MAX_FDS = 16
"""How many file descriptors may be received before the frames that they belong to are read."""


class UnixTransport(Transport):
    """Addresses are ``unix:///path``."""

    scheme = "unix"
    resumable = False

    def listen(self, address: str) -> Listener:
        path = _path(address)
        is_alive = _is_alive(path)
        if is_alive or (is_alive is None and path.exists()):
            raise OSError(
                errno.EADDRINUSE, f"{path} is in use: another process listens there, or it is not a socket of telegrad"
            )
        # Bound under another name and renamed when it listens: if a file with the final name refuses connections, its
        # process is dead, and the file may be removed.
        temporary = path.with_suffix(NEW_SUFFIX)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(temporary))
            temporary.chmod(0o600)
            sock.listen(_BACKLOG)
            temporary.rename(path)
        except OSError:
            sock.close()
            temporary.unlink(missing_ok=True)
            raise
        return _UnixListener(sock, path)

    def connect(self, address: str, deadline: float) -> Link:
        path = _path(address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connect(sock, str(path))
            except FileNotFoundError as error:
                raise ConnectionRefusedError(error.errno, f"there is no socket at {path}") from error
            pid, uid = _peer_credentials(sock)
            if uid != os.getuid():
                raise AuthenticationError(
                    f"the process that listens at {path} runs as user {uid}, not as {os.getuid()}"
                )
            return UnixLink(sock, peer=f"{path} (pid {pid})")
        except BaseException:
            sock.close()
            raise

    def reaches(self, address: str) -> bool:
        try:
            status = _path(address).lstat()
        except OSError:
            return False
        return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()

    def remove_dead(self, address: str) -> bool:
        """Remove the socket file of a process that was killed. Return False if somebody still listens there."""
        path = _path(address)
        is_alive = _is_alive(path)
        if is_alive is False:
            path.unlink(missing_ok=True)
        return not is_alive


class UnixLink(SocketLink):
    """A connected unix socket, which can also pass file descriptors."""

    shares_memory = IS_SUPPORTED

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        super().__init__(sock, peer=peer, resumable=False)
        self._fds: list[int] = []  # a deque would take 0.7 KB on every link, and be empty on most

    def admit(self, limits: Limits, place: Callable[[int, int], memoryview | None]) -> None:
        super().admit(limits, place)
        if self.shares_memory:  # before that, the kernel discards them
            self._recv_into = self._recv_with_fds

    def _recv_with_fds(self, buffer: memoryview) -> int:
        count, ancillary, _, _ = self._socket.recvmsg_into((buffer,), _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(fd for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size]))
        if len(self._fds) > _MAX_FDS:
            raise ProtocolError(
                f"the peer sent {len(self._fds)} file descriptors without the frames that they belong to"
            )
        return count

    def offer(self, body: bytes, fd: int) -> bool:
        header = pack_header(Kind.SLAB_OFFER, len(body), 0, 0, 0)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
        with self._lock:
            if self._closed or self.unsent():
                return False
            try:
                sent = self._socket.sendmsg((header, body), passed)
            except OSError:  # no room, or closed: then receive() will raise
                return False
            if sent < len(header) + len(body):
                self._started = remaining([memoryview(header), memoryview(body)], sent)
                self._update_mask()
        return True

    def take_fd(self) -> int | None:
        try:
            return self._fds.pop(0)
        except IndexError:
            return None

    def close(self) -> None:
        super().close()
        self._close_fds()

    def abandon(self) -> None:
        super().abandon()
        self._close_fds()

    def __del__(self) -> None:
        super().__del__()
        self._close_fds()

    def _close_fds(self) -> None:
        while (fd := self.take_fd()) is not None:
            os.close(fd)


class _UnixListener(SocketListener):
    def __init__(self, sock: socket.socket, path: Path) -> None:
        super().__init__(sock, f"unix://{path}", self._admit)
        self._path = path

    def _admit(self, sock: socket.socket) -> Link | None:
        pid, uid = _peer_credentials(sock)
        if uid != os.getuid():
            _log.warning("refused a connection to %s: process %d runs as user %d", self._path, pid, uid)
            sock.close()
            return None
        return UnixLink(sock, peer=f"pid {pid}")

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)


def _is_alive(path: Path) -> bool | None:
    """Return whether a process listens at `path`; None if there is no socket, or it belongs to another user."""
    if not path.is_socket():
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            sock.connect(str(path))
    except BlockingIOError:  # alive, but its backlog is full
        return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _path(address: str) -> Path:
    return Path(address.removeprefix("unix://"))


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and user id at the other end, as the kernel reports them."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
