"""Calls between real processes: many workers, kills, broken connections, forks and exits."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support.loaded_interpreter import run_loaded
from tests.support.redirection import redirected

import telegrad
from telegrad import launch, rpc
from telegrad.agent.agent import Agent
from telegrad.connection.worker_record import WorkerRecord
from telegrad.errors import WorkerLost
from telegrad.protocol.limits import SessionSettings
from telegrad.transport.sockets import SocketPoller
from telegrad.transport.tcp import TcpTransport
from telegrad.waiting import RealRuntime

TOKEN = b"a token for the tests of processes"


# -- functions that run in the workers -------------------------------------------------------------------------------


def call_eight_others(world: int) -> int:
    me = telegrad.get_worker_info().id
    return sum(telegrad.rpc_sync(f"worker{(me + k) % world}", operator.add, (k, me)) for k in range(1, 9))


def down(depth: int) -> int:
    if depth == 0:
        return 0
    other = "worker0" if telegrad.get_worker_info().name == "worker1" else "worker1"
    return 1 + telegrad.rpc_sync(other, down, (depth - 1,))


def deep() -> int:
    return down(200) if telegrad.get_worker_info().name == "worker0" else 0


def never_return(note: str) -> None:
    Path(note).touch()
    signal.pause()


def call_the_worker_to_be_killed(note: str) -> dict[str, Any]:
    """Call the worker that will be killed, and report how the call ended."""
    if telegrad.get_worker_info().name != "worker0":
        threading.Event().wait(30)
        return {}
    with pytest.raises(WorkerLost) as caught:
        telegrad.rpc_sync("worker1", never_return, (note,), timeout=0)
    error = caught.value
    with pytest.raises(WorkerLost):
        telegrad.rpc_sync("worker1", operator.add, (1, 2))
    begin = time.monotonic()
    telegrad.shutdown()  # returns although workers were killed
    return {
        "text": str(error),
        "worker": error.worker,
        "ended": time.time(),
        "shutdown": time.monotonic() - begin,
        "sockets": [path.name for path in Path(os.environ["TELEGRAD_RUNTIME_DIR"]).glob("*.sock")],
    }


# -- tests --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_sixty_four_workers_start_call_each_other_and_shut_down() -> None:
    results = launch.local(call_eight_others, 64, (64,), timeout=90)
    assert results == [sum(k + me for k in range(1, 9)) for me in range(64)]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_calls_nested_two_hundred_deep_between_two_processes_return(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    assert launch.local(deep, 2, timeout=60) == [200, 0]


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_killed_callee_fails_the_pending_call_before_any_timeout(
    transport: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TELEGRAD_TRANSPORTS", transport)
    note = tmp_path / "running"
    with launch.start(call_the_worker_to_be_killed, 3, (str(note),)) as group:
        _until(note.exists)
        killed_at = time.time()
        group.kill("worker1")
        group.kill("worker2")  # nobody is connected to it, so only shutdown can notice
        report = group.join(60)[0]
    assert "worker 'worker1' is lost" in report["text"]
    assert "never_return" in report["text"]
    assert report["worker"] == "worker1"
    assert report["sockets"] == []
    # Far below the time after which a silent peer is lost, and far above what a busy machine adds. The simulation
    # in test_under_faults.py checks the exact time.
    assert report["ended"] - report["shutdown"] - killed_at < SessionSettings().silence_limit / 2


def _until(condition: Any, seconds: float = 30) -> None:
    """Poll for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        threading.Event().wait(0.01)


# -- a connection that breaks in the middle -----------------------------------------------------------------


