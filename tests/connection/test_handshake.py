"""Only workers that know the token and prove their identity pass the handshake, and no secret leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.connection.group_keys import derive_keys
from telegrad.connection.handshake import (
    NONCE_SIZE,
    Acceptor,
    AnotherWorker,
    Opener,
    Refused,
    Rejected,
    StaleGeneration,
)
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError, ProtocolError, TelegradError, WorkerLost
from telegrad.wire.frames import HANDSHAKE_LIMITS
from telegrad.wire.handshake_messages import (
    Challenge,
    Description,
    HandshakeMessage,
    Hello,
    Proof,
    Purpose,
    Reject,
    Welcome,
    decode_handshake,
)

TOKEN = b"a token of 128 bits, or a few more"
OTHER = b"the token of quite another group.."
ALICE = WorkerRecord("alice", 1, 111, ("tcp://10.0.0.1:1",), host="host-a", main="main-a")
BOB = WorkerRecord("bob", 2, 222, ("tcp://10.0.0.2:2", "tcp://10.0.0.3:2"))
CAROL = WorkerRecord("carol", 3, 333, ("tcp://10.0.0.2:2",))
NONCES = (b"o" * NONCE_SIZE, b"l" * NONCE_SIZE)


@dataclass
class Channel:
    """What one side knows of the connection."""

    binding: bytes = b""
    peer_names: tuple[str, ...] | None = None


def key_of(token: bytes | None) -> bytes | None:
    return None if token is None else derive_keys(token).handshake


@dataclass
class Handshake:
    """Alice's opener and Bob's acceptor, with a record of the callbacks to Bob's agent."""

    opener_token: bytes | None = TOKEN
    acceptor_token: bytes | None = TOKEN
    opener_is: WorkerRecord = ALICE
    acceptor_is: WorkerRecord = BOB
    target: WorkerRecord = BOB
    dialled: str = "tcp://10.0.0.2:2"
    nonces: tuple[bytes, bytes] = NONCES
    channels: tuple[Channel, Channel] = field(default_factory=lambda: (Channel(), Channel()))
    callbacks: list[str] = field(default_factory=list)
    check_fails: Exception | None = None
    resume_fails: Exception | None = None
    purpose: Purpose = Purpose.SESSION
    known_generation: int = -1

    def __post_init__(self) -> None:
        self.opener = Opener(
            self.opener_is,
            self.target,
            key_of(self.opener_token),
            self.nonces[0],
            dialled=self.dialled,
            attempt=3,
            session=77,
            received=(5, 6),
            fresh=False,
            link=self.channels[0],
            purpose=self.purpose,
        )
        self.acceptor = Acceptor(
            self.acceptor_is,
            key_of(self.acceptor_token),
            self.nonces[1],
            check=self._check,
            resume=self._resume,
            known_generation=lambda hello: self.known_generation,
            describe=lambda hello: Description(f"member {hello.session}".encode(), 1, True, b""),
            link=self.channels[1],
        )

    def _check(self, hello: Hello) -> None:
        self.callbacks.append("check")
        if self.check_fails is not None:
            raise self.check_fails

    def _resume(self, hello: Hello) -> tuple[int, int]:
        self.callbacks.append("resume")
        if self.resume_fails is not None:
            raise self.resume_fails
        return (8, 9)

    def run(self, relay: Callable[[HandshakeMessage], HandshakeMessage] = lambda greeting: greeting) -> tuple[int, int]:
        """Exchange greetings, as bytes and through `relay`, until the handshake is complete."""
        greeting = self.opener.start()
        while True:
            response = self.acceptor.receive(relay(reencoded(greeting)))
            answer = self.opener.receive(relay(reencoded(response)))
            if isinstance(answer, tuple):
                return answer
            greeting = answer

    def rejection(self) -> Reject:
        """Return the Reject that Bob sends."""
        with pytest.raises(Rejected) as caught:
            self.run()
        assert caught.value.greeting is not None
        return caught.value.greeting

    def hello(self) -> Hello:
        hello = self.opener.start()
        assert isinstance(hello, Hello)
        return hello

    def challenge(self) -> Challenge:
        challenge = self.acceptor.receive(self.opener.start())
        assert isinstance(challenge, Challenge)
        return challenge

    def proof(self) -> Proof:
        proof = self.opener.receive(self.challenge())
        assert isinstance(proof, Proof)
        return proof

    def welcome(self) -> Welcome:
        welcome = self.acceptor.receive(self.proof())
        assert isinstance(welcome, Welcome)
        return welcome


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
    hello = handshake.acceptor.hello
    assert hello is not None
    assert handshake.acceptor.proof is not None
    assert (hello.name, hello.incarnation, hello.host, hello.main) == ("alice", 111, "host-a", "main-a")
    assert (hello.session, hello.received, hello.fresh) == (77, (5, 6), False)


