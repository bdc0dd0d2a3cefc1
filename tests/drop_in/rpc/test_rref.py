"""RRefs under the drop-in: torch's private names and error messages."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from telegrad.agent.agent import Agent
from telegrad.drop_in import rpc
from telegrad.drop_in.rpc import api, internal


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start


def read(serialized: tuple[Any, ...]) -> int:
    counter = rpc.PyRRef._deserialize(serialized)
    return counter.local_value().count if counter.is_owner() else -1


@pytest.mark.usefixtures("agents")
def test_a_serialized_rref_can_be_sent() -> None:
    counter = rpc.remote("b", Counter, (7,))
    assert rpc.rpc_sync("b", read, (counter._serialize(),)) == 7
    assert internal._InternalRPCPickler._py_rref_receiver(counter._serialize()) is counter
    with pytest.raises(TypeError, match="takes what _serialize"):
        rpc.PyRRef._deserialize((1, 2))
    with pytest.raises(RuntimeError, match="Can not unpickle rref"):
        counter.__setstate__(())


def test_a_custom_pickler_sends_rrefs(agents: dict[str, Agent]) -> None:
    counter = rpc.remote("b", Counter, (7,))

    class CustomPickler(internal._InternalRPCPickler):
        pass

    with api._use_rpc_pickler(CustomPickler()):
        assert rpc.rpc_sync("b", count_of, (counter,)) == 7


def count_of(counter: Any) -> int:
    count: int = counter.local_value().count
    return count


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("to", ["a", "b"])
def test_an_rref_whose_creation_failed_raises_torchs_error(to: str) -> None:
    rref = rpc.remote(to, operator.neg, (1,))
    with pytest.raises(RuntimeError, match="was not sent"):
        rref._get_future().wait()
    for use in (rref.to_here, rref._serialize, lambda: rpc.rpc_async("b", read, (rref,))):
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            use()
    if to == "a":
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            rref.local_value()


def test_an_rref_to_the_caller_itself_whose_creation_timed_out_raises_torchs_error(agents: dict[str, Agent]) -> None:
    blocked = agents["a"].runtime.event()
    agents["a"].register("wait", lambda: agents["a"].executor.wait(blocked, agents["a"].runtime.now() + 60))
    rref = agents["a"].references.create("a", "@wait", (), None, 0.01)
    try:
        for _ in range(2):  # the first one waits for the timeout
            with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
                rref.to_here()
    finally:
        blocked.set()


@pytest.mark.usefixtures("agents")
def test_an_rref_created_under_a_profiler_has_a_profiling_future() -> None:
    with torch.autograd.profiler.profile():
        rref = rpc.remote("b", Counter)
    rref._get_profiling_future().wait()
    with pytest.raises(RuntimeError, match="Profiling future has not been set"):
        rpc.remote("b", Counter)._get_profiling_future()
