"""A member gets through while strangers flood its worker, and the flood leaves little behind.

`benchmarks/floods.py` measures the times. On a loaded machine they vary, so the limits here are generous: before silent
connections were evicted first, such a member waited for seconds, or was lost.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support import tls_client
from tests.support.log_lines import LogLines
from tests.support.processes import wait_until
from tests.support.stalls import Stalls

from telegrad.agent.agent import Agent
from telegrad.connection.accept import MAX_PENDING
from telegrad.connection.refusal_log import FIRST
from telegrad.testing.group import local_group
from telegrad.testing.simulation import Simulation
from telegrad.transport.addresses import parse_address
from telegrad.transport.memory import MemoryTransport
from telegrad.transport.socket_link import SocketLink
from telegrad.transport.tls_link import TlsLink
from telegrad.wire.frames import Kind, pack_header

PATIENCE = 60.0
STRANGERS = 3000
LIMIT = 3.0  # seconds for a reconnect; it takes about 20 ms on an idle machine


@pytest.fixture
def log() -> Iterator[LogLines]:
    handler, logger = LogLines(), logging.getLogger("telegrad")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < STRANGERS + 1000:
        pytest.skip(f"this user may open only {limits[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (STRANGERS + 1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def reconnect(member: Agent, to: str) -> float:
    """Break the connection of `member`, and return how long its next call takes, without stalls of the machine."""
    channel = member.peers.find(to).outgoing
    assert channel is not None
    assert isinstance(channel.link, SocketLink)
    with socket.socket(fileno=os.dup(channel.link.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)
    with Stalls() as stalls:
        began = time.monotonic()
        assert member.call(to, operator.add, (1, 2), timeout=PATIENCE) == 3
        took = time.monotonic() - began
    return took - stalls.seconds


def open_connections(agent: Agent, stack: contextlib.ExitStack, first_bytes: bytes) -> None:
    """Open very many connections from the members' own address, and send the same on each of them."""
    address = parse_address(agent.me.addresses[0])
    for _ in range(STRANGERS):
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.connect_ex((address.host, address.port))
        if first_bytes:
            with contextlib.suppress(OSError):  # not connected yet, or closed already
                sock.send(first_bytes)


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"",
        pack_header(Kind.HANDSHAKE, 100, 0, 0, 0)[:1],
        pack_header(Kind.HANDSHAKE, 100, 0, 0, 0),
        b"GET / HTTP/1.1\r\n" * 5,
        client_hello(),
        tls_client.preamble_for("tcp://127.0.0.1:1") + client_hello(),
    ],
    ids=["silent", "one byte", "a header", "another protocol", "tls hellos", "preambles for another worker"],
)
def test_a_member_reconnects_during_a_flood(many_files: None, log: LogLines, first_bytes: bytes) -> None:
    with local_group(transport="tcp") as group, contextlib.ExitStack() as stack:
        group["b"].call("a", operator.add, (1, 2), timeout=PATIENCE)
        open_connections(group["a"], stack, first_bytes)
        took = reconnect(group["b"], "a")
        assert took < LIMIT
        assert len(group["a"].pending.all()) <= MAX_PENDING
        group["a"].pending.refusals.flush()
    lines = [log.next()]
    while not log.is_empty():
        lines.append(log.next())
    assert len(lines) <= 3 * FIRST + 4, lines
    assert any("connections from 1 address in the last" in line for line in lines)


@pytest.mark.parametrize("with_preamble", [False, True], ids=["no preamble", "one recorded preamble"])
def test_a_member_reconnects_and_openssl_rests_while_tls_hellos_come_all_the_time(
    many_files: None, log: LogLines, with_preamble: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, sent, started = threading.Event(), [0], [0]
    start_tls = TlsLink._start_tls

    def counting(link: TlsLink, context: ssl.SSLContext, *, opens: bool) -> None:
        started[0] += not opens
        start_tls(link, context, opens=opens)

    def flood(address: tuple[str, int], data: bytes) -> None:
        while not stop.is_set():
            with socket.create_connection(address) as sock, contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(data)
                sent[0] += 1
                sock.recv(1)

    with local_group(transport="tcp") as group:
        where = parse_address(group["a"].me.addresses[0])
        preamble = tls_client.preamble_for(group["a"].me.addresses[0]) if with_preamble else b""
        group["b"].call("a", operator.add, (1, 2), timeout=PATIENCE)
        monkeypatch.setattr(TlsLink, "_start_tls", counting)
        thread = threading.Thread(target=flood, args=((where.host, where.port), preamble + client_hello()))
        thread.start()
        try:
            wait_until(lambda: sent[0] > 20)
            assert max(reconnect(group["b"], "a") for _ in range(3)) < LIMIT
        finally:
            stop.set()
            thread.join()
        assert sent[0] > 20
        # Those of the member, some of which may take two attempts, and of the first who uses the recorded preamble.
        assert 3 <= started[0] - with_preamble <= 6
    log.clear()


def test_a_member_reconnects_while_connections_come_and_go(many_files: None) -> None:
    stop = threading.Event()

    def churn(address: tuple[str, int]) -> None:
        while not stop.is_set():
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.connect(address)

    with local_group(transport="tcp") as group:
        group["b"].call("a", operator.add, (1, 2), timeout=PATIENCE)
        where = parse_address(group["a"].me.addresses[0])
        thread = threading.Thread(target=churn, args=((where.host, where.port),))
        thread.start()
        try:
            assert max(reconnect(group["b"], "a") for _ in range(3)) < LIMIT
        finally:
            stop.set()
            thread.join()


def test_a_worker_without_file_descriptors_evicts_strangers_for_others(many_files: None, log: LogLines) -> None:
    with local_group(["a"], transport="tcp") as group, contextlib.ExitStack() as stack:
        address = parse_address(group["a"].me.addresses[0])
        for _ in range(20):
            stack.enter_context(socket.create_connection((address.host, address.port)))
        wait_until(lambda: len(group["a"].pending.all()) == 20)
        others = [stack.enter_context(socket.socket()) for _ in range(3)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files: list[int] = []
        stack.callback(lambda: [os.close(fd) for fd in files])
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            for other in others:  # they have their descriptors; the worker needs one for each
                other.connect((address.host, address.port))
                peer = f"127.0.0.1:{other.getsockname()[1]}"
                wait_until(lambda peer=peer: peer in [one.link.peer for one in group["a"].pending.all()])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert 18 <= len(group["a"].pending.all()) <= 22, "only as many strangers were evicted as was needed"
    assert "made room" in log.next()


# -- simulated ----------------------------------------------------------------------------------------------------


def timed_in(sim: Simulation, action: Callable[[], object]) -> float:
    began = sim.scheduler.now
    action()
    return sim.scheduler.now - began


def test_a_member_needs_less_than_a_tenth_of_a_second_through_a_full_backlog() -> None:
    with Simulation(seed=3, workers=["a", "b"]) as sim:

        def program() -> float:
            sim["b"].call("a", operator.add, (1, 2))
            sim.sleep(1.0)
            transport = MemoryTransport(sim.network, origin="memory://stranger")
            strangers = [transport.connect("memory://a", 0.0) for _ in range(4000)]
            outgoing = sim["b"].peers.find("a").outgoing
            assert outgoing is not None
            sim.network.cut(outgoing.link, "the network broke it")  # type: ignore[arg-type]  # a memory link
            took = timed_in(sim, lambda: sim["b"].call("a", operator.add, (1, 2)))
            assert len(strangers) == 4000
            return took

        assert sim.run(program) < 0.1
