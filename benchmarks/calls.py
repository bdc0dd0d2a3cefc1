"""Are calls faster than torch's, and by how much? torch.distributed.rpc and telegrad, alternately, in one run.

Each system has a pair of worker processes, a caller and a callee, that live during the whole run. While one pair
runs a block, all threads of the others are stopped by a signal: torch's shared-memory transport polls, and an idle
pair of it would take a whole core from the pair that is measured.

    python benchmarks/calls.py [--transport unix|tcp] [--cases noop add ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from measure import Block, Comparison, Report, Series, alternate, machine, time_each
from torch.distributed import rpc as torch_rpc

from telegrad import rpc as telegrad_rpc

TORCH, TELEGRAD, RAW = "torch", "telegrad", "raw"
CALLER, CALLEE = "caller", "callee"
IN_FLIGHT = 500
PING = bytes(64)
PATIENCE = 120.0
"""Seconds after which a worker that has not answered is taken for stuck."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

Action = Callable[[], object]


class BenchmarkError(RuntimeError):
    """The run cannot go on, and its figures are worth nothing."""


# -- what is called, and how ----------------------------------------------------------------------------------


def noop() -> None:
    """What a call costs that does nothing."""


def echo(value: Any) -> Any:
    """What it costs to move a value there and back."""
    return value


def _call_noop(rpc: Any) -> Action:
    return lambda: rpc.rpc_sync(CALLEE, noop)


def _call_many(rpc: Any) -> Action:
    def all_at_once() -> None:
        for future in [rpc.rpc_async(CALLEE, noop) for _ in range(IN_FLIGHT)]:
            future.wait()

    return all_at_once


def _call_add(rpc: Any) -> Action:
    pair = torch.rand(16), torch.rand(16)
    _check(rpc.rpc_sync(CALLEE, torch.add, pair), pair[0] + pair[1])
    return lambda: rpc.rpc_sync(CALLEE, torch.add, pair)


