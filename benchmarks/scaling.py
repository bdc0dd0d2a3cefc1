"""How the cost of a worker grows with the group: real processes on this machine, and simulated workers.

    python benchmarks/scaling.py [--workers 2 8 32 64 96 128] [--agents 100 300 1000] [--rules 100 1000 10000]
                                 [--json FILE]

With real processes, times contain the scheduling of n processes on a few cores: "init" of 128 workers on 2 cores cannot
take less than 64 times the work of one. So the table has the CPU time of a worker, too. Simulated workers exchange the
same messages without processes (`simulated_scaling.py`); messages are counted, which no load of the machine changes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from telegrad import launch, rpc

ROUNDS = 5
PARAMETERS = 10_000
STEPS = ("init", "barrier", "all_gather", "server step", "call_all", "shutdown")
_weights = torch.zeros(PARAMETERS)
_lock = threading.Lock()


def push(gradient: torch.Tensor) -> torch.Tensor:
    """Serve one step of a trainer: add its gradient, and return the parameters."""
    with _lock:
        _weights.add_(gradient, alpha=-0.1)
        return _weights


def nothing() -> None:
    """Serve a call that does nothing."""


def measure() -> dict[str, float]:
    """Take all steps on one worker, and return how long each took there, and what it uses."""
    figures: dict[str, float] = {}

    def timed(step: str, action: Callable[[], object], rounds: int = 1) -> None:
        times = []
        cpu = time.process_time()
        for _ in range(rounds):
            begin = time.perf_counter()
            action()
            times.append(time.perf_counter() - begin)
        figures[step] = statistics.median(times)
        figures[f"{step}, CPU"] = (time.process_time() - cpu) / rounds

    torch.set_num_threads(1)
    timed("init", rpc.init_rpc)
    me = rpc.get_worker_info()
    rpc.barrier()  # opens the connections
    timed("barrier", rpc.barrier, ROUNDS)
    timed("all_gather", partial(rpc.all_gather, me.id), ROUNDS)
    gradient = torch.ones(PARAMETERS)
    timed("server step", partial(rpc.rpc_sync, "worker0", push, (gradient,)), ROUNDS)
    rpc.barrier()
    if me.id == 0:
        timed("call_all", partial(rpc.call_all, nothing), ROUNDS)
    rpc.barrier()
    figures["threads"] = threading.active_count()
    figures["descriptors"] = len(os.listdir("/proc/self/fd"))
    figures["private MB"] = _private_bytes() / 1e6
    timed("shutdown", rpc.shutdown)
    figures["cpu ms"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) * 1e3
    return figures


def _private_bytes() -> int:
    """Return the memory that only this process uses: the workers are forked, and share torch."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def real(count: int) -> dict[str, Any]:
    """Measure a group of so many processes."""
    found: list[dict[str, float]] = launch.local(measure, workers=count, init=False, timeout=900)
    figures: dict[str, Any] = {"workers": count}
    for name in (*STEPS, *(f"{step}, CPU" for step in STEPS), "threads", "descriptors", "private MB", "cpu ms"):
        values = [each[name] for each in found if name in each]
        figures[name] = {"median": statistics.median(values), "max": max(values)}
    return figures


def main() -> None:
    """Measure, print a table, and write the figures."""
    import simulated_scaling  # not in the workers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8, 32, 64, 128])
    parser.add_argument(
        "--agents", type=int, nargs="*", default=[100, 300, 1000], help="simulated agents that know all"
    )
    parser.add_argument("--rules", type=int, nargs="*", default=[100, 1000, 10000], help="simulated workers")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    results: dict[str, Any] = {"load": os.getloadavg(), "cores": os.cpu_count(), "real": [], "simulated": {}}
    for count in options.workers:
        figures = real(count)
        results["real"].append(figures)
        print(f"\n{count} workers{'':>14}median       max   max / worker      CPU, median and max")
        for name in STEPS:
            median, most = figures[name]["median"] * 1e3, figures[name]["max"] * 1e3
            cpu = figures[f"{name}, CPU"]
            print(
                f"  {name:<16} {median:>9.2f} ms {most:>9.2f} ms {most / count:>9.3f} ms "
                f"{cpu['median'] * 1e3:>9.2f} ms {cpu['max'] * 1e3:>9.2f} ms"
            )
        for name in ("threads", "descriptors", "private MB", "cpu ms"):
            print(f"  {name:<16} {figures[name]['median']:>9.1f}    {figures[name]['max']:>9.1f}")
    for name, function, counts in (
        ("init", simulated_scaling.init, options.rules),
        ("departures", simulated_scaling.departures, [min(count, 3000) for count in options.rules]),
        ("agents", simulated_scaling.agents, options.agents),
        ("rules", simulated_scaling.rules, options.rules),
        ("rendezvous", simulated_scaling.rendezvous, options.rules),
    ):
        print(f"\n{name}, per worker of {', '.join(map(str, counts))}")
        found = {count: function(count) for count in counts}
        results["simulated"][name] = found
        for figure in next(iter(found.values()), {}):
            print(f"  {figure:<34}" + "".join(f"{figures[figure]:>12.3f}" for figures in found.values()))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    # Imported under its own name: workers find remote functions by module name.
    sys.path.insert(0, str(Path(__file__).parent))
    import scaling

    scaling.main()
