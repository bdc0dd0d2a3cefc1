"""A TLS link and a stranger: bytes before, during and after the TLS handshake.

An input is a program for a stranger with a real TLS implementation, which connects to the link or has accepted its
connection. It sends raw bytes, continues the handshake, changes a byte of what OpenSSL wants to send, sends frames and
garbage through the encryption, repeats records, ends the stream, and reads or does not read. The link sends frames too,
before the TLS handshake and after it.

A stranger that connects mostly has a valid preamble, as somebody on the path may have. Otherwise it has an altered one,
a part of one, or none, and nothing that it sends may reach OpenSSL or be answered.
"""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from fuzz.choices import Choices
from fuzz.target import Target
from fuzz.targets.handshake import OTHER_KEY, framed, opener
from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.base import LinkClosed
from telegrad.transport.certificates import Credentials, make_credentials
from telegrad.transport.preamble_verifier import PreambleVerifier
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.frames import Kind, Limits, pack_header
from telegrad.wire.handshake_messages import decode_handshake
from telegrad.wire.messages import encode_head
from telegrad.wire.preamble import NONCE_SIZE, PREAMBLE_SIZE, pack_preamble

MOST_STEPS = 48
LIMITS = Limits(frame=1 << 16, message=1 << 16)
KEY, ADDRESS = b"the key of a group for preambles", "tcp://10.0.0.9:41234"
VALID = pack_preamble(KEY, bytes(NONCE_SIZE), ADDRESS)


@cache
def _credentials(name: str) -> Credentials:
    """Return the credentials of the link or of the stranger, which are made once: a key takes milliseconds."""
    return make_credentials()


@cache
def _clients(version: ssl.TLSVersion) -> ssl.SSLContext:
    """Return the context of a client that offers nothing above a version of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    return context


class _Stranger:
    """Somebody with OpenSSL on the other end of a socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, listens: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._socket = sock
        self._last = b""
        self._skipped = PREAMBLE_SIZE if listens else 0  # bytes in front of TLS that are still to come
        self.answered = False
        """Whether the link has sent something."""
        self.altered = False
        """Whether it has sent something that OpenSSL did not make."""

    def read(self) -> None:
        """Give OpenSSL what the link sent."""
        try:
            received = self._socket.recv(1 << 16)
        except (BlockingIOError, ConnectionResetError):
            return
        self.answered = self.answered or bool(received)
        skipped = min(self._skipped, len(received))
        self._skipped -= skipped
        self._incoming.write(received[skipped:])

    def step(self, choices: Choices) -> None:
        """Send something."""
        action = choices.below(10)
        if action == 0:
            self.altered = True
            self._send(choices.take(choices.below(64)))
        elif action == 1:
            self.altered = True
            self._send(self._last)
        elif action <= 4:
            with suppress(ssl.SSLError):  # it needs more, or the link refused
                self._tls.do_handshake()
            self._flush(choices)
        elif action <= 7:
            plain = framed(encode_head(opener(OTHER_KEY).start()))
            if action == 6:
                plain = choices.take(choices.below(200))
            elif action == 7:
                plain = pack_header(choices.below(14), choices.below(64), choices.below(3), 0, 0)
                plain += bytes(choices.below(64))
            with suppress(ssl.SSLError):
                self._tls.write(plain)
            self._flush(choices)
        elif action == 8:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush(choices)
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def decrypt(self) -> None:
        """Check that OpenSSL accepts what the link sends."""
        try:
            while self._tls.read(1 << 16):
                pass
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            if not self.altered and "RECORD" in str(error.reason):
                raise AssertionError(f"the link sent invalid records: {error}") from error

    def _flush(self, choices: Choices) -> None:
        data, alters = bytearray(self._outgoing.read()), choices.rarely()
        if data and alters:
            data[choices.integer(2) % len(data)] ^= 1 << choices.below(8)
            self.altered = True
        self._last = bytes(data[:4096])
        self._send(bytes(data))

    def _send(self, data: bytes) -> None:
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)