def _call_echo(size: int) -> Callable[[Any], Action]:
    def prepare(rpc: Any) -> Action:
        tensor = torch.rand(size // 4)
        _check(rpc.rpc_sync(CALLEE, echo, (tensor,)), tensor)
        return lambda: rpc.rpc_sync(CALLEE, echo, (tensor,))

    return prepare


def _check(found: Any, expected: Any) -> None:
    if not torch.equal(found, expected):
        raise BenchmarkError(f"a call returned a wrong tensor, of shape {tuple(found.shape)}: its time means nothing")


@dataclass(frozen=True)
class Case:
    """One thing to measure. `prepare` gets the system's rpc module, in the caller, before each block."""

    what: str
    iterations: int
    prepare: Callable[[Any], Action]


KB, MB = 1 << 10, 1 << 20
CASES = {
    "noop": Case("rpc_sync of a function that does nothing", 200, _call_noop),
    "echo": Case("16 floats there and back", 200, _call_echo(64)),
    "add": Case("torch.add of two tensors of 16 floats", 200, _call_add),
    "async": Case(f"{IN_FLIGHT} no-ops in flight, time for all", 5, _call_many),
    "64KB": Case("tensor there and back", 100, _call_echo(64 * KB)),
    "1MB": Case("tensor there and back", 40, _call_echo(MB)),
    "16MB": Case("tensor there and back", 8, _call_echo(16 * MB)),
    "64MB": Case("tensor there and back", 4, _call_echo(64 * MB)),
}
PING_PONG = Case("64 bytes there and back through a unix socket, in Python", 200, lambda pair: pair.ping)


# -- in a worker ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which worker a process is, and where it meets the other."""

    system: str
    name: str
    transport: str
    directory: str
    token: str
    socket: socket.socket


class RawPair:
    """One end of a plain socket, under the two names that a worker uses of a system."""

    def __init__(self, place: Place) -> None:
        self._socket = place.socket
        if place.name == CALLEE:
            threading.Thread(target=self._answer, daemon=True).start()

    def ping(self) -> None:
        """Send some bytes and wait until they are back."""
        self._socket.sendall(PING)
        if len(self._socket.recv(len(PING))) != len(PING):
            raise BenchmarkError("the other end of the raw socket is gone")

    def _answer(self) -> None:
        while data := self._socket.recv(len(PING)):
            self._socket.sendall(data)

    def shutdown(self) -> None:
        """Nothing is to be agreed on."""


def join(place: Place) -> Any:
    """Enter the system's group of two, and return what its calls are made with."""
    meeting = f"file://{place.directory}/{place.system}"
    member = {"rank": (CALLER, CALLEE).index(place.name), "world_size": 2}
    if place.system == RAW:
        return RawPair(place)
    if place.system == TELEGRAD:
        ours = telegrad_rpc.Options(init_method=meeting, transports=(place.transport,), token=place.token)
        telegrad_rpc.init_rpc(place.name, rpc_backend_options=ours, **member)
        return telegrad_rpc
    # Without these it looks up the name of this host, which can take seconds and leaves the machine.
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use of its own group
    chosen = ["uv"] if place.transport == "tcp" else None
    theirs = torch_rpc.TensorPipeRpcBackendOptions(init_method=meeting, _transports=chosen)
    torch_rpc.init_rpc(place.name, rpc_backend_options=theirs, **member)  # type: ignore[no-untyped-call]  # torch's
    return torch_rpc


def work(place: Place, control: Connection) -> None:
    """Be a worker: run blocks as the driver says, until it says None."""
    # Ctrl-C reaches every process of the terminal, but the driver alone decides. Where the driver is killed, only the
    # kernel can end a worker that is stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        rpc = join(place)
        control.send([])
        while (order := control.recv()) is not None:
            case, iterations = order
            prepared = (PING_PONG if place.system == RAW else CASES[case]).prepare(rpc)
            prepared()  # wakes up what has slept since the last block
            control.send(time_each(prepared, iterations))
        rpc.shutdown()
        control.send([])
    except Exception:  # noqa: BLE001 - the driver prints it and ends the run
        control.send(traceback.format_exc())


# -- in the driver --------------------------------------------------------------------------------------------


class Pair:
    """The two processes of one system, stopped unless told to do something."""

    def __init__(self, system: str, transport: str, directory: str) -> None:
        self._system = system
        # Forked, so that torch is loaded once, and the driver, as the parent, learns from the kernel when they stop.
        # Nothing of torch or telegrad has run in the driver.
        context = get_context("fork")
        token = secrets.token_hex(32)
        self._controls: dict[str, Connection] = {}
        self._processes = {}
        for name, end in zip((CALLER, CALLEE), socket.socketpair(), strict=True):
            mine, theirs = context.Pipe()
            place = Place(system, name, transport, directory, token, end)
            process = context.Process(target=work, args=(place, theirs), name=f"{system} {name}")
            process.start()
            theirs.close()
            end.close()
            self._controls[name] = mine
            self._processes[name] = process

    def join(self) -> None:
        """Wait until both are in their group, and stop them."""
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

    def leave(self) -> None:
        """Let both shut their system down and end."""
        self._signal(signal.SIGCONT)
        for control in self._controls.values():
            control.send(None)
        for name, process in self._processes.items():
            self._hear(name)
            process.join(PATIENCE)

    def kill(self) -> None:
        """End both, in whatever state they are."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def _hear(self, name: str) -> Block:
        who, control = f"the {name} of {self._system}", self._controls[name]
        if not control.poll(PATIENCE):
            raise BenchmarkError(f"{who} did not answer within {PATIENCE:g} s")
        try:
            answer: Block | str = control.recv()
        except EOFError:
            process = self._processes[name]
            process.join(PATIENCE)
            raise BenchmarkError(f"{who} died, with exit code {process.exitcode}") from None
        if isinstance(answer, str):
            raise BenchmarkError(f"{who} failed:\n{answer}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def _stop(self) -> None:
        """Return when no thread of either can run."""
        self._signal(signal.SIGSTOP)
        for name, process in self._processes.items():
            seen = os.waitid(os.P_PID, process.pid or 0, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if seen is None or seen.si_code != os.CLD_STOPPED:
                process.join(PATIENCE)
                raise BenchmarkError(f"the {name} of {self._system} died, with exit code {process.exitcode}")


@contextlib.contextmanager
def pairs(transport: str) -> Iterator[dict[str, Pair]]:
    """All systems, ready, for a block of code; however that ends, no process is left."""
    started: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as directory:
        try:
            for system in (TORCH, TELEGRAD, RAW):
                started[system] = Pair(system, transport, directory)
                started[system].join()
            yield started
            for pair in started.values():
                pair.leave()
        finally:
            for pair in started.values():
                pair.kill()


def compare(options: argparse.Namespace) -> Report:
    """Measure the chosen cases. The raw socket takes its turns in the first of them."""
    facts = machine()
    comparisons: list[Comparison] = []
    alone: dict[str, Series] = {}
    with pairs(options.transport) as ready:
        for name in options.cases:
            case = CASES[name]
            iterations = max(2, case.iterations // 10) if options.quick else case.iterations
            taking_part = (TORCH, TELEGRAD) if comparisons else (TORCH, TELEGRAD, RAW)
            runs = {system: _block_of(ready[system], name, iterations) for system in taking_part}
            measured = alternate(runs, options.blocks)
            comparisons.append(Comparison(name, case.what, measured[TORCH], measured[TELEGRAD]))
            if RAW in measured:
                alone[PING_PONG.what] = measured[RAW]
            print(f"{name}: {comparisons[-1].ratio():.2f}", file=sys.stderr, flush=True)
    settings = {"transport": options.transport, "blocks": options.blocks, "quick": options.quick}
    return Report(TORCH, TELEGRAD, settings, comparisons, alone, facts)


def _block_of(pair: Pair, case: str, iterations: int) -> Callable[[], Block]:
    return lambda: pair.run(case, iterations)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as a command."""
    parser = argparse.ArgumentParser(description="Compare calls of telegrad with calls of torch.distributed.rpc.")
    parser.add_argument("--transport", choices=("unix", "tcp"), default="unix", help="unix: torch's default options")
    parser.add_argument(
        "--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE", help="of %(choices)s"
    )
    parser.add_argument("--blocks", type=_at_least_one, help="blocks per system and case (10; with --quick, 2)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args(arguments)
    options.blocks = options.blocks or (2 if options.quick else 10)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = compare(options)
    except BenchmarkError as error:
        print(f"calls.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("calls.py: interrupted", file=sys.stderr)
        return 130
    print(report.text())
    if options.json is not None:
        report.write_json(options.json)
    return 0


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # The same module again, under its own name: what is called remotely must be found by that on the other side.
    import calls

    sys.exit(calls.main())