def test_neither_the_token_nor_the_key_is_ever_sent() -> None:
    greetings: list[HandshakeMessage] = []

    def relay(greeting: HandshakeMessage) -> HandshakeMessage:
        greetings.append(greeting)
        return greeting

    Handshake().run(relay)
    assert [type(greeting) for greeting in greetings] == [Hello, Challenge, Proof, Welcome]
    key = key_of(TOKEN)
    assert key is not None
    for greeting in greetings:
        assert TOKEN not in msgspec.msgpack.encode(greeting)
        assert key not in msgspec.msgpack.encode(greeting)


def test_a_long_hello_fits_into_a_handshake_frame() -> None:
    addresses = (
        f"unix:///{'p' * 100}",
        f"tcp://{'h' * 253}:65535",
        "tcp://[2001:db8:1111:2222:3333:4444:5555:6666]:65535",
    )
    me = WorkerRecord("a" * 127, 65535, 2**64 - 1, addresses, host="h" * 64, main="m" * 16, accept="registered")
    target = WorkerRecord("b" * 127, 65534, 2**64 - 1, (addresses[1],), accept="registered")
    handshake = Handshake(opener_is=me, acceptor_is=target, target=target, dialled=addresses[1])
    assert handshake.run() == (8, 9)


# -- strangers are told nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opener", "listener", "reason"),
    [
        (OTHER, TOKEN, "claims to be worker 'alice', but could not prove it; the group tokens differ"),
        (None, TOKEN, "claims to be worker 'alice' and has no group token, but this worker has one"),
        (TOKEN, None, "claims to be worker 'alice' and has a group token, but this worker has none"),
    ],
)
def test_a_hello_with_another_token_is_not_answered(opener: bytes | None, listener: bytes | None, reason: str) -> None:
    handshake = Handshake(opener_token=opener, acceptor_token=listener)
    with pytest.raises(AuthenticationError, match=reason) as caught:
        handshake.run()
    assert type(caught.value) is AuthenticationError, "there is no greeting to send"
    assert handshake.callbacks == []
    assert handshake.acceptor.hello is None


def test_a_claimed_name_cannot_forge_a_log_line() -> None:
    hello = msgspec.structs.replace(Handshake().hello(), name="x\nall is well" + "y" * 1000)
    with pytest.raises(AuthenticationError) as caught:
        Handshake().acceptor.receive(hello)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_guessed_proof_is_not_answered() -> None:
    for proof in (b"", b"x", b"x" * 32, b"x" * 33):
        with pytest.raises(AuthenticationError):
            Handshake().acceptor.receive(msgspec.structs.replace(Handshake().hello(), proof=proof))


@pytest.mark.parametrize("token", [OTHER, None])
def test_an_opener_detects_a_listener_with_another_token(token: bytes | None) -> None:
    # The stranger accepts any Hello, since it cannot check it, and answers with what it can make.
    hello = Handshake().hello()
    stranger = Acceptor(
        BOB,
        key_of(token),
        NONCES[1],
        check=print,
        resume=lambda hello: (0, 0),
        known_generation=lambda hello: -1,
        describe=lambda hello: Description(b"", 0, False, b""),
        link=Channel(),
    )
    stranger.hello = hello
    challenge = stranger._transcript.prove("listener", Challenge("bob", 2, 222, "any", -1, NONCES[1], b""))
    with pytest.raises(AuthenticationError, match="the listener could not prove that it is worker 'bob' of this group"):
        Handshake().opener.receive(challenge)


