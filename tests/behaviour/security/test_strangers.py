"""Strangers are told nothing, and what they say has no effect on the worker in whose place they say it."""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.support.log_lines import LogLines
from tests.support.redirection import redirected
from tests.support.stalls import Stalls
from tests.support.strangers import Listener, connect, read_exactly, read_until_closed
from tests.support.tls_client import preamble_for

from telegrad.errors import AuthenticationError, DeadlineExceeded, OtherVersion, TelegradError
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.wire.frames import HEADER, HEADER_SIZE, MAGIC, VERSION, Kind, pack_header
from telegrad.wire.handshake_messages import Challenge, Reject, Welcome

Answer = Callable[[socket.socket], None]


def saying(data: bytes) -> Answer:
    """Return a stranger that reads a Hello and answers with `data`."""

    def answer(sock: socket.socket) -> None:
        read_exactly(sock, HEADER.unpack(read_exactly(sock, HEADER_SIZE))[3])
        sock.sendall(data)
        read_until_closed(sock)

    return answer


def greeting(message: object) -> Answer:
    body = msgspec.msgpack.encode(message)
    return saying(pack_header(Kind.HANDSHAKE, len(body), 0, 0, 0) + body)


STRANGERS: dict[str, Answer] = {
    "incarnation": greeting(Reject("b", 1, 7, "incarnation", "I am another one", b"")),
    "session": greeting(Reject("b", 1, 7, "session", "I forgot", bytes(32))),
    "name": greeting(Reject("c", 2, 7, "name", "line1\nworker 'a' lost worker 'b'", b"")),
    "welcome": greeting(Welcome((0, 0), b"")),
    "challenge": greeting(Challenge("b", 1, 7, "any", -1, os.urandom(32), os.urandom(32))),
    "version": saying(HEADER.pack(MAGIC, VERSION - 1, Kind.HANDSHAKE, 0, 0, 0, 0)),
    "garbage": saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "frame": saying(pack_header(Kind.MESSAGE, 16, 1, 0, 0) + bytes(16)),
    "close": lambda sock: None,
}


@pytest.mark.parametrize("transport", ["tcp", "plain tcp"])
@pytest.mark.parametrize("what", STRANGERS)
def test_a_first_call_fails_soon_and_the_worker_is_not_lost(what: str, transport: str, log: LogLines) -> None:
    with local_group(["a", "b"], transport=transport) as agents:
        real = agents["b"].me.addresses[0]
        with Listener(STRANGERS[what], tls=transport == "tcp") as stranger:
            with redirected(agents["a"], real, stranger.address):
                start = time.monotonic()
                with pytest.raises(OtherVersion if what == "version" else AuthenticationError) as caught:
                    agents["a"].call("b", operator.add, (1, 2), timeout=60)
                assert 1.0 < time.monotonic() - start < 20.0  # 1.1 s on an idle machine
                assert stranger.connections >= 5
                assert "\n" not in str(caught.value)
                if what != "version":
                    assert "Start every worker with the same TELEGRAD_TOKEN" in str(caught.value)
        assert not agents["a"].peers.find("b").gone
        assert agents["a"].call("b", operator.add, (1, 2)) == 3
    log.clear()


@pytest.mark.parametrize("transport", ["tcp", "plain tcp"])
@pytest.mark.parametrize("what", STRANGERS)
def test_an_established_session_survives_a_stranger_at_its_address(what: str, transport: str, log: LogLines) -> None:
    with local_group(["a", "b"], transport=transport) as agents:
        real = agents["b"].me.addresses[0]
        agents["a"].call("b", operator.add, (1, 2))
        channel = agents["a"].peers.find("b").outgoing
        assert channel is not None
        with Listener(STRANGERS[what], tls=transport == "tcp") as stranger:
            with redirected(agents["a"], real, stranger.address):
                link = channel.link
                assert link is not None
                channel.link_ended(link, "cut by the test")
                call = agents["a"].begin("b", operator.add, (3, 4), timeout=60)
                while stranger.connections < 3:
                    assert not agents["a"].wait(call, agents["a"].runtime.now() + 0.01)
        agents["a"].wait(call)
        assert agents["a"].result(call) == 7
        assert agents["a"].peers.find("b").outgoing is channel
    log.clear()


def test_all_who_wait_for_the_same_connection_get_the_error_at_once(log: LogLines) -> None:
    with local_group(["a", "b"], transport="tcp") as agents:
        with Listener(STRANGERS["close"], tls=True) as stranger:
            with redirected(agents["a"], agents["b"].me.addresses[0], stranger.address):

                def call(_: int) -> type:
                    with pytest.raises(TelegradError) as caught:
                        agents["a"].call("b", operator.add, (1, 2), timeout=60)
                    return caught.type

                with Stalls() as stalls:
                    start = time.monotonic()
                    with ThreadPoolExecutor(8) as pool:
                        assert set(pool.map(call, range(8))) == {AuthenticationError}
                    took = time.monotonic() - start
                # One after the other they would take 9 s. A late one begins anew.
                assert took < 8.0 + stalls.seconds
    log.clear()


def test_a_deadline_that_passes_first_says_what_was_seen(log: LogLines) -> None:
    with local_group(["a", "b"], transport="plain tcp") as agents:
        with Listener(STRANGERS["name"]) as stranger:
            with redirected(agents["a"], agents["b"].me.addresses[0], stranger.address):
                with pytest.raises(DeadlineExceeded, match="last attempt: the listener refused without proving itself"):
                    agents["a"].call("b", operator.add, (1, 2), timeout=0.2)
    log.clear()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_workers_with_different_modes_refuse_each_other(transport: str, log: LogLines) -> None:
    with local_group(["a", "b"], transport=transport) as agents:
        strict = msgspec.structs.replace(agents["b"].me, accept="registered")
        agents["b"].me = agents["b"].local.me = strict
        agents["b"].local.settings = AgentSettings(accept="registered")
        sentence = r"'b' accepts only exposed functions .* and worker 'a' any function .*TELEGRAD_ACCEPT to the same"
        with pytest.raises(AuthenticationError, match=f"'b' refused our connection: worker {sentence}"):
            agents["a"].call("b", operator.add, (1, 2))
        assert "TELEGRAD_ACCEPT to the same on every worker" in log.next()
        with pytest.raises(AuthenticationError, match="TELEGRAD_ACCEPT"):
            agents["b"].call("a", operator.add, (1, 2))
        assert not agents["a"].peers.find("b").gone
    log.clear()


@pytest.mark.parametrize(
    "probe",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-scanner\r\n", b"\0" * 64, MAGIC + bytes(30), b"\x16\3\1\0\5hello"],
    ids=["http", "ssh", "zeros", "magic", "tls"],
)
@pytest.mark.parametrize("inside", ["plain", "tls"])
def test_a_scanner_reads_nothing_from_a_worker(probe: bytes, inside: str, log: LogLines) -> None:
    with local_group(["a", "b"], transport="tcp") as agents:
        address = agents["a"].me.addresses[0]
        # It gets inside only with a preamble that it took from a member, and that the worker has not seen.
        with connect(address, preamble=preamble_for(address) if inside == "tls" else b"") as sock:
            sock.sendall(probe)
            answer = read_until_closed(sock)
        assert answer == b""
        assert "refused a connection from an unknown peer" in log.next()
        assert agents["b"].call("a", operator.add, (1, 2)) == 3
    log.clear()
