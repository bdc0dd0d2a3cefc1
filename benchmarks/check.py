"""Counts the work of a call, and compares it with the committed counts.

Times on a shared machine are noisy, and counts are nearly the same on every run. The check counts Python functions,
builtins, system calls, wake-ups of other threads, bytes on the wire, and leaked memory blocks, per iteration and side.

python benchmarks/check.py [--update] [--cases noop ...]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from measure import columns
from pairs import CALLEE, CALLER

from telegrad import autograd, rpc
from telegrad.execution import watchdog
from telegrad.transport.socket_link import SocketLink

COMMITTED = Path(__file__).parent / "counts.json"
ROUNDS = 5
"""Rounds per case. The smallest count is used, because disturbances only add."""
IN_FLIGHT = 100
WIDE = 100
SLACK = 0.5
"""Counts are averages; a rare event (a timer, a new thread) must not fail the check."""

FUNCTIONS, BUILTINS, SYSTEM, WAKES, BYTES, LEFT = (
    *("Python functions", "builtins", "system calls", "wake-ups of threads", "bytes sent", "memory blocks left"),
)
TOLERANCE = {FUNCTIONS: 0.08, BUILTINS: 0.08, SYSTEM: 0.15, WAKES: 0.15, BYTES: 0.02, LEFT: 0.15}
LOOSE = 3.0
"""The tolerance is larger by this factor where threads race and runs differ."""

_SYSTEM_CALLS = frozenset(
    {
        *("socket.send", "socket.sendmsg", "socket.recv_into", "socket.recvmsg_into", "socket.recvmsg"),
        *("poll.poll", "epoll.poll", "epoll.modify", "epoll.register", "epoll.unregister"),
        *("eventfd_read", "eventfd_write"),
    }
)
_WAKES = frozenset({"_LockEvent.set", "SocketPoller.wake", "SocketLink.wake"})


# -- counting -------------------------------------------------------------------------------------------------

_counts: Counter[str] = Counter()


def _on_event(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        code = frame.f_code
        if code.co_filename != __file__:
            _counts[FUNCTIONS] += 1
            if code.co_qualname in _WAKES:
                _counts[WAKES] += 1
    elif event == "c_call" and frame.f_code.co_filename != __file__:
        _counts[BUILTINS] += 1
        if getattr(argument, "__qualname__", "") in _SYSTEM_CALLS:
            _counts[SYSTEM] += 1


def _on_first_event(frame: FrameType, event: str, argument: Any) -> None:
    """Count on this thread, unless only timers drive it."""
    watches = threading.current_thread().name.endswith(":watchdog")
    sys.setprofile(None if watches else _on_event)


def _count_bytes() -> None:
    send = SocketLink.send

    def counting(self: SocketLink, kind: int, body: Any, *rest: int) -> None:
        _counts[BYTES] += 32 + len(body)
        send(self, kind, body, *rest)

    SocketLink.send = counting  # type: ignore[method-assign]  # in the processes of this benchmark only


def _counted() -> dict[str, int]:
    """Return the counts of this process. Called remotely."""
    gc.collect()
    return {**_counts, LEFT: sys.getallocatedblocks()}


# -- cases ----------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """Do nothing."""


def _echo(value: Any) -> Any:
    return value


def _double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def _echoes(size: int) -> Callable[[], object]:
    tensor = torch.rand(size // 4)
    return lambda: rpc.rpc_sync(CALLEE, _echo, (tensor,))


def _batch() -> None:
    for future in [rpc.rpc_async(CALLEE, _nothing) for _ in range(IN_FLIGHT)]:
        future.wait()
    rpc.rpc_async(CALLEE, _nothing).wait()  # the next call removes finished calls from the deadline queue


def _hop() -> None:
    x = torch.ones(16, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(CALLEE, _double, (x,)).sum()])


def _double_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x * 2 for x in tensors]


def _wide() -> Callable[[], object]:
    leaves = [torch.ones(4, requires_grad=True) for _ in range(WIDE)]
    slope = torch.ones(WIDE, 4)

    def run() -> None:
        with autograd.context() as context:
            results = rpc.rpc_sync(CALLEE, _double_all, (leaves,))
            autograd.backward(context, [(torch.stack(results) * slope).sum()])

    return run


CASES: dict[str, tuple[str, int, int, bool, Callable[[], Callable[[], object]]]] = {
    # description, iterations per round, calls per iteration, whether threads race, preparation
    "noop": ("a call that does nothing", 200, 1, False, lambda: lambda: rpc.rpc_sync(CALLEE, _nothing)),
    "echo": ("16 floats there and back", 200, 1, False, lambda: _echoes(64)),
    "64KB": ("64 KB there and back", 100, 1, False, lambda: _echoes(1 << 16)),
    "async": (f"one of {IN_FLIGHT} calls in flight", 6, IN_FLIGHT, True, lambda: _batch),
    "hop": ("forward and backward over one hop", 40, 1, True, lambda: _hop),
    "wide": (f"one of {WIDE} tensors of a message, forward and backward", 10, WIDE, True, _wide),
}

Counts = dict[str, dict[str, float]]
"""Counts by side and kind."""


def _run(case: str) -> Counts:
    _, iterations, calls, _, prepare = CASES[case]
    action = prepare()
    for _ in range(iterations):  # also fills pools and caches
        action()
    best: Counts = {CALLER: {}, CALLEE: {}}
    for _ in range(ROUNDS):
        there, here = rpc.rpc_sync(CALLEE, _counted), _counted()
        for _ in range(iterations):
            action()
        here_now, there_now = _counted(), rpc.rpc_sync(CALLEE, _counted)
        for side, before, after in ((CALLER, here, here_now), (CALLEE, there, there_now)):
            for kind in TOLERANCE:
                count = round((after.get(kind, 0) - before.get(kind, 0)) / iterations / calls, 1)
                best[side][kind] = min(best[side].get(kind, count), count)
    for counts in best.values():
        counts[LEFT] = max(0.0, counts[LEFT])
    return best


def _work(name: str, directory: str, cases: Sequence[str], control: Any) -> None:
    torch.set_num_threads(1)
    # Counting makes everything about ten times slower, and a slow function would be moved to another thread.
    watchdog.SLOW_TASK = 0.5
    _count_bytes()
    threading.setprofile(_on_first_event)
    # How often a thread spins before it sleeps depends on the machine.
    # A full ring of events allocates nothing that stays, so it is small enough to be full from the start.
    options = rpc.Options(init_method=f"file://{directory}/rendezvous", transports=("unix",), spin=0, events=16)
    rpc.init_rpc(name, rank=0 if name == CALLER else 1, world_size=2, rpc_backend_options=options)
    if name == CALLER:
        sys.setprofile(_on_event)
        found = {case: _run(case) for case in cases}
        sys.setprofile(None)
        control.send(found)
    rpc.shutdown()


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="telegrad-check-") as directory:
        yield directory


def count(cases: Sequence[str]) -> dict[str, Counts]:
    """Return the counts of each case, measured in two new processes."""
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    with _directory() as directory:
        workers = [
            context.Process(target=_work, args=(name, directory, cases, theirs), name=name) for name in (CALLER, CALLEE)
        ]
        for worker in workers:
            worker.start()
        theirs.close()
        try:
            found: dict[str, Counts] = mine.recv()
        except EOFError:
            raise SystemExit("check.py: a worker failed; its error is above") from None
        finally:
            for worker in workers:
                worker.join(30)
                worker.kill()
                worker.join()
    return found


# -- comparing ------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that counts depend on."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__.partition("+")[0]}


def compare(committed: Mapping[str, Counts], found: Mapping[str, Counts]) -> tuple[list[list[str]], int]:
    """Return a table of all counts, and how many exceed their tolerance."""
    rows, worse = [], 0
    for case, sides in found.items():
        loose = LOOSE if CASES[case][3] else 1.0
        for side, counts in sides.items():
            for kind, value in counts.items():
                before = committed.get(case, {}).get(side, {}).get(kind)
                status = "new"
                if before is not None:
                    limit = before * (1 + TOLERANCE[kind] * loose) + SLACK
                    status = "" if before - (limit - before) <= value <= limit else "better"
                    if value > limit:
                        status = f"WORSE, the limit is {limit:.1f}"
                        worse += 1
                rows.append([case, side, kind, "-" if before is None else f"{before:.1f}", f"{value:.1f}", status])
    return rows, worse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check as a command."""
    parser = argparse.ArgumentParser(description="Compare the work of calls with the counts in counts.json.")
    parser.add_argument("--update", action="store_true", help="write the counts instead of comparing them")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--counts", type=Path, default=COMMITTED, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    written = json.loads(options.counts.read_text()) if options.counts.exists() else {"versions": {}, "cases": {}}
    found = count(options.cases)
    rows, worse = compare(written["cases"], found)
    head = ["case", "side", "count", "committed", "now", ""]
    print("\n".join(columns([head, *rows], left=(0, 1, 2, 5))))
    if options.update:
        content = {"versions": versions(), "cases": {**written["cases"], **found}}
        options.counts.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nwrote {os.path.relpath(options.counts)}")
        return 0
    if written["versions"] != versions():
        print(f"\nThe counts are of {written['versions']}, this is {versions()}: not judged.")
        return 0
    if worse:
        print(f"\n{worse} counts have grown. If that is worth it, say why and run: python benchmarks/check.py --update")
    return 1 if worse else 0


if __name__ == "__main__":
    # Imported under its own name: the other side finds remote functions by module name.
    import check

    sys.exit(check.main())