# -- relayed, replayed and reflected messages -------------------------------------------------------------------


def test_a_relay_between_two_connections_does_not_pass() -> None:
    # Somebody in between has a certificate of its own, which the opener sees.
    handshake = Handshake(channels=(Channel(b"certificate of mallory"), Channel(b"certificate of bob")))
    with pytest.raises(AuthenticationError, match="or somebody relays the connection"):
        handshake.run()
    assert handshake.callbacks == []
    same = Handshake(channels=(Channel(b"certificate of bob"), Channel(b"certificate of bob")))
    assert same.run() == (8, 9)


def test_a_recorded_hello_gets_a_challenge_that_its_proof_does_not_answer() -> None:
    recorded = Handshake()
    hello, proof = recorded.hello(), Handshake().proof()
    later = Handshake(nonces=(NONCES[0], b"m" * NONCE_SIZE))
    assert isinstance(later.acceptor.receive(hello), Challenge)
    with pytest.raises(AuthenticationError, match="its Proof is not proved: it repeats what it recorded"):
        later.acceptor.receive(proof)
    assert later.callbacks == []
    assert later.acceptor.proof is None


def test_a_challenge_from_an_earlier_connection_is_not_believed() -> None:
    recorded = Handshake().challenge()
    later = Handshake(nonces=(b"p" * NONCE_SIZE, NONCES[1]))
    later.opener.start()
    with pytest.raises(AuthenticationError, match="could not prove"):
        later.opener.receive(recorded)


def test_a_listeners_proof_is_not_accepted_from_an_opener() -> None:
    handshake = Handshake()
    challenge = handshake.challenge()
    with pytest.raises(AuthenticationError, match="its Proof is not proved"):
        handshake.acceptor.receive(Proof(challenge.proof))
    assert handshake.callbacks == []


def test_a_reflected_handshake_does_not_pass() -> None:
    # Bob opens a connection to himself. The attacker gives Bob the opener what Bob the opener said, and gives Bob the
    # listener what Bob the listener said on another connection.
    bob = Handshake(opener_is=BOB, acceptor_is=BOB, target=BOB)
    hello, challenge = Handshake(opener_is=BOB, target=BOB).hello(), bob.challenge()
    other = Handshake(opener_is=BOB, acceptor_is=BOB, target=BOB, nonces=(NONCES[0], challenge.nonce))
    with pytest.raises(AuthenticationError, match="could not prove"):
        Handshake(opener_is=BOB, target=BOB).opener.receive(hello)
    for proof in (challenge.proof, other.challenge().proof, hello.proof):
        with pytest.raises(AuthenticationError, match="its Proof is not proved"):
            bob.acceptor.receive(Proof(proof))
    assert bob.callbacks == other.callbacks == []


def changed_values(value: object) -> st.SearchStrategy[object]:
    """Return strategies for other values of the same type."""
    match value:
        case bool():
            return st.just(not value)
        case int():
            return st.integers(0, 2**64 - 1).filter(lambda other: other != value)
        case str():
            return st.text(max_size=30).filter(lambda other: other != value)
        case bytes():
            flipped = st.integers(0, len(value) * 8 - 1).map(lambda bit: flip(value, bit))
            return flipped | st.binary(max_size=64).filter(lambda other: other != value)
        case ():  # devices
            return st.lists(st.tuples(st.text(max_size=9), st.integers(0, 9)), min_size=1, max_size=3).map(tuple)
        case tuple() if all(isinstance(item, int) for item in value):
            return st.tuples(*(st.integers(0, 2**64 - 1) for _ in value)).filter(lambda other: other != value)
    return st.lists(st.text(max_size=30), max_size=3).map(tuple).filter(lambda other: other != value)


