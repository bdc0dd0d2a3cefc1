"""Checks of what workers are given, what they return, and what they print."""

from __future__ import annotations

import os
import sys

import torch

from telegrad import rpc
from telegrad.default_agent import process_agent
from telegrad.testing.launch_contract.harness import Harness, expect, this_worker

_LARGE = 5_000_000  # more bytes than any pipe buffers


def _name_of(worker: str) -> str:
    return rpc.get_worker_info().name if worker == this_worker() else ""


def _call_the_others() -> list[str]:
    me = rpc.get_worker_info().name
    others = sorted(rpc.all_gather(me))
    return [rpc.rpc_sync(other, _name_of, (other,)) for other in others]


def _print_lines() -> None:
    print(f"out of {this_worker()}", flush=True)
    print(f"err of {this_worker()}", file=sys.stderr, flush=True)


def results_are_in_the_order_of_the_workers(harness: Harness) -> None:
    """In the order of the names, not of the alphabet or of finishing."""
    found = harness.run(lambda x: (this_worker(), x), 17, workers=["ps", "b", "a"])
    expect(found == [("ps", 17), ("b", 17), ("a", 17)], f"the results are {found}")


def a_number_of_workers_names_them(harness: Harness) -> None:
    """The names are worker0, worker1 and so on."""
    with harness.start(this_worker, workers=2) as group:
        expect(list(group.names) == ["worker0", "worker1"], f"the names are {group.names}")
        found = group.join(harness.patience)
    expect(found == ["worker0", "worker1"], f"the results are {found}")


def the_workers_form_a_group_under_their_names(harness: Harness) -> None:
    """Each is a member, and can call each."""
    found = harness.run(_call_the_others, workers=["ps", "a"], init=True)
    expect(found == [["a", "ps"]] * 2, f"the workers found {found}")


def without_init_the_workers_join_no_group(harness: Harness) -> None:
    """The function may call `init_rpc` itself."""
    expect(harness.run(lambda: process_agent() is None) == [True, True], "a worker has an agent")


def init_rpc_of_the_function_needs_no_arguments(harness: Harness) -> None:
    """The environment says all."""

    def work() -> list[str]:
        rpc.init_rpc()
        found = _call_the_others()
        rpc.shutdown()
        return found

    found = harness.run(work)
    expect(found == [["a", "b"]] * 2, f"the workers found {found}")


def arguments_and_results_may_be_large_and_of_any_type(harness: Harness) -> None:
    """Also functions that exist on the launcher only."""

    class Pair:
        def __init__(self, tensor: torch.Tensor, data: bytes) -> None:
            self.tensor, self.data = tensor, data

    first, _ = harness.run(lambda pair: Pair(pair.tensor + 1, pair.data * 2), Pair(torch.ones(2), b"x" * _LARGE))
    expect(isinstance(first, Pair) and first.tensor.tolist() == [2, 2], "the result is not what was returned")
    expect(len(first.data) == 2 * _LARGE, f"the result has {len(first.data)} bytes")


def each_worker_is_a_process(harness: Harness) -> None:
    """Workers share no memory, and are not the launcher."""
    found = harness.run(os.getpid, workers=3)
    expect(len({*found, os.getpid()}) == 4, f"the processes are {found}, and {os.getpid()} launched them")


def output_has_the_name_of_its_worker(harness: Harness) -> None:
    """Lines on stdout and on stderr."""
    with harness.output() as lines:
        harness.run(_print_lines)
        for name in ("a", "b"):
            for stream in ("out", "err"):
                # The name comes before the text, so a line that only repeats the text does not count.
                harness.wait_until(
                    lambda text=f"{stream} of {name}", name=name: any(  # type: ignore[misc]  # mypy cannot infer it
                        name in line.partition(text)[0] for line in lines() if text in line
                    ),
                    f"the line of {name} on std{stream}",
                )


def two_groups_may_run_at_once(harness: Harness) -> None:
    """With workers of the same names."""
    one = harness.start(_call_the_others, init=True)
    two = harness.start(_call_the_others, init=True)
    expect(one.join(harness.patience) == two.join(harness.patience) == [["a", "b"]] * 2, "the groups are mixed up")


RESULT_CHECKS = (
    results_are_in_the_order_of_the_workers,
    a_number_of_workers_names_them,
    the_workers_form_a_group_under_their_names,
    without_init_the_workers_join_no_group,
    init_rpc_of_the_function_needs_no_arguments,
    arguments_and_results_may_be_large_and_of_any_type,
    each_worker_is_a_process,
    output_has_the_name_of_its_worker,
    two_groups_may_run_at_once,
)
