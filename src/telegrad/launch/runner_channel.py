"""The connection between a launcher and a runner: TLS, or the pipes of ssh. One thread at a time may use it.

A launcher never waits for a runner that takes nothing: it `post`s, and what does not fit is sent when it can be. A
runner waits for its launcher as long as that lives (`send`), and so does its worker, as a program does whose output
goes to a terminal that was stopped.

Under TLS, the launcher has a certificate made for this group. It hands its SHA-256 and a key to the runners that it
starts (`Invitation`). A runner checks the certificate before it sends the key, and the launcher checks the key before
it believes anything.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import ssl
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from telegrad.errors import AuthenticationError, TelegradError
from telegrad.launch.runner_messages import MAX_FRAME, MAX_HELLO, Frames, Hello, Message, pack

VARIABLE = "TELEGRAD_LAUNCHER"
KEY_VARIABLE = "TELEGRAD_LAUNCHER_KEY"
_READ_SIZE = 256 * 1024
_CONNECT_TIMEOUT = 10.0
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds, and probes: a host that vanishes without a word is noticed within two minutes."""


class ChannelClosed(TelegradError):
    """The other side is gone."""


class Channel(ABC):
    """Sends messages, and returns those that have arrived."""

    def __init__(self, frames: Frames | None = None) -> None:
        self._frames = frames or Frames()
        self._unsent: deque[Iterator[Message]] = deque()
        self._begun = memoryview(b"")  # the rest of the frame of which some bytes may have been sent

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that is readable when messages may have arrived."""

    def post(self, messages: Iterable[Message]) -> None:
        """Send what fits now, and the rest with `flush`. Each message is asked for when those before it are sent.

        Raises ChannelClosed if the other side is gone.
        """
        self._unsent.append(iter(messages))
        self.flush()

    def flush(self) -> None:
        """Send what fits now. Raises ChannelClosed if the other side is gone."""
        try:
            while self._begin() and (sent := self._write(self._begun)):
                self._begun = self._begun[sent:]
        except ChannelClosed:
            self._unsent.clear()
            self._begun = memoryview(b"")
            raise

    @property
    def unsent(self) -> bool:
        """Whether something that was posted is not sent yet."""
        return bool(self._begun or self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, and wait until the other side takes it. Raises ChannelClosed if that is gone."""
        self.post([message])
        while self.unsent:
            poll = select.poll()
            poll.register(*self.writable())
            poll.poll()  # ends at the latest when the other side is gone
            self.flush()

    @abstractmethod
    def _write(self, data: memoryview) -> int:
        """Write some bytes, and return how many; 0: none fit. Raises ChannelClosed."""

    @abstractmethod
    def writable(self) -> tuple[int, int]:
        """Return a descriptor, and the event of `select.poll` after which `flush` may send more."""

    @abstractmethod
    def _read(self) -> bytes | None:
        """Return the next bytes, empty at the end, or None if there are none yet."""

    @abstractmethod
    def close(self) -> None:
        """Close the channel."""

    def receive(self) -> Iterator[Message]:
        """Yield what has arrived. Raises ChannelClosed at the end."""
        while (piece := self._read()) is not None:
            if not piece:
                raise ChannelClosed("the connection to the launcher or to a runner has ended")
            yield from self._frames.feed(piece)

    def _begin(self) -> bool:
        """Make the next frame, unless one has begun. Return whether there is one."""
        while not self._begun and self._unsent:
            message = next(self._unsent[0], None)
            if message is None:
                self._unsent.popleft()
            else:
                self._begun = memoryview(pack(message))
        return bool(self._begun)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
"""Those of this process. A forked child must not keep them open, or the other side would not see this process end."""


def _close_channels_in_child() -> None:
    for channel in list(_channels):
        channel.close()
    _channels.clear()


os.register_at_fork(after_in_child=_close_channels_in_child)


