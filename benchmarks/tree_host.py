"""Runs the systems of a benchmark with the telegrad of another source tree, in processes of their own.

The driver starts one *host* for each tree. A host imports the benchmarks of this folder and telegrad from its tree, and
forks the workers. It runs one block of one case when the driver says so, and its workers are stopped otherwise. The
cases are the same for all trees, whatever benchmarks the trees contain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pairs
from measure import Block
from pairs import BenchmarkError, SystemFailedError
from trees import Tree

PATIENCE = 4 * pairs.PATIENCE
"""Seconds after which a host that does not reply counts as stuck. Its workers have less."""


@dataclass(frozen=True)
class Begin:
    """Start these systems of a benchmark."""

    program: str
    systems: tuple[str, ...]
    transport: str


@dataclass(frozen=True)
class RunBlock:
    """Run a block of a case."""

    system: str
    case: str
    iterations: int


@dataclass(frozen=True)
class Failed:
    """The systems have failed, and are killed."""

    system: str
    """Which of them, or an empty string."""
    text: str


class TreeFailedError(SystemFailedError):
    """A system failed with the telegrad of one tree."""

    def __init__(self, tree: str, failure: Failed) -> None:
        BenchmarkError.__init__(self, f"{tree}: {failure.text}")
        self.system = failure.system


# -- in the driver --------------------------------------------------------------------------------------------


class TreeHost:
    """The process that runs systems with the telegrad of one tree."""

    def __init__(self, tree: Tree) -> None:
        self._label = tree.label
        mine, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(tree.sources)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
            )
        self._control = Connection(mine.detach())

    def check(self, tree: Tree) -> None:
        """Wait until the host has loaded the benchmarks, and raise unless it uses its tree."""
        loaded = Path(self._receive())
        if loaded.parent != tree.sources:
            raise BenchmarkError(f"{self._label}: telegrad was loaded from {loaded}, not from {tree.sources}")

    @contextlib.contextmanager
    def round(self, begin: Begin) -> Iterator[None]:
        """Have the systems run within the block."""
        self._ask(begin)
        try:
            yield
        except BenchmarkError:
            with contextlib.suppress(BenchmarkError):  # the first error counts; this host may be the one that failed
                self._ask(None)
            raise
        self._ask(None)

    def run(self, order: RunBlock) -> Block:
        """Run one block."""
        return self._ask(order)

    def close(self) -> None:
        """End the process and its workers."""
        self._control.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()  # which kills its workers
            self._process.wait()

    def _ask(self, order: Begin | RunBlock | None) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next line reports
            self._control.send(order)
        return self._receive()

    def _receive(self) -> Any:
        if not self._control.poll(PATIENCE):
            raise BenchmarkError(f"{self._label}: its host did not reply within {PATIENCE:g} s")
        try:
            reply = self._control.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait(PATIENCE)
            raise BenchmarkError(
                f"{self._label}: its host ended with exit code {code}; the benchmarks may need a newer telegrad"
            ) from None
        if isinstance(reply, Failed):
            raise TreeFailedError(self._label, reply)
        return reply


@contextlib.contextmanager
def hosting(trees: Sequence[Tree]) -> Iterator[list[TreeHost]]:
    """Start a host for each tree, and end them after the block."""
    with contextlib.ExitStack() as ended:
        hosts = []
        for tree in trees:
            hosts.append(TreeHost(tree))
            ended.callback(hosts[-1].close)
        for host, tree in zip(hosts, trees, strict=True):
            host.check(tree)
        yield hosts


# -- in the host ----------------------------------------------------------------------------------------------


def serve(control: Connection) -> None:
    """Run rounds until the driver closes the connection."""
    import everything  # with the telegrad of this tree

    import telegrad

    benchmarks = {benchmark.program: benchmark for benchmark in everything.BENCHMARKS}
    control.send(str(Path(telegrad.__file__).parent))
    while True:
        order = control.recv()
        if order is None:  # the driver ends a round that has failed
            control.send(None)
            continue
        benchmark = benchmarks[order.program]
        systems = {name: benchmark.systems[name] for name in order.systems}
        try:
            with pairs.started(systems, {**benchmark.cases, **benchmark.hidden}, order.transport) as ready:
                control.send(None)
                while (block := control.recv()) is not None:
                    control.send(ready[block.system].run(block.case, block.iterations))
            control.send(None)
        except BenchmarkError as error:
            control.send(Failed(getattr(error, "system", ""), str(error)))


def main() -> None:
    """Serve the driver that has started this process."""
    # Ctrl-C reaches every process of the terminal, but the driver handles it. If the driver is killed, so is this host,
    # and then its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(pairs._PR_SET_PDEATHSIG, signal.SIGKILL)
    # The end of the driver's connection, which ends the workers as well.
    with Connection(int(sys.argv[1])) as control, contextlib.suppress(EOFError, ConnectionError):
        serve(control)


if __name__ == "__main__":
    # Imported under its own name: the driver reads what is sent by module name.
    import tree_host

    tree_host.main()
