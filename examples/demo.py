"""Four workers on this machine call each other: what telegrad can do today, in a few seconds. Run by `make demo`."""

import asyncio
import operator
import os
import statistics
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import telegrad
from telegrad import launch

WORKERS = ["alice", "bob", "carol", "dave"]


@contextmanager
def timed() -> Iterator[list[str]]:
    """Print what the block says, after the time that it took."""
    said: list[str] = []
    start = time.perf_counter()
    yield said
    first, *more = said
    print(f"{(time.perf_counter() - start) * 1000:10.2f} ms   {first}", *more, sep="\n", flush=True)


def greet(who: str) -> str:
    return f"hello {who}, this is {telegrad.get_worker_info().name}"


def visit(way: list[str]) -> list[str]:
    """Go on to the next worker of the way, from wherever this runs."""
    here = telegrad.get_worker_info().name
    return [here, *telegrad.rpc_sync(way[0], visit, (way[1:],))] if way else [here]


def divide(a: float, b: float) -> float:
    return a / b


async def think_for_a_minute() -> None:
    await asyncio.sleep(60)


def tour() -> None:
    """Alice's part: she calls, the others serve."""
    with timed() as say:
        say.append("the first call to bob opens a connection; he says: " + telegrad.rpc_sync("bob", greet, ("alice",)))
    with timed() as say:
        times = []
        for number in range(500):
            start = time.perf_counter()
            telegrad.rpc_sync("bob", operator.add, (number, 1))
            times.append((time.perf_counter() - start) * 1e6)
        say.append(f"500 calls to bob, one after the other: {statistics.median(times):.0f} µs each (median)")
    with timed() as say:
        futures = [telegrad.rpc_async(WORKERS[1 + i % 3], operator.mul, (i, 2)) for i in range(900)]
        total = sum(torch.futures.wait_all(futures))
        say.append(f"900 calls to three workers, all in flight at once; the results add up to {total}")
    with timed() as say:
        matrix = torch.eye(1000)
        product = telegrad.rpc_sync("carol", torch.matmul, (matrix, matrix))
        say.append(f"carol multiplied a 4 MB matrix by itself; the result is right: {torch.equal(product, matrix)}")
    with timed() as say:
        way = telegrad.rpc_sync("bob", visit, (["carol", "dave"],))
        say.append(f"a call within a call within a call: alice > {' > '.join(way)}, and all the way back")
    with timed() as say:
        try:
            telegrad.rpc_sync("dave", divide, (1, 0))
        except ZeroDivisionError as error:
            say.append("dave raised ZeroDivisionError, and we caught just that; where it happened comes with it:")
            say.append(textwrap.indent(str(error.__cause__).strip(), " " * 18))
    with timed() as say:
        try:
            telegrad.rpc_sync("bob", think_for_a_minute, timeout=0.2)
        except TimeoutError as error:
            say.append(f"bob would think for a minute, we wait 0.2 s: {type(error).__name__}; he was told to stop")
    with timed() as say:
        say.append(f"all_gather, everybody learns everybody's process id: {telegrad.all_gather(os.getpid())}")


def work() -> None:
    if telegrad.get_worker_info().name == "alice":
        tour()
    else:
        telegrad.all_gather(os.getpid())  # while the others wait here, they serve


if __name__ == "__main__":
    start = time.perf_counter()
    print(f"Starting four workers, each a process on this machine: {', '.join(WORKERS)}. Alice tells.", flush=True)
    launch.local(work, workers=WORKERS, prefix=False, timeout=60)
    print(f"Done in {time.perf_counter() - start:.1f} s. All four workers have left in order; nothing is left running.")
