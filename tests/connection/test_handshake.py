"""The handshake: only workers that know the token and are who they say they are get in, and nothing leaks."""

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
class Door:
    """Alice's opener and Bob's acceptor, with a note of all that was asked of Bob's agent."""

    opener_token: bytes | None = TOKEN
    acceptor_token: bytes | None = TOKEN
    opener_is: WorkerRecord = ALICE
    acceptor_is: WorkerRecord = BOB
    target: WorkerRecord = BOB
    nonces: tuple[bytes, bytes] = NONCES
    channels: tuple[bytes, bytes] = (b"", b"")
    asked: list[str] = field(default_factory=list)
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
        self.asked.append("check")
        if self.check_fails is not None:
            raise self.check_fails

    def _resume(self, hello: Hello, proof: Proof) -> tuple[int, int]:
        self.asked.append("resume")
        if self.resume_fails is not None:
            raise self.resume_fails
        return (8, 9)

    def run(self) -> tuple[int, int]:
        """Carry greetings to and fro, as bytes, until the opener is in."""
        greeting = self.opener.start()
        while True:
            answer = self.opener.take(carried(self.acceptor.take(carried(greeting))))
            if isinstance(answer, tuple):
                return answer
            greeting = answer

    def challenge(self) -> Challenge:
        challenge = self.acceptor.take(self.opener.start())
        assert isinstance(challenge, Challenge)
        return challenge

    def proof(self) -> Proof:
        proof = self.opener.take(self.challenge())
        assert isinstance(proof, Proof)
        return proof


def carried(greeting: HandshakeMessage) -> HandshakeMessage:
    encoded = msgspec.msgpack.encode(greeting)
    assert len(encoded) <= HANDSHAKE_LIMITS.frame
    return decode_handshake(encoded)


# -- those who belong here ------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, None])
def test_workers_of_one_group_let_each_other_in(token: bytes | None) -> None:
    door = Door(opener_token=token, acceptor_token=token)
    assert door.run() == (8, 9)
    assert door.asked == ["check", "resume"]
    assert door.acceptor.hello is not None
    assert door.acceptor.proof is not None
    assert (door.acceptor.hello.name, door.acceptor.hello.incarnation) == ("alice", 111)
    assert (door.acceptor.proof.session, door.acceptor.proof.received, door.acceptor.proof.fresh) == (77, (5, 6), False)


def test_the_token_itself_never_travels() -> None:
    door = Door()
    hello = door.opener.start()
    challenge = door.acceptor.take(hello)
    proof = door.opener.take(challenge)
    assert not isinstance(proof, tuple)
    for greeting in (hello, challenge, proof, door.acceptor.take(proof)):
        assert TOKEN not in msgspec.msgpack.encode(greeting)


def test_the_hello_tells_who_opens_and_whom_it_wants() -> None:
    hello = Door().opener.start()
    assert hello == Hello("alice", 1, 111, ("tcp://10.0.0.1:1",), "main-a", "bob", NONCES[0], True)


# -- those who do not know the token --------------------------------------------------------------------------


def test_an_opener_finds_out_that_the_listener_has_another_token() -> None:
    door = Door(opener_token=TOKEN, acceptor_token=OTHER)
    with pytest.raises(
        Rejected, match=r"'bob' could not prove that it belongs to this group.*TELEGRAD_TOKEN"
    ) as caught:
        door.run()
    assert caught.value.greeting.code == "proof"
    assert door.asked == []


def test_a_listener_finds_out_that_the_opener_has_another_token() -> None:
    door, stranger = Door(), Door(opener_token=OTHER, acceptor_token=OTHER)
    challenge = door.challenge()
    door_proof = stranger.proof()
    assert challenge.nonce == NONCES[1]
    with pytest.raises(Rejected, match=r"'alice' could not prove itself.*TELEGRAD_TOKEN") as caught:
        door.acceptor.take(door_proof)
    assert caught.value.greeting.code == "proof"
    assert door.asked == []
    assert door.acceptor.proof is None