def flip(value: bytes, bit: int) -> bytes:
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (Hello, Challenge, Proof, Welcome) for name in kind.__struct_fields__]
)
@given(data=st.data())
def test_no_field_of_any_message_can_be_changed(kind: type, name: str, data: st.DataObject) -> None:
    def relay(greeting: HandshakeMessage) -> HandshakeMessage:
        if type(greeting) is not kind:
            return greeting
        changed = data.draw(changed_values(getattr(greeting, name)))
        return msgspec.structs.replace(greeting, **{name: changed})

    handshake = Handshake()
    with pytest.raises(AuthenticationError) as caught:
        handshake.run(relay)
    assert type(caught.value) is AuthenticationError
    if kind is not Welcome:
        assert handshake.callbacks == []


@pytest.mark.parametrize("name", Reject.__struct_fields__)
@given(data=st.data())
def test_no_field_of_a_reject_can_be_changed(name: str, data: st.DataObject) -> None:
    handshake = Handshake(resume_fails=Rejected("session", "the session is not known here any more"))
    rejection = handshake.rejection()
    changed = data.draw(changed_values(getattr(rejection, name)))
    with pytest.raises(AuthenticationError, match="refused without proving itself") as caught:
        handshake.opener.receive(msgspec.structs.replace(rejection, **{name: changed}))
    assert type(caught.value) is AuthenticationError


@given(order=st.lists(st.sampled_from(range(8)), max_size=6))
def test_no_other_order_of_messages_passes(order: list[int]) -> None:
    # What an attacker has recorded of two handshakes, and may say to Bob in any order.
    recorded: list[HandshakeMessage] = []
    for nonces in (NONCES, (b"p" * NONCE_SIZE, b"m" * NONCE_SIZE)):
        earlier = Handshake(nonces=nonces)
        earlier.run(lambda greeting: recorded.append(greeting) or greeting)  # type: ignore[func-returns-value]
    later = Handshake(nonces=(b"q" * NONCE_SIZE, b"n" * NONCE_SIZE))
    for index in order:
        try:
            later.acceptor.receive(recorded[index])
        except TelegradError:
            break
    assert later.callbacks == []
    later = Handshake(nonces=(b"q" * NONCE_SIZE, b"n" * NONCE_SIZE))
    later.opener.start()
    for index in order:
        with pytest.raises((AuthenticationError, ProtocolError)):
            later.opener.receive(recorded[index])


# -- modes, addresses and certificates ------------------------------------------------------------------------


def test_workers_that_accept_different_calls_refuse_each_other() -> None:
    strict = msgspec.structs.replace(BOB, accept="registered")
    handshake = Handshake(acceptor_is=strict, target=strict)
    rejection = handshake.rejection()
    sentence = (
        "worker 'bob' accepts only exposed functions (accept='registered'), and worker 'alice' any function "
        "(accept='any'): set Options(accept=...) or TELEGRAD_ACCEPT to the same on every worker"
    )
    assert (rejection.code, rejection.reason) == ("mode", sentence)
    with pytest.raises(Refused, match="TELEGRAD_ACCEPT to the same on every worker"):
        handshake.opener.receive(rejection)
    assert handshake.callbacks == []


def test_an_opener_does_not_accept_a_listener_with_another_mode() -> None:
    # A listener that does not check the mode.
    handshake = Handshake()
    handshake.acceptor._me = msgspec.structs.replace(BOB, accept="registered")
    hello = handshake.opener.start()
    assert handshake.acceptor._transcript.check("opener", hello)
    challenge = Challenge("bob", 2, 222, "registered", -1, NONCES[1], b"")
    with pytest.raises(Rejected, match="accept='registered'") as caught:
        handshake.opener.receive(handshake.acceptor._transcript.prove("listener", challenge))
    assert caught.value.greeting is not None


def test_an_opener_that_was_redirected_is_refused() -> None:
    handshake = Handshake(dialled="tcp://10.6.6.6:6")
    rejection = handshake.rejection()
    assert rejection.code == "address"
    assert "dialled tcp://10.6.6.6:6, but worker 'bob' announces tcp://10.0.0.2:2, tcp://10.0.0.3:2" in rejection.reason
    assert handshake.callbacks == []
    assert Handshake(dialled="tcp://10.0.0.3:2").run() == (8, 9)


