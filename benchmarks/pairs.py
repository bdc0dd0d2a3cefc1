"""Systems that are compared must not disturb each other: each has worker processes that run only while it is measured.

A system has, in most cases, a pair of workers, a caller and a callee, that live during one round. While one system
runs a block, all threads of the others are stopped by a signal: torch's shared-memory transport polls, and an idle
pair of it would take a whole core from the pair that is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import Block, time_each
from torch.distributed import rpc as torch_rpc

from telegrad import rpc as telegrad_rpc

TORCH, TELEGRAD = "torch", "telegrad"
CALLER, CALLEE = "caller", "callee"
PATIENCE = 45.0
"""Seconds after which a worker that has not answered is taken for stuck."""
WARM_UP = 0.15
"""Seconds that a block runs before it is timed."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

Action = Callable[[], object]


class BenchmarkError(RuntimeError):
    """The run cannot go on, and its figures are worth nothing."""


class SystemFailedError(BenchmarkError):
    """One of the systems does not work."""

    def __init__(self, system: str, worker: str, what: str) -> None:
        super().__init__(f"the {worker} of {system} {what}")
        self.system = system


@dataclass(frozen=True)
class Case:
    """One thing to measure. `prepare` gets what its system was joined with, in the caller, before each block.

    `measure` is given what `prepare` returned, and runs it so many times.
    """

    what: str
    iterations: int
    prepare: Callable[[Any], Any]
    measure: Callable[[Any, int], Block] = time_each
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By transport and by system: how much of that system's time telegrad may take."""


def at_most(unix: float, tcp: float = 0.5, **beside: float) -> dict[str, dict[str, float]]:
    """Targets against torch; and against what has its turns beside it, over unix.

    >>> at_most(0.25)
    {'unix': {'torch': 0.25}, 'tcp': {'torch': 0.5}}
    """
    return {"unix": {TORCH: unix, **beside}, "tcp": {TORCH: tcp}}


# -- in a worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which worker a process is, and where it meets the others."""

    system: str
    name: str
    names: tuple[str, ...]
    transport: str
    directory: str
    token: str
    socket: socket.socket | None
    """Leads to the other worker of a pair, for a system that is nothing but that."""

    def meeting(self) -> str:
        """Where the workers of the system meet."""
        return f"file://{self.directory}/{self.system}"

    def member(self) -> dict[str, int]:
        """What both kinds of init_rpc want to know of a worker."""
        return {"rank": self.names.index(self.name), "world_size": len(self.names)}


def join_telegrad(place: Place) -> Any:
    """Enter telegrad's group, and return what its calls are made with."""
    options = telegrad_rpc.Options(init_method=place.meeting(), transports=(place.transport,), token=place.token)
    telegrad_rpc.init_rpc(place.name, rpc_backend_options=options, **place.member())
    return telegrad_rpc


def join_torch(place: Place) -> Any:
    """Enter torch's group, and return what its calls are made with."""
    # Without these it looks up the name of this host, which can take seconds and leaves the machine.
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use of its own group
    # With tcp the two stand for workers of two hosts. Torch's transport alone does not make it so: its channels would
    # still move tensors between the processes by shared memory. The basic one sends them through the transport.
    apart = place.transport == "tcp"
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=place.meeting(), _transports=["uv"] if apart else None, _channels=["basic"] if apart else None
    )
    torch_rpc.init_rpc(place.name, rpc_backend_options=options, **place.member())  # type: ignore[no-untyped-call]  # torch's
    return torch_rpc


@dataclass(frozen=True)
class System:
    """Something to measure: how its workers come together, and what they are called.

    One is the caller. `join` returns what cases are prepared with; it has a `shutdown`.
    """

    join: Callable[[Place], Any]
    names: tuple[str, ...] = (CALLER, CALLEE)


def _wake_up(case: Case, prepared: Any) -> None:
    """Run it for a while: after a pause the first hundred milliseconds are slower."""
    end = time.monotonic() + WARM_UP
    case.measure(prepared, 1)
    while time.monotonic() < end:
        case.measure(prepared, 1)


def _work(place: Place, system: System, cases: Mapping[str, Case], control: Connection) -> None:
    """Be a worker: run blocks as the driver says, until it says None."""
    # Ctrl-C reaches every process of the terminal, but the driver alone decides. Where the driver is killed, only the
    # kernel can end a worker that is stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        joined = system.join(place)
        control.send([])
        while (order := control.recv()) is not None:
            name, iterations = order
            case = cases[name]
            prepared = case.prepare(joined)
            _wake_up(case, prepared)
            control.send(case.measure(prepared, iterations))
        joined.shutdown()
        control.send([])
    except Exception:  # noqa: BLE001 - the driver prints it and ends the run
        control.send(traceback.format_exc())


