"""Are calls faster than torch's, and by how much? torch.distributed.rpc and telegrad, alternately, in one run.

Over unix, torch has its default options, shared memory among them. Over tcp, both act as if they were on two hosts:
torch with its `uv` transport and its `basic` channel, so that tensors, too, go through the sockets.

python benchmarks/calls.py [--transport unix|tcp] [--cases noop add ...] [--blocks N] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
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
    Place,
    System,
    Workers,
    join_telegrad,
    join_torch,
)

RAW = "raw"
IN_FLIGHT = 500
PING = bytes(64)


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


# -- the least that a round trip can cost ---------------------------------------------------------------------


class RawPair:
    """One end of a plain socket, in the place of a system."""

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


PING_PONG = {"ping": Case("64 bytes there and back through a unix socket, in Python", 200, lambda pair: pair.ping)}
SYSTEMS = {TORCH: System(join_torch), TELEGRAD: System(join_telegrad), RAW: System(RawPair)}


def turns(ready: Mapping[str, Workers], case: str, number: int) -> dict[str, tuple[Workers, str]]:
    """Torch and telegrad. The raw socket takes its turns in the first case only."""
    both = {system: (ready[system], case) for system in (TORCH, TELEGRAD)}
    return both if number else {**both, RAW: (ready[RAW], "ping")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as a command."""
    return command.run(
        "calls.py",
        "Compare calls of telegrad with calls of torch.distributed.rpc.",
        CASES,
        SYSTEMS,
        turns,
        hidden=PING_PONG,
        arguments=arguments,
    )


if __name__ == "__main__":
    # The same module again, under its own name: what is called remotely must be found by that on the other side.
    import calls

    sys.exit(calls.main())
