"""The counters of a worker's view."""

from __future__ import annotations

import operator
import threading

import torch
from tests.support.processes import wait_until

from telegrad import autograd, rpc
from telegrad.agent.agent import Agent
from telegrad.default_agent import acting_as
from telegrad.observe.gather import gather
from telegrad.testing.group import local_group


def meet(agent: Agent) -> None:
    with acting_as(agent):
        rpc.barrier()


def test_collectives_are_no_calls_on_either_side() -> None:
    with local_group(["a", "b"]) as group:
        threads = [threading.Thread(target=meet, args=(group[name],)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group["b"].call("a", operator.add, (1, 2))
        counted = {view.name: (view.calls_made, view.calls_served) for view in gather(group["a"]).workers}
    assert counted == {"a": (0, 1), "b": (1, 0)}


def test_a_pass_is_begun_by_one_worker_and_run_by_all() -> None:
    with local_group(["a", "b"]) as group, acting_as(group["a"]):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("b", operator.mul, (x, 2)).sum()])

        def all_have_counted() -> bool:  # b counts when it hears that the pass has ended
            counted = {view.name: (view.passes_run, view.passes_begun) for view in gather(group["a"]).workers}
            return counted == {"a": (1, 1), "b": (1, 0)}

        wait_until(all_have_counted)
