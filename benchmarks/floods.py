"""Measures how a worker serves its group while strangers flood its TCP port.

Four processes on the loopback address, with TLS as in a real group: the flooded worker `a`, two members in this
process, and the flooder. Member `b` loses its connection again and again, and the time until its next call returns is
taken. Member `c` calls `a` all the time over a connection that stays. All strangers come from the members' own address,
which is the hardest case.

    python benchmarks/floods.py                # all floods
    python benchmarks/floods.py idle --seconds 10
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import resource
import select
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FLOODS = {
    "none": "no strangers",
    "idle": "connections that send nothing; closed ones are opened again",
    "slowloris": "connections that send a byte of a preamble per second",
    "churn": "connections that are reset as soon as they are open",
    "garbage": "connections that send something else (an HTTP request)",
    "client-hello": "connections that send a TLS ClientHello, and end when the worker has answered or closed them",
    "preamble": "the same after a forged preamble",
    "replay": "the same after a preamble that was recorded",
    "hello": "connections that send a well-formed Hello without the token; the group has no TLS",
}
RESETS = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, so that the flooder keeps no TIME_WAIT
PLAIN = ("hello",)  # floods of a worker without TLS: with it, a stranger's Hello does not get as far
PATIENCE = 60.0


# -- the flooded worker ---------------------------------------------------------------------------------------------


def serve(*, plain: bool) -> None:
    """Be worker `a`: print its record, read the group, and answer each line with the figures of this process."""
    import logging

    import msgspec

    from telegrad.connection.worker_record import WorkerRecord

    class Count(logging.Handler):
        lines = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.lines += 1
            with open(os.environ.get("FLOOD_LOG", os.devnull), "a") as file:
                print(record.getMessage(), file=file)

    counted = Count()
    logging.getLogger("telegrad").addHandler(counted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    agent = _agent("a", 0, plain=plain)
    print(msgspec.json.encode(agent.me).decode(), flush=True)
    agent.start(msgspec.json.decode(sys.stdin.readline(), type=list[WorkerRecord]))
    for _ in sys.stdin:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        figures = {
            "rss": _resident(),
            "cpu": usage.ru_utime + usage.ru_stime,
            "lines": counted.lines,
            "files": len(os.listdir("/proc/self/fd")),
        }
        print(json.dumps(figures), flush=True)
    agent.close()


def _agent(name: str, number: int, *, plain: bool) -> Any:
    from telegrad.agent.agent import Agent
    from telegrad.connection.group_keys import derive_keys
    from telegrad.testing.group import TOKEN
    from telegrad.transport.sockets import SocketPoller
    from telegrad.transport.tcp import TcpTransport
    from telegrad.transport.tls import TlsTransport
    from telegrad.waiting import RealRuntime

    return Agent(
        name,
        number,
        transports=[(TcpTransport() if plain else TlsTransport(derive_keys(TOKEN).preamble), "tcp://127.0.0.1:0")],
        poller=SocketPoller(),
        runtime=RealRuntime(),
        token=TOKEN,
        main="floods",
    )


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# -- the flooder ----------------------------------------------------------------------------------------------------


def flood(kind: str, port: int, count: int) -> None:
    """Flood `port` until standard input ends. Prints a line when `count` connections were started."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    flooder = _Flooder(kind, port, count)
    stop = select.poll()
    stop.register(sys.stdin, select.POLLIN | select.POLLHUP)
    announced = False
    while not stop.poll(0):
        flooder.step()
        if not announced and flooder.opened >= count:
            announced = True
            print("flooding", flush=True)
    print(json.dumps({"opened": flooder.opened, "open": len(flooder.sockets)}), flush=True)


class _Flooder:
    def __init__(self, kind: str, port: int, count: int) -> None:
        self.kind, self.address, self.count = kind, ("127.0.0.1", port), count
        self.sockets: dict[int, socket.socket] = {}
        self.opened = 0
        self._epoll = select.epoll()
        self._next_byte = time.monotonic()
        self._data = _first_bytes(kind, port)
        self._sent: dict[socket.socket, int] = {}  # how many bytes
        self._slow = _forged_preamble() if kind == "slowloris" else b""

    def step(self) -> None:
        """Open some connections, and replace those that ended."""
        for _ in range(min(64, self.count - len(self.sockets))):
            self._open()
        for fd, events in self._epoll.poll(0.001, 256):
            sock = self.sockets[fd]
            if events & select.EPOLLOUT and self._data:
                with contextlib.suppress(OSError):
                    sock.send(self._data)
                    self._sent[sock] = len(self._data)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) or self.kind == "churn":
                self._close(sock)
            else:
                self._epoll.modify(fd, select.EPOLLIN)
        if self.kind == "slowloris" and time.monotonic() >= self._next_byte:
            self._next_byte = time.monotonic() + 1.0
            for sock, sent in self._sent.items():
                with contextlib.suppress(OSError):
                    sock.send(self._slow[sent : sent + 1])
                self._sent[sock] = sent + 1

    def _open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            sock.connect_ex(self.address)
            self.sockets[sock.fileno()] = sock
            self._epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        except OSError:
            self.sockets.pop(sock.fileno(), None)
            sock.close()
        self.opened += 1

    def _close(self, sock: socket.socket) -> None:
        del self.sockets[sock.fileno()]
        self._sent.pop(sock, None)
        sock.close()