def _preamble(kind: int, choices: Choices) -> bytes:
    """Return what a stranger that connects sends first: mostly a valid preamble."""
    if kind == 13:
        altered = bytearray(VALID)
        altered[choices.below(PREAMBLE_SIZE)] ^= 1 << choices.below(8)
        return bytes(altered)
    if kind == 14:
        return VALID[: choices.below(PREAMBLE_SIZE // 2)]  # by chance the fuzzer finds one byte, but not sixteen
    return VALID if kind < 13 else b""


def _run(data: bytes) -> None:
    choices = Choices(data)
    admits_after = 1 + choices.below(MOST_STEPS)
    kind = choices.byte()
    opens, old = kind & 15 == 15, choices.rarely()
    preamble = b"" if opens else _preamble(kind >> 4, choices)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    expected = VALID if opens else PreambleVerifier(KEY, ADDRESS)
    link = TlsLink(ours, peer="a stranger", credentials=_credentials("link"), preamble=expected)
    version = ssl.TLSVersion.TLSv1_2 if old else ssl.TLSVersion.TLSv1_3
    context = _credentials("stranger").listener if opens else _clients(version)
    stranger = _Stranger(theirs, context, listens=opens)
    try:
        if opens:
            link.begin()
        theirs.sendall(preamble)
        _talk(link, stranger, choices, admits_after)
    finally:
        link.close()
        stranger.read()
        theirs.close()
        if not opens and preamble != VALID:
            assert not stranger.answered, "the link answered somebody without a valid preamble"
            assert not hasattr(link, "_tls"), "somebody without a valid preamble reached OpenSSL"
    assert not (old and not opens and link._established), "the link accepted an old version of TLS"


def _talk(link: TlsLink, stranger: _Stranger, choices: Choices, admits_after: int) -> None:
    admitted = False
    for step in range(MOST_STEPS):
        if not choices:
            break
        if not choices.rarely():
            stranger.read()
        stranger.step(choices)
        for frame in link.receive():
            assert admitted or frame.kind == Kind.HANDSHAKE
            if not admitted:
                decode_handshake(frame.body)
            if step > admits_after and not admitted:
                admitted = True
                break
        if admitted:
            link.admit(LIMITS, lambda sequence, length: None)
        if choices.rarely():
            size = choices.pick((0, 10, 5000, 70_000, 300_000))
            link.send(choices.pick((Kind.HANDSHAKE, Kind.MESSAGE, Kind.BULK_CHUNK)), bytes(size), 0, 0, 0)
        link.flush()
        if link._established:
            stranger.decrypt()


def _seeds() -> Iterable[bytes]:
    rng = random.Random(5)
    reads, quiet = b"\0", b"\0"
    handshake = (reads + b"\2\0" + quiet) * 3  # of the stranger, unchanged
    hello, sends, ends = reads + b"\5\0" + quiet, reads + b"\5\0\x0f", reads + b"\x08\0" + quiet
    for kind in (b"\0\0", b"\x0f\0", b"\0\x0f"):  # it connects, it listens, it has an old version
        yield b"\2" + kind + handshake + hello * 4
        yield b"\4" + kind + handshake + hello + sends + b"\3\2" + hello + sends + b"\4\1" + hello * 4 + ends
        yield b"\2" + kind + reads + b"\0\x14GET / HTTP/1.1\r\nHost" + quiet
        for index in range(1, 6):
            yield b"\4" + kind + handshake + hello + rng.randbytes(16 * index)
    for first in (b"\4\xd0\0\x05\3", b"\4\xd0\0\x1f\7", b"\4\xe0\0\5", b"\4\xf0\0"):  # altered, a part, none
        yield first + handshake + hello


TLS = Target("tls", _run, (ProtocolError, LinkClosed, AuthenticationError), _seeds, max_size=1024)