def test_a_listener_checks_the_name_in_the_openers_certificate() -> None:
    handshake = Handshake(channels=(Channel(), Channel(peer_names=("carol",))))
    rejection = handshake.rejection()
    assert (rejection.code, rejection.reason) == ("certificate", "the certificate of worker 'alice' is for 'carol'")
    assert handshake.callbacks == []
    nameless = Handshake(channels=(Channel(), Channel(peer_names=()))).rejection()
    assert nameless.reason == "the certificate of worker 'alice' has no DNS name (subjectAltName)"
    assert Handshake(channels=(Channel(), Channel(peer_names=("x", "alice")))).run() == (8, 9)


def test_an_opener_checks_the_name_in_the_listeners_certificate() -> None:
    handshake = Handshake(channels=(Channel(peer_names=("carol",)), Channel()))
    with pytest.raises(Rejected, match="the certificate of worker 'bob' is for 'carol'") as caught:
        handshake.opener.receive(handshake.challenge())
    assert caught.value.greeting is not None
    with pytest.raises(AuthenticationError, match="it ended the handshake: the certificate of worker 'bob'"):
        handshake.acceptor.receive(caught.value.greeting)
    assert Handshake(channels=(Channel(peer_names=("bob",)), Channel())).run() == (8, 9)


# -- the wrong worker -----------------------------------------------------------------------------------------


def test_an_opener_learns_that_another_worker_of_the_group_listens_there() -> None:
    handshake = Handshake(acceptor_is=CAROL)
    rejection = handshake.rejection()
    assert (rejection.code, rejection.reason) == ("name", "this is worker 'carol', not 'bob'")
    with pytest.raises(AnotherWorker, match=r"'bob' \(id 2\) was expected at tcp://10.0.0.2:2, but worker 'carol'"):
        handshake.opener.receive(rejection)
    assert handshake.callbacks == []


@pytest.mark.parametrize("there", [WorkerRecord("carol", 2, 222, ()), WorkerRecord("bob", 3, 222, ())])
def test_an_opener_detects_that_it_reached_another_worker(there: WorkerRecord) -> None:
    handshake = Handshake()
    hello = handshake.opener.start()
    assert handshake.acceptor._transcript.check("opener", hello)
    challenge = Challenge(there.name, there.id, there.incarnation, "any", -1, NONCES[1], b"")
    with pytest.raises(AnotherWorker, match=f"but worker '{there.name}' \\(id {there.id}\\) of this group"):
        handshake.opener.receive(handshake.acceptor._transcript.prove("listener", challenge))


@pytest.mark.parametrize("code", ["incarnation", "session"])
def test_only_the_worker_itself_can_say_that_it_forgot_our_session(code: str) -> None:
    handshake = Handshake()
    assert handshake.acceptor._transcript.check("opener", handshake.opener.start())
    handshake.acceptor._me = CAROL
    with pytest.raises(AnotherWorker):
        handshake.opener.receive(handshake.acceptor.reject(code, "because"))


def test_a_restarted_worker_is_lost() -> None:
    handshake = Handshake(acceptor_is=msgspec.structs.replace(BOB, incarnation=999))
    with pytest.raises(WorkerLost, match="'bob' was restarted") as caught:
        handshake.run()
    assert caught.value.worker == "bob"
    assert handshake.callbacks == []


# -- decisions of the listener's agent ------------------------------------------------------------------------


def test_an_unknown_opener_is_rejected_after_its_proof() -> None:
    handshake = Handshake(check_fails=Rejected("name", "there is no worker 'alice' here"))
    rejection = handshake.rejection()
    assert handshake.callbacks == ["check"]
    assert handshake.acceptor.proof is None
    with pytest.raises(Refused, match="'bob' refused our connection: there is no worker 'alice' here"):
        handshake.opener.receive(rejection)


@pytest.mark.parametrize("code", ["incarnation", "session"])
@pytest.mark.parametrize("token", [TOKEN, None])
def test_a_worker_that_forgot_our_session_is_lost(code: str, token: bytes | None) -> None:
    handshake = Handshake(opener_token=token, acceptor_token=token, resume_fails=Rejected(code, "because"))
    rejection = handshake.rejection()
    assert handshake.callbacks == ["check", "resume"]
    with pytest.raises(WorkerLost, match="'bob' cannot resume our session: because") as caught:
        handshake.opener.receive(rejection)
    assert caught.value.worker == "bob"


