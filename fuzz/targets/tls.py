"""The listening side of a TLS link: bytes of strangers before, during and after the TLS handshake.

An input is a program for a client with a real TLS implementation: it sends raw bytes, continues the handshake, changes
a byte of what OpenSSL wants to send, sends frames and garbage through the encryption, and repeats records.
"""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress

from fuzz.choices import Choices
from fuzz.target import Target
from fuzz.targets.handshake import opener
from telegrad.errors import ProtocolError
from telegrad.transport.base import LinkClosed
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.frames import Kind, Limits, pack_header
from telegrad.wire.handshake_messages import decode_handshake
from telegrad.wire.messages import encode_head

MOST_STEPS = 48
_credentials: list[Credentials] = []  # made once: a key takes milliseconds


class _Client:
    """A stranger with OpenSSL."""

    def __init__(self, sock: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)
        self._socket = sock
        self._last = b""

    def read(self) -> None:
        """Give OpenSSL what the listener sent."""
        try:
            received = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        self._incoming.write(received)

    def step(self, choices: Choices) -> None:
        """Send something."""
        action = choices.below(8)
        if action == 0:
            self._send(choices.take(choices.below(64)))
        elif action == 1:
            self._send(self._last)
        elif action <= 4:
            with suppress(ssl.SSLError):  # it needs more, or the listener refused
                self._tls.do_handshake()
            self._flush(choices)
        else:
            frame = encode_head(opener().start())
            plain = pack_header(Kind.HANDSHAKE, len(frame), 0, 0, 0) + frame
            if action == 6:
                plain = choices.take(choices.below(200))
            elif action == 7:
                plain = pack_header(choices.below(14), choices.below(64), choices.below(3), 0, 0) + bytes(
                    choices.below(64)
                )
            try:
                self._tls.write(plain)
            except ssl.SSLError:
                return
            self._flush(choices)

    def _flush(self, choices: Choices) -> None:
        data = bytearray(self._outgoing.read())
        if data and choices.rarely():
            data[choices.integer(2) % len(data)] ^= 1 << choices.below(8)
        self._last = bytes(data[:4096])
        self._send(bytes(data))

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BlockingIOError, BrokenPipeError):
            return


def _run(data: bytes) -> None:
    if not _credentials:
        _credentials.append(make_credentials())
    choices = Choices(data)
    admits_after = 1 + choices.below(MOST_STEPS)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    link = TlsLink(ours, peer="a stranger", credentials=_credentials[0], opens=False)
    client, admitted = _Client(theirs), False
    try:
        for step in range(MOST_STEPS):
            if not choices:
                break
            client.step(choices)
            for frame in link.receive():
                assert admitted or frame.kind == Kind.HANDSHAKE
                if not admitted:
                    decode_handshake(frame.body)
                if step > admits_after and not admitted:
                    admitted = True
                    break
            if admitted:
                link.admit(Limits(frame=1 << 16, message=1 << 16), lambda sequence, length: None)
            link.flush()
            client.read()
    finally:
        link.close()
        theirs.close()


def _seeds() -> Iterable[bytes]:
    rng = random.Random(5)
    yield bytes([2, 2, 0, 2, 0, 2, 0, 5, 0, 5, 0, 5, 0])
    yield bytes([0, 0, 20]) + b"GET / HTTP/1.1\r\nHost"
    for index in range(1, 12):
        yield bytes([4, 2, 0, 2, 0, 5, 0]) + rng.randbytes(8 * index)


TLS = Target("tls", _run, (ProtocolError, LinkClosed), _seeds, max_size=1024)
