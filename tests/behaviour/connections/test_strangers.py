"""Whoever cannot prove that it belongs to the group is shut out, noted in one line, and noticed by nobody else."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad.agent.agent import Agent
from telegrad.connection.handshake import NONCE_SIZE, Opener
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import AuthenticationError
from telegrad.protocol.limits import SessionSettings
from telegrad.settings import AgentSettings
from telegrad.testing.group import TOKEN, local_group
from telegrad.transport.addresses import parse_address
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.transport.unix import UnixTransport
from telegrad.waiting import RealRuntime
from telegrad.wire.frames import HEADER, HEADER_SIZE, MAGIC, VERSION, Kind
from telegrad.wire.handshake_messages import Hello, Proof, Reject, Welcome, decode_handshake
from telegrad.wire.messages import Request, encode_head
from telegrad.wire.packing import pack_small

SPARE = 40
"""Runners that a loaded machine's watchdogs may start: few, and not one for each stranger."""
SETTINGS = AgentSettings(session=SessionSettings(request_credits=4))
IMPATIENT = AgentSettings(connect_timeout=1.5)
"""Not for all: on a loaded machine a second may pass where nobody is to blame."""
PATIENCE = 30.0


def frame(
    kind: int,
    body: bytes = b"",
    sequence: int = 0,
    *,
    magic: bytes = MAGIC,
    version: int = VERSION,
    length: int | None = None,
) -> bytes:
    """A frame that may lie about its length."""
    return HEADER.pack(magic, version, kind, len(body) if length is None else length, sequence, 0, 0) + body


def hello(agent: Agent, **other: object) -> Hello:
    good = Hello("c", 2, 7, (), "", agent.me.name, bytes(NONCE_SIZE), True)
    return msgspec.structs.replace(good, **other)


def greeting(value: object) -> bytes:
    return frame(Kind.HANDSHAKE, msgspec.msgpack.encode(value))


def request(call: int, sequence: int) -> bytes:
    """A request whose function does not return before the test lets it."""
    head = encode_head(Request(call, f"{__name__}:wait_for_the_end", 0.0, False))
    return frame(Kind.MESSAGE, bytes(pack_small(head, b"\x80\x05)}\x86.").body), sequence)


