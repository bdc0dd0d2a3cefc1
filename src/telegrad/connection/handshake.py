"""The handshake that authenticates a connection before anything else is parsed.

::

    opener                                              listener
      Hello (who I am, whom I want, session, nonce)   →
                                                      ← Challenge (who I am, nonce)
      Proof                                           →
                                                      ← Welcome (what it has received of the session)

The rules:

1. Every message carries a proof: an HMAC-SHA256 under the group's handshake key. It covers the protocol version, the
   role of its sender, the channel binding (`Link.binding`), all messages before it on this connection, and all other
   fields of the message itself. So whatever a message says is proved, including fields that are added one day, and a
   proof cannot be replayed, reflected, relayed over another connection, or combined with other messages.
2. Strangers are told nothing. A listener answers a Hello only if its proof is right. Otherwise it just closes.
3. Strangers are believed nothing. A message without a right proof has no effect except that this connection is closed.
   In particular, an opener believes only a proved Reject, and that a worker has forgotten its session, or is another
   incarnation, only from that worker itself.
4. A Hello has no nonce of the listener, so without TLS a recorded one gets a Challenge. The listener acts on what a
   Hello says (`check`, `resume`) only after the Proof, which covers its own nonce.
5. Both sides say how they accept calls (`accept`), and end the handshake if they differ: nobody in between can make one
   of them less strict.
6. The opener says which address it dialled. The listener refuses if it does not announce that address: then somebody
   has redirected the opener. It is compared as text with the listener's own record, from which the opener has it, so
   address translation and port forwarding do not matter.
7. The opener numbers its connections. A listener refuses a Proof if it has admitted a later connection of this opener:
   somebody on the path may have held back the Proof of a connection that the opener gave up long ago.
8. With certificates on both sides (`Link.peer_names`), each side also checks that the certificate is for the worker
   whose name the other one claims. A shared token cannot do that: whoever knows it can claim any name.

Without a token the proofs are empty. Workers then listen on unix sockets only, where the kernel identifies the peer.

`Opener` and `Acceptor` are state machines without I/O: greetings in, greetings out.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from telegrad.connection.goodbye import shortened
from telegrad.connection.group_keys import authenticate
from telegrad.connection.worker_record import WorkerRecord, modes_differ
from telegrad.errors import AuthenticationError, ProtocolError, WorkerLost
from telegrad.wire.frames import VERSION
from telegrad.wire.handshake_messages import (
    Challenge,
    Description,
    HandshakeMessage,
    Hello,
    Proof,
    Purpose,
    Reject,
    Welcome,
)

NONCE_SIZE = 32
_MAX_REASON = 400  # characters of a reason that is sent: a handshake message is small

Greeting = TypeVar("Greeting", Hello, Challenge, Proof, Welcome, Reject, Description)


class Rejected(AuthenticationError):
    """This side ends the handshake with a peer that has proved itself. `greeting`, if any, tells the peer why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.greeting: Reject | None = None


