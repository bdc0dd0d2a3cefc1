"""A worker of the group that `fault_run` disturbs: ``python -m tests.support.fault_worker NAME RENDEZVOUS [ADDRESS]``.

Worker a calls the others in three loops, each on its own thread: "b" and "c" call that worker, and "chain" calls b,
which calls c. Each step is a call and a backward pass, and checks its result and the gradients on all its workers. It
writes a line for each step, and one for each worker that it has joined. The others serve. All leave the group when
their input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from telegrad import autograd, rpc

WORKERS = ("a", "b", "c")
LOOPS = {"b": ("b",), "c": ("c",), "chain": ("b", "c")}
"""The workers that each loop calls, one through the other."""
TIMEOUT = 100.0
"""Seconds that a call or a pass may take: more than any loss needs to be found."""
PACE = 0.02
"""Seconds between two steps of a loop."""
LARGE = 16_384
"""Elements of the tensor of every tenth step."""

weights = torch.ones(1, requires_grad=True)
seen: set[tuple[str, int]] = set()
_lock = threading.Lock()  # protects seen, and lines of output


def forward(loop: str, number: int, x: torch.Tensor, others: tuple[str, ...]) -> torch.Tensor:
    """Return the square of `x` times the weights of this worker and of the others, which are called."""
    with _lock:
        if (loop, number) in seen:
            raise AssertionError(f"step {number} of loop {loop} ran twice")
        seen.add((loop, number))
    if others:
        return weights * rpc.rpc_sync(others[0], forward, (loop, number, x, others[1:]), timeout=TIMEOUT)
    return weights * x * x


def gradient_of_weights(context: int) -> torch.Tensor:
    """Return the gradient that a pass has left here."""
    return autograd.get_gradients(context)[weights]


def step(loop: str, number: int) -> None:
    """Make a call and run a backward pass. Raises if a result is wrong."""
    workers = LOOPS[loop]
    size = LARGE if number % 10 == 9 else 4
    x = (torch.arange(float(size)) % 7 + number % 5).requires_grad_()
    with autograd.context() as context:
        y = rpc.rpc_sync(workers[0], forward, (loop, number, x, workers[1:]), timeout=TIMEOUT)
        assert torch.equal(y, x * x), "a wrong result"
        autograd.backward(context, [y.sum()], timeout=TIMEOUT)
        assert torch.equal(autograd.get_gradients(context)[x], 2 * x), "a wrong gradient"
        for worker in workers:
            there = rpc.rpc_sync(worker, gradient_of_weights, (context,), timeout=TIMEOUT)
            assert torch.equal(there, (x * x).detach().sum().reshape(1)), "a wrong gradient of the weights"


def say(**values: Any) -> None:
    """Write a line."""
    with _lock:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


def run_loop(loop: str, over: threading.Event) -> None:
    """Make steps until the event is set. Steps that fail are reported, and the loop goes on."""
    number = 0
    while not over.wait(PACE):
        begin, error = time.monotonic(), None
        try:
            step(loop, number)
        except Exception as raised:  # noqa: BLE001 - what the caller sees is what the test wants to know
            error = [type(raised).__name__, str(raised)]
        say(loop=loop, number=number, begin=begin, end=time.monotonic(), error=error)
        number += 1


def main(name: str, rendezvous: str, address: str | None = None) -> None:
    """Join the group, run or serve, and leave it."""
    torch.set_num_threads(1)
    options = rpc.Options(
        init_method=f"file://{rendezvous}",
        transports=("unix",) if address is None else ("tcp",),
        bind=address,
        advertise=address,
    )
    rpc.init_rpc(name, rank=WORKERS.index(name), world_size=len(WORKERS), rpc_backend_options=options)
    over = threading.Event()
    threads = [threading.Thread(target=run_loop, args=(loop, over)) for loop in LOOPS] if name == "a" else []
    for thread in threads:
        thread.start()
    say(joined=name)
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    begin = time.monotonic()
    try:
        rpc.shutdown(timeout=20.0)
    finally:
        say(left=name, took=time.monotonic() - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
