"""Worker processes of the compared systems, which run only while their system is measured.

Most systems have a pair of workers, a caller and a callee, which live for one round. While one system runs a block, the
processes of all others are stopped by a signal: torch's shared-memory transport polls, and an idle pair would take a
whole core from the pair that is measured.
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
"""Seconds after which a worker that does not reply counts as stuck."""
WARM_UP = 0.15
"""Seconds that a block runs untimed before it is timed."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

Action = Callable[[], object]


class BenchmarkError(RuntimeError):
    """The run cannot continue, and its figures are invalid."""


class SystemFailedError(BenchmarkError):
    """One of the systems failed."""

    def __init__(self, system: str, worker: str, what: str) -> None:
        super().__init__(f"the {worker} of {system} {what}")
        self.system = system


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Before each block, the caller passes the result of `System.join` to `prepare`. `measure` gets what that returned and
    the number of iterations.
    """

    what: str
    iterations: int
    prepare: Callable[[Any], Any]
    measure: Callable[[Any, int], Block] = time_each
    targets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The largest allowed ratio of telegrad's time to that of a system, by transport and system."""


def at_most(unix: float, tcp: float = 0.5, **beside: float) -> dict[str, dict[str, float]]:
    """Return targets against torch, and over unix against other systems.

    >>> at_most(0.25)
    {'unix': {'torch': 0.25}, 'tcp': {'torch': 0.5}}
    """
    return {"unix": {TORCH: unix, **beside}, "tcp": {TORCH: tcp}}


# -- in a worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerSpec:
    """Which worker a process is, and how it joins the others."""

    system: str
    name: str
    names: tuple[str, ...]
    transport: str
    directory: str
    token: str
    socket: socket.socket | None
    """A connection to the other worker of a pair, for systems that need one."""

    def init_method(self) -> str:
        """Return where the workers of the system rendezvous."""
        return f"file://{self.directory}/{self.system}"

    def member(self) -> dict[str, int]:
        """Return the arguments that both kinds of init_rpc take."""
        return {"rank": self.names.index(self.name), "world_size": len(self.names)}


def join_telegrad(spec: WorkerSpec) -> Any:
    """Join telegrad's group, and return its rpc module."""
    options = telegrad_rpc.Options(init_method=spec.init_method(), transports=(spec.transport,), token=spec.token)
    telegrad_rpc.init_rpc(spec.name, rpc_backend_options=options, **spec.member())
    return telegrad_rpc


def join_torch(spec: WorkerSpec) -> Any:
    """Join torch's group, and return its rpc module."""
    # Without these it resolves the host name, which can take seconds and use the network.
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # caused by torch itself
    # With tcp the two simulate workers on two hosts. Choosing the transport is not enough: torch's channels would still
    # move tensors through shared memory. The basic channel sends them through the transport.
    apart = spec.transport == "tcp"
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=spec.init_method(), _transports=["uv"] if apart else None, _channels=["basic"] if apart else None
    )
    torch_rpc.init_rpc(spec.name, rpc_backend_options=options, **spec.member())  # type: ignore[no-untyped-call]  # torch has no types for it
    return torch_rpc


@dataclass(frozen=True)
class System:
    """A system to measure: how its workers join it, and their names, one of them the caller.

    `join` returns the object that cases are prepared with. It has a `shutdown` method.
    """

    join: Callable[[WorkerSpec], Any]
    names: tuple[str, ...] = (CALLER, CALLEE)


def _warm_up(case: Case, prepared: Any) -> None:
    """Run the case for a while, because the first hundred milliseconds after a pause are slower."""
    end = time.monotonic() + WARM_UP
    case.measure(prepared, 1)
    while time.monotonic() < end:
        case.measure(prepared, 1)


def _work(spec: WorkerSpec, system: System, cases: Mapping[str, Case], control: Connection) -> None:
    """Run a worker: execute the blocks that the driver sends, until it sends None."""
    # Ctrl-C reaches every process of the terminal, but the driver handles it. If the driver is killed, only the kernel
    # can kill a stopped worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        joined = system.join(spec)
        control.send([])
        while (order := control.recv()) is not None:
            name, iterations = order
            case = cases[name]
            prepared = case.prepare(joined)
            _warm_up(case, prepared)
            control.send(case.measure(prepared, iterations))
        joined.shutdown()
        control.send([])
    except Exception:  # noqa: BLE001 - the driver prints it and stops the run
        control.send(traceback.format_exc())