@pytest.mark.parametrize(
    ("opener", "listener", "message"),
    [
        (TOKEN, None, "'alice' has a group token and worker 'bob' has none"),
        (None, TOKEN, "'bob' has .* 'alice' has none"),
    ],
)
def test_a_side_without_token_is_named(opener: bytes | None, listener: bytes | None, message: str) -> None:
    door = Door(opener_token=opener, acceptor_token=listener)
    with pytest.raises(Rejected, match=message) as caught:
        door.run()
    assert caught.value.greeting.code == "token"
    assert door.asked == []


def test_an_opener_cannot_talk_a_listener_out_of_its_token() -> None:
    door = Door(opener_token=None)
    hello = door.opener.start()
    assert isinstance(hello, Hello)
    door.acceptor.take(msgspec.structs.replace(hello, has_token=True))
    with pytest.raises(Rejected):
        door.acceptor.take(Proof(b"", 77, (0, 0), True))
    assert door.asked == []


def test_a_listener_cannot_talk_an_opener_out_of_its_token() -> None:
    with pytest.raises(Rejected):
        Door().opener.take(Challenge("bob", 2, 222, NONCES[1], b""))


@given(proof=st.binary(max_size=64))
def test_no_guess_is_a_proof(proof: bytes) -> None:
    door = Door()
    door.challenge()
    with pytest.raises(Rejected):
        door.acceptor.take(Proof(proof, 77, (0, 0), True))
    with pytest.raises(Rejected):
        Door().opener.take(Challenge("bob", 2, 222, NONCES[1], proof))
    assert door.asked == []


# -- proofs that were made for something else -----------------------------------------------------------------


def test_a_listeners_proof_is_not_an_openers() -> None:
    door = Door()
    challenge = door.challenge()
    with pytest.raises(Rejected):
        door.acceptor.take(Proof(challenge.proof, 77, (5, 6), False))
    assert door.asked == []


def test_a_greeting_turned_around_does_not_let_a_stranger_in() -> None:
    # The stranger has Bob challenge himself: he opens to Bob as "bob", and answers with what Bob proves elsewhere.
    bob_listens = Acceptor(BOB, TOKEN, NONCES[1], check=lambda hello: None, resume=lambda hello, proof: (0, 0))
    challenge = bob_listens.take(Hello("bob", 2, 222, (), "", "bob", NONCES[0], True))
    assert isinstance(challenge, Challenge)
    elsewhere = Acceptor(BOB, TOKEN, NONCES[0], check=lambda hello: None, resume=lambda hello, proof: (0, 0))
    mirrored = elsewhere.take(Hello("bob", 2, 222, (), "", "bob", challenge.nonce, True))
    assert isinstance(mirrored, Challenge)
    with pytest.raises(Rejected):
        bob_listens.take(Proof(mirrored.proof, 1, (0, 0), True))


def test_a_proof_of_an_earlier_connection_is_worth_nothing() -> None:
    recorded = Door().proof()
    later = Door(nonces=(NONCES[0], b"m" * NONCE_SIZE))
    later.challenge()
    with pytest.raises(Rejected):
        later.acceptor.take(recorded)
    assert later.asked == []


def test_a_challenge_of_an_earlier_connection_is_worth_nothing() -> None:
    recorded = Door().challenge()
    with pytest.raises(Rejected):
        Door(nonces=(b"p" * NONCE_SIZE, NONCES[1])).opener.take(recorded)


@pytest.mark.parametrize(
    "change",
    [{"name": "mallory"}, {"id": 3}, {"incarnation": 112}, {"nonce": b"x" * NONCE_SIZE}],
    ids=lambda change: next(iter(change)),
)
def test_a_hello_that_was_changed_on_its_way_is_noticed_by_both(change: dict[str, object]) -> None:
    door = Door()
    hello = door.opener.start()
    assert isinstance(hello, Hello)
    challenge = door.acceptor.take(msgspec.structs.replace(hello, **change))
    with pytest.raises(Rejected):
        door.opener.take(challenge)
    with pytest.raises(Rejected):
        door.acceptor.take(Door().proof())
    assert door.asked == []