# -- in the driver --------------------------------------------------------------------------------------------


class Workers:
    """The processes of one system, stopped unless told to do something."""

    def __init__(self, name: str, system: System, cases: Mapping[str, Case], transport: str, directory: str) -> None:
        self._system = name
        # Forked, so that torch is loaded once, and the driver, as the parent, learns from the kernel when they stop.
        # Nothing of torch or telegrad has run in the driver.
        context = get_context("fork")
        token = secrets.token_hex(32)
        self._controls: dict[str, Connection] = {}
        self._processes = {}
        ends = _connected(transport)
        for worker in system.names:
            mine, theirs = context.Pipe()
            end = ends.pop() if ends and len(system.names) <= 2 else None
            place = Place(name, worker, system.names, transport, directory, token, end)
            process = context.Process(target=_work, args=(place, system, cases, theirs), name=f"{name} {worker}")
            process.start()
            theirs.close()
            if end is not None:
                end.close()
            self._controls[worker] = mine
            self._processes[worker] = process
        for left_over in ends:
            left_over.close()

    def join(self) -> None:
        """Wait until all are in their group, and stop them."""
        for name in self._controls:
            self._hear(name)
        self._stop()

    def run(self, case: str, iterations: int) -> Block:
        """Let the caller run one block; the processes run only meanwhile."""
        self._signal(signal.SIGCONT)
        self._controls[CALLER].send((case, iterations))
        block = self._hear(CALLER)
        self._stop()
        return block

    def runs(self, case: str, iterations: int) -> Callable[[], Block]:
        """The same, to be done later, and again."""
        return lambda: self.run(case, iterations)

    def leave(self) -> None:
        """Let all shut their system down and end."""
        self._signal(signal.SIGCONT)
        for control in self._controls.values():
            control.send(None)
        for name, process in self._processes.items():
            self._hear(name)
            process.join(PATIENCE)

    def kill(self) -> None:
        """End all, in whatever state they are."""
        for pid in self._signal(signal.SIGSTOP):  # first, so that none ends or starts another meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.join()

    def _hear(self, name: str) -> Block:
        control = self._controls[name]
        if not control.poll(PATIENCE):
            raise SystemFailedError(self._system, name, f"did not answer within {PATIENCE:g} s")
        try:
            answer: Block | str = control.recv()
        except EOFError:
            raise self._died(name) from None
        if isinstance(answer, str):
            raise SystemFailedError(self._system, name, f"failed:\n{answer}")
        return answer

    def _died(self, name: str) -> SystemFailedError:
        process = self._processes[name]
        process.join(PATIENCE)
        return SystemFailedError(self._system, name, f"died, with exit code {process.exitcode}")

    def _signal(self, number: signal.Signals) -> list[int]:
        """Signal all processes, and after each those that it has started: a system may have some of its own."""
        reached: list[int] = []
        due = [process.pid for process in self._processes.values() if process.pid is not None and process.is_alive()]
        while due:
            for pid in due:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            reached += due
            due = _children(due)
        return reached

    def _stop(self) -> None:
        """Return when no thread of any can run."""
        self._signal(signal.SIGSTOP)
        for name, process in self._processes.items():
            seen = None
            with contextlib.suppress(ChildProcessError):  # it has died, and `is_alive` has seen that
                seen = os.waitid(os.P_PID, process.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if seen is None or seen.si_code != os.CLD_STOPPED:
                raise self._died(name)


def _connected(transport: str) -> list[socket.socket]:
    """The two ends of a plain connection of this kind."""
    if transport == "unix":
        return list(socket.socketpair())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends


def _children(parents: Collection[int]) -> list[int]:
    """The processes that these have started, and that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # The name, in brackets, may hold anything; after it come state and parent.
            if int(path.read_text().rpartition(")")[2].split()[1]) in parents:
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def started(systems: Mapping[str, System], cases: Mapping[str, Case], transport: str) -> Iterator[dict[str, Workers]]:
    """The systems, ready, for a block of code; however that ends, no process is left."""
    ready: dict[str, Workers] = {}
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as directory:
        try:
            for name, system in systems.items():
                ready[name] = Workers(name, system, cases, transport, directory)
                ready[name].join()
            yield ready
            for name, workers in ready.items():
                try:
                    workers.leave()
                except BenchmarkError as error:
                    if name == TELEGRAD:
                        raise
                    # Torch's can time out on a busy machine. All has been measured by now.
                    print(f"{name} did not shut down in order: {error}", file=sys.stderr)
        finally:
            for workers in ready.values():
                workers.kill()
