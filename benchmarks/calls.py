"""Compares calls of torch.distributed.rpc and telegrad, in turn, in one run.

Over unix, torch uses its default options, including shared memory. Over tcp, both behave as if on two hosts: torch uses
its `uv` transport and `basic` channel, which sends tensors through the sockets.

As lower bounds of a round trip in Python, a plain socket of the same kind carries as many bytes, and 16 MB are copied
twice in memory, which shared memory cannot avoid.

python benchmarks/calls.py [--transport unix|tcp] [--cases noop add ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import command
import torch
from pairs import (
    CALLEE,
    TELEGRAD,
    TORCH,
    Action,
    BenchmarkError,
    Case,
    System,
    Workers,
    WorkerSpec,
    at_most,
    join_telegrad,
    join_torch,
)

RAW = "raw socket"
IN_FLIGHT = 500
SIZE = struct.Struct("!Q")


# -- calls ----------------------------------------------------------------------------------------------------


def noop() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    """Return the value."""
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


KB, MB = 1 << 10, 1 << 20
COPIES = "two copies in memory"
ECHOES = {
    "echo": (64, 200, at_most(0.25)),
    "1KB": (KB, 200, {}),
    "16KB": (16 * KB, 100, {}),
    "64KB": (64 * KB, 100, at_most(0.35)),
    "256KB": (256 * KB, 60, {}),
    "1MB": (MB, 40, at_most(0.5)),
    "4MB": (4 * MB, 20, {}),
    "16MB": (16 * MB, 8, at_most(0.5, **{COPIES: 2.5})),
    "64MB": (64 * MB, 4, at_most(0.25)),
}
"""Bytes that travel both ways, iterations in a block, and targets."""
CASES = {
    "noop": Case("rpc_sync of a function that does nothing", 200, _call_noop, targets=at_most(0.25)),
    "add": Case("torch.add of two tensors of 16 floats", 200, _call_add, targets=at_most(0.35)),
    "async": Case(f"{IN_FLIGHT} no-ops in flight, time for all", 5, _call_many, targets=at_most(0.3)),
    **{
        name: Case(
            "16 floats there and back" if name == "echo" else "tensor there and back",
            often,
            _call_echo(size),
            targets=targets,
        )
        for name, (size, often, targets) in ECHOES.items()
    },
}


# -- lower bounds ---------------------------------------------------------------------------------------------


class RawPair:
    """One end of a plain socket, as the lower bound of what a system can do."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._socket = spec.socket
        if spec.name == CALLEE:
            threading.Thread(target=self._answer, daemon=True).start()

    def echo(self, size: int) -> Action:
        """Return an action that sends `size` bytes and waits for their echo, reusing memory."""
        sent, back = memoryview(bytearray(size)), memoryview(bytearray(size))
        head = SIZE.pack(size)

        def action() -> None:
            self._socket.sendall(head + sent if size <= KB else head)
            if size > KB:
                self._socket.sendall(sent)
            if not self._read(back):
                raise BenchmarkError("the other end of the raw socket is gone")

        return action

    def _answer(self) -> None:
        head, buffer = memoryview(bytearray(SIZE.size)), memoryview(b"")
        while self._read(head):
            (size,) = SIZE.unpack(head)
            if size != len(buffer):
                buffer = memoryview(bytearray(size))
            self._read(buffer)
            self._socket.sendall(buffer)

    def _read(self, into: memoryview) -> bool:
        """Fill a buffer. Returns False if the other end is closed."""
        while into:
            if not (count := self._socket.recv_into(into)):
                return False
            into = into[count:]
        return True

    def shutdown(self) -> None:
        """Do nothing: the other end sees the connection close."""


def _copy_twice(size: int) -> Action:
    tensor, there, back = torch.rand(size // 4), torch.zeros(size // 4), torch.zeros(size // 4)

    def action() -> None:
        there.copy_(tensor)
        back.copy_(there)

    return action


def _least(size: int) -> Callable[[RawPair], Action]:
    return lambda pair: pair.echo(size)


LEAST = {
    RAW: {"noop": 64, **{name: size for name, (size, _, _) in ECHOES.items()}},
    COPIES: {"16MB": 16 * MB},
}
"""The bytes that each lower bound moves, by case."""
HIDDEN = {
    **{f"{RAW} {name}": Case("", 1, _least(size)) for name, size in LEAST[RAW].items()},
    **{
        f"{COPIES} {name}": Case("", 1, lambda pair, size=size: _copy_twice(size))
        for name, size in LEAST[COPIES].items()
    },
}
SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad), RAW: System(RawPair)}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Return torch and telegrad, and the lower bounds of the case."""
    both = {system: (ready[system], case) for system in (TORCH, TELEGRAD)}
    return both | {least: (ready[RAW], f"{least} {case}") for least, sizes in LEAST.items() if case in sizes}


BENCHMARK = command.Benchmark(
    "calls.py",
    "Compare calls of telegrad with calls of torch.distributed.rpc, and with plain sockets.",
    CASES,
    SYSTEMS,
    turns,
    HIDDEN,
)


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import calls

    sys.exit(command.run(calls.BENCHMARK))
