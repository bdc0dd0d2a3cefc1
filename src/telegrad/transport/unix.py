"""Unix sockets: between processes of one user on one host.

A broken connection means that the other process has ended. Only processes of the same user get in: the socket is
readable and writable for its owner alone, and the kernel is asked who is at the other end.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import time
from pathlib import Path

from telegrad.errors import AuthenticationError
from telegrad.transport.base import Link, Listener, Transport
from telegrad.transport.sockets import SocketLink, SocketListener

_log = logging.getLogger("telegrad")
_CREDENTIALS = struct.Struct("iII")
_BACKLOG = 1024


class UnixTransport(Transport):
    """Addresses are ``unix:///path``."""

    scheme = "unix"
    resumable = False

    def listen(self, address: str) -> Listener:
        path = _path(address)
        answers = _answers(path)
        if answers or (answers is None and path.exists()):
            raise OSError(errno.EADDRINUSE, f"{path} is in use: somebody listens there, or it is no socket of ours")
        # Bound under another name and renamed when it listens: a file with the final name to which connecting is
        # refused has no process behind it, and may be removed.
        temporary = path.with_suffix(".new")
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
                sock.connect(str(path))
            except FileNotFoundError as error:
                raise ConnectionRefusedError(error.errno, f"there is no socket {path}") from error
            pid, uid = _who(sock)
            if uid != os.getuid():
                raise AuthenticationError(f"the process behind {path} belongs to user {uid}, not to {os.getuid()}")
            return SocketLink(sock, peer=f"{path} (pid {pid})", resumable=False)
        except BaseException:
            sock.close()
            raise

    def remove_dead(self, address: str) -> None:
        """Remove the socket file of a process that was killed. Whoever notices its death does this."""
        path = _path(address)
        if _answers(path) is False:
            path.unlink(missing_ok=True)


class _UnixListener(SocketListener):
    def __init__(self, sock: socket.socket, path: Path) -> None:
        super().__init__(sock, f"unix://{path}", self._admit)
        self._path = path

    def _admit(self, sock: socket.socket) -> Link | None:
        pid, uid = _who(sock)
        if uid != os.getuid():
            _log.warning("refused a connection to %s: process %d belongs to user %d", self._path, pid, uid)
            sock.close()
            return None
        return SocketLink(sock, peer=f"pid {pid}", resumable=False)

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)


def _answers(path: Path) -> bool | None:
    """Whether a process is behind the socket `path`; None if there is no such socket, or it is not ours."""
    if not path.is_socket():
        return None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            sock.connect(str(path))
    except BlockingIOError:  # alive, with a full backlog
        return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _path(address: str) -> Path:
    return Path(address.removeprefix("unix://"))


def _who(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
