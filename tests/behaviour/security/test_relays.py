"""Nobody between two workers gets past the handshake: relays, swapped certificates, recorded connections."""

from __future__ import annotations

import operator

import msgspec
import pytest
from tests.support.log_lines import LogLines
from tests.support.redirection import redirected
from tests.support.strangers import HoldingRelay, Relay, connect, read_until_closed

from telegrad.errors import AuthenticationError
from telegrad.testing.group import local_group
from telegrad.wire.frames import HEADER, HEADER_SIZE, Kind
from telegrad.wire.handshake_messages import Challenge, Hello, decode_handshake

ran: list[str] = []


def note(text: str) -> None:
    ran.append(text)


def greetings(data: bytes) -> list[type]:
    """Return the types of the messages in a recorded stream, which must all be of the handshake."""
    found = []
    while data:
        fields = HEADER.unpack(data[:HEADER_SIZE])
        assert fields[2] == Kind.HANDSHAKE
        found.append(type(decode_handshake(data[HEADER_SIZE : HEADER_SIZE + fields[3]])))
        data = data[HEADER_SIZE + fields[3] :]
    return found


def test_a_man_in_the_middle_at_the_real_address_gets_no_answer_with_its_own_certificate(log: LogLines) -> None:
    ran.clear()
    with local_group(["a", "b"], transport="tcp") as agents:
        real = agents["b"].me.addresses[0]
        with Relay(real, tls=True) as relay, redirected(agents["a"], real, relay.address):
            with pytest.raises(AuthenticationError, match="'b' did not prove that it belongs to this group"):
                agents["a"].call("b", note, ("for b",))
            assert relay.connections >= 5
            assert set(greetings(b"".join(relay.sent))) == {Hello}
            assert relay.answered == [], "the worker told the relay something"
        assert ran == []
        assert "or somebody relays the connection" in log.next()
        log.clear()
        assert agents["a"].call("b", operator.add, (1, 2)) == 3, "the worker is not lost"


def test_a_man_in_the_middle_cannot_take_over_an_established_session(log: LogLines) -> None:
    ran.clear()
    with local_group(["a", "b"], transport="tcp") as agents:
        real = agents["b"].me.addresses[0]
        agents["a"].call("b", note, ("first",))
        channel = agents["a"].peers.find("b").outgoing
        assert channel is not None
        with Relay(real, tls=True) as relay, redirected(agents["a"], real, relay.address):
            link = channel.link
            assert link is not None
            channel.link_ended(link, "cut by the test")
            call = agents["a"].begin("b", note, ("second",), timeout=60)
            while relay.connections < 2:
                assert not agents["a"].wait(call, agents["a"].runtime.now() + 0.01)
            assert relay.answered == []
        agents["a"].wait(call)
        agents["a"].result(call)
        assert ran == ["first", "second"]
        assert agents["a"].peers.find("b").outgoing is channel, "the session survived"
    log.clear()


def test_an_address_that_was_rewritten_leads_to_nothing(log: LogLines) -> None:
    # As in a store without authentication: worker a believes that b is where the relay listens. Without TLS, the proofs
    # are the same on both sides of the relay, but the address that was dialled is not one of b's.
    ran.clear()
    with local_group(["a", "b"], transport="plain tcp") as agents:
        with Relay(agents["b"].me.addresses[0], tls=False) as relay:
            wrong = msgspec.structs.replace(agents["b"].me, addresses=(relay.address,))
            agents["a"].peers.set_group([agents["a"].me, wrong])
            with pytest.raises(AuthenticationError, match="'b' refused our connection: worker 'a' dialled tcp://"):
                agents["a"].call("b", note, ("for b",))
        assert ran == []
        assert "somebody redirects connections" in log.next()
    log.clear()


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_a_proof_that_somebody_held_back_does_not_end_the_session_that_came_after(tls: bool, log: LogLines) -> None:
    ran.clear()
    with local_group(["a", "b"], transport="tcp" if tls else "plain tcp") as agents:
        real = agents["b"].me.addresses[0]
        with HoldingRelay(real, answers=2 if tls else 1) as relay, redirected(agents["a"], real, relay.address):
            agents["a"].call("b", note, ("once",))  # over the second connection
            assert relay.connections == 2
            channel = agents["b"].peers.find("a").incoming
            relay.drops_answers = True
            call = agents["a"].begin("b", note, ("not answered",), timeout=60)
            while len(ran) < 2:
                assert not agents["a"].wait(call, agents["a"].runtime.now() + 0.01)
            relay.release.set()
            while relay.is_holding:
                assert not agents["a"].wait(call, agents["a"].runtime.now() + 0.01)
            relay.drops_answers = False
            assert agents["b"].peers.find("a").incoming is channel
            outgoing = agents["a"].peers.find("b").outgoing
            assert outgoing is not None
            assert outgoing.link is not None
            outgoing.link_ended(outgoing.link, "cut by the test")
            agents["a"].wait(call)
            agents["a"].result(call)
        assert ran == ["once", "not answered"]
        assert relay.answer == b""
    log.clear()


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_a_recorded_connection_cannot_be_repeated(tls: bool, log: LogLines) -> None:
    ran.clear()
    with local_group(["a", "b"], transport="tcp" if tls else "plain tcp") as agents:
        real = agents["b"].me.addresses[0]
        with Relay(real, tls=False) as tap, redirected(agents["a"], real, tap.address):
            agents["a"].call("b", note, ("once",))
            recorded = b"".join(tap.sent)
        with connect(real) as sock:
            sock.sendall(recorded)
            answer = read_until_closed(sock)
        line = log.next()
        if tls:  # OpenSSL got nothing of it
            assert answer == b""
            assert "refused a connection" in line
            assert "its preamble was used before: somebody repeats what it recorded" in line
        else:  # its Hello is as good as before, but not the Proof
            assert greetings(answer) == [Challenge]
            assert ("refused a connection" in line) or ("closed the connection" in line)
        assert ran == ["once"]
    log.clear()