@pytest.mark.parametrize(
    "change",
    [{"incarnation": 223}, {"nonce": b"x" * NONCE_SIZE}, {"proof": b"x" * 32}],
    ids=lambda change: next(iter(change)),
)
def test_a_challenge_that_was_changed_on_its_way_is_noticed(change: dict[str, object]) -> None:
    door = Door()
    with pytest.raises(Rejected):
        door.opener.take(msgspec.structs.replace(door.challenge(), **change))


def test_a_handshake_cannot_be_moved_to_another_channel() -> None:
    with pytest.raises(Rejected):
        Door(channels=(b"certificate of mallory", b"certificate of bob")).run()
    assert Door(channels=(b"certificate", b"certificate")).run() == (8, 9)


# -- the wrong worker -----------------------------------------------------------------------------------------


def test_a_worker_that_is_not_the_wanted_one_says_who_it_is() -> None:
    carol = WorkerRecord("carol", 3, 333, ())
    door = Door(acceptor_is=carol)
    with pytest.raises(Rejected, match="this is worker 'carol', not 'bob'") as caught:
        door.run()
    assert caught.value.greeting.code == "name"
    assert door.asked == []


@pytest.mark.parametrize("there", [WorkerRecord("carol", 2, 222, ()), WorkerRecord("bob", 3, 222, ())])
def test_an_opener_does_not_take_another_worker_for_the_wanted_one(there: WorkerRecord) -> None:
    door = Door()
    listener = Door(acceptor_is=there, target=there)
    with pytest.raises(Rejected, match=f"the worker there is '{there.name}' \\(id {there.id}\\), not 'bob' \\(2\\)"):
        door.opener.take(listener.challenge())


def test_a_worker_that_was_restarted_is_lost_to_those_who_knew_it() -> None:
    door = Door(acceptor_is=WorkerRecord("bob", 2, 999, ()))
    with pytest.raises(WorkerLost, match="'bob' was restarted") as caught:
        door.run()
    assert caught.value.worker == "bob"
    assert door.asked == []


def test_a_stranger_cannot_make_a_worker_look_restarted() -> None:
    with pytest.raises(Rejected):
        Door(acceptor_is=WorkerRecord("bob", 2, 999, ()), acceptor_token=OTHER).run()


# -- what the listener's agent says ---------------------------------------------------------------------------


def test_an_opener_that_the_agent_does_not_know_is_rejected_after_its_proof() -> None:
    door = Door(check_fails=Rejected("name", "there is no worker 'alice' here"))
    with pytest.raises(Rejected, match="no worker 'alice' here"):
        door.run()
    assert door.asked == ["check"]
    assert door.acceptor.proof is None


def test_a_session_that_the_agent_does_not_know_is_rejected() -> None:
    door = Door(resume_fails=Rejected("session", "the session is not known here any more"))
    with pytest.raises(Rejected, match="not known here"):
        door.run()
    assert door.asked == ["check", "resume"]


@pytest.mark.parametrize("code", ["incarnation", "session"])
def test_an_opener_whose_session_is_gone_has_lost_the_worker(code: str) -> None:
    with pytest.raises(WorkerLost, match="'bob' is not what it was: because") as caught:
        Door().opener.take(Reject(code, "because"))
    assert caught.value.worker == "bob"


def test_a_rejection_is_an_authentication_error_with_the_reason() -> None:
    with pytest.raises(AuthenticationError, match="'bob' refused our connection: because"):
        Door().opener.take(Reject("token", "because"))
    with pytest.raises(AuthenticationError, match="it ended the handshake: because"):
        Door().acceptor.take(Reject("proof", "because"))


def test_a_strangers_reason_cannot_forge_a_line_of_our_log() -> None:
    for side in (Door().opener, Door().acceptor):
        with pytest.raises(AuthenticationError) as caught:
            side.take(Reject("proof", "no\nERROR everything is lost"))
        assert "\n" not in str(caught.value)


# -- out of turn, and cut short -------------------------------------------------------------------------------

GREETINGS: dict[str, Callable[[], HandshakeMessage]] = {
    "Hello": lambda: Door().opener.start(),
    "Challenge": lambda: Door().challenge(),
    "Proof": lambda: Door().proof(),
    "Welcome": lambda: Welcome((0, 0)),
}