class Refused(AuthenticationError):
    """The peer, which has proved itself, refuses this worker, and says why."""

    def __init__(self, message: str, code: str, reason: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class GivenUp(WorkerLost):
    """The peer, which has proved itself, holds this incarnation of this worker for lost, and will not take it again."""

    def __init__(self, message: str, worker: str, reason: str) -> None:
        super().__init__(message, worker=worker)
        self.reason = reason


class StaleGeneration(AuthenticationError):
    """The peer, which has proved itself, knows a generation that is not lower than the one that this worker wants."""

    def __init__(self, known: int) -> None:
        super().__init__(f"generation {known} exists")
        self.known = known


class AnotherWorker(AuthenticationError):
    """Another worker of the group, which has proved itself, listens at the address of the one that was wanted."""


class HandshakeLink(Protocol):
    """What the handshake knows of its connection; see `telegrad.transport.base.Link`."""

    binding: bytes
    peer_names: tuple[str, ...] | None


class _Transcript:
    """What both sides have said on one connection. Each proof covers all of it."""

    def __init__(self, key: bytes | None, link: HandshakeLink) -> None:
        self._key = key
        self._link = link
        self._said: list[HandshakeMessage] = []

    def prove(self, role: str, greeting: Greeting) -> Greeting:
        """Return `greeting`, to be sent by this side, with its proof."""
        proved: Greeting = msgspec.structs.replace(greeting, proof=self._proof(role, greeting))
        self._said.append(proved)
        return proved

    def check(self, role: str, greeting: HandshakeMessage) -> bool:
        """Return whether `greeting` comes from a peer that knows the key and has seen the same messages."""
        if not hmac.compare_digest(self._proof(role, greeting), greeting.proof):
            return False
        self._said.append(greeting)
        return True

    def _proof(self, role: str, greeting: HandshakeMessage) -> bytes:
        if self._key is None:
            return b""
        unproved = msgspec.structs.replace(greeting, proof=b"")
        return authenticate(self._key, "telegrad handshake", VERSION, role, self._link.binding, self._said, unproved)


class _Side:
    def __init__(self, me: WorkerRecord, role: str, key: bytes | None, link: HandshakeLink) -> None:
        self._me = me
        self._role = role
        self._link = link
        self._transcript = _Transcript(key, link)

    def reject(self, code: str, reason: str) -> Reject:
        """Return the message that ends the handshake."""
        me = self._me
        rejection = Reject(me.name, me.id, me.incarnation, code, shortened(reason, _MAX_REASON), b"")
        return self._transcript.prove(self._role, rejection)

    def _check_peer(self, greeting: Hello | Challenge) -> None:
        """Check what a peer that has proved itself says about itself."""
        if len(greeting.nonce) != NONCE_SIZE:
            raise ProtocolError(f"a nonce has {NONCE_SIZE} bytes, not {len(greeting.nonce)}")
        names = self._link.peer_names
        if names is not None and greeting.name not in names:
            found = f"is for {', '.join(map(repr, names))}" if names else "has no DNS name (subjectAltName)"
            raise Rejected("certificate", f"the certificate of worker {greeting.name!r} {found}")
        if greeting.accept != self._me.accept:
            raise Rejected("mode", modes_differ(self._me, greeting.name, greeting.accept))


class Opener(_Side):
    """The side that connects. `target` is the worker that it wants to reach, at the address `dialled`.

    With the purpose DESCRIBE or OBSERVE, the target may have no name: then any worker of the group will do.
    """

    def __init__(
        self,
        me: WorkerRecord,
        target: WorkerRecord,
        key: bytes | None,
        nonce: bytes,
        *,
        dialled: str,
        attempt: int,
        session: int,
        received: tuple[int, int],
        fresh: bool,
        link: HandshakeLink,
        purpose: Purpose = Purpose.SESSION,
    ) -> None:
        super().__init__(me, "opener", key, link)
        self._target = target
        self._hello = Hello(
            name=me.name,
            id=me.id,
            incarnation=me.incarnation,
            generation=me.generation,
            purpose=purpose,
            addresses=me.addresses,
            host=me.host,
            main=me.main,
            tls=me.tls,
            accept=me.accept,
            devices=me.devices,
            target=target.name,
            dialled=dialled,
            nonce=nonce,
            attempt=attempt,
            session=session,
            received=received,
            fresh=fresh,
            proof=b"",
        )
        self._challenged = False

    def start(self) -> HandshakeMessage:
        """Return the first greeting."""
        return self._transcript.prove("opener", self._hello)

    def receive(self, greeting: HandshakeMessage) -> HandshakeMessage | tuple[int, int]:
        """Return the next greeting to send or, at the end, what the listener has received of the session.

        After a Hello with the purpose DESCRIBE, the end is the Description.

        Raises WorkerLost or Refused if the listener proved that, AnotherWorker if another worker proved itself, and
        otherwise AuthenticationError or ProtocolError, which say nothing about the target: anybody can cause them.
        """
        name = self._target.name
        if not self._transcript.check("listener", greeting):
            if isinstance(greeting, Reject):
                said = shortened(greeting.reason, _MAX_REASON)
                raise AuthenticationError(f"the listener refused without proving itself, and said: {said}")
            raise AuthenticationError(f"the listener could not prove that it is worker {name!r} of this group")
        if isinstance(greeting, Reject):
            raise self._refusal(greeting)
        if isinstance(greeting, Challenge) and not self._challenged:
            self._check_target(greeting)
            self._challenged = True
            return self._transcript.prove("opener", Proof(b""))
        describes = self._hello.purpose is Purpose.DESCRIBE
        if isinstance(greeting, Welcome) and self._challenged and not describes:
            return greeting.received
        if isinstance(greeting, Description) and self._challenged and describes:
            return greeting
        raise ProtocolError(f"worker {name!r} sent a {type(greeting).__name__} out of turn")

    def _check_target(self, challenge: Challenge) -> None:
        target = self._target
        if target.name and (challenge.name, challenge.id) != (target.name, target.id):
            raise self._another(challenge)
        try:
            self._check_peer(challenge)
        except Rejected as error:
            error.greeting = self.reject(error.code, str(error))
            raise
        if target.name and challenge.incarnation != target.incarnation:
            raise WorkerLost(f"worker {target.name!r} was restarted", worker=target.name)
        if self._hello.purpose is Purpose.VOTE and challenge.known_generation >= self._hello.generation:
            raise StaleGeneration(challenge.known_generation)

    def _refusal(self, greeting: Reject) -> Exception:
        target, reason = self._target, shortened(greeting.reason, _MAX_REASON)
        if target.name and (greeting.name, greeting.id) != (target.name, target.id):
            return self._another(greeting)
        if greeting.code == "incarnation" or greeting.code == "session":
            text = f"worker {target.name!r} cannot resume our session: {reason}"
            if greeting.code == "incarnation":
                return GivenUp(text, target.name, reason)
            return WorkerLost(text, worker=target.name)
        return Refused(f"worker {greeting.name!r} refused our connection: {reason}", greeting.code, reason)

    def _another(self, greeting: Challenge | Reject) -> AnotherWorker:
        return AnotherWorker(
            f"worker {self._target.name!r} (id {self._target.id}) was expected at {self._hello.dialled}, but worker "
            f"{greeting.name!r} (id {greeting.id}) of this group listens there"
        )


class Acceptor(_Side):
    """The side that accepts a connection.

    The callbacks run after the opener has proved itself. `known_generation` returns the highest generation in which
    others with the opener's name are known. `check` raises Rejected if the opener's identity is not acceptable.
    `resume` returns what has been received of its session, and raises Rejected if that is unknown. `describe` returns
    what an opener with the purpose DESCRIBE wants to know, without its proof.
    """

    def __init__(
        self,
        me: WorkerRecord,
        key: bytes | None,
        nonce: bytes,
        *,
        check: Callable[[Hello], None],
        resume: Callable[[Hello], tuple[int, int]],
        known_generation: Callable[[Hello], int],
        describe: Callable[[Hello], Description],
        link: HandshakeLink,
    ) -> None:
        super().__init__(me, "listener", key, link)
        self._describe = describe
        self._has_key = key is not None
        self._nonce = nonce
        self._check = check
        self._resume = resume
        self._known_generation = known_generation
        self.hello: Hello | None = None
        """The opener's Hello, once one has come whose proof is right. It may be a recorded one until `proof` is set."""
        self.proof: Proof | None = None
        """The opener's Proof, once it was accepted."""

    def receive(self, greeting: HandshakeMessage) -> HandshakeMessage:
        """Return the next greeting to send. After a Welcome, `hello` identifies the opener.

        Raises Rejected with a greeting to send, or else AuthenticationError or ProtocolError: send nothing then.
        """
        try:
            if self.hello is None:
                return self._take_hello(greeting)
            return self._take_proof(greeting, self.hello)
        except Rejected as error:
            error.greeting = self.reject(error.code, str(error))
            raise

    def _take_hello(self, hello: HandshakeMessage) -> HandshakeMessage:
        me = self._me
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a {type(hello).__name__} out of turn")
        if not self._transcript.check("opener", hello):
            raise AuthenticationError(self._unproved(hello))
        self.hello = hello
        if hello.target != me.name and (hello.target or hello.purpose not in (Purpose.DESCRIBE, Purpose.OBSERVE)):
            raise Rejected("name", f"this is worker {me.name!r}, not {hello.target!r}")
        if hello.dialled not in me.addresses:
            raise Rejected(
                "address",
                f"worker {hello.name!r} dialled {hello.dialled}, but worker {me.name!r} announces "
                f"{', '.join(me.addresses)}: somebody redirects connections",
            )
        self._check_peer(hello)
        return self._transcript.prove(
            "listener",
            Challenge(me.name, me.id, me.incarnation, me.accept, self._known_generation(hello), self._nonce, b""),
        )

    def _take_proof(self, greeting: HandshakeMessage, hello: Hello) -> HandshakeMessage:
        if not self._transcript.check("opener", greeting):
            raise AuthenticationError(
                f"its {type(greeting).__name__} is not proved: it repeats what it recorded or it alters messages"
            )
        if isinstance(greeting, Reject):
            raise AuthenticationError(f"it ended the handshake: {shortened(greeting.reason, _MAX_REASON)}")
        if not isinstance(greeting, Proof) or self.proof is not None:
            raise ProtocolError(f"a {type(greeting).__name__} out of turn")
        # Only now: an unauthenticated peer must not affect the worker that it claims to be.
        self._check(hello)
        self.proof = greeting
        if hello.purpose is Purpose.DESCRIBE:
            return self._transcript.prove("listener", self._describe(hello))
        received = self._resume(hello) if hello.purpose is Purpose.SESSION else (0, 0)
        return self._transcript.prove("listener", Welcome(received, b""))

    def _unproved(self, hello: Hello) -> str:
        claim = f"it claims to be worker {hello.name[:127]!r}"
        if not self._has_key:
            return f"{claim} and has a group token, but this worker has none"
        if not hello.proof:
            return f"{claim} and has no group token, but this worker has one"
        return f"{claim}, but could not prove it; the group tokens differ, or somebody relays the connection"
