"""The connection of an observer on another host: the transport and handshake of the group, with the purpose OBSERVE."""

from __future__ import annotations

import secrets
import time

from telegrad.connection.dialer import ANYBODY, send_greeting
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.handshake import NONCE_SIZE, Opener, Refused
from telegrad.connection.token_source import find_token
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import LimitExceeded, ProtocolError, TelegradError, TokenError
from telegrad.observe.attach import parse
from telegrad.observe.attach_protocol import MOST_ANSWER, AttachAnswer, AttachRequest, encode
from telegrad.options import MODES, Options
from telegrad.transport.addresses import parse_address
from telegrad.transport.base import Link, LinkClosed, Ready, Transport
from telegrad.transport.tcp import TcpTransport
from telegrad.wire.frames import Kind, Limits
from telegrad.wire.handshake_messages import Purpose, decode_handshake

NAME = "observer"
"""Who observers say that they are. With mutual TLS, their certificate must be for this name."""
_CONNECT = 10.0  # seconds
_SLACK = 5.0
_LIMITS = Limits(frame=4 << 20, message=0)
LAST, MORE = b"\0", b"\1"
"""The first byte of each frame of an answer."""


class RemoteConnection:
    """A connection to the member at an address, which it announces."""

    def __init__(self, address: str, token: str | bytes | None = None) -> None:
        address = member_address(address)
        found = find_token(token)
        if found is None:
            raise TokenError(
                f"{address} needs the token of its group: set TELEGRAD_TOKEN or TELEGRAD_TOKEN_FILE as its workers "
                "have it. A group that `telegrad run` has started keeps its token to itself: look at it on its own "
                "machine, where none is needed"
            )
        self._address = address
        transport = _transport(found)
        for number, mode in enumerate(MODES):
            try:
                self._link = _open(transport, address, found, mode)
                return
            except Refused as error:
                if error.code != "mode" or number + 1 == len(MODES):
                    raise
            except OSError as error:
                raise TelegradError(
                    f"nobody can be reached at {address}: {error}. Workers listen on a TCP port only if their group "
                    "has workers on several machines. `telegrad status` on a machine of the group shows its addresses"
                ) from error

    def ask(self, request: AttachRequest) -> AttachAnswer:
        """Send a request, and return the answer."""
        deadline = time.monotonic() + request.timeout + _SLACK
        self._link.send(Kind.MESSAGE, encode(request), 0, 0, 0)
        data = bytearray()
        while True:
            ready = self._link.wait(deadline)
            if not ready & Ready.READ and time.monotonic() >= deadline:
                raise TimeoutError(f"the worker at {self._address} did not answer in time")
            try:
                for frame in self._link.receive():
                    data += memoryview(frame.body)[1:]
                    if len(data) > MOST_ANSWER:
                        raise LimitExceeded(f"an answer of more than {MOST_ANSWER:,} bytes")
                    if bytes(frame.body[:1]) == LAST:
                        return parse(data)
            except LinkClosed as error:
                raise LinkClosed(f"the worker at {self._address} has ended the connection: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._link.close()


def _transport(token: bytes) -> Transport:
    options = Options()
    if not options.uses_tls():
        return TcpTransport()
    from telegrad.transport.certificates import load_credentials
    from telegrad.transport.tls import TlsTransport

    files = options.certificate_files()
    credentials = load_credentials(*files, worker=NAME) if files is not None else None
    return TlsTransport(derive_keys(token).preamble, credentials)


def member_address(text: str) -> str:
    """Return the address of a member; ``tcp://`` may be left out. Raises TelegradError if it is none.

    >>> member_address("10.0.0.5:41234")
    'tcp://10.0.0.5:41234'
    """
    address = text if "://" in text else f"tcp://{text}"
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise TelegradError(
            f"{error}; --address takes tcp://HOST:PORT of a member, as `telegrad status` shows it"
        ) from error
    if parsed.scheme != "tcp":
        raise TelegradError(f"{text!r} is not the address of a TCP port: --address takes tcp://HOST:PORT of a member")
    return address


def _open(transport: Transport, address: str, token: bytes, mode: str) -> Link:
    deadline = time.monotonic() + _CONNECT
    link = transport.connect(address, deadline)
    try:
        me = WorkerRecord(NAME, 0, secrets.randbits(63), (), tls=transport.encrypted, accept=mode)
        opener = Opener(
            me,
            ANYBODY,
            derive_keys(token).handshake,
            secrets.token_bytes(NONCE_SIZE),
            dialled=address,
            attempt=1,
            session=0,
            received=(0, 0),
            fresh=True,
            link=link,
            purpose=Purpose.OBSERVE,
        )
        send_greeting(link, opener.start())
        while True:
            if not link.wait(deadline) & Ready.READ and time.monotonic() >= deadline:
                raise TimeoutError(f"the worker at {address} did not answer within {_CONNECT:g} s")
            for frame in link.receive():
                response = opener.receive(decode_handshake(frame.body))
                if isinstance(response, tuple):
                    link.admit(_LIMITS, no_chunks)
                    return link
                send_greeting(link, response)
    except BaseException:
        link.close()
        raise


def no_chunks(sequence: int, size: int) -> memoryview | None:
    """Refuse a chunk: requests and answers of observers are whole messages."""
    raise ProtocolError("a chunk of a message, where only whole ones are expected")
