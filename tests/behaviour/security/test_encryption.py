"""Nothing of a group's traffic over TCP can be read on the wire, and TLS is switched off only on purpose."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.certificate_authority import Authority
from tests.support.redirection import redirected

from telegrad import launch, rpc
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import RendezvousError
from telegrad.testing.group import local_group
from telegrad.transport.addresses import parse_address

NAMES = "caller-of-the-recorded-group", "callee-of-the-recorded-group"
SECRET = "a secret in an argument"
NEEDLES = {
    "a worker's name": NAMES[0].encode(),
    "the other's name": NAMES[1].encode(),
    "a function's name": b"returns_its_argument",
    "an argument": SECRET.encode(),
    "a tensor": torch.full((64,), 1.2345).numpy().tobytes()[:32],
    "a large tensor": torch.arange(1000.0, 1016.0).numpy().tobytes(),
    "the end of a pickle of arguments": b"\x94\x85\x94}\x94\x86\x94.",
}
"""What an observer may look for: nothing so short that it occurs by chance."""


def returns_its_argument(value: Any) -> Any:
    return value


class RecordingProxy:
    """Passes connections on to a worker, and keeps a copy of all bytes."""

    def __init__(self, target: str) -> None:
        address = parse_address(target)
        self._target = address.host, address.port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.recorded = bytearray()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                here = self._server.accept()[0]
            except OSError:
                return
            there = socket.create_connection(self._target)
            self._sockets += [here, there]
            for source, sink in ((here, there), (there, here)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, sink)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 20):
                self.recorded += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for sock in [self._server, *self._sockets]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()
        for sock in [self._server, *self._sockets]:
            sock.close()


def record_calls(transport: str) -> bytes:
    """Return what is on the wire while one worker calls another."""
    with local_group(NAMES, transport=transport) as agents:
        caller, callee = (agents[name] for name in NAMES)
        with closing(RecordingProxy(callee.me.addresses[0])) as proxy:
            with redirected(caller, callee.me.addresses[0], proxy.address):
                values = SECRET, torch.full((64,), 1.2345), torch.arange(500_000.0)
                for value in values:
                    returned = caller.call(NAMES[1], returns_its_argument, (value,))
                    assert torch.equal(returned, value) if isinstance(value, torch.Tensor) else returned == value
            for agent in agents.values():
                agent.close()
        return bytes(proxy.recorded)


def test_a_proxy_between_two_workers_finds_nothing() -> None:
    recorded = record_calls("tcp")
    assert len(recorded) > 4_000_000
    assert [what for what, needle in NEEDLES.items() if needle in recorded] == []


def test_the_proxy_finds_everything_if_there_is_no_tls() -> None:
    recorded = record_calls("plain tcp")
    assert [what for what, needle in NEEDLES.items() if needle not in recorded] == []


# -- the options ------------------------------------------------------------------------------------------------


def init(options: Callable[[int], dict[str, Any]]) -> str:
    """Join the group with the options of this rank, call the other worker, and return what happened."""
    rank = int(os.environ["RANK"])
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a short handler
    logging.getLogger("telegrad").addHandler(handler)
    store = os.environ["TELEGRAD_INIT_METHOD"]
    try:
        rpc.init_rpc(
            rpc_backend_options=rpc.Options(
                init_method=store, init_timeout=20, transports=("tcp",), rpc_timeout=20, **options(rank)
            )
        )
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    answer = rpc.rpc_sync(f"worker{1 - rank}", returns_its_argument, (rank,))
    rpc.shutdown()
    return " ".join([str(answer), *lines])


def switched_off(rank: int) -> dict[str, Any]:
    return {"tls": False}


def switched_off_on_one(rank: int) -> dict[str, Any]:
    return {"tls": rank == 0}


def nothing(rank: int) -> dict[str, Any]:
    return {}


def own_certificates(rank: int) -> dict[str, Any]:
    directory = Path(os.environ["TEST_CERTIFICATES"])
    name = f"worker{rank}"
    return {
        "tls_certificate": directory / f"{name}.pem",
        "tls_key": directory / f"{name}.key",
        "tls_ca": directory / "ca.pem",
    }


WARNING = (
    "worker 'worker{}' runs without TLS (tls=False or TELEGRAD_TLS=0): anyone on the network path to another machine "
    "can read and change its traffic, and run code on both workers"
)


def test_tls_is_switched_off_by_the_option_with_a_warning() -> None:
    answers = launch.local(init, 2, (switched_off,), init=False, timeout=60)
    assert answers == [f"{rank} {WARNING.format(rank)}" for rank in (0, 1)]


def test_tls_is_switched_off_by_the_environment_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_TLS", "0")
    answers = launch.local(init, 2, (nothing,), init=False, timeout=60)
    assert answers == [f"{rank} {WARNING.format(rank)}" for rank in (0, 1)]


def test_workers_with_and_without_tls_form_no_group() -> None:
    for answer in launch.local(init, 2, (switched_off_on_one,), init=False, timeout=60):
        assert answer.startswith("RendezvousError: ")
        assert answer.endswith(
            "worker 'worker1' has TLS switched off and worker 'worker0' has not: start all workers with the same "
            "option tls and the same TELEGRAD_TLS"
        )


def test_workers_use_the_users_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    for rank in (0, 1):
        authority.issue(f"worker{rank}")
    monkeypatch.setenv("TEST_CERTIFICATES", str(tmp_path))
    assert launch.local(init, 2, (own_certificates,), init=False, timeout=60) == ["0", "1"]


def test_a_record_tells_whether_its_worker_uses_tls() -> None:
    for transport, expected in (("unix", False), ("tcp", True), ("plain tcp", False)):
        with local_group(["a"], transport=transport) as agents:
            assert agents["a"].me.tls is expected
    assert not WorkerRecord("a", 0, 1, ()).tls
    assert issubclass(RendezvousError, RuntimeError)