@pytest.mark.parametrize("code", ["incarnation", "session", "name", "mode"])
def test_a_reject_without_a_proof_says_nothing_about_the_worker(code: str) -> None:
    for proof in (b"", b"x" * 32):
        opener = Handshake().opener
        opener.start()
        with pytest.raises(AuthenticationError, match="refused without proving itself, and said: because") as caught:
            opener.receive(Reject("bob", 2, 222, code, "because", proof))
        assert type(caught.value) is AuthenticationError


def test_a_rejection_reason_is_one_short_line() -> None:
    handshake = Handshake(check_fails=Rejected("name", "no\nERROR everything is lost" + "é" * 5000))
    rejection = handshake.rejection()
    assert len(msgspec.msgpack.encode(rejection)) <= HANDSHAKE_LIMITS.frame
    for greeting in (rejection, Reject("bob", 2, 222, "name", "no\nERROR" + "x" * 1000, b"")):
        opener = Handshake().opener
        opener.start()
        with pytest.raises(AuthenticationError) as caught:
            opener.receive(greeting)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


# -- out of order, and truncated ------------------------------------------------------------------------------

GREETINGS: dict[str, Callable[[], HandshakeMessage]] = {
    "Hello": lambda: Handshake().opener.start(),
    "Challenge": lambda: Handshake().challenge(),
    "Proof": lambda: Handshake().proof(),
    "Welcome": lambda: Handshake().welcome(),
    "Reject": lambda: Reject("alice", 1, 111, "name", "because", b""),
}


@pytest.mark.parametrize("name", ["Challenge", "Proof", "Welcome", "Reject"])
def test_a_listener_expects_a_hello_first(name: str) -> None:
    handshake = Handshake()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(GREETINGS[name]())
    assert handshake.callbacks == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Welcome", "Reject"])
def test_a_listener_expects_a_proof_after_the_challenge(name: str) -> None:
    handshake = Handshake()
    handshake.challenge()
    with pytest.raises(AuthenticationError, match=f"its {name} is not proved"):
        handshake.acceptor.receive(GREETINGS[name]())
    assert handshake.callbacks == []


def without_token(name: str) -> HandshakeMessage:
    return msgspec.structs.replace(GREETINGS[name](), proof=b"")


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Welcome"])
def test_a_listener_without_a_token_expects_a_proof_after_the_challenge(name: str) -> None:
    handshake = Handshake(opener_token=None, acceptor_token=None)
    handshake.challenge()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(without_token(name))
    assert handshake.callbacks == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof", "Welcome"])
def test_a_listener_expects_nothing_after_the_handshake(name: str) -> None:
    handshake = Handshake(opener_token=None, acceptor_token=None)
    handshake.run()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        handshake.acceptor.receive(without_token(name))
    assert handshake.callbacks == ["check", "resume"]


