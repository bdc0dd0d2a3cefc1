"""Only workers that know the token and prove their identity pass the handshake, and no secret leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.connection.handshake import NONCE_SIZE, Acceptor, Opener, Rejected
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, TelegradError, WorkerLost
from telegrad.wire.frames import HANDSHAKE_LIMITS
from telegrad.wire.handshake_messages import (
    Challenge,
    HandshakeMessage,
    Hello,
    Proof,
    Reject,
    Welcome,
    decode_handshake,
)

TOKEN = b"a token of 128 bits, or a few more"
OTHER = b"the token of quite another group.."
ALICE = WorkerRecord("alice", 1, 111, ("tcp://10.0.0.1:1",), main="main-a")
BOB = WorkerRecord("bob", 2, 222, ("tcp://10.0.0.2:2",))
NONCES = (b"o" * NONCE_SIZE, b"l" * NONCE_SIZE)


@dataclass
class Handshake:
    """Alice's opener and Bob's acceptor, with a record of the callbacks to Bob's agent."""

    opener_token: bytes | None = TOKEN
    acceptor_token: bytes | None = TOKEN
    opener_is: WorkerRecord = ALICE
    acceptor_is: WorkerRecord = BOB
    target: WorkerRecord = BOB
    nonces: tuple[bytes, bytes] = NONCES
    channels: tuple[bytes, bytes] = (b"", b"")
    callbacks: list[str] = field(default_factory=list)
    check_fails: Exception | None = None
    resume_fails: Exception | None = None

    def __post_init__(self) -> None:
        self.opener = Opener(
            self.opener_is,
            self.target,
            self.opener_token,
            self.nonces[0],
            session=77,
            received=(5, 6),
            fresh=False,
            channel=self.channels[0],
        )
        self.acceptor = Acceptor(
            self.acceptor_is,
            self.acceptor_token,
            self.nonces[1],
            check=self._check,
            resume=self._resume,
            channel=self.channels[1],
        )

    def _check(self, hello: Hello) -> None:
        self.callbacks.append("check")
        if self.check_fails is not None:
            raise self.check_fails

    def _resume(self, hello: Hello, proof: Proof) -> tuple[int, int]:
        self.callbacks.append("resume")
        if self.resume_fails is not None:
            raise self.resume_fails
        return (8, 9)

    def run(self) -> tuple[int, int]:
        """Exchange greetings, as bytes, until the handshake is complete."""
        greeting = self.opener.start()
        while True:
            answer = self.opener.receive(reencoded(self.acceptor.receive(reencoded(greeting))))
            if isinstance(answer, tuple):
                return answer
            greeting = answer

    def challenge(self) -> Challenge:
        challenge = self.acceptor.receive(self.opener.start())
        assert isinstance(challenge, Challenge)
        return challenge

    def proof(self) -> Proof:
        proof = self.opener.receive(self.challenge())
        assert isinstance(proof, Proof)
        return proof


def reencoded(greeting: HandshakeMessage) -> HandshakeMessage:
    encoded = msgspec.msgpack.encode(greeting)
    assert len(encoded) <= HANDSHAKE_LIMITS.frame
    return decode_handshake(encoded)


# -- members of the group -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, None])
def test_workers_with_the_same_token_complete_the_handshake(token: bytes | None) -> None:
    handshake = Handshake(opener_token=token, acceptor_token=token)
    assert handshake.run() == (8, 9)
    assert handshake.callbacks == ["check", "resume"]
    assert handshake.acceptor.hello is not None
    assert handshake.acceptor.proof is not None
    assert (handshake.acceptor.hello.name, handshake.acceptor.hello.incarnation) == ("alice", 111)
    assert (handshake.acceptor.proof.session, handshake.acceptor.proof.received, handshake.acceptor.proof.fresh) == (
        77,
        (5, 6),
        False,
    )


def test_the_token_is_never_sent() -> None:
    handshake = Handshake()
    hello = handshake.opener.start()
    challenge = handshake.acceptor.receive(hello)
    proof = handshake.opener.receive(challenge)
    assert not isinstance(proof, tuple)
    for greeting in (hello, challenge, proof, handshake.acceptor.receive(proof)):
        assert TOKEN not in msgspec.msgpack.encode(greeting)


def test_the_hello_names_the_opener_and_its_target() -> None:
    hello = Handshake().opener.start()
    assert hello == Hello("alice", 1, 111, ("tcp://10.0.0.1:1",), "main-a", "bob", NONCES[0], True)


