"""What a worker of an endurance run does to itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.support.loaded_interpreter import run_loaded
from tests.support.paths import ROOT

from telegrad.testing import endurance_worker as worker

PROGRAM = """
import os, socket
from telegrad.testing.endurance_worker import cut_connections
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
pair = socket.socketpair()
before = len(os.listdir("/proc/self/fd"))
assert cut_connections() == 2
assert client.recv(1) == b"" and server.recv(1) == b""
pair[0].send(b"x")
assert pair[1].recv(1) == b"x"
assert len(os.listdir("/proc/self/fd")) == before
socket.create_connection(listener.getsockname()).close()
"""


def test_cutting_ends_the_tcp_connections_alone_and_leaks_nothing() -> None:
    """In another process: it would cut all connections of this one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run_loaded([sys.executable, "-c", PROGRAM], env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_request_to_cut_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, calls = tmp_path / "a.cut", []

    def cut() -> int:
        calls.append(request.exists())
        worker.over.set()
        return 1

    monkeypatch.setattr(worker, "cut_connections", cut)
    request.touch()
    try:
        worker.cut_on_request(request)
    finally:
        worker.over.clear()
    assert calls == [False]