class Proxy:
    """Forwards bytes between a caller and a callee, and cuts the first connection after a number of bytes."""

    def __init__(self, target: tuple[str, int], *, forward: int | None, back: int | None) -> None:
        self._target = target
        self._limits = [forward, back]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
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
            limits = self._limits if self.connections == 1 else [None, None]
            for source, sink, limit in ((client, server, limits[0]), (server, client, limits[1])):
                thread = threading.Thread(target=self._forward, args=(source, sink, limit))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        left = limit
        try:
            while data := source.recv(4096):
                if left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    break
                sink.sendall(data)
                left = None if left is None else left - len(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads[:1]:
            thread.join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads[1:]:
            thread.join()


def _tcp_agent(name: str, number: int) -> Agent:
    return Agent(
        name,
        number,
        transports=[(TcpTransport(), "tcp://127.0.0.1:0")],
        poller=SocketPoller(),
        runtime=RealRuntime(),
        token=TOKEN,
        incarnation=number + 1,
    )


def count_and_return(counter: str, value: torch.Tensor) -> torch.Tensor:
    with open(counter, "a") as file:
        file.write("x")
    return value + 1


def run_callee(caller: bytes, note: str, stop: str) -> None:
    agent = _tcp_agent("b", 1)
    agent.start([msgspec.json.decode(caller, type=WorkerRecord), agent.me])
    Path(note + ".new").write_bytes(msgspec.json.encode(agent.me))
    Path(note + ".new").rename(note)
    _until(Path(stop).exists, 100)
    agent.close()


@pytest.fixture
def callee(tmp_path: Path) -> Iterator[tuple[Agent, WorkerRecord, Path]]:
    """Run worker a in this process and worker b in another one."""
    agent = _tcp_agent("a", 0)
    note, stop = tmp_path / "record", tmp_path / "stop"
    try:
        with launch.start(
            run_callee, ["b"], (msgspec.json.encode(agent.me), str(note), str(stop)), init=False
        ) as group:
            _until(note.exists)
            yield agent, msgspec.json.decode(note.read_bytes(), type=WorkerRecord), tmp_path
            stop.touch()
            group.join(20)
    finally:
        agent.close()


@pytest.mark.parametrize(
    ("forward", "back"),
    [(700, None), (300_000, None), (None, 500), (None, 300_000), (1_000_500, None), (2_000_000, 3_000_000)],
)
def test_a_call_whose_connection_breaks_in_the_middle_runs_once_and_returns(
    callee: tuple[Agent, WorkerRecord, Path], forward: int | None, back: int | None
) -> None:
    agent, record, directory = callee
    host, port = record.addresses[0].removeprefix("tcp://").split(":")
    proxy = Proxy((host, int(port)), forward=forward, back=back)
    try:
        agent.start([agent.me, record])
        counter = directory / "counter"
        x = torch.arange(1_000_000.0)
        with redirected(agent, record.addresses[0], f"tcp://127.0.0.1:{proxy.port}"):
            assert torch.equal(agent.call("b", count_and_return, (str(counter), x), timeout=30), x + 1)
            assert counter.read_text() == "x"
            assert agent.call("b", operator.add, (1, 2)) == 3
            assert proxy.connections >= 2
    finally:
        proxy.close()


# -- fork and exit ------------------------------------------------------------------------------------------


def sockets_held() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:") or target == "anon_inode:[eventpoll]":
            found.append(target)
    return found


class Rows(torch.utils.data.Dataset[Any]):
    """A dataset that reports the sockets of its worker process."""

    def __init__(self, before: list[str]) -> None:
        self.before = before

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[list[str], str]:
        try:
            telegrad.rpc_sync("worker1", operator.add, (1, 2))
        except RuntimeError as error:
            refusal = str(error)
        return [held for held in sockets_held() if held in self.before], refusal


def load_data_while_calling() -> tuple[list[str], str, int] | None:
    if telegrad.get_worker_info().name != "worker0":
        return None
    telegrad.rpc_sync("worker1", operator.add, (1, 2))
    ours = sockets_held()
    loader = torch.utils.data.DataLoader(Rows(ours), batch_size=None, num_workers=1, multiprocessing_context="fork")
    rows = list(loader)
    return rows[0][0], rows[0][1], telegrad.rpc_sync("worker1", operator.add, (1, 2))


def test_a_forked_child_neither_holds_nor_uses_the_sockets_of_the_agent() -> None:
    held, refusal, after = launch.local(load_data_while_calling, 2, timeout=60)[0]
    assert held == []
    assert "fork" in refusal
    assert after == 3


EXIT_SCRIPT = """
import sys, threading, operator, signal, telegrad
held = threading.Semaphore(0)
def hold():
    held.release()
    signal.pause()
def are_held(count):
    for _ in range(count):
        held.acquire()
telegrad.init_rpc()  # after the functions that the other worker calls
me = telegrad.get_worker_info().name
if me == "worker0":
    def wait():
        try:
            telegrad.rpc_sync("worker1", hold, timeout=0)
        except RuntimeError as error:
            print("aborted:", type(error).__name__)
    thread = threading.Thread(target=wait)  # not a daemon: the interpreter waits for it
    thread.start()
    telegrad.rpc_async("worker1", hold, timeout=0)
    telegrad.rpc_sync("worker1", are_held, (2,))
    telegrad.barrier()
    print("leaving")
else:
    telegrad.rpc_sync("worker0", operator.add, (1, 2))
    telegrad.barrier()
    threading.Event().wait(3)
"""


def test_a_process_that_exits_without_shutdown_while_threads_wait_does_not_hang(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(EXIT_SCRIPT)
    done = run_loaded(
        [sys.executable, "-m", "telegrad.cli", "run", "-n", "2", str(script)],
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "worker0 | leaving" in done.stdout
    assert "worker0 | aborted: WorkerLost" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


# -- init ---------------------------------------------------------------------------------------------------


def init_with(**options: Any) -> str:
    try:
        rpc.init_rpc(rpc_backend_options=rpc.Options(init_timeout=20, **options))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    rpc.shutdown()
    return "fine"


def init_without_token(transports: tuple[str, ...] | None) -> str:
    del os.environ["TELEGRAD_TOKEN_FD"]
    return init_with(transports=transports, init_method=os.environ["TELEGRAD_INIT_METHOD"])


def init_twice() -> list[str]:
    store = os.environ["TELEGRAD_INIT_METHOD"]
    return [init_with(init_method=store), init_with(init_method=store)]


def init_in_another_directory() -> str:
    if os.environ["RANK"] == "1":
        os.environ["TELEGRAD_RUNTIME_DIR"] = tempfile.mkdtemp(dir=os.environ["TELEGRAD_RUNTIME_DIR"])
    return init_without_token(None)


def test_workers_on_one_host_use_unix_sockets_without_a_token() -> None:
    assert launch.local(init_without_token, 2, (None,), init=False, timeout=60) == ["fine", "fine"]


def test_tcp_without_a_token_fails_at_init_with_one_clear_sentence() -> None:
    for answer in launch.local(init_without_token, 2, (("tcp",),), init=False, timeout=60):
        assert answer == (
            "TokenError: tcp connections need a group token, but none is set. Run `telegrad token` once and set "
            "TELEGRAD_TOKEN to its output on every worker."
        )


def test_init_fails_if_workers_share_neither_a_runtime_directory_nor_a_token() -> None:
    for result in launch.local(init_in_another_directory, 2, init=False, timeout=60):
        assert "TokenError: worker 'worker" in result  # its own, or that of the other one
        assert "needs a group token" in result


def test_a_process_can_init_again_after_shutdown() -> None:
    assert launch.local(init_twice, 2, init=False, timeout=60) == [["fine", "fine"]] * 2


def test_an_invalid_name_or_token_is_rejected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("with space", "", "x" * 128):
        with pytest.raises(ValueError, match="use 1 to 127 letters"):
            rpc.init_rpc(name, rank=0, world_size=1)
    monkeypatch.setenv("TELEGRAD_TOKEN", "short")
    with pytest.raises(ValueError, match="telegrad token"):
        rpc.init_rpc("a", rank=0, world_size=1)