# -- in the driver --------------------------------------------------------------------------------------------


class Workers:
    """The processes of one system, stopped while they have nothing to do."""

    def __init__(self, name: str, system: System, cases: Mapping[str, Case], transport: str, directory: str) -> None:
        self._system = name
        # Forked: torch is loaded once, and the kernel tells the driver, as the parent, when they stop. The driver
        # itself has not used torch or telegrad.
        context = get_context("fork")
        token = secrets.token_hex(32)
        self._controls: dict[str, Connection] = {}
        self._processes = {}
        ends = _connected(transport)
        for worker in system.names:
            mine, theirs = context.Pipe()
            end = ends.pop() if ends and len(system.names) <= 2 else None
            spec = WorkerSpec(name, worker, system.names, transport, directory, token, end)
            process = context.Process(target=_work, args=(spec, system, cases, theirs), name=f"{name} {worker}")
            process.start()
            theirs.close()
            if end is not None:
                end.close()
            self._controls[worker] = mine
            self._processes[worker] = process
        for left_over in ends:
            left_over.close()

    def join(self) -> None:
        """Wait until all have joined, and stop them."""
        for name in self._controls:
            self._receive(name)
        self._stop()

    def run(self, case: str, iterations: int) -> Block:
        """Let the caller run one block. The processes run only during it."""
        self._signal(signal.SIGCONT)
        self._controls[CALLER].send((case, iterations))
        block = self._receive(CALLER)
        self._stop()
        return block

    def runs(self, case: str, iterations: int) -> Callable[[], Block]:
        """Return a function that does the same."""
        return lambda: self.run(case, iterations)

    def leave(self) -> None:
        """Let all processes shut their system down and exit."""
        self._signal(signal.SIGCONT)
        for control in self._controls.values():
            control.send(None)
        for name, process in self._processes.items():
            self._receive(name)
            process.join(PATIENCE)

    def kill(self) -> None:
        """Kill all processes, in whatever state they are."""
        for pid in self._signal(signal.SIGSTOP):  # first, so that none exits or starts another
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.join()

    def _receive(self, name: str) -> Block:
        control = self._controls[name]
        if not control.poll(PATIENCE):
            raise SystemFailedError(self._system, name, f"did not reply within {PATIENCE:g} s")
        try:
            reply: Block | str = control.recv()
        except EOFError:
            raise self._died(name) from None
        if isinstance(reply, str):
            raise SystemFailedError(self._system, name, f"failed:\n{reply}")
        return reply

    def _died(self, name: str) -> SystemFailedError:
        process = self._processes[name]
        process.join(PATIENCE)
        return SystemFailedError(self._system, name, f"died, with exit code {process.exitcode}")

    def _signal(self, number: signal.Signals) -> list[int]:
        """Signal all processes and their descendants, and return their pids."""
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
        """Stop all processes, and return when none of their threads runs."""
        self._signal(signal.SIGSTOP)
        for name, process in self._processes.items():
            seen = None
            with contextlib.suppress(ChildProcessError):  # it has died, and `is_alive` has reaped it
                seen = os.waitid(os.P_PID, process.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if seen is None or seen.si_code != os.CLD_STOPPED:
                raise self._died(name)


def _connected(transport: str) -> list[socket.socket]:
    """Return the two ends of a plain connection."""
    if transport == "unix":
        return list(socket.socketpair())
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname()), server.accept()[0]]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends


def _children(parents: Collection[int]) -> list[int]:
    """Return the living children of these processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just exited
            # The name in parentheses may contain anything. State and parent follow.
            if int(path.read_text().rpartition(")")[2].split()[1]) in parents:
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def started(systems: Mapping[str, System], cases: Mapping[str, Case], transport: str) -> Iterator[dict[str, Workers]]:
    """Start the systems, and kill all of their processes at the end of the block."""
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
                    # Torch can time out on a busy machine. Everything is measured by now.
                    print(f"{name} did not shut down cleanly: {error}", file=sys.stderr)
        finally:
            for workers in ready.values():
                workers.kill()