def _first_bytes(kind: str, port: int) -> bytes:
    if kind == "slowloris":
        return _forged_preamble()[:1]
    if kind == "garbage":
        return b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    if kind == "client-hello":
        return _client_hello()
    if kind == "preamble":
        return _forged_preamble() + _client_hello()
    if kind == "replay":
        from telegrad.connection.group_keys import derive_keys
        from telegrad.testing.group import TOKEN
        from telegrad.wire.preamble import NONCE_SIZE, pack_preamble

        key, address = derive_keys(TOKEN).preamble, f"tcp://127.0.0.1:{port}"
        return pack_preamble(key, os.urandom(NONCE_SIZE), address) + _client_hello()
    if kind == "hello":
        import msgspec

        from telegrad.wire.frames import Kind, pack_header
        from telegrad.wire.handshake_messages import Hello

        hello = Hello(
            name="b",
            id=1,
            incarnation=5,
            addresses=(),
            host="",
            main="",
            tls=False,
            accept="any",
            devices=(),
            target="a",
            dialled=f"tcp://127.0.0.1:{port}",
            nonce=b"n" * 32,
            attempt=1,
            session=1,
            received=(0, 0),
            fresh=True,
            proof=b"p" * 32,  # of another token
        )
        body = msgspec.msgpack.encode(hello)
        return pack_header(Kind.HANDSHAKE, len(body), 0, 0, 0) + body
    return b""


def _client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def _forged_preamble() -> bytes:
    from telegrad.wire.preamble import NONCE_SIZE, pack_preamble

    return pack_preamble(b"a key of another group", os.urandom(NONCE_SIZE), "")


# -- the members, and the measurement ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.stdout.close()


def _ask(process: subprocess.Popen[str], line: str = "") -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def measure(kind: str, count: int, seconds: float) -> dict[str, float]:
    """Flood a worker for some seconds, and return what its members notice."""
    import msgspec

    from telegrad.connection.worker_record import WorkerRecord

    with contextlib.ExitStack() as stack:
        target = stack.enter_context(_process("--role", "serve", *(["--plain"] if kind in PLAIN else [])))
        assert target.stdout is not None
        record = msgspec.json.decode(target.stdout.readline(), type=WorkerRecord)
        members = {name: _agent(name, number, plain=kind in PLAIN) for number, name in enumerate("bc", start=1)}
        for member in members.values():
            stack.callback(member.close)
        group = [record, *(member.me for member in members.values())]
        for member in members.values():
            member.start(group)
        before = _ask(target, msgspec.json.encode(group).decode() + "\n")
        for member in members.values():
            member.call("a", operator.add, (1, 2))
        flooder = None
        if kind != "none":
            port = record.addresses[0].rpartition(":")[2]
            flooder = stack.enter_context(_process("--role", kind, "--port", port, "--count", str(count)))
            assert flooder.stdout is not None
            assert flooder.stdout.readline() == "flooding\n"
        began = time.monotonic()
        reconnects, latencies = _members(members["b"], members["c"], seconds)
        took = time.monotonic() - began
        opened = _ask(flooder)["opened"] if flooder is not None else 0
        after = _ask(target)
    return {
        "reconnect median": statistics.median(reconnects),
        "reconnect worst": max(reconnects),
        "reconnects": len(reconnects),
        "call median": statistics.median(latencies),
        "call p99": sorted(latencies)[len(latencies) * 99 // 100],
        "call worst": max(latencies),
        "strangers per second": opened / took,
        "cpu": (after["cpu"] - before["cpu"]) / took,
        "MB more": after["rss"] - before["rss"],
        "files": after["files"],
        "log lines": after["lines"] - before["lines"],
    }


def _members(b: Any, c: Any, seconds: float) -> tuple[list[float], list[float]]:
    end = time.monotonic() + seconds
    latencies: list[float] = []

    def call_often() -> None:
        while time.monotonic() < end:
            latencies.append(_timed(lambda: c.call("a", operator.add, (1, 2), timeout=PATIENCE)))
            time.sleep(0.005)

    thread = threading.Thread(target=call_often)
    thread.start()
    reconnects = []
    while time.monotonic() < end:
        time.sleep(0.55)  # a connection that lives shorter than the longest pause counts as a failed attempt
        _cut(b.peers.find("a").outgoing.link.fileno())
        reconnects.append(_timed(lambda: b.call("a", operator.add, (1, 2), timeout=PATIENCE)))
    thread.join()
    return reconnects, latencies


def _cut(fd: int) -> None:
    """Break a connection, as the network would."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _timed(action: Callable[[], Any]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("floods", nargs="*", choices=[[], *FLOODS], help="what to measure (default: all)")
    parser.add_argument("--count", type=int, default=10_000, help="connections that the flooder keeps open")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each flood is measured")
    parser.add_argument("--role", choices=["serve", *FLOODS], help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "serve":
        serve(plain=options.plain)
    elif options.role:
        flood(options.role, options.port, options.count)
    else:
        for kind in options.floods or FLOODS:
            figures = measure(kind, options.count, options.seconds)
            print(f"{kind}: {FLOODS[kind]}")
            for name, figure in figures.items():
                unit = " ms" if name.startswith(("call", "reconnect ")) else ""
                print(f"  {name:22} {figure * 1000 if unit else figure:12,.1f}{unit}", flush=True)


if __name__ == "__main__":
    main()