@pytest.mark.parametrize("name", ["Hello", "Proof", "Welcome"])
def test_an_opener_expects_a_challenge_first(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        Handshake(opener_token=None).opener.receive(without_token(name))


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof"])
def test_an_opener_expects_a_welcome_after_its_proof(name: str) -> None:
    handshake = Handshake(opener_token=None, acceptor_token=None)
    handshake.proof()
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        handshake.opener.receive(without_token(name))


@pytest.mark.parametrize("size", [0, NONCE_SIZE - 1, NONCE_SIZE + 1])
def test_a_nonce_of_the_wrong_size_is_rejected(size: int) -> None:
    handshake = Handshake(nonces=(b"o" * size, NONCES[1]))
    with pytest.raises(ProtocolError, match=f"a nonce has 32 bytes, not {size}"):
        handshake.run()
    with pytest.raises(ProtocolError, match=f"a nonce has 32 bytes, not {size}"):
        Handshake(nonces=(NONCES[0], b"l" * size)).run()


@pytest.mark.parametrize("name", list(GREETINGS))
def test_a_truncated_greeting_cannot_be_decoded(name: str) -> None:
    encoded = msgspec.msgpack.encode(GREETINGS[name]())
    for size in range(len(encoded)):
        with pytest.raises(ProtocolError, match="invalid handshake message"):
            decode_handshake(encoded[:size])


# -- secrets --------------------------------------------------------------------------------------------------


def failures() -> list[TelegradError]:
    """Return the error of every way in which a handshake can fail."""
    challenge, proof = Handshake().challenge(), Handshake().proof()
    found = []
    attempts: list[Callable[[], object]] = [
        lambda: Handshake(acceptor_token=OTHER).run(),
        lambda: Handshake(opener_token=None).run(),
        lambda: Handshake(acceptor_token=None).run(),
        lambda: Handshake(acceptor_is=msgspec.structs.replace(BOB, incarnation=999)).run(),
        lambda: Handshake(nonces=(b"p" * NONCE_SIZE, NONCES[1])).opener.receive(challenge),
        lambda: Handshake(check_fails=Rejected("name", "no")).run(),
        lambda: Handshake().acceptor.receive(proof),
        lambda: Handshake().acceptor.receive(challenge),
        lambda: Handshake().opener.receive(proof),
        lambda: Handshake(channels=(Channel(b"a"), Channel(b"b"))).run(),
    ]
    for attempt in attempts:
        with pytest.raises(TelegradError) as caught:
            attempt()
        found.append(caught.value)
    return found


def test_errors_contain_neither_token_nor_keys_nor_proofs() -> None:
    secrets = [TOKEN, OTHER, *(key_of(token) or b"" for token in (TOKEN, OTHER))]
    secrets += [Handshake().challenge().proof, Handshake().proof().proof]
    for error in failures():
        texts = [str(error), repr(error), repr(error.args)]
        if isinstance(error, Rejected):
            texts.append(repr(error.greeting))
        for secret in secrets:
            for text in texts:
                assert repr(secret)[2:-1] not in text
                assert secret.hex() not in text
                assert secret.decode("latin1") not in text


@pytest.mark.parametrize("purpose", [Purpose.VOTE, Purpose.PROBE])
def test_a_question_is_answered_without_a_session(purpose: Purpose) -> None:
    handshake = Handshake(purpose=purpose)
    assert handshake.run() == (0, 0)
    assert handshake.callbacks == ["check"]


@pytest.mark.parametrize("name", ["", "bob"])
def test_a_member_describes_its_group_to_who_knows_only_an_address(name: str) -> None:
    target = msgspec.structs.replace(
        BOB, name=name, id=BOB.id if name else 9, incarnation=BOB.incarnation if name else 0
    )
    handshake = Handshake(purpose=Purpose.DESCRIBE, target=target)
    found = handshake.acceptor.receive(handshake.opener.start())
    found = handshake.acceptor.receive(handshake.opener.receive(found))  # type: ignore[arg-type]  # its Proof
    assert isinstance(found, Description)
    assert handshake.opener.receive(reencoded(found)) == found
    assert (found.record, found.state, found.is_open) == (b"member 77", 1, True)
    assert handshake.callbacks == ["check"]


def test_only_a_question_about_the_group_may_be_addressed_to_anybody() -> None:
    handshake = Handshake(purpose=Purpose.PROBE, target=msgspec.structs.replace(BOB, name=""))
    with pytest.raises(Rejected, match="this is worker 'bob', not ''"):
        handshake.run()


def test_a_description_must_be_proved() -> None:
    handshake = Handshake(purpose=Purpose.DESCRIBE)
    challenge = handshake.acceptor.receive(handshake.opener.start())
    found = handshake.acceptor.receive(handshake.opener.receive(challenge))  # type: ignore[arg-type]  # its Proof
    with pytest.raises(AuthenticationError, match="could not prove"):
        handshake.opener.receive(msgspec.structs.replace(found, is_open=False))  # type: ignore[type-var]


def test_a_newcomer_learns_the_generation_that_it_has_to_exceed() -> None:
    handshake = Handshake(purpose=Purpose.VOTE, known_generation=4)
    with pytest.raises(StaleGeneration, match="generation 4 exists") as caught:
        handshake.run()
    assert caught.value.known == 4
    assert handshake.callbacks == []