# -- wrong token ----------------------------------------------------------------------------------------------


def test_an_opener_detects_a_listener_with_another_token() -> None:
    handshake = Handshake(opener_token=TOKEN, acceptor_token=OTHER)
    with pytest.raises(
        Rejected, match=r"'bob' could not prove that it belongs to this group.*TELEGRAD_TOKEN"
    ) as caught:
        handshake.run()
    assert caught.value.greeting.code == "proof"
    assert handshake.callbacks == []


def test_a_listener_detects_an_opener_with_another_token() -> None:
    handshake, other = Handshake(), Handshake(opener_token=OTHER, acceptor_token=OTHER)
    challenge = handshake.challenge()
    other_proof = other.proof()
    assert challenge.nonce == NONCES[1]
    with pytest.raises(Rejected, match=r"'alice' could not prove itself.*TELEGRAD_TOKEN") as caught:
        handshake.acceptor.receive(other_proof)
    assert caught.value.greeting.code == "proof"
    assert handshake.callbacks == []
    assert handshake.acceptor.proof is None


@pytest.mark.parametrize(
    ("opener", "listener", "message"),
    [
        (TOKEN, None, "'alice' has a group token and worker 'bob' has none"),
        (None, TOKEN, "'bob' has .* 'alice' has none"),
    ],
)
def test_the_error_names_the_side_without_a_token(opener: bytes | None, listener: bytes | None, message: str) -> None:
    handshake = Handshake(opener_token=opener, acceptor_token=listener)
    with pytest.raises(Rejected, match=message) as caught:
        handshake.run()
    assert caught.value.greeting.code == "token"
    assert handshake.callbacks == []


def test_an_opener_cannot_make_a_listener_skip_its_token() -> None:
    handshake = Handshake(opener_token=None)
    hello = handshake.opener.start()
    assert isinstance(hello, Hello)
    handshake.acceptor.receive(msgspec.structs.replace(hello, has_token=True))
    with pytest.raises(Rejected):
        handshake.acceptor.receive(Proof(b"", 77, (0, 0), True))
    assert handshake.callbacks == []


def test_a_listener_cannot_make_an_opener_skip_its_token() -> None:
    with pytest.raises(Rejected):
        Handshake().opener.receive(Challenge("bob", 2, 222, NONCES[1], b""))


@given(proof=st.binary(max_size=64))
def test_a_guessed_proof_is_rejected(proof: bytes) -> None:
    handshake = Handshake()
    handshake.challenge()
    with pytest.raises(Rejected):
        handshake.acceptor.receive(Proof(proof, 77, (0, 0), True))
    with pytest.raises(Rejected):
        Handshake().opener.receive(Challenge("bob", 2, 222, NONCES[1], proof))
    assert handshake.callbacks == []


# -- replayed and reflected proofs ----------------------------------------------------------------------------


def test_a_listeners_proof_is_not_accepted_from_an_opener() -> None:
    handshake = Handshake()
    challenge = handshake.challenge()
    with pytest.raises(Rejected):
        handshake.acceptor.receive(Proof(challenge.proof, 77, (5, 6), False))
    assert handshake.callbacks == []


def test_a_reflected_proof_is_rejected() -> None:
    # The attacker opens a connection to Bob as "bob", and uses a proof that Bob gives on another connection.
    acceptor = Acceptor(BOB, TOKEN, NONCES[1], check=lambda hello: None, resume=lambda hello, proof: (0, 0))
    challenge = acceptor.receive(Hello("bob", 2, 222, (), "", "bob", NONCES[0], True))
    assert isinstance(challenge, Challenge)
    other_acceptor = Acceptor(BOB, TOKEN, NONCES[0], check=lambda hello: None, resume=lambda hello, proof: (0, 0))
    reflected = other_acceptor.receive(Hello("bob", 2, 222, (), "", "bob", challenge.nonce, True))
    assert isinstance(reflected, Challenge)
    with pytest.raises(Rejected):
        acceptor.receive(Proof(reflected.proof, 1, (0, 0), True))


def test_a_proof_from_an_earlier_connection_is_rejected() -> None:
    recorded = Handshake().proof()
    later = Handshake(nonces=(NONCES[0], b"m" * NONCE_SIZE))
    later.challenge()
    with pytest.raises(Rejected):
        later.acceptor.receive(recorded)
    assert later.callbacks == []


def test_a_challenge_from_an_earlier_connection_is_rejected() -> None:
    recorded = Handshake().challenge()
    with pytest.raises(Rejected):
        Handshake(nonces=(b"p" * NONCE_SIZE, NONCES[1])).opener.receive(recorded)


