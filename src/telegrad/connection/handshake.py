"""The handshake that authenticates a connection before anything else is parsed.

::

    opener                                   listener
      Hello (own identity, target, nonce)  →
                                           ← Challenge (own identity, nonce, proof)
      Proof (proof, session)               →
                                           ← Welcome (what it has received of the session)

Both proofs are HMAC-SHA256 under the group token, over role, protocol version, both nonces, both workers' names, ids
and incarnations, and the channel binding. Each side proves that it knows the token without revealing it, and a proof
cannot be replayed, reflected, or moved to another connection. Either side may send a Reject instead.

Without a token the proofs are empty. Workers then listen on unix sockets only, where the kernel identifies the peer.

`Opener` and `Acceptor` are state machines without I/O: greetings in, greetings out.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, WorkerLost
from telegrad.wire.frames import VERSION
from telegrad.wire.handshake_messages import Challenge, HandshakeMessage, Hello, Proof, Reject, Welcome

NONCE_SIZE = 32

_TOKENS_DIFFER = "the group tokens differ: start every worker with the same TELEGRAD_TOKEN"


class Rejected(AuthenticationError):
    """This side ends the handshake. `greeting` tells the peer why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.greeting = Reject(code, reason)


def _printable_reason(greeting: Reject) -> str:
    """Return the peer's reason, escaped if needed: an unauthenticated peer must not forge log lines."""
    return greeting.reason if greeting.reason.isprintable() else repr(greeting.reason)


@dataclass(frozen=True)
class _Identity:
    name: str
    id: int
    incarnation: int


def _prove(
    token: bytes | None, role: str, opener: _Identity, listener: _Identity, nonces: tuple[bytes, bytes], channel: bytes
) -> bytes:
    if token is None:
        return b""
    # A msgpack array decodes in only one way, so no two different handshakes yield the same bytes.
    transcript = msgspec.msgpack.encode(
        (
            "telegrad",
            role,
            VERSION,
            nonces[0],
            nonces[1],
            (opener.name, opener.id, opener.incarnation),
            (listener.name, listener.id, listener.incarnation),
            channel,
        )
    )
    return hmac.new(token, transcript, hashlib.sha256).digest()


class Opener:
    """The side that connects. `target` is the worker that it wants to reach."""

    def __init__(
        self,
        me: WorkerRecord,
        target: WorkerRecord,
        token: bytes | None,
        nonce: bytes,
        *,
        session: int,
        received: tuple[int, int],
        fresh: bool,
        channel: bytes = b"",
    ) -> None:
        self._me = me
        self._target = target
        self._token = token
        self._nonce = nonce
        self._session = session
        self._received = received
        self._fresh = fresh
        self._channel = channel
        self._proved = False

    def start(self) -> HandshakeMessage:
        """Return the first greeting."""
        me = self._me
        return Hello(
            me.name,
            me.id,
            me.incarnation,
            me.addresses,
            me.main,
            self._target.name,
            self._nonce,
            self._token is not None,
        )

    def receive(self, greeting: HandshakeMessage) -> HandshakeMessage | tuple[int, int]:
        """Return the next greeting to send or, at the end, what the listener has received of the session."""
        target = self._target
        if isinstance(greeting, Reject):
            if greeting.code == "incarnation" or greeting.code == "session":
                raise WorkerLost(
                    f"worker {target.name!r} cannot resume our session: {_printable_reason(greeting)}",
                    worker=target.name,
                )
            raise AuthenticationError(f"worker {target.name!r} refused our connection: {_printable_reason(greeting)}")
        if isinstance(greeting, Challenge) and not self._proved:
            if (greeting.name, greeting.id) != (target.name, target.id):
                raise Rejected(
                    "name",
                    f"worker {target.name!r} (id {target.id}) was expected here, but this is worker {greeting.name!r} "
                    f"(id {greeting.id})",
                )
            me = _Identity(self._me.name, self._me.id, self._me.incarnation)
            peer = _Identity(greeting.name, greeting.id, greeting.incarnation)
            nonces = (self._nonce, greeting.nonce)
            expected = _prove(self._token, "listener", me, peer, nonces, self._channel)
            if len(greeting.nonce) != NONCE_SIZE or not hmac.compare_digest(expected, greeting.proof):
                raise Rejected(
                    "proof", f"worker {target.name!r} could not prove that it belongs to this group; {_TOKENS_DIFFER}"
                )
            if greeting.incarnation != target.incarnation:
                raise WorkerLost(f"worker {target.name!r} was restarted", worker=target.name)
            self._proved = True
            proof = _prove(self._token, "opener", me, peer, nonces, self._channel)
            return Proof(proof, self._session, self._received, self._fresh)
        if isinstance(greeting, Welcome) and self._proved:
            return greeting.received
        raise ProtocolError(f"worker {target.name!r} sent a {type(greeting).__name__} out of turn")


class Acceptor:
    """The side that accepts a connection.

    Both callbacks run after the opener proved that it knows the token. `check` raises Rejected if the opener's identity
    is not acceptable. `resume` returns what has been received of its session, and raises Rejected if that is unknown.
    """

    def __init__(
        self,
        me: WorkerRecord,
        token: bytes | None,
        nonce: bytes,
        *,
        check: Callable[[Hello], None],
        resume: Callable[[Hello, Proof], tuple[int, int]],
        channel: bytes = b"",
    ) -> None:
        self._me = me
        self._token = token
        self._nonce = nonce
        self._check = check
        self._resume = resume
        self._channel = channel
        self.hello: Hello | None = None
        self.proof: Proof | None = None

    def receive(self, greeting: HandshakeMessage) -> HandshakeMessage:
        """Return the next greeting to send. After a Welcome, `hello` and `proof` identify the opener."""
        me = self._me
        if isinstance(greeting, Reject):
            raise AuthenticationError(f"it ended the handshake: {_printable_reason(greeting)}")
        if isinstance(greeting, Hello) and self.hello is None:
            if greeting.target != me.name:
                raise Rejected("name", f"this is worker {me.name!r}, not {greeting.target!r}")
            if len(greeting.nonce) != NONCE_SIZE:
                raise Rejected("nonce", f"a nonce has {NONCE_SIZE} bytes")
            if greeting.has_token != (self._token is not None):
                having, lacking = (me.name, greeting.name) if self._token is not None else (greeting.name, me.name)
                raise Rejected("token", f"worker {having!r} has a group token and worker {lacking!r} has none")
            self.hello = greeting
            return Challenge(me.name, me.id, me.incarnation, self._nonce, self._prove("listener"))
        if isinstance(greeting, Proof) and self.hello is not None and self.proof is None:
            if not hmac.compare_digest(self._prove("opener"), greeting.proof):
                raise Rejected("proof", f"worker {self.hello.name!r} could not prove itself; {_TOKENS_DIFFER}")
            # Only now: an unauthenticated peer must not affect the worker that it claims to be.
            self._check(self.hello)
            self.proof = greeting
            return Welcome(self._resume(self.hello, greeting))
        raise ProtocolError(f"a {type(greeting).__name__} out of turn")

    def _prove(self, role: str) -> bytes:
        me, hello = self._me, self.hello
        assert hello is not None
        return _prove(
            self._token,
            role,
            _Identity(hello.name, hello.id, hello.incarnation),
            _Identity(me.name, me.id, me.incarnation),
            (hello.nonce, self._nonce),
            self._channel,
        )