@pytest.mark.parametrize("name", ["Challenge", "Proof", "Welcome"])
def test_a_listener_that_waits_for_a_hello_takes_nothing_else(name: str) -> None:
    door = Door()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        door.acceptor.take(GREETINGS[name]())
    assert door.asked == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Welcome"])
def test_a_listener_that_waits_for_a_proof_takes_nothing_else(name: str) -> None:
    door = Door()
    door.challenge()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        door.acceptor.take(GREETINGS[name]())
    assert door.asked == []


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof", "Welcome"])
def test_a_listener_that_let_somebody_in_takes_no_more(name: str) -> None:
    door = Door()
    door.run()
    with pytest.raises(ProtocolError, match=f"a {name} out of turn"):
        door.acceptor.take(GREETINGS[name]())
    assert door.asked == ["check", "resume"]


@pytest.mark.parametrize("name", ["Hello", "Proof", "Welcome"])
def test_an_opener_that_waits_for_a_challenge_takes_nothing_else(name: str) -> None:
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        Door().opener.take(GREETINGS[name]())


@pytest.mark.parametrize("name", ["Hello", "Challenge", "Proof"])
def test_an_opener_that_waits_for_a_welcome_takes_nothing_else(name: str) -> None:
    door = Door()
    door.proof()
    with pytest.raises(ProtocolError, match=f"'bob' sent a {name} out of turn"):
        door.opener.take(GREETINGS[name]())


@pytest.mark.parametrize("size", [0, NONCE_SIZE - 1, NONCE_SIZE + 1])
def test_a_nonce_of_another_size_is_rejected(size: int) -> None:
    door = Door(nonces=(b"o" * size, NONCES[1]))
    with pytest.raises(Rejected, match="a nonce has 32 bytes"):
        door.run()
    with pytest.raises(Rejected):
        Door(nonces=(NONCES[0], b"l" * size)).run()


@pytest.mark.parametrize("name", list(GREETINGS))
def test_a_greeting_that_was_cut_short_cannot_be_read(name: str) -> None:
    encoded = msgspec.msgpack.encode(GREETINGS[name]())
    for size in range(len(encoded)):
        with pytest.raises(ProtocolError, match="invalid handshake message"):
            decode_handshake(encoded[:size])


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_proof_that_was_cut_or_lengthened_is_none(size: int) -> None:
    door = Door()
    proof = door.proof()
    with pytest.raises(Rejected):
        door.acceptor.take(msgspec.structs.replace(proof, proof=(proof.proof + b"x")[:size]))
    assert door.asked == []


# -- secrets --------------------------------------------------------------------------------------------------


def failures() -> list[TelegradError]:
    """Every way in which a handshake with secrets in it fails."""
    challenge, proof = Door().challenge(), Door().proof()
    found = []
    attempts: list[Callable[[], object]] = [
        lambda: Door(acceptor_token=OTHER).run(),
        lambda: Door(opener_token=None).run(),
        lambda: Door(acceptor_token=None).run(),
        lambda: Door(acceptor_is=WorkerRecord("bob", 2, 999, ())).run(),
        lambda: Door(nonces=(b"p" * NONCE_SIZE, NONCES[1])).opener.take(challenge),
        lambda: Door().acceptor.take(proof),
        lambda: Door().acceptor.take(challenge),
        lambda: Door().opener.take(proof),
        lambda: Door(channels=(b"a", b"b")).run(),
    ]
    for attempt in attempts:
        with pytest.raises(TelegradError) as caught:
            attempt()
        found.append(caught.value)
    return found


def test_neither_token_nor_proofs_occur_in_errors() -> None:
    secrets = [TOKEN, OTHER, Door().challenge().proof, Door().proof().proof]
    for error in failures():
        texts = [str(error), repr(error), repr(error.args)]
        if isinstance(error, Rejected):
            texts.append(repr(error.greeting))
        for secret in secrets:
            for text in texts:
                assert repr(secret)[2:-1] not in text
                assert secret.hex() not in text
                assert secret.decode("latin1") not in text
