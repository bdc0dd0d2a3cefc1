"""Whatever connects without a valid preamble or without TLS 1.3 is refused, logged in one line, and disturbs nobody."""

from __future__ import annotations

import contextlib
import operator
import socket
import ssl
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import tls_client
from tests.support.log_lines import PATIENCE, LogLines

from telegrad.agent.agent import Agent
from telegrad.settings import AgentSettings
from telegrad.testing.group import local_group
from telegrad.transport.addresses import parse_address
from telegrad.transport.tls_link import MAX_UNAUTHENTICATED, TlsLink
from telegrad.wire.frames import HEADER, MAGIC, PREAMBLE, VERSION, Kind, pack_header


def hello_of(version: ssl.TLSVersion) -> bytes:
    """Return the first bytes of a client that speaks no newer TLS than `version`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


class Stranger:
    """A plain socket that is connected to worker a."""

    def __init__(self, agents: dict[str, Agent], log: LogLines) -> None:
        self._agents, self._log = agents, log
        self.address = agents["a"].me.addresses[0]

    def knows_the_token_and_says(self, data: bytes) -> bytes:
        """The same after a valid preamble, so that OpenSSL gets `data`."""
        return self.says(tls_client.preamble_for(self.address) + data)

    def says(self, data: bytes) -> bytes:
        """Send `data`, and return what the worker sends before it closes the connection."""
        address = parse_address(self.address)
        answer = b""
        with socket.create_connection((address.host, address.port), timeout=PATIENCE) as sock:
            with contextlib.suppress(ConnectionError):  # the worker may close the connection in the middle
                sock.sendall(data)
                while piece := sock.recv(65536):
                    answer += piece
        return answer

    def is_refused_because(self, reason: str) -> None:
        """Check that one line was logged, and that the group works."""
        line = self._log.next()
        assert "worker 'a' refused a connection from an unknown peer" in line
        assert reason in line
        assert "\n" not in line
        assert self._agents["b"].call("a", operator.add, (1, 2), timeout=PATIENCE) == 3
        assert self._log.is_empty(), f"a second line was logged: {self._log.next()}"
        assert not self._agents["a"].pending.all()
        self._agents["a"].pending.refusals.flush()  # the next one is again the first of its kind


@pytest.fixture
def stranger(log: LogLines) -> Iterator[Stranger]:
    with local_group(transport="tcp") as agents:
        agents["b"].call("a", operator.add, (1, 2), timeout=PATIENCE)
        yield Stranger(agents, log)
    log.clear()


with_one_group = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@with_one_group
@given(data=st.binary(min_size=1, max_size=5000).filter(lambda data: data[:2] not in (b"\x16\3", b"t", b"tg")))
def test_random_bytes_get_no_answer(stranger: Stranger, data: bytes) -> None:
    assert stranger.says(data) == b""
    stranger.is_refused_because("not a worker of this group: it starts with")


@with_one_group
@given(data=st.binary(max_size=5000))
def test_random_bytes_in_a_client_hello_are_refused(stranger: Stranger, data: bytes) -> None:
    record = b"\x01" + len(data).to_bytes(3, "big") + data
    stranger.knows_the_token_and_says(b"\x16\3\1" + len(record).to_bytes(2, "big") + record + b"\x16\3\3\0\0")
    stranger.is_refused_because("invalid TLS")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a worker of this group: it starts with b'GE'"),
        (hello_of(ssl.TLSVersion.TLSv1_3), "a TLS hello without the preamble of a worker: it is not telegrad, or its"),
        (
            pack_header(Kind.HANDSHAKE, 0, 0, 0, 0),
            "it is a worker without TLS, and this worker requires TLS: start all workers with TLS, or none (tls=False)",
        ),
        (HEADER.pack(MAGIC, VERSION + 1, PREAMBLE, 0, 0, 0, 0), f"protocol version {VERSION + 1}, this worker speaks"),
        (
            tls_client.preamble_for("tcp://127.0.0.1:1") + hello_of(ssl.TLSVersion.TLSv1_3),
            "its preamble is not valid; the group tokens differ, or it dialled another address than tcp://127.0.0.1:",
        ),
    ],
    ids=["http", "tls", "plain worker", "another version", "for another worker"],
)
def test_whoever_has_no_valid_preamble_gets_no_answer_and_does_not_reach_openssl(
    stranger: Stranger, data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(link: TlsLink, *args: object, **kwargs: object) -> None:
        raise AssertionError("OpenSSL was used")

    monkeypatch.setattr(TlsLink, "_start_tls", start)
    assert stranger.says(data) == b""
    stranger.is_refused_because(reason)


def test_a_worker_of_another_group_gets_no_answer(stranger: Stranger) -> None:
    other = tls_client.preamble_for(stranger.address, b"the token of quite another group")
    assert stranger.says(other + hello_of(ssl.TLSVersion.TLSv1_3)) == b""
    stranger.is_refused_because("its preamble is not valid; the group tokens differ")


def test_a_preamble_opens_one_connection_only(stranger: Stranger) -> None:
    sent = tls_client.preamble_for(stranger.address) + hello_of(ssl.TLSVersion.TLSv1_2)
    stranger.says(sent)
    stranger.is_refused_because("it offers no TLS 1.3")
    assert stranger.says(sent) == b""
    stranger.is_refused_because("its preamble was used before: somebody repeats what it recorded")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a TLS client hello: it starts with b'GE'"),
        (b"\x16\3\1\0\5\2\0\0\1\0", "not a TLS client hello: it starts with b'\\x16\\x03'"),
        (hello_of(ssl.TLSVersion.TLSv1_2), "it offers no TLS 1.3"),
        (hello_of(ssl.TLSVersion.TLSv1_3) + bytes(2 * MAX_UNAUTHENTICATED), "invalid TLS"),
    ],
    ids=["http", "server hello", "tls 1.2", "hello and zeros"],
)
def test_anything_but_tls_1_3_is_refused_and_logged_with_the_reason(
    stranger: Stranger, data: bytes, reason: str
) -> None:
    stranger.knows_the_token_and_says(data)
    stranger.is_refused_because(reason)


def test_half_a_preamble_or_client_hello_is_refused_after_the_timeout(log: LogLines) -> None:
    with local_group(transport="tcp", settings=AgentSettings(connect_timeout=2.0)) as agents:
        agents["b"].call("a", operator.add, (1, 2), timeout=PATIENCE)
        stranger = Stranger(agents, log)
        assert stranger.knows_the_token_and_says(b"\x16\3\1\x40\0\1\0\x3f\xfc" + bytes(8000)) == b""
        stranger.is_refused_because("no proof within 2 s")
        assert stranger.says(tls_client.preamble_for(stranger.address)[:-1]) == b""
        stranger.is_refused_because("no proof within 2 s")
    log.clear()
