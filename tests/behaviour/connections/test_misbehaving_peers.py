"""Unauthenticated and misbehaving peers are disconnected, logged in one line, and do not disturb the group."""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import tls_client
from tests.support.log_lines import PATIENCE, LogLines

from telegrad.agent.agent import Agent
from telegrad.connection.group_keys import derive_keys
from telegrad.connection.handshake import NONCE_SIZE, Opener, Refused
from telegrad.connection.refusal_log import FIRST
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import TOKEN, local_group
from telegrad.transport.addresses import parse_address
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tls import TlsTransport
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.frames import HEADER, HEADER_SIZE, MAGIC, VERSION, Kind
from telegrad.wire.handshake_messages import Challenge, Hello, Proof, Reject, Welcome, decode_handshake
from telegrad.wire.messages import Request, encode_head
from telegrad.wire.packing import pack_small

SPARE = 40
"""Runners that the watchdogs may start on a loaded machine: few, and not one for each connection."""
SETTINGS = AgentSettings(session=SessionSettings(request_credits=4))
SHORT_TIMEOUT = AgentSettings(connect_timeout=2.0)
"""Only for tests that need the timeout: on a loaded machine a handshake may take a second."""


def frame(
    kind: int,
    body: bytes = b"",
    sequence: int = 0,
    *,
    magic: bytes = MAGIC,
    version: int = VERSION,
    length: int | None = None,
) -> bytes:
    """Return a frame, possibly with a wrong length."""
    return HEADER.pack(magic, version, kind, len(body) if length is None else length, sequence, 0, 0) + body


class RawChannel:
    """What a raw peer knows of its connection to an agent."""

    peer_names = None

    def __init__(self, agent: Agent) -> None:
        transport = agent.peers.connector.dialer._transports.get("tcp")
        self.binding = transport._credentials.binding if isinstance(transport, TlsTransport) else b""


def opener(agent: Agent, record: WorkerRecord, token: bytes | None = TOKEN) -> Opener:
    return Opener(
        record,
        agent.me,
        None if token is None else derive_keys(token).handshake,
        os.urandom(NONCE_SIZE),
        dialled=agent.me.addresses[0],
        attempt=time.monotonic_ns(),
        session=1,
        received=(0, 0),
        fresh=True,
        link=RawChannel(agent),
    )


def hello(agent: Agent, record: WorkerRecord, token: bytes | None = TOKEN) -> Hello:
    """Return the Hello of a worker that knows `token`."""
    hello = opener(agent, record, token).start()
    assert isinstance(hello, Hello)
    return hello


def greeting(value: object) -> bytes:
    return frame(Kind.HANDSHAKE, msgspec.msgpack.encode(value))


def request(call: int, sequence: int) -> bytes:
    """Return a request whose function blocks until the test releases it."""
    head = encode_head(Request(call, f"{__name__}:wait_for_release", 0.0, False))
    return frame(Kind.MESSAGE, bytes(pack_small(head, b"\x80\x05)}\x86.").body), sequence)


