"""A worker of the group that `telegrad.testing.endurance` disturbs: it trains, calls the others, and serves them.

Worker 0 trains a model whose layers are on the other workers, next to a copy in its own process, and compares both. If
a worker is lost, it waits for the replacement and builds the layers again from the copy. All workers keep calling each
other. Workers 0 and 1 call each other over unix sockets, and all other pairs over TCP.

When a file NAME.cut appears, the worker shuts down all its TCP connections, below telegrad.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.errors import TelegradError, WorkerLost
from telegrad.optim import DistributedOptimizer
from telegrad.rref.handle import RRef

WIDTH = 32
RATE = 0.01
TIMEOUT = 60.0
"""Seconds that a call or a pass may take."""
GRACE = 60.0
"""Seconds in which a lost worker must have been replaced."""
_PACE = 0.005  # seconds between two steps, or two calls, of a loop

counts: Counter[str] = Counter()
layers: dict[str, nn.Linear] = {}
over = threading.Event()


# -- on the workers that are called -------------------------------------------------------------------------------


def build(state: dict[str, torch.Tensor]) -> list[RRef[torch.Tensor]]:
    """Make the layer of this worker, and return references to its parameters."""
    layers["own"] = layer = nn.Linear(WIDTH, WIDTH)
    layer.load_state_dict(state)
    return [RRef(parameter) for parameter in layer.parameters()]


def forward(x: torch.Tensor) -> torch.Tensor:
    """Return the output of the layer of this worker."""
    return layers["own"](x).tanh()  # type: ignore[no-any-return]  # torch's modules return Any


def state() -> dict[str, torch.Tensor]:
    """Return the parameters of the layer of this worker."""
    return layers["own"].state_dict()


def echo(value: torch.Tensor) -> torch.Tensor:
    """Return the argument."""
    return value


def finish() -> None:
    """Let this worker leave the group."""
    over.set()


# -- training -----------------------------------------------------------------------------------------------------


class Training:
    """A model on other workers, and its copy in this process."""

    def __init__(self, workers: list[str]) -> None:
        torch.manual_seed(0)
        self._workers = workers
        self._copy = [nn.Linear(WIDTH, WIDTH) for _ in workers]
        self._local = torch.optim.SGD([p for layer in self._copy for p in layer.parameters()], RATE)
        self._optimizer: DistributedOptimizer | None = None
        self._steps = 0

    def build(self) -> None:
        """Build all layers from the copy."""
        rrefs = []
        for worker, layer in zip(self._workers, self._copy, strict=True):
            rrefs += rpc.rpc_sync(worker, build, (layer.state_dict(),), timeout=TIMEOUT)
        self._optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, RATE)

    def step(self) -> None:
        """Make a step on the other workers, and one with the copy. Every tenth time, compare them."""
        assert self._optimizer is not None
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self._steps))
        with autograd.context() as context:
            y = x
            for worker in self._workers:
                y = rpc.rpc_sync(worker, forward, (y,), timeout=TIMEOUT)
            autograd.backward(context, [y.square().sum()], timeout=TIMEOUT)
            self._optimizer.step(context)
        y = x
        for layer in self._copy:
            y = layer(y).tanh()
        self._local.zero_grad()
        y.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's
        self._local.step()
        self._steps += 1
        if self._steps % 10 == 0:
            self._compare()

    def _compare(self) -> None:
        for worker, layer in zip(self._workers, self._copy, strict=True):
            there = rpc.rpc_sync(worker, state, timeout=TIMEOUT)
            for name, tensor in layer.state_dict().items():
                if not torch.equal(there[name], tensor):
                    raise AssertionError(f"{name} of {worker} differs from one process after {self._steps} steps")


def train(workers: list[str], seconds: float, kills: bool) -> None:
    """Train for some time. Only with `kills` may a worker be lost."""
    training = Training(workers)
    end = time.monotonic() + seconds
    built = False
    while time.monotonic() < end:
        try:
            if not built:
                training.build()
                built = True
            training.step()
            counts["steps"] += 1
        except WorkerLost:
            if not kills:
                raise
            counts["steps repeated"] += 1
            built = False
            wait_for_all(workers)
        over.wait(_PACE)


def wait_for_all(workers: list[str]) -> None:
    """Wait until lost workers have been replaced."""
    end = time.monotonic() + GRACE
    for worker in workers:
        while True:
            try:
                rpc.rpc_sync(worker, echo, (torch.ones(1),), timeout=TIMEOUT)
                break
            except WorkerLost:
                if time.monotonic() > end:
                    raise
                over.wait(0.1)


# -- on all workers -----------------------------------------------------------------------------------------------


def call_others(others: list[str], kills: bool) -> None:
    """Call the others with tensors of all sizes until the run is over."""
    draw = random.Random(os.getpid())
    while not over.wait(_PACE):
        worker = draw.choice(others)
        value = torch.full((draw.choice((1, 100, 10_000, 100_000)),), draw.random())
        try:
            if draw.random() < 0.3:
                found = rpc.remote(worker, echo, (value,), timeout=TIMEOUT).to_here(timeout=TIMEOUT)
            else:
                found = rpc.rpc_sync(worker, echo, (value,), timeout=TIMEOUT)
        except WorkerLost:
            if not kills:
                raise
            counts["calls to lost workers"] += 1
            continue
        if not torch.equal(found, value):
            raise AssertionError(f"worker {worker} returned another value")
        counts["calls"] += 1


def cut_on_request(request: Path) -> None:
    """Shut down all TCP connections whenever this file appears."""
    while not over.wait(0.05):
        if request.exists():
            request.unlink()
            counts["connections cut"] += cut_connections()


def cut_connections() -> int:
    """Shut down all TCP connections of this process, and return how many there were."""
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # it was closed since
        with found:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                found.getpeername()
                found.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it listens, or has ended
            cut += 1
    return cut


def main(directory: str, seconds: str, kills: str) -> None:
    """Join the group, take part until worker 0 says that it is over, and write what was counted."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(rpc_backend_options=rpc.Options(transports=("unix", "tcp") if rank < 2 else ("tcp",)))
    me, killing = rpc.get_worker_info().name, kills == "kills"
    others = [info.name for info in rpc.get_worker_infos() if info.name != me]
    failures: list[BaseException] = []

    def calling() -> None:
        try:
            call_others(others, killing)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            failures.append(error)
            over.set()

    requests = Path(directory, f"{me}.cut")
    threads = [threading.Thread(target=calling), threading.Thread(target=cut_on_request, args=(requests,))]
    for thread in threads:
        thread.start()
    written = Path(directory, f"{me}.pid.new")
    written.write_text(str(os.getpid()))
    written.rename(Path(directory, f"{me}.pid"))
    try:
        if rank == 0:
            train(others, float(seconds), killing)
            wait_for_all(others)
            for other in others:
                rpc.rpc_sync(other, finish, timeout=TIMEOUT)
        elif not over.wait(float(seconds) + 2 * GRACE):
            raise TelegradError(f"worker {me!r} was not told that the run is over")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    rpc.shutdown(timeout=GRACE)
    Path(directory, f"{me}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