class Log(logging.Handler):
    """What the group logs for people, in order."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def next(self) -> str:
        return self._lines.get(timeout=PATIENCE)

    def is_empty(self) -> bool:
        return self._lines.empty()


class Stranger:
    """A bare socket at an agent's door."""

    def __init__(self, agent: Agent) -> None:
        address = parse_address(agent.me.addresses[0])
        self.agent = agent
        self.socket = socket.socket(socket.AF_INET if address.scheme == "tcp" else socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((address.host, address.port) if address.scheme == "tcp" else address.path)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the door may close in the middle of a long speech
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

    def read_to_the_end(self) -> bytes:
        """What comes until the agent closes the connection."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                data += piece
        return data

    def enter_as(self, record: WorkerRecord, token: bytes = TOKEN) -> None:
        """Go through the handshake as a worker that knows the token."""
        opener = Opener(record, self.agent.me, token, os.urandom(NONCE_SIZE), session=1, received=(0, 0), fresh=True)
        self.send(greeting(opener.start()))
        proof = opener.take(self.read_greeting())  # type: ignore[arg-type]  # a greeting, or the test fails
        assert isinstance(proof, Proof)
        self.send(greeting(proof))
        assert isinstance(self.read_greeting(), Welcome)


class Town:
    """A group of real agents, with its log."""

    def __init__(self, agents: dict[str, Agent], log: Log, transport: str) -> None:
        self.a, self.b, self.c = agents["a"], agents["b"], agents["c"]
        self.log = log
        self.transport = transport
        self.numbers = iter(range(1_000_000))
        self.goes_on()
        self.threads = threading.active_count()

    def goes_on(self) -> None:
        number = next(self.numbers)
        assert self.a.call("b", operator.add, (number, 1), timeout=PATIENCE) == number + 1
        assert self.b.call("a", operator.neg, (number,), timeout=PATIENCE) == -number

    def noted_one_line(self, *words: str) -> None:
        """Exactly one line was logged, with these words; and the group works."""
        line = self.log.next()
        for word in words:
            assert word in line
        assert "\n" not in line
        self.goes_on()
        assert self.log.is_empty(), f"a second line: {self.log.next()}"
        assert not self.a.pending.inside()


the_end = threading.Event()


def wait_for_the_end() -> None:
    the_end.wait(PATIENCE)


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    handler, logger = Log(), logging.getLogger("telegrad")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


@contextlib.contextmanager
def a_town(transport: str, log: Log, settings: AgentSettings) -> Iterator[Town]:
    the_end.clear()
    with local_group(["a", "b", "c"], transport=transport, settings=settings) as agents:
        yield Town(agents, log, transport)
        the_end.set()
    while not log.is_empty():
        log.next()


@pytest.fixture(params=["tcp", "unix"])
def town(request: pytest.FixtureRequest, log: Log) -> Iterator[Town]:
    with a_town(request.param, log, SETTINGS) as town:
        yield town


@pytest.fixture(params=["tcp", "unix"])
def impatient_town(request: pytest.FixtureRequest, log: Log) -> Iterator[Town]:
    with a_town(request.param, log, SETTINGS) as town:
        town.a.settings = IMPATIENT  # now that its own connections are there
        yield town


# -- before the handshake -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=5000).filter(lambda data: not MAGIC.startswith(data[:2])))
def test_random_bytes_are_shut_out_and_noted_in_one_line(town: Town, data: bytes) -> None:
    with Stranger(town.a) as stranger:
        stranger.send(data)
        assert stranger.read_to_the_end() == b""
        town.noted_one_line("worker 'a' refused a connection from somebody", "not a telegrad frame")
    assert threading.active_count() <= town.threads + SPARE


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=2048))
def test_random_bytes_in_a_proper_frame_are_shut_out_and_noted_in_one_line(town: Town, body: bytes) -> None:
    with Stranger(town.a) as stranger:
        stranger.send(frame(Kind.HANDSHAKE, body))
        stranger.read_to_the_end()
        town.noted_one_line("worker 'a' refused a connection from")


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
            frame(Kind.HANDSHAKE, b"\x95\x0e\x92\x00\x00" + b"\x91" * 1990),
            "invalid handshake message: maximum recursion depth",
        ),
        (greeting(Reject("proof", "I go\nall is well")), r"it ended the handshake: 'I go\nall is well'"),
        (greeting(Proof(b"", 1, (0, 0), True)), "a Proof out of turn"),
    ],
    ids=["http", "newline", "magic", "version", "length", "message", "kind", "depth", "reject", "proof"],
)
def test_what_is_no_handshake_is_shut_out_and_noted_with_the_reason(town: Town, data: bytes, reason: str) -> None:
    with Stranger(town.a) as stranger:
        stranger.send(data)
        stranger.read_to_the_end()
        town.noted_one_line("worker 'a' refused a connection from somebody", reason)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"target": "z"}, "this is worker 'a', not 'z'"),
        ({"nonce": b"short"}, "a nonce has 32 bytes"),
        ({"has_token": False}, "worker 'a' has a group token and worker 'c' has none"),
    ],
)
def test_a_hello_that_cannot_be_served_is_answered_with_the_reason(
    town: Town, other: dict[str, object], reason: str
) -> None:
    with Stranger(town.a) as stranger:
        stranger.send(greeting(hello(town.a, **other)))
        answer = stranger.read_greeting()
        assert isinstance(answer, Reject)
        assert answer.reason == reason
        assert stranger.read_to_the_end() == b""
        town.noted_one_line("refused a connection", reason)


def test_a_stranger_that_says_hello_and_then_nothing_is_shut_out_in_time(impatient_town: Town) -> None:
    with Stranger(impatient_town.a) as stranger:
        stranger.send(greeting(hello(impatient_town.a)))
        stranger.read_greeting()
        assert stranger.read_to_the_end() == b""
        impatient_town.noted_one_line("worker 'a' refused a connection from worker 'c'", "no proof within 1.5 s")


def test_a_stranger_that_says_nothing_at_all_is_shut_out_in_time(impatient_town: Town) -> None:
    with Stranger(impatient_town.a) as stranger:
        assert stranger.read_to_the_end() == b""
        impatient_town.noted_one_line("worker 'a' refused a connection from somebody", "no proof within 1.5 s")


def test_a_stranger_that_claims_to_be_a_worker_does_it_no_harm(town: Town) -> None:
    """What an unproved peer says of itself must not touch what is held of the worker that it claims to be."""
    town.b.call("a", operator.add, (1, 2))
    claim = hello(town.a, name="b", id=1, incarnation=town.b.me.incarnation + 1)
    with Stranger(town.a) as stranger:
        stranger.send(greeting(claim))
        stranger.read_greeting()
        stranger.send(greeting(Proof(bytes(32), 1, (0, 0), True)))
        answer = stranger.read_greeting()
        assert isinstance(answer, Reject)
        assert "the group tokens differ" in answer.reason
        stranger.read_to_the_end()
        town.noted_one_line("worker 'b' could not prove itself")


def test_at_most_a_few_kilobytes_of_a_stranger_are_read(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = socket.socket.recv_into

    def counting(self: socket.socket, *args: object) -> int:
        count = real(self, *args)  # type: ignore[arg-type]  # passed on as they came
        read.append(count)
        return count

    # Before the connection: its link looks the method up once, when it is made.
    monkeypatch.setattr(socket.socket, "recv_into", counting)
    with Stranger(town.a) as stranger:
        stranger.send(frame(Kind.HANDSHAKE, b"\xc1" * 4_000_000, length=2048))
        stranger.read_to_the_end()
        monkeypatch.undo()
        town.noted_one_line("invalid handshake message")
    assert 0 < sum(read) <= 16 * 1024


def test_a_crowd_of_strangers_leaves_nothing_behind(town: Town) -> None:
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(Stranger(town.a)) for _ in range(100)]
        for number, stranger in enumerate(strangers):
            stranger.send(b"tg"[: number % 3] + b"!" * 40)
        town.goes_on()
        for stranger in strangers:
            stranger.read_to_the_end()
            assert "refused a connection" in town.log.next()
    before = len(os.listdir("/proc/self/fd"))
    town.goes_on()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert town.log.is_empty()
    assert not town.a.pending.inside()
    assert threading.active_count() <= town.threads + SPARE


# -- with another token -------------------------------------------------------------------------------------


def test_a_worker_with_another_token_is_told_that_the_tokens_differ(town: Town) -> None:
    directory = os.environ["TELEGRAD_RUNTIME_DIR"]
    way = (
        (TcpTransport(), "tcp://127.0.0.1:0")
        if town.transport == "tcp"
        else (UnixTransport(), f"unix://{directory}/x.sock")
    )
    other = Agent(
        "c",
        2,
        transports=[way],
        poller=SocketPoller(),
        runtime=RealRuntime(),
        token=b"the token of quite another group",
        host="here",
    )
    try:
        other.start([town.a.me, town.b.me, other.me])
        with pytest.raises(AuthenticationError, match="the group tokens differ: start every worker with the same"):
            other.call("a", operator.add, (1, 2))
        town.noted_one_line("worker 'a' refused a connection from worker 'c'", "the group tokens differ")
    finally:
        other.close()


# -- with the right token -----------------------------------------------------------------------------------

LYING = struct.pack("<IIQ", 10, 1_000_000, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (frame(Kind.MESSAGE, b"", 1, length=2**32 - 1), "a frame of 4,294,967,295 bytes; the limit is 67,108,864"),
        (frame(Kind.MESSAGE, LYING + b"x" * 10, 1), "a message of 10 + 1000000 + 0 bytes in a frame of 26"),
        (frame(Kind.MESSAGE, b"x", 1), "a message of 1 bytes is shorter than its prefix"),
        (frame(Kind.BULK_HEAD, struct.pack("<IIQ", 0, 0, 2**63), 1), "the limit is 68,719,476,736"),
        (frame(Kind.BULK_HEAD, LYING, 1), "a BULK_HEAD of 16 bytes announces a head of 10"),
        (frame(Kind.BULK_CHUNK, b"x", 1), "a BULK_CHUNK without a BULK_HEAD before it"),
        (frame(Kind.MESSAGE, b"x" * 16, 5), "a message of"),
        (frame(Kind.PING, b"x"), "a PING of 1 bytes"),
        (frame(Kind.ACK, b"", 1), "a frame of kind 5 is not part of a message"),
        (b"\0" * 32, "not a telegrad frame"),
    ],
    ids=["frame", "parts", "prefix", "bulk", "bulk head", "chunk", "sequence", "ping", "ack", "zeros"],
)
def test_a_peer_whose_lengths_lie_is_closed_with_the_reason(town: Town, data: bytes, reason: str) -> None:
    with Stranger(town.a) as stranger:
        stranger.enter_as(town.c.me)
        stranger.send(data)
        assert stranger.read_to_the_end() == b""
        # Over tcp the worker may connect again and go on; a broken unix socket means that it is lost.
        start = "closed the connection with" if town.transport == "tcp" else "worker 'a' lost"
        town.noted_one_line(f"{start} worker 'c'", reason)


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
def test_a_peer_that_breaks_the_rules_of_messages_is_lost_with_the_reason(town: Town, data: bytes, reason: str) -> None:
    with Stranger(town.a) as stranger:
        stranger.enter_as(town.c.me)
        stranger.send(data)
        assert stranger.read_to_the_end() == b""
        the_end.set()
        town.noted_one_line("worker 'a' lost worker 'c'", "it broke the protocol", reason)


def test_a_request_whose_values_are_garbage_is_answered_with_an_error(town: Town) -> None:
    head = encode_head(Request(1, "operator:add", 0.0, False))
    with Stranger(town.a) as stranger:
        stranger.enter_as(town.c.me)
        stranger.send(frame(Kind.MESSAGE, bytes(pack_small(head, b"no pickle").body), 1))
        answer = b""
        while b"PayloadError" not in answer:  # an ACK may come first
            answer += stranger._read(HEADER_SIZE)
        town.goes_on()
    # The worker hangs up, which the log may or may not have noted by now.


# -- a genuine peer on a bad line ---------------------------------------------------------------------------


class BadLine:
    """Passes on what two workers say, but for one thing: `garble` changes the first frame of a kind on the way."""

    def __init__(self, target: str, kind: Kind, garble: Callable[[int], int]) -> None:
        address = parse_address(target)
        self._target = (address.host, address.port)
        self._kind = kind
        self._garble = garble
        self.garbled = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for task, source, sink in ((self._forward, client, server), (self._back, server, client)):
                self._threads.append(threading.Thread(target=task, args=(source, sink)))
                self._threads[-1].start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as stream:
            while len(header := stream.read(HEADER_SIZE)) == HEADER_SIZE:
                fields = list(HEADER.unpack(header))
                body = stream.read(fields[3])
                if fields[2] == self._kind and not self.garbled:
                    self.garbled += 1
                    fields[3] = self._garble(fields[3])
                sink.sendall(HEADER.pack(*fields) + body)
        self._hang_up(source, sink)

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._hang_up(source, sink)

    def _hang_up(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._hang_up(self._listener)
        self._listener.close()
        self._threads[0].join()
        self._hang_up(*self._sockets)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._sockets:
            end.close()


times_run: list[int] = []


def note_and_add_one(number: int, x: torch.Tensor) -> torch.Tensor:
    times_run.append(number)
    return x + 1


@pytest.mark.parametrize(
    "garble", [lambda n: n ^ 0x80000000, lambda n: n - 1, lambda n: n // 2], ids=["huge", "-1", "half"]
)
@pytest.mark.parametrize("kind", [Kind.MESSAGE, Kind.BULK_HEAD, Kind.BULK_CHUNK])
def test_a_worker_whose_frame_is_garbled_on_the_way_resumes_and_the_call_returns(
    kind: Kind, garble: Callable[[int], int], log: Log
) -> None:
    x = torch.arange(8.0 if kind == Kind.MESSAGE else 400_000.0)
    times_run.clear()
    with local_group(["a", "b"], transport="tcp") as agents:
        line = BadLine(agents["b"].me.addresses[0], kind, garble)
        try:
            around = msgspec.structs.replace(agents["b"].me, addresses=(line.address,))
            agents["a"].peers.set_group([agents["a"].me, around])
            assert torch.equal(agents["a"].call("b", note_and_add_one, (1, x), timeout=PATIENCE), x + 1)
            assert torch.equal(agents["a"].call("b", note_and_add_one, (2, x), timeout=PATIENCE), x + 1)
            assert times_run == [1, 2]
            assert (line.garbled, line.connections) == (1, 2)
            assert "closed the connection with worker 'a'" in log.next()
            assert log.is_empty()
        finally:
            for agent in agents.values():
                agent.close()
            line.close()
    while not log.is_empty():
        log.next()