class RawPeer:
    """A socket that is connected to an agent, with TLS if the agent uses it."""

    def __init__(self, agent: Agent) -> None:
        address = parse_address(agent.me.addresses[0])
        self.agent = agent
        self.socket = socket.socket(socket.AF_INET if address.scheme == "tcp" else socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((address.host, address.port) if address.scheme == "tcp" else address.path)
        if agent.me.tls:
            self.socket = tls_client.wrap(self.socket, tls_client.preamble_for(agent.me.addresses[0]))

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # the agent may close the connection in the middle
            self.socket.sendall(data)

    def read_greeting(self) -> object:
        header = self._read(HEADER_SIZE)
        return decode_handshake(self._read(HEADER.unpack(header)[3]))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            assert piece, "the connection was closed in the middle of a greeting"
            data += piece
        return data

    def read_until_closed(self) -> bytes:
        """Return what the agent sends until it closes the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError, ssl.SSLError):
            while piece := self.socket.recv(65536):
                data += piece
        return data

    def authenticate_as(self, record: WorkerRecord, token: bytes = TOKEN) -> None:
        """Perform the handshake as a worker that knows the token."""
        side = opener(self.agent, record, token)
        self.send(greeting(side.start()))
        proof = side.receive(self.read_greeting())  # type: ignore[arg-type]  # a greeting, or the test fails
        assert isinstance(proof, Proof)
        self.send(greeting(proof))
        assert isinstance(self.read_greeting(), Welcome)


class LoggedGroup:
    """A group of agents whose log lines are checked."""

    def __init__(self, agents: dict[str, Agent], log: LogLines, transport: str) -> None:
        self.a, self.b, self.c = agents["a"], agents["b"], agents["c"]
        self.log = log
        self.transport = transport
        self.numbers = iter(range(1_000_000))
        self.check_works()
        self.threads = threading.active_count()

    def check_works(self) -> None:
        number = next(self.numbers)
        assert self.a.call("b", operator.add, (number, 1), timeout=PATIENCE) == number + 1
        assert self.b.call("a", operator.neg, (number,), timeout=PATIENCE) == -number

    def assert_one_log_line(self, *words: str) -> None:
        """Check that exactly one line was logged, that it contains `words`, and that the group works."""
        line = self.log.next()
        for word in words:
            assert word in line
        assert "\n" not in line
        self.check_works()
        assert self.log.is_empty(), f"a second line was logged: {self.log.next()}"
        assert not self.a.pending.all()
        self.a.pending.refusals.flush()  # the next one is again the first of its kind


release = threading.Event()


def wait_for_release() -> None:
    release.wait(PATIENCE)


@contextlib.contextmanager
def logged_group(transport: str, log: LogLines, settings: AgentSettings) -> Iterator[LoggedGroup]:
    release.clear()
    with local_group(["a", "b", "c"], transport=transport, settings=settings) as agents:
        yield LoggedGroup(agents, log, transport)
        release.set()
    log.clear()


@pytest.fixture(params=["tcp", "unix"])
def group(request: pytest.FixtureRequest, log: LogLines) -> Iterator[LoggedGroup]:
    with logged_group(request.param, log, SETTINGS) as group:
        yield group


@pytest.fixture(params=["tcp", "unix"])
def impatient_group(request: pytest.FixtureRequest, log: LogLines) -> Iterator[LoggedGroup]:
    with logged_group(request.param, log, SHORT_TIMEOUT) as group:
        yield group


# -- before the handshake -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=5000).filter(lambda data: not MAGIC.startswith(data[:2])))
def test_random_bytes_are_refused_with_one_log_line(group: LoggedGroup, data: bytes) -> None:
    with RawPeer(group.a) as peer:
        peer.send(data)
        assert peer.read_until_closed() == b""
        group.assert_one_log_line("worker 'a' refused a connection from an unknown peer", "not a telegrad frame")
    assert threading.active_count() <= group.threads + SPARE


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=2048))
def test_random_bytes_in_a_valid_frame_are_refused_with_one_log_line(group: LoggedGroup, body: bytes) -> None:
    with RawPeer(group.a) as peer:
        peer.send(frame(Kind.HANDSHAKE, body))
        peer.read_until_closed()
        group.assert_one_log_line("worker 'a' refused a connection from")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a telegrad frame: it starts with b'GE'"),
        (b"\n", "not a telegrad frame: it starts with b'\\n'"),
        (frame(Kind.HANDSHAKE, b"", magic=b"gt"), "not a telegrad frame: it starts with b'gt'"),
        (frame(Kind.HANDSHAKE, b"", version=99), f"protocol version 99, this worker speaks {VERSION}"),
        (frame(Kind.HANDSHAKE, b"x" * 100, length=10_000_000), "a frame of 10,000,000 bytes; the limit is 2,048"),
        (frame(Kind.MESSAGE, b"x" * 100, 1), "a frame of kind 2 before the handshake"),
        (frame(99), "a frame of unknown kind 99"),
        (
            frame(Kind.HANDSHAKE, b"\x92\x0e\x92\x00\x00" + b"\x91" * 1990),
            "invalid handshake message",
        ),
        (greeting(Reject("c", 2, 7, "proof", "I go\nall is well", b"")), "a Reject out of turn"),
        (greeting(Proof(b"")), "a Proof out of turn"),
    ],
    ids=["http", "newline", "magic", "version", "length", "message", "kind", "depth", "reject", "proof"],
)
def test_anything_but_a_handshake_is_refused_and_logged_with_the_reason(
    group: LoggedGroup, data: bytes, reason: str
) -> None:
    with RawPeer(group.a) as peer:
        peer.send(data)
        peer.read_until_closed()
        group.assert_one_log_line("worker 'a' refused a connection from an unknown peer", reason)


@pytest.mark.parametrize(
    ("token", "change", "reason"),
    [
        (b"the token of quite another group", {}, "claims to be worker 'c', but could not prove it"),
        (None, {}, "claims to be worker 'c' and has no group token"),
        (TOKEN, {"target": "b"}, "could not prove it"),
        (TOKEN, {"proof": bytes(32)}, "could not prove it"),
    ],
    ids=["token", "no token", "changed", "proof"],
)
def test_a_hello_that_is_not_proved_gets_no_answer(
    group: LoggedGroup, token: bytes | None, change: dict[str, object], reason: str
) -> None:
    with RawPeer(group.a) as peer:
        peer.send(greeting(msgspec.structs.replace(hello(group.a, group.c.me, token), **change)))
        assert peer.read_until_closed() == b""
        group.assert_one_log_line("worker 'a' refused a connection from an unknown peer", reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "z"}, "there is no worker 'z' with id 2 in this group"),
        ({"accept": "registered"}, "TELEGRAD_ACCEPT to the same on every worker"),
    ],
    ids=["name", "mode"],
)
def test_a_member_that_does_not_fit_learns_the_reason(
    group: LoggedGroup, change: dict[str, object], reason: str
) -> None:
    side = opener(group.a, msgspec.structs.replace(group.c.me, **change))
    with RawPeer(group.a) as peer:
        peer.send(greeting(side.start()))
        answer = peer.read_greeting()
        if isinstance(answer, Challenge):
            peer.send(greeting(side.receive(answer)))
            answer = peer.read_greeting()
        assert isinstance(answer, Reject)
        with pytest.raises(Refused, match=reason):
            side.receive(answer)
        assert peer.read_until_closed() == b""
        group.assert_one_log_line("refused a connection from worker", reason)


def test_a_peer_that_stalls_after_its_hello_is_refused_after_the_timeout(impatient_group: LoggedGroup) -> None:
    with RawPeer(impatient_group.a) as peer:
        peer.send(greeting(hello(impatient_group.a, impatient_group.c.me)))
        peer.read_greeting()
        assert peer.read_until_closed() == b""
        impatient_group.assert_one_log_line("worker 'a' refused a connection from worker 'c'", "no proof within 2 s")


def test_a_silent_peer_is_refused_after_the_timeout(impatient_group: LoggedGroup) -> None:
    with RawPeer(impatient_group.a) as peer:
        assert peer.read_until_closed() == b""
        impatient_group.assert_one_log_line(
            "worker 'a' refused a connection from an unknown peer", "no proof within 2 s"
        )


def test_an_unauthenticated_peer_does_not_affect_the_worker_that_it_claims_to_be(group: LoggedGroup) -> None:
    group.b.call("a", operator.add, (1, 2))
    # Without TLS, somebody may have recorded a Hello.
    recorded = hello(group.a, msgspec.structs.replace(group.b.me, incarnation=group.b.me.incarnation + 1))
    with RawPeer(group.a) as peer:
        peer.send(greeting(recorded))
        peer.read_greeting()
        peer.send(greeting(Proof(bytes(32))))
        assert peer.read_until_closed() == b""
        group.assert_one_log_line("a connection from worker 'b'", "its Proof is not proved")


def test_only_a_few_kilobytes_are_read_from_an_unauthenticated_peer(
    group: LoggedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = socket.socket.recv_into

    def counting(self: socket.socket, *args: object) -> int:
        count = real(self, *args)  # type: ignore[arg-type]  # forwarded unchanged
        read.append(count)
        return count

    # Patched before connecting: a link looks the method up once, when it is created.
    monkeypatch.setattr(socket.socket, "recv_into", counting)
    with RawPeer(group.a) as peer:
        peer.send(frame(Kind.HANDSHAKE, b"\xc1" * 4_000_000, length=2048))
        peer.read_until_closed()
        monkeypatch.undo()
        group.assert_one_log_line("invalid handshake message")
    assert 0 < sum(read) <= 32 * 1024


def test_many_unauthenticated_connections_leave_nothing_behind(group: LoggedGroup) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(group.a)) for _ in range(100)]
        for number, peer in enumerate(peers):
            peer.send(b"tg"[: number % 3] + b"!" * 40)
        group.check_works()
        for peer in peers:
            peer.read_until_closed()
    for _ in range(FIRST):
        assert "refused a connection" in group.log.next()
    group.a.pending.refusals.flush()
    assert "worker 'a' refused 100 connections from 1 address" in group.log.next()
    before = len(os.listdir("/proc/self/fd"))
    group.check_works()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert group.log.is_empty()
    assert not group.a.pending.all()
    assert threading.active_count() <= group.threads + SPARE


# -- another token -------------------------------------------------------------------------------------


def test_a_worker_with_another_token_learns_that_the_tokens_differ(group: LoggedGroup) -> None:
    directory, token = os.environ["TELEGRAD_RUNTIME_DIR"], b"the token of quite another group"
    way = (
        (TlsTransport(derive_keys(token).preamble), "tcp://127.0.0.1:0")
        if group.transport == "tcp"
        else (UnixTransport(), f"unix://{directory}/x.sock")
    )
    other = Agent(
        "c",
        2,
        transports=[way],
        poller=SocketPoller(),
        runtime=RealRuntime(),
        token=token,
        host="here",
    )
    try:
        other.start([group.a.me, group.b.me, other.me])
        with pytest.raises(AuthenticationError, match="Start every worker with the same TELEGRAD_TOKEN") as caught:
            other.call("a", operator.add, (1, 2))
        if group.transport == "tcp":
            assert "a worker with another group token does that" in str(caught.value)
            reason = "its preamble is not valid; the group tokens differ"
        else:
            reason = "claims to be worker 'c', but could not prove it; the group tokens differ"
        assert not other.peers.find("a").gone
        for _ in range(group.log.count()):
            assert reason in group.log.next()
        group.check_works()
    finally:
        other.close()


# -- the right token -----------------------------------------------------------------------------------

WRONG_LENGTHS = struct.pack("<IIQ", 10, 1_000_000, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(Kind.MESSAGE, b"", 1, length=2**32 - 1), "a frame of 4,294,967,295 bytes; the limit is 67,108,864"),
        (frame(Kind.MESSAGE, WRONG_LENGTHS + b"x" * 10, 1), "a message of 10 + 1000000 + 0 bytes in a frame of 26"),
        (frame(Kind.MESSAGE, b"x", 1), "a message of 1 bytes is shorter than its prefix"),
        (frame(Kind.BULK_HEAD, struct.pack("<IIQ", 0, 0, 2**63), 1), "the limit is 68,719,476,736"),
        (frame(Kind.BULK_HEAD, WRONG_LENGTHS, 1), "a BULK_HEAD of 16 bytes announces a head of 10"),
        (frame(Kind.BULK_CHUNK, b"x", 1), "a BULK_CHUNK without a BULK_HEAD before it"),
        (frame(Kind.MESSAGE, b"x" * 16, 5), "a message of"),
        (frame(Kind.PING, b"x"), "a PING of 1 bytes"),
        (frame(Kind.ACK, b"", 1), "a frame of kind 5 is not part of a message"),
        (b"\0" * 32, "not a telegrad frame"),
    ],
    ids=["frame", "parts", "prefix", "bulk", "bulk head", "chunk", "sequence", "ping", "ack", "zeros"],
)
def test_a_peer_that_sends_malformed_frames_is_disconnected_with_the_reason(
    group: LoggedGroup, data: bytes, reason: str
) -> None:
    with RawPeer(group.a) as peer:
        peer.authenticate_as(group.c.me)
        peer.send(data)
        assert peer.read_until_closed() == b""
        # Over tcp the worker may reconnect and resume. A broken unix connection means that it is lost.
        start = "closed the connection with" if group.transport == "tcp" else "worker 'a' lost"
        group.assert_one_log_line(f"{start} worker 'c'", reason)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(Kind.MESSAGE, struct.pack("<IIQ", 8, 0, 0) + b"\xff" * 8, 1), "invalid message head"),
        (frame(Kind.MESSAGE, struct.pack("<IIQ", 0, 0, 0), 1), "invalid message head"),
        (
            frame(Kind.MESSAGE, bytes(pack_small(msgspec.msgpack.encode([2, 1]), b"").body), 1),
            "sent a Reply in the wrong direction",
        ),
        (b"".join(request(call, call) for call in range(1, 7)), "beyond its credits"),
    ],
    ids=["garbage", "empty", "a reply", "overdrawn"],
)
def test_a_peer_that_sends_invalid_messages_is_lost_with_the_reason(
    group: LoggedGroup, data: bytes, reason: str
) -> None:
    with RawPeer(group.a) as peer:
        peer.authenticate_as(group.c.me)
        peer.send(data)
        assert peer.read_until_closed() == b""
        release.set()
        group.assert_one_log_line("worker 'a' lost worker 'c'", "it broke the protocol", reason)


def test_a_request_with_unreadable_arguments_gets_an_error_reply(group: LoggedGroup) -> None:
    head = encode_head(Request(1, "operator:add", 0.0, False))
    with RawPeer(group.a) as peer:
        peer.authenticate_as(group.c.me)
        peer.send(frame(Kind.MESSAGE, bytes(pack_small(head, b"no pickle").body), 1))
        answer = b""
        while b"PayloadError" not in answer:  # an ACK may come first
            answer += peer._read(HEADER_SIZE)
        group.check_works()