@pytest.mark.parametrize(
    "change",
    [{"name": "mallory"}, {"id": 3}, {"incarnation": 112}, {"nonce": b"x" * NONCE_SIZE}],
    ids=lambda change: next(iter(change)),
)
def test_both_sides_detect_a_modified_hello(change: dict[str, object]) -> None:
    handshake = Handshake()
    hello = handshake.opener.start()
    assert isinstance(hello, Hello)
    challenge = handshake.acceptor.receive(msgspec.structs.replace(hello, **change))
    with pytest.raises(Rejected):
        handshake.opener.receive(challenge)
    with pytest.raises(Rejected):
        handshake.acceptor.receive(Handshake().proof())
    assert handshake.callbacks == []


@pytest.mark.parametrize(
    "change",
    [{"incarnation": 223}, {"nonce": b"x" * NONCE_SIZE}, {"proof": b"x" * 32}],
    ids=lambda change: next(iter(change)),
)
def test_an_opener_detects_a_modified_challenge(change: dict[str, object]) -> None:
    handshake = Handshake()
    with pytest.raises(Rejected):
        handshake.opener.receive(msgspec.structs.replace(handshake.challenge(), **change))


def test_a_handshake_is_bound_to_its_channel() -> None:
    with pytest.raises(Rejected):
        Handshake(channels=(b"certificate of mallory", b"certificate of bob")).run()
    assert Handshake(channels=(b"certificate", b"certificate")).run() == (8, 9)


# -- the wrong worker -----------------------------------------------------------------------------------------


def test_a_listener_that_is_not_the_target_says_who_it_is() -> None:
    carol = WorkerRecord("carol", 3, 333, ())
    handshake = Handshake(acceptor_is=carol)
    with pytest.raises(Rejected, match="this is worker 'carol', not 'bob'") as caught:
        handshake.run()
    assert caught.value.greeting.code == "name"
    assert handshake.callbacks == []


@pytest.mark.parametrize("there", [WorkerRecord("carol", 2, 222, ()), WorkerRecord("bob", 3, 222, ())])
def test_an_opener_detects_that_it_reached_another_worker(there: WorkerRecord) -> None:
    handshake = Handshake()
    listener = Handshake(acceptor_is=there, target=there)
    with pytest.raises(
        Rejected, match=f"'bob' \\(id 2\\) was expected here, but this is worker '{there.name}' \\(id {there.id}\\)"
    ):
        handshake.opener.receive(listener.challenge())


def test_a_restarted_worker_is_lost() -> None:
    handshake = Handshake(acceptor_is=WorkerRecord("bob", 2, 999, ()))
    with pytest.raises(WorkerLost, match="'bob' was restarted") as caught:
        handshake.run()
    assert caught.value.worker == "bob"
    assert handshake.callbacks == []


def test_an_unauthenticated_listener_cannot_make_a_worker_look_restarted() -> None:
    with pytest.raises(Rejected):
        Handshake(acceptor_is=WorkerRecord("bob", 2, 999, ()), acceptor_token=OTHER).run()


# -- decisions of the listener's agent ------------------------------------------------------------------------


def test_an_unknown_opener_is_rejected_after_its_proof() -> None:
    handshake = Handshake(check_fails=Rejected("name", "there is no worker 'alice' here"))
    with pytest.raises(Rejected, match="no worker 'alice' here"):
        handshake.run()
    assert handshake.callbacks == ["check"]
    assert handshake.acceptor.proof is None


def test_an_unknown_session_is_rejected() -> None:
    handshake = Handshake(resume_fails=Rejected("session", "the session is not known here any more"))
    with pytest.raises(Rejected, match="not known here"):
        handshake.run()
    assert handshake.callbacks == ["check", "resume"]


@pytest.mark.parametrize("code", ["incarnation", "session"])
def test_a_worker_that_forgot_our_session_is_lost(code: str) -> None:
    with pytest.raises(WorkerLost, match="'bob' cannot resume our session: because") as caught:
        Handshake().opener.receive(Reject(code, "because"))
    assert caught.value.worker == "bob"


def test_a_rejection_raises_an_authentication_error_with_the_reason() -> None:
    with pytest.raises(AuthenticationError, match="'bob' refused our connection: because"):
        Handshake().opener.receive(Reject("token", "because"))
    with pytest.raises(AuthenticationError, match="it ended the handshake: because"):
        Handshake().acceptor.receive(Reject("proof", "because"))