class PipeChannel(Channel):
    """Two pipes."""

    def __init__(self, read_end: int, write_end: int, frames: Frames | None = None) -> None:
        super().__init__(frames)
        self._read_end, self._write_end = read_end, write_end
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        _channels.add(self)

    def fileno(self) -> int:
        """Return the end to read from."""
        return self._read_end

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._write_end, data[:_READ_SIZE])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the pipe is closed: {error}") from error

    def writable(self) -> tuple[int, int]:
        """Return the end to write to."""
        return self._write_end, select.POLLOUT

    def _read(self) -> bytes | None:
        try:
            return os.read(self._read_end, _READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close both ends."""
        _channels.discard(self)
        os.close(self._read_end)
        os.close(self._write_end)


class TlsChannel(Channel):
    """A TLS connection."""

    def __init__(self, sock: ssl.SSLSocket, frames: Frames | None = None) -> None:
        super().__init__(frames)
        self._sock = sock
        self._wanted = select.POLLOUT
        self.peer = str(sock.getpeername()[0])
        """The address of the other side, also when that is gone."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _channels.add(self)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def _write(self, data: memoryview) -> int:
        try:
            return self._sock.send(data[:_READ_SIZE])
        except ssl.SSLWantWriteError:
            self._wanted = select.POLLOUT
        except ssl.SSLWantReadError:
            self._wanted = select.POLLIN
        except OSError as error:
            raise ChannelClosed(f"the connection is closed: {error}") from error
        return 0

    def writable(self) -> tuple[int, int]:
        """Return the descriptor of the socket, and what TLS waits for."""
        return self._sock.fileno(), self._wanted

    def _read(self) -> bytes | None:
        try:
            return self._sock.recv(_READ_SIZE)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


@dataclass(frozen=True)
class Invitation:
    """How a runner finds its launcher and proves that it was started by it."""

    hosts: Sequence[str]
    """Addresses of the launcher, of which at least one is reachable."""
    port: int
    key: str = field(repr=False)
    fingerprint: str
    """SHA-256 of the launcher's certificate."""

    def environment(self) -> dict[str, str]:
        """Return the invitation as environment variables: other users cannot read those of a process."""
        return {VARIABLE: f"{','.join(self.hosts)} {self.port}", KEY_VARIABLE: f"{self.key} {self.fingerprint}"}

    @classmethod
    def take(cls, environ: dict[str, str] | os._Environ[str]) -> Invitation:
        """Return the invitation in the environment, and remove it there."""
        where, key = environ.pop(VARIABLE, ""), environ.pop(KEY_VARIABLE, "")
        if not where or not key:
            raise TelegradError("this program is started by telegrad's launchers only: see telegrad.launch")
        hosts, port = where.split()
        secret, fingerprint = key.split()
        return cls(hosts.split(","), int(port), secret, fingerprint)

    def is_from(self, hello: Hello) -> bool:
        """Return whether a runner has this invitation."""
        return hmac.compare_digest(self.key.encode(), hello.key.encode())

    def connect(self) -> TlsChannel:
        """Return a channel to the launcher. Raises a TelegradError that names what was tried."""
        problems = []
        for host in self.hosts:
            try:
                return TlsChannel(self._open(host))
            except (OSError, AuthenticationError) as error:
                problems.append(f"{host}: {error}")
        raise TelegradError(
            f"this runner cannot reach its launcher at port {self.port} ({'; '.join(problems)}); pass an address that "
            "all hosts can reach as address= to start"
        )

    def _open(self, host: str) -> ssl.SSLSocket:
        from telegrad.transport.certificates import client_context

        plain = socket.create_connection((host, self.port), timeout=_CONNECT_TIMEOUT)
        try:
            sock = client_context().wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        found = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(found, self.fingerprint):
            sock.close()
            raise AuthenticationError("another program answers there")
        return sock


def accept(plain: socket.socket, context: ssl.SSLContext, invitation: Invitation) -> tuple[TlsChannel, Hello]:
    """Return the channel of an incoming connection, and who it is. Raises an error if it has not been invited."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    plain.setblocking(False)
    sock = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
    try:
        _shake_hands(sock, deadline)
        frames = Frames(MAX_HELLO)
        channel = TlsChannel(sock, frames)
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while time.monotonic() < deadline:
            for message in channel.receive():
                if isinstance(message, Hello) and invitation.is_from(message):
                    frames.limit = MAX_FRAME
                    return channel, message
                raise AuthenticationError("it does not know the key of this launcher")
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        raise AuthenticationError(f"it has not said who it is within {_CONNECT_TIMEOUT:g} s")
    except BaseException:
        sock.close()
        raise


def _shake_hands(sock: ssl.SSLSocket, deadline: float) -> None:
    """Do the handshake of TLS. The deadline counts for all of it: a stranger may send one byte at a time."""
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        poll = select.poll()
        poll.register(sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000) or time.monotonic() > deadline:
            raise AuthenticationError(f"it has not finished the handshake of TLS within {_CONNECT_TIMEOUT:g} s")