def test_a_rejection_reason_cannot_forge_a_log_line() -> None:
    for side in (Handshake().opener, Handshake().acceptor):
        with pytest.raises(AuthenticationError) as caught:
            side.receive(Reject("proof", "no\nERROR everything is lost"))
        assert "\n" not in str(caught.value)


# -- out of order, and truncated ------------------------------------------------------------------------------

GREETINGS: dict[str, Callable[[], HandshakeMessage]] = {
    "Hello": lambda: Handshake().opener.start(),
    "Challenge": lambda: Handshake().challenge(),
    "Proof": lambda: Handshake().proof(),
    "Welcome": lambda: Welcome((0, 0)),
}


@pytest.mark.parametrize("name", ["Challenge", "Proof", "Welcome"])
def test_a_listener_expects_a_hello_first(name: str) -> None:
    handshake = Handshake()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(GREETINGS[name]())
    assert handshake.callbacks == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Welcome"])
def test_a_listener_expects_a_proof_after_the_challenge(name: str) -> None:
    handshake = Handshake()
    handshake.challenge()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(GREETINGS[name]())
    assert handshake.callbacks == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof", "Welcome"])
def test_a_listener_expects_nothing_after_the_handshake(name: str) -> None:
    handshake = Handshake()
    handshake.run()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(GREETINGS[name]())
    assert handshake.callbacks == ["check", "resume"]


@pytest.mark.parametrize("name", ["Hello", "Proof", "Welcome"])
def test_an_opener_expects_a_challenge_first(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        Handshake().opener.receive(GREETINGS[name]())


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof"])
def test_an_opener_expects_a_welcome_after_its_proof(name: str) -> None:
    handshake = Handshake()
    handshake.proof()
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        handshake.opener.receive(GREETINGS[name]())


@pytest.mark.parametrize("size", [0, NONCE_SIZE - 1, NONCE_SIZE + 1])
def test_a_nonce_of_the_wrong_size_is_rejected(size: int) -> None:
    handshake = Handshake(nonces=(b"o" * size, NONCES[1]))
    with pytest.raises(Rejected, match="a nonce has 32 bytes"):
        handshake.run()
    with pytest.raises(Rejected):
        Handshake(nonces=(NONCES[0], b"l" * size)).run()


@pytest.mark.parametrize("name", list(GREETINGS))
def test_a_truncated_greeting_cannot_be_decoded(name: str) -> None:
    encoded = msgspec.msgpack.encode(GREETINGS[name]())
    for size in range(len(encoded)):
        with pytest.raises(ProtocolError, match="invalid handshake message"):
            decode_handshake(encoded[:size])


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_proof_of_the_wrong_length_is_rejected(size: int) -> None:
    handshake = Handshake()
    proof = handshake.proof()
    with pytest.raises(Rejected):
        handshake.acceptor.receive(msgspec.structs.replace(proof, proof=(proof.proof + b"x")[:size]))
    assert handshake.callbacks == []


# -- secrets --------------------------------------------------------------------------------------------------


def failures() -> list[TelegradError]:
    """Return the error of every way in which a handshake can fail."""
    challenge, proof = Handshake().challenge(), Handshake().proof()
    found = []
    attempts: list[Callable[[], object]] = [
        lambda: Handshake(acceptor_token=OTHER).run(),
        lambda: Handshake(opener_token=None).run(),
        lambda: Handshake(acceptor_token=None).run(),
        lambda: Handshake(acceptor_is=WorkerRecord("bob", 2, 999, ())).run(),
        lambda: Handshake(nonces=(b"p" * NONCE_SIZE, NONCES[1])).opener.receive(challenge),
        lambda: Handshake().acceptor.receive(proof),
        lambda: Handshake().acceptor.receive(challenge),
        lambda: Handshake().opener.receive(proof),
        lambda: Handshake(channels=(b"a", b"b")).run(),
    ]
    for attempt in attempts:
        with pytest.raises(TelegradError) as caught:
            attempt()
        found.append(caught.value)
    return found


def test_errors_contain_neither_token_nor_proofs() -> None:
    secrets = [TOKEN, OTHER, Handshake().challenge().proof, Handshake().proof().proof]
    for error in failures():
        texts = [str(error), repr(error), repr(error.args)]
        if isinstance(error, Rejected):
            texts.append(repr(error.greeting))
        for secret in secrets:
            for text in texts:
                assert repr(secret)[2:-1] not in text
                assert secret.hex() not in text
                assert secret.decode("latin1") not in text
